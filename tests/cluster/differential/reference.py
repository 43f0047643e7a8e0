"""What the real kube-scheduler holds feasible: a control plane of its own, a world, and its answers.

Nothing is ever bound: an extender that rejects every node reads the answers off (`extender`). There is
no controller-manager and no kubelet, so that objects stay as they were written.
"""

import asyncio
import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import NotFound
from localcluster.addresses import cluster_network
from localcluster.controlplane import ControlPlane, User
from localcluster.processes import end, spawn, tail
from tests.cluster.differential.canary import Canary
from tests.cluster.differential.extender import FILTER_VERB, Extender
from tests.cluster.differential.objects import (
    GPU_MEMORY,
    SCHEDULER_NAME,
    Json,
    Objects,
    name_of,
    namespace_of,
)

T = TypeVar("T")
R = TypeVar("R")

# ServiceAccount wants an account in each namespace, TaintNodesByCondition taints every new node, and
# StorageObjectInUseProtection adds finalizers: each of them counts on a controller that does not run here.
_WITHOUT_ADMISSION = ("ServiceAccount", "TaintNodesByCondition", "StorageObjectInUseProtection")
_NAMESPACES = "/api/v1/namespaces"
_VOLUMES = "/api/v1/persistentvolumes"
_CLAIMS = "/api/v1/persistentvolumeclaims"
_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_AT_ONCE = 16
_ANSWER_SECONDS = 60.0
_CANARY_PAUSE_SECONDS = 0.02


class ReferenceFailed(Exception):
    """kube-scheduler gave no answer that could be used; the message says why."""


class SchedulerErred(ReferenceFailed):
    """kube-scheduler met an error of its own instead of coming to a verdict."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A world and its pending pods as the API server gives them, and the feasible nodes by pod name."""

    world: Objects
    pods: Mapping[str, Json]
    feasible: Mapping[str, frozenset[str]]


class Reference:
    """A running kube-scheduler; get one from `running()`. One world at a time."""

    def __init__(self, client: KubeClient, extender: Extender, log: Path) -> None:
        self._client, self._extender, self._log = client, extender, log
        self._canaries = (Canary(f"canary{number}") for number in itertools.count(1))

    async def feasible(self, world: Objects, pods: Sequence[Json]) -> Judged:
        """Load the world, let kube-scheduler try the pods, and remove everything again.

        Every pod is judged against the same world: none of them ever gets a node.
        """
        canary = next(self._canaries)
        try:
            await self._load(world)
            await self._load(canary.objects())
            await self._until_all_is_seen(canary)
            loaded = await self._read_back()
            self._extender.begin()
            answers = await self._ask(pods)
            self._extender.end()
        finally:
            self._extender.listening = False
            await self._clear()
        return Judged(loaded, *answers)

    async def _load(self, world: Objects) -> None:
        """The objects that others name come first. All are there when it returns."""
        create = self._client.create
        await _each(partial(create, _NAMESPACES), world.namespaces)
        await _each(partial(create, _CLASSES), world.storage_classes)
        await _each(partial(create, paths.NODES), world.nodes)
        await _each(partial(self._bring, _VOLUMES), world.volumes)
        await _each(lambda claim: self._bring(_claims(namespace_of(claim)), claim), world.claims)
        await _each(lambda pod: self._bring(paths.pods(namespace_of(pod)), pod), world.pods)

    async def _bring(self, collection: str, manifest: Json) -> None:
        """Create an object and take it to the state that its manifest describes."""
        await self._client.create(collection, manifest)
        path = f"{collection}/{name_of(manifest)}"
        if "status" in manifest:
            await self._client.patch(f"{path}/status", {"status": manifest["status"]})
        if "deletionTimestamp" in manifest["metadata"]:
            await self._client.delete(path)

    async def _until_all_is_seen(self, canary: Canary) -> None:
        """Each kind's informer sees its changes in their order, and the canary's objects are the last.

        So when kube-scheduler finds the canary's node, it has seen the rest. It looks again only upon
        some kinds of events, hence a new pod for each try. Until it has seen the claims' storage class
        it may err over them (GetPodVolumeClaims in volumebinding/binder.go).
        """
        self._extender.begin()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                for number in itertools.count():
                    with suppress(SchedulerErred):
                        _, feasible = await self._ask([canary.pod(number)])
                        if [*feasible.values()] == [{canary.name}]:
                            return
                    await asyncio.sleep(_CANARY_PAUSE_SECONDS)
        except TimeoutError as error:
            raise ReferenceFailed(f"kube-scheduler does not see the world:\n{tail(self._log)}") from error

    async def _ask(self, pods: Sequence[Json]) -> tuple[dict[str, Json], dict[str, frozenset[str]]]:
        """The pods as created, and the nodes that passed, both by name. Raises SchedulerErred."""
        version = (await self._client.get(paths.PODS, limit="1"))["metadata"]["resourceVersion"]
        made = await _each(lambda pod: self._client.create(paths.pods(namespace_of(pod)), pod), pods)
        created = {name_of(pod): pod for pod in made}
        await self._until_tried(set(created), version)
        # kube-scheduler asks the extender before it writes the condition that was waited for.
        passed = self._extender.passed
        return created, {
            name: passed.get(pod["metadata"]["uid"], frozenset()) for name, pod in created.items()
        }

    async def _until_tried(self, names: set[str], version: str) -> None:
        """Return when kube-scheduler has tried every one of these pods, as seen from that version on."""
        params = {"watch": "true", "resourceVersion": version}
        stream = self._client.stream(paths.PODS, params, idle_timeout_seconds=_ANSWER_SECONDS)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), aclosing(stream) as events:
                async for event in events:
                    if event["type"] == "MODIFIED" and name_of(event["object"]) in names:
                        if _is_tried(event["object"]):
                            names.remove(name_of(event["object"]))
                        if not names:
                            return
        except TimeoutError as error:
            raise ReferenceFailed(f"no answer for {sorted(names)}:\n{tail(self._log)}") from error
        raise ReferenceFailed(f"the watch ended before {sorted(names)}:\n{tail(self._log)}")

    async def _read_back(self) -> Objects:
        lists = (paths.NODES, _NAMESPACES, _CLASSES, _VOLUMES, _CLAIMS, paths.PODS)
        nodes, namespaces, classes, volumes, claims, pods = await _each(self._client.get, lists)
        return Objects(
            nodes=nodes["items"],
            namespaces=namespaces["items"],
            storage_classes=classes["items"],
            volumes=volumes["items"],
            claims=claims["items"],
            pods=[pod for pod in pods["items"] if pod["spec"].get("nodeName")],
        )

    async def _clear(self) -> None:
        """Pods first: an object that goes would wake pending ones."""
        ours = [
            name_of(namespace)
            for namespace in (await self._client.get(_NAMESPACES))["items"]
            if "world" in namespace["metadata"].get("labels", {})
        ]
        await _each(lambda name: self._client.delete(paths.pods(name), grace_seconds=0), ours)
        await _each(self._release, (await self._client.get(_CLAIMS))["items"])
        await _each(self._client.delete, [_claims(name) for name in ours])
        await _each(self._client.delete, (_VOLUMES, _CLASSES, paths.NODES))
        await _each(self._end_namespace, ours)

    async def _release(self, claim: Json) -> None:
        if claim["metadata"].get("finalizers"):
            path = f"{_claims(namespace_of(claim))}/{name_of(claim)}"
            with suppress(NotFound):
                await self._client.patch(path, {"metadata": {"finalizers": None}})

    async def _end_namespace(self, name: str) -> None:
        """What the namespace controller would do once the namespace is empty."""
        ending = await self._client.delete(f"{_NAMESPACES}/{name}")
        ending["spec"]["finalizers"] = []
        await self._client.replace(f"{_NAMESPACES}/{name}/finalize", ending)


