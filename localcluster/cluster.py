"""A whole cluster on one machine: `async with LocalCluster(spec) as cluster`.

A real control plane and, per simulated node, a process kubelet. What runs there is `deploy/`, applied as it
is but for mock GPUs: the DaemonSets' pods with a real Triton and an agent, and the binders' Deployment, under
their own ServiceAccounts. Nothing outlives the block, nor the process.
"""

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from berth.kube.client import KubeClient, open_client
from berth.kube.errors import Conflict, Invalid
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import CLIENT_RATE, ControlPlane, User, node_user
from localcluster.credentials import write_kubeconfig
from localcluster.deployment import (
    AUTOSCALED,
    DEPLOY,
    SCENARIO,
    SYSTEM_NAMESPACE,
    Overlay,
    base_container,
    flag_of,
    node_labels,
    rendered,
    sockets,
)
from localcluster.guard import KEEP_FILE
from localcluster.kube_proxy import KubeProxy
from localcluster.kubelet.images import Images
from localcluster.kubelet.kubelet import DEFAULT_CAPACITY, Kubelet, NodeIdentity, host_directory
from localcluster.kubelet.pod import PodRunner
from localcluster.parts import Part
from localcluster.processes import CLUSTER_ID_VARIABLE, StartFailed
from localcluster.programs import make_images
from localcluster.services import Services, service_range

JsonObject = dict[str, Any]

AGENT_PORT, AGENT_ADMIN_PORT, GATEWAY_PORT, GATEWAY_ADMIN_PORT = 8470, 8471, 8472, 8473
BINDER_ADMIN_PORT, EXTENDER_PORT = 8480, 8481
_TOKEN_SECONDS = 24 * 3600
_ADDRESSES = Path(__file__).parent / "addresses.yaml"
_POLICY_SECONDS = 30.0
_SOCKET_PATH_BYTES = 107  # unix(7), without the final NUL
# Of `deploy/extender` this one is a process: kube-scheduler finds its Service and its token at places that a
# process kubelet cannot give it.
_EXTENDED = "berth-kube-scheduler"
_SCHEDULER = User("system:kube-scheduler")


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One simulated GPU node. `scenario` is the mock GPUs' YAML, which can be rewritten while running."""

    name: str
    scenario: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    capacity: Mapping[str, str] = field(default_factory=lambda: DEFAULT_CAPACITY)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The nodes, how many binders, scalers and activators, and flags that agents and scalers get besides those of
    `deploy/`."""

    nodes: Sequence[NodeSpec] = ()
    binders: int = 1
    # Without either the cluster has nothing of `deploy/autoscaling`.
    scalers: int = 0
    activators: int = 0
    kube_scheduler: bool = False  # with the extender, as `deploy/extender` sets it up
    agent_flags: Sequence[str] = ()
    scaler_flags: Sequence[str] = ()

    @property
    def deployed(self) -> Path:
        """The kustomization that is applied."""
        if self.kube_scheduler:
            return DEPLOY / "extender"
        return AUTOSCALED if self.scalers or self.activators else DEPLOY / "base"


@dataclass(slots=True)
class SimulatedNode:
    """The parts of one node. They come back when they are killed."""

    name: str
    address: str
    directory: Path
    agent: Part
    triton: Part
    gateway: Part
    kubelet: Kubelet

    @property
    def repository(self) -> Path:
        """The agent's `--repository`."""
        return self.kubelet.host_path(flag_of(base_container("agent"), "--repository"))

    @property
    def scenario(self) -> Path:
        """The mock GPUs' YAML."""
        return self.kubelet.host_path(SCENARIO)


class LocalCluster:
    """Use as an async context manager; everything below is for its inside."""

    client: KubeClient
    kubeconfig: Path
    services: Services

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._stack = AsyncExitStack()
        self.id = secrets.token_hex(8)
        """What every process of the cluster carries in its environment."""
        self._env = {**_machine_environment(), CLUSTER_ID_VARIABLE: self.id}
        self.nodes: dict[str, SimulatedNode] = {}
        self.binders = self._parts("binder", spec.binders)
        """They come back when they are killed."""
        self.scalers, self.activators = (
            self._parts("scaler", spec.scalers),
            self._parts("activator", spec.activators),
        )
        """These too."""

    async def __aenter__(self) -> "LocalCluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def apply(self, documents: Iterable[JsonObject], *, dry_run: bool = False) -> None:
        """Server-side apply with strict field validation, as `kubectl apply --server-side` does."""
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        for document in documents:
            await self.client.apply(_path_of(document), document, manager="berth-localcluster", **params)

    def pid_of(self, namespace: str, pod: str, container: str) -> int:
        """The process of a container that is running now. Raises KeyError or ProcessLookupError."""
        for node in self.nodes.values():
            try:
                runner = node.kubelet.runner(namespace, pod)
            except KeyError:
                continue
            pid = runner.containers[container].pid
            if pid is None:
                raise ProcessLookupError(f"{container} of {namespace}/{pod} is not running")
            return pid
        raise KeyError(f"{namespace}/{pod} runs on no node")

    def binder_address(self, index: int) -> str:
        """Where a binder's ports are."""
        return self.binders[index].address

    async def restart_api_server(self) -> None:
        """kill -9; returns when the next one is ready."""
        await self._control_plane.restart_api_server()

    def keep_logs(self) -> Path:
        """Leave the directory with every log behind; where it is."""
        (self.directory / KEEP_FILE).touch()
        return self.directory

    def addresses(self) -> list[str]:
        """What a person needs to play with the cluster, a line each."""
        lines = [f"export KUBECONFIG={self.kubeconfig}"]
        for node in self.nodes.values():
            lines.append(
                f"{node.name}: agent {node.address}:{AGENT_PORT}, metrics {node.address}:{AGENT_ADMIN_PORT}"
            )
            lines.append(f"{node.name}: gateway's metrics {node.address}:{GATEWAY_ADMIN_PORT}")
            lines.append(f"{node.name}: mock GPUs in {node.scenario}")
        return [*lines, f"logs: {self.directory}"]

    def rss_mebibytes(self) -> dict[str, float]:
        """Resident memory of each process of the cluster."""
        pids: dict[str, int | None] = dict(self._control_plane.pids())
        for node in self.nodes.values():
            for runner in node.kubelet.runners():
                where = node.name if runner.ref.namespace == SYSTEM_NAMESPACE else runner.ref.name
                pids |= {f"{name} {where}": c.pid for name, c in runner.containers.items()}
        found = {name: _rss_mebibytes(pid) for name, pid in pids.items() if pid is not None}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def signing_key(self) -> Path:
        """The private key of the cluster's ServiceAccount tokens."""
        return self._control_plane.signing_key

    async def _start(self) -> None:
        self.directory = self._stack.enter_context(self._work_directory())
        network = self._stack.enter_context(cluster_network())
        await self._start_guard()
        users = [node_user(node.name) for node in self._spec.nodes]
        binaries = await asyncio.to_thread(control_plane_directory)
        self._control_plane = ControlPlane(
            self.directory,
            host=f"{network}.0.1",
            binaries=binaries,
            users=[_SCHEDULER, *users],
            env=self._env,
            services=service_range(network),
        )
        self._stack.push_async_callback(self._control_plane.stop)
        self._stack.callback(triton.remove_shared_memory, triton.shm_prefix(self.id))
        _, documents, images = await asyncio.gather(
            self._control_plane.start(),
            asyncio.to_thread(rendered, binaries / "kubectl", self._spec.deployed),
            asyncio.to_thread(make_images, self.directory / "images", cluster_id=self.id),
        )
        await self._start_scheduler()
        self.kubeconfig = self._control_plane.kubeconfig(
            self._control_plane.admin, self.directory / "kubeconfig"
        )
        self.client = await self._stack.enter_async_context(open_client(str(self.kubeconfig)))
        labels = node_labels(documents)
        await self._serve_services()
        await asyncio.gather(
            self._deploy(documents),
            *(
                self._start_node(spec, user, f"{network}.{index}.1", images, labels)
                for index, (spec, user) in enumerate(zip(self._spec.nodes, users, strict=True), start=1)
            ),
        )
        parts = [part for node in self.nodes.values() for part in (node.agent, node.triton, node.gateway)]
        await asyncio.gather(
            *(part.running() for part in (*parts, *self.binders, *self.scalers, *self.activators))
        )
        if self._spec.kube_scheduler:
            await self._start_extended_scheduler()

    async def _serve_services(self) -> None:
        """Let EndpointSlices take the pods' addresses, and connections to Services get there."""
        self.services = Services(self.client)
        await self._stack.enter_async_context(_running(self.services.run()))
        await self._stack.enter_async_context(_running(KubeProxy(self.services).run()))
        await self.apply(yaml.safe_load_all(_ADDRESSES.read_text()))
        async with asyncio.timeout(_POLICY_SECONDS):
            while not await self._takes_loopback():
                await asyncio.sleep(0.05)
        await self.services.synced()

    async def _takes_loopback(self) -> bool:
        """Whether the policy works already: the API server reads it some moments after it has been written."""
        probe = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"name": "probe"},
            "endpoints": [{"addresses": ["127.0.0.1"]}],
        }
        try:
            await self.apply([probe], dry_run=True)
        except Invalid:
            return False
        return True

    @contextmanager
    def _work_directory(self) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix="berth-"))
        try:
            _require_short([host_directory(directory / node.name) for node in self._spec.nodes])
            yield directory
        finally:
            if not (directory / KEEP_FILE).exists():
                shutil.rmtree(directory, ignore_errors=True)

    async def _start_guard(self) -> None:
        """The pipe's other end is ours alone: it closes when this process ends, in whatever way."""
        guard = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "localcluster.guard",
            self.id,
            str(self.directory),
            stdin=asyncio.subprocess.PIPE,
            env=_machine_environment(),
            start_new_session=True,
        )

        async def release() -> None:
            assert guard.stdin is not None
            guard.stdin.close()
            await guard.wait()

        self._stack.push_async_callback(release)

    async def _deploy(self, documents: Sequence[JsonObject]) -> None:
        ours = [d for d in documents if (d["kind"], d["metadata"]["name"]) != ("Deployment", _EXTENDED)]
        overlay = Overlay(
            replicas={
                "binder": self._spec.binders,
                "scaler": self._spec.scalers,
                "activator": self._spec.activators,
            },
            flags={"agent": self._spec.agent_flags, "scaler": self._spec.scaler_flags},
        )
        await self.apply(overlay.over(ours))
        # The controller-manager makes this too, but only after some seconds, and pods need it.
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        try:
            await self.client.create("/api/v1/namespaces/default/serviceaccounts", account)
        except Conflict:
            return

    def _parts(self, container: str, count: int) -> list[Part]:
        """Of a Deployment whose pods have this one container."""
        return [
            Part(f"{container} {index}", container, partial(self._pod, container, index))
            for index in range(count)
        ]

    def _pod(self, container: str, index: int) -> PodRunner | None:
        kubelets = [node.kubelet for node in self.nodes.values()]
        found = [runner for kubelet in kubelets for runner in kubelet.kept(SYSTEM_NAMESPACE, container)]
        return sorted(found, key=lambda runner: runner.ref.name)[index] if index < len(found) else None

    async def _start_scheduler(self) -> None:
        """For the pods of DaemonSets and of the binders' Deployment."""
        kubeconfig = self._control_plane.kubeconfig(_SCHEDULER, self.directory / "scheduler.kubeconfig")
        flags = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", *CLIENT_RATE]
        await self._control_plane.start_scheduler("kube-scheduler", flags)

    async def _start_extended_scheduler(self) -> None:
        """The overlay's configuration, but for the Service: it calls the first binder, which need not lead."""
        config = yaml.safe_load((DEPLOY / "extender" / "scheduler.yaml").read_text())
        config["extenders"][0]["urlPrefix"] = f"http://{self.binder_address(0)}:{EXTENDER_PORT}"
        kubeconfig = await self._account_kubeconfig(_EXTENDED, "kube-scheduler")
        config["clientConnection"] = {"kubeconfig": str(kubeconfig)}
        path = self.directory / f"{_EXTENDED}.yaml"
        path.write_text(yaml.safe_dump(config))
        await self._control_plane.start_scheduler(_EXTENDED, [f"--config={path}"])

    async def _start_node(
        self, spec: NodeSpec, user: User, address: str, images: Images, labels: Mapping[str, str]
    ) -> None:
        directory = self.directory / spec.name
        directory.mkdir()
        kubeconfig = self._control_plane.kubeconfig(user, directory / "kubelet.kubeconfig")
        client = await self._stack.enter_async_context(open_client(str(kubeconfig)))
        kubelet = Kubelet(
            client,
            NodeIdentity(spec.name, address, {**labels, **spec.labels}, spec.taints, spec.capacity),
            directory=directory,
            images=images,
            marks={CLUSTER_ID_VARIABLE: self.id},
            service=self.services.address,
        )
        node = SimulatedNode(
            spec.name,
            address,
            directory,
            agent=_part_of(kubelet, "agent", spec.name),
            triton=_part_of(kubelet, "triton", spec.name),
            gateway=_part_of(kubelet, "gateway", spec.name),
            kubelet=kubelet,
        )
        node.scenario.parent.mkdir(parents=True)
        node.scenario.write_text(spec.scenario)
        self.nodes[spec.name] = node
        await kubelet.register()
        await self._stack.enter_async_context(_running(kubelet.run()))

    async def _account_kubeconfig(self, account: str, name: str) -> Path:
        """A kubeconfig with a real token of a ServiceAccount, for a process that is not in a pod."""
        answer = await self.client.create(
            f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/{account}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": _TOKEN_SECONDS},
            },
        )
        return write_kubeconfig(
            self.directory / f"{name}.kubeconfig",
            server=self._control_plane.server,
            certificate=self._control_plane.certificate,
            token=answer["status"]["token"],
        )