@asynccontextmanager
async def running(binaries: Path) -> AsyncIterator[Reference]:
    """A control plane with kube-scheduler and its extender, which end with the block."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-differential-")))
        host = f"{stack.enter_context(cluster_network())}.0.1"
        user = User("system:kube-scheduler")
        plane = ControlPlane(
            directory,
            host=host,
            binaries=binaries,
            users=[user],
            env={},
            api_flags=[f"--disable-admission-plugins={','.join(_WITHOUT_ADMISSION)}"],
            controllers=False,
        )
        stack.push_async_callback(plane.stop)
        await plane.start()
        kubeconfig = plane.kubeconfig(plane.admin, directory / "kubeconfig")
        client = await stack.enter_async_context(open_client(str(kubeconfig)))
        extender = Extender()
        url = await stack.enter_async_context(_serving(extender, host))
        settings = _configuration(plane.kubeconfig(user, directory / "scheduler.kubeconfig"), url)
        log = await stack.enter_async_context(_scheduling(directory, binaries, settings))
        yield Reference(client, extender, log)


@asynccontextmanager
async def _scheduling(directory: Path, binaries: Path, settings: Json) -> AsyncIterator[Path]:
    """A kube-scheduler that ends with the block; where its log is. The canary shows when it is ready."""
    configuration, log = directory / "scheduler.json", directory / "kube-scheduler.log"
    configuration.write_text(json.dumps(settings))
    command = [str(binaries / "kube-scheduler"), f"--config={configuration}", "--secure-port=0"]
    process = await spawn(command, log=log, env={})
    try:
        yield log
    finally:
        await end(process, grace_seconds=0)


@asynccontextmanager
async def _serving(extender: Extender, host: str) -> AsyncIterator[str]:
    runner = web.AppRunner(extender.application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _configuration(kubeconfig: Path, url: str) -> Json:
    """The plugins of the default profile but for preemption, which would try to make room."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 2000, "burst": 4000},
        "leaderElection": {"leaderElect": False},
        "parallelism": 2,
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": 1,
        "profiles": [
            {
                "schedulerName": SCHEDULER_NAME,
                "plugins": {"postFilter": {"disabled": [{"name": "*"}]}},
            }
        ],
        "extenders": [
            {
                "urlPrefix": url,
                "filterVerb": FILTER_VERB,
                "httpTimeout": "30s",
                "nodeCacheCapable": True,
                "ignorable": False,
                "managedResources": [{"name": GPU_MEMORY, "ignoredByScheduler": True}],
            }
        ],
    }


def _is_tried(pod: Json) -> bool:
    """Raises SchedulerErred where the attempt came to no verdict."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled":
            if condition["reason"] == "Unschedulable":
                return True
            raise SchedulerErred(f"{name_of(pod)}: {condition['reason']}: {condition.get('message')}")
    return False


def _claims(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"


async def _each(action: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """The results in order; a few at a time. The first failure cancels the rest."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(item: T) -> R:
        async with slots:
            return await action(item)

    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(one(item)) for item in items]
    return [task.result() for task in begun]