def _require_short(hosts: Sequence[Path]) -> None:
    """Raises StartFailed where a node's unix sockets would have longer paths than the kernel takes."""
    places = [f"{host}{path}" for host in hosts for path in sockets()]
    longest = max(places, key=len, default="")
    if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES:
        raise StartFailed(
            f"{longest} is longer than the {_SOCKET_PATH_BYTES} bytes that a unix socket's path may have: "
            "set TMPDIR to a shorter directory"
        )


def _part_of(kubelet: Kubelet, container: str, node: str) -> Part:
    def find() -> PodRunner | None:
        return next(iter(kubelet.kept(SYSTEM_NAMESPACE, container)), None)

    return Part(f"{container} of {node}", container, find)


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


_CLUSTER_SCOPED = frozenset(
    {
        *("Namespace", "ClusterRole", "ClusterRoleBinding", "Node", "PriorityClass", "RuntimeClass"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
        *("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"),
    }
)
_PLURALS = {
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "RuntimeClass": "runtimeclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}


def _path_of(document: JsonObject) -> str:
    """The path of a built-in kind."""
    version, kind, meta = document["apiVersion"], document["kind"], document["metadata"]
    prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = "" if kind in _CLUSTER_SCOPED else f"/namespaces/{meta.get('namespace', 'default')}"
    return f"{prefix}{scope}/{_PLURALS.get(kind, kind.lower() + 's')}/{meta['name']}"


def _machine_environment() -> dict[str, str]:
    """The caller's environment without settings that would reach Berth's processes by accident."""
    return {k: v for k, v in os.environ.items() if not k.startswith("BERTH_") and k != "KUBECONFIG"}


def _rss_mebibytes(pid: int) -> float | None:
    """None: it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2
