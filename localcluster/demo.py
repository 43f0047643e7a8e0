"""`berth demo`: a tour of Berth on one machine, shown in a terminal and checked at every step.

Each step asserts what it shows; the first that does not hold ends the story with exit 1 and says what went wrong.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from tritonclient.utils import InferenceServerException

from berth.contract.keys import Keys
from berth.kube import paths
from berth.kube.errors import KubeError, NotFound
from berth.kube.times import utc_now
from berth.runtime.options import CommonOptions, log_level, switch
from berth.runtime.process import run_process
from binder.cli import top
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.inference import infer_grpc, infer_rest, is_hidden
from localcluster.model_server import serving
from localcluster.samples import SIMPLE_MODEL, archive, model_deployment, model_pod, model_service, packed
from localcluster.services import ServicePort
from scaler import scale

Json = dict[str, Any]

SUMMARY = (
    "Start a real control plane, three simulated GPU nodes with a real Triton each, and Berth; deploy models, use them, "
    "break things, and show how it heals."
)

# What each model takes on its mock GPU once loaded; the pods ask for as much or a little more.
_TAKES = "models: {resnet: 10Gi, resnet-big: 19Gi, resnet-huge: 19Gi, simple: 300Mi, sleeper: 900Mi}\n"
NODES = (
    NodeSpec(
        name="gpu-1",
        scenario="gpus:\n  - {uuid: GPU-1-0, product: Tesla T4, total: 16Gi}\n" + _TAKES,
    ),
    # Of memory it has little: only the model that is scaled fits.
    NodeSpec(
        name="gpu-3",
        scenario="gpus:\n  - {uuid: GPU-3-0, product: Tesla P4, total: 2Gi}\n" + _TAKES,
    ),
    NodeSpec(
        name="gpu-2",
        scenario=(
            "gpus:\n"
            "  - {uuid: GPU-2-0, product: NVIDIA A2, total: 12Gi}\n"
            "  - {uuid: GPU-2-1, product: NVIDIA A10, total: 24Gi}\n" + _TAKES
        ),
    ),
)
_WAIT_SECONDS = 60.0
# The scene of scaling: Knative's own annotations, with its shortest window, and so many requests a second for a replica.
_TARGET = "autoscaling.knative.dev/target"
_SCALING = {
    "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
    "autoscaling.knative.dev/metric": "rps",
    _TARGET: "15",
    "autoscaling.knative.dev/max-scale": "3",
    "autoscaling.knative.dev/window": "6s",
    # Its clients here are no pods of its namespace.
    "seldon.io/trtis-clients": "*",
}
_CLIENTS = 6

_CONFIG, _PROGRAM = (
    (SIMPLE_MODEL / "config.pbtxt").read_bytes(),
    (SIMPLE_MODEL / "1" / "model.py").read_bytes(),
)
# Model name: what its owner is up to, and the files that try it.
_HOSTILE = {
    "nosy": (
        "names resnet's file as its own",
        {
            "config.pbtxt": _CONFIG + b'default_model_filename: "../../resnet/1/model.py"\n',
            "1/model.py": _PROGRAM,
        },
    ),
    "smuggler": (
        "brings a backend of its own",
        {"config.pbtxt": _CONFIG.replace(b'"python"', b'"mine"'), "1/libtriton_mine.so": b"\x7fELF"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions(CommonOptions):
    """The demo's own switches."""

    keep: bool = switch("leave the cluster up afterwards, until Ctrl-C", default=False)
    log_level: str = log_level("error")


class StoryFailed(Exception):
    """A step did not show what it must."""


_GOES_WRONG = (StoryFailed, KubeError, AssertionError, OSError, ClientError, InferenceServerException)


@dataclass(slots=True)
class Timeline:
    """When a Deployment's first pod passed each phase, in seconds since it was applied."""

    created: float | None = None
    bound: float | None = None
    loaded: float | None = None
    ready: float | None = None

    def observe(self, pod: Json, elapsed: float) -> None:
        status = pod.get("status", {})
        self.created = self.created or elapsed
        if pod["spec"].get("nodeName"):
            self.bound = self.bound or elapsed
        inits = status.get("initContainerStatuses") or []
        if inits and all("terminated" in c.get("state", {}) for c in inits):
            self.loaded = self.loaded or elapsed
        if _is_ready(pod):
            self.ready = self.ready or elapsed


@dataclass(slots=True)
class Story:
    """The steps, in order. `console` is where it is shown."""

    cluster: LocalCluster
    console: Console
    url: Callable[[str, bytes], str]
    keys: Keys = Keys()
    timelines: dict[str, Timeline] = field(default_factory=dict)

    async def run(self) -> None:
        await self.deploys()
        await self.infers()
        await self.isolates()
        await self.refuses_hostile_models()
        await self.waits_for_memory()
        await self.heals_a_killed_proxy()
        await self.heals_a_killed_gateway()
        await self.heals_a_pod_killed_hard()
        await self.scales_from_and_to_zero()

    async def deploys(self) -> None:
        self._step("Three models, as Deployments of pods: 11 GiB, 20 GiB and 400 MiB of GPU memory")
        source = self.url("simple.tar.gz", archive())
        await asyncio.gather(
            self._deploy("resnet", "11Gi", source),
            self._deploy("resnet-big", "20Gi", source),
            self._deploy("simple", "400Mi", f"file://{SIMPLE_MODEL}"),
        )
        await self._show_gpus()

    async def infers(self) -> None:
        self._step("Inference over REST and gRPC, each at its own pod, all through the gateway of their node")
        for model in ("resnet", "resnet-big", "simple"):
            ip = await self._ip(model)
            await infer_rest(f"{ip}:9000", model)
            await infer_grpc(f"{ip}:9001", model)
            self._report(f"{model}: right answers from http://{ip}:9000 and grpc {ip}:9001")

    async def isolates(self) -> None:
        self._step("At one model's pod no other model is found, whatever it is called")
        ip = await self._ip("simple")
        for other in ("resnet", "no-such-model"):
            if not await is_hidden(f"{ip}:9000", f"{ip}:9001", other):
                raise StoryFailed(f"simple's pod answered for {other}")
        self._report("simple's pod: resnet is unknown, in the same words as a model that does not exist")

    async def refuses_hostile_models(self) -> None:
        self._step(
            "Two hostile models on resnet's node: refused before Triton sees them, and resnet serves on"
        )
        node = (await self._pods("resnet"))[0]["spec"]["nodeName"]
        async with self._serving_all_the_while("resnet"):
            await asyncio.gather(*(self._refused(name, node) for name in _HOSTILE))

    async def _refused(self, name: str, node: str) -> None:
        does, files = _HOSTILE[name]
        source = self.url(f"{name}.tar.gz", packed(**files))
        spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "restartPolicy": "Never"}
        await self.cluster.apply([model_pod(name, source=source, gpu_mem="64Mi", pod_spec=spec)])
        reason = await self._until(f"{name} to be refused", lambda: self._last_words(name))
        self._report(f"{name} {does}; its pod's status: {reason}")
        await self.cluster.client.delete(paths.pod("default", name))

    @asynccontextmanager
    async def _serving_all_the_while(self, model: str) -> AsyncIterator[None]:
        """Infer without a pause. Raises AssertionError or the client's error for an answer that is not right."""
        address, over = f"{await self._ip(model)}:9000", asyncio.Event()

        async def infer() -> int:
            answers = 0
            while not over.is_set():
                await infer_rest(address, model)
                answers += 1
            return answers

        inferring = asyncio.create_task(infer())
        try:
            yield
        finally:
            over.set()
            answers = await inferring
        self._report(f"{model} answered {answers} times meanwhile, each time right")

    async def waits_for_memory(self) -> None:
        self._step("A model that is too big waits, with its reason, until there is room")
        source = self.url("simple.tar.gz", archive())
        await self.cluster.apply([model_deployment("resnet-huge", source=source, gpu_mem="20Gi")])
        reason = await self._until("resnet-huge to be refused", lambda: self._unschedulable("resnet-huge"))
        self._report(f"resnet-huge is Pending: {reason}")
        self._report("deleting resnet-big …")
        await self.cluster.client.delete("/apis/apps/v1/namespaces/default/deployments/resnet-big")
        await self._ready("resnet-huge")
        await infer_rest(f"{await self._ip('resnet-huge')}:9000", "resnet-huge")
        self._report("resnet-huge got the place of resnet-big and serves")
        await self._show_gpus()

    async def heals_a_killed_proxy(self) -> None:
        self._step("kill -9 of a proxy: the model stays loaded, the pod serves again")
        pod = (await self._pods("simple"))[0]
        os.kill(self.cluster.pid_of("default", pod["metadata"]["name"], "proxy"), signal.SIGKILL)

        async def restarted() -> bool:
            current = (await self._pods("simple"))[0]
            statuses = current["status"].get("containerStatuses") or [{}]
            return statuses[0].get("restartCount", 0) > 0 and _is_ready(current)

        await self._until("the proxy to be restarted", restarted)
        await infer_grpc(f"{await self._ip('simple')}:9001", "simple")
        self._report(f"{pod['metadata']['name']}: proxy restarted, answers again")

    async def heals_a_killed_gateway(self) -> None:
        self._step(
            "kill -9 of a node's gateway: the agent sends the next one its replicas, and they serve again"
        )
        pod = (await self._pods("simple"))[0]
        address, gateway = pod["status"]["podIP"], self.cluster.nodes[pod["spec"]["nodeName"]].gateway
        killed = gateway.pid
        gateway.kill()
        began = time.monotonic()

        async def serves() -> bool:
            if gateway.pid in (None, killed):
                return False
            try:
                await infer_rest(f"{address}:9000", "simple")
                await infer_grpc(f"{address}:9001", "simple")
            except (OSError, ClientError, InferenceServerException):
                return False
            return _is_ready((await self._pods("simple"))[0])

        await self._until("simple to be served through the next gateway", serves)
        self._report(f"simple answers again after {time.monotonic() - began:.1f} s; no pod was started anew")

    async def heals_a_pod_killed_hard(self) -> None:
        self._step("A pod deleted with no grace at all: the agent unloads its model")
        pod = (await self._pods("resnet"))[0]
        await self.cluster.client.delete("/apis/apps/v1/namespaces/default/deployments/resnet")
        await self.cluster.client.delete(paths.pod("default", pod["metadata"]["name"]), grace_seconds=0)

        await self._unloaded("resnet")
        self._report("resnet is gone from its node, and the memory that it reserved is free")
        await self._show_gpus()

    async def scales_from_and_to_zero(self) -> None:
        self._step(
            "A model without requests: no replica, no GPU memory, and a Service that routes to an activator"
        )
        model = "sleeper"
        deployment = model_deployment(
            model, source=self.url("simple.tar.gz", archive()), gpu_mem="1Gi", replicas=0, scaling=_SCALING
        )
        await self.cluster.apply([model_service(model), deployment])
        address = await self._until(f"{model}'s Service to have an endpoint", lambda: self._listens(model))
        self._report(
            f"{model}: 0 replicas; http://{address}:9000 routes to {self._endpoints(model)}, a port of an activator"
        )

        self._step("A cold start: the first request starts a replica, and is buffered")
        await self._cold_start(model, address)
        self._step(
            f"{_CLIENTS} clients at once, and a replica has a target of 70 % of {_SCALING[_TARGET]} requests a second: "
            "three replicas, as max-scale allows"
        )
        async with self._asking(model, address):
            await self._counts(model, 3)
            self._report(f"the Service routes to {self._endpoints(model)}, directly")
            await self._show_scaling(model)
        self._step("No more requests: scaled to zero, and the memory is free")
        await self._counts(model, 0)
        await self._unloaded(model)
        await self._show_gpus()

    async def _cold_start(self, model: str, address: str) -> None:
        timeline, began = Timeline(), time.monotonic()
        asking = asyncio.create_task(infer_rest(f"{address}:9000", model))
        try:
            while not asking.done():
                for pod in await self._pods(model):
                    timeline.observe(pod, time.monotonic() - began)
                await asyncio.sleep(0.02)
        finally:
            asking.cancel()
        await asking
        took = time.monotonic() - began
        phases = {"replica made": timeline.created, "bound": timeline.bound, "loaded": timeline.loaded}
        shown = ", ".join(f"{name} after {seconds:.2f} s" for name, seconds in phases.items() if seconds)
        self._report(f"{shown}, answered after {took:.2f} s")

    @asynccontextmanager
    async def _asking(self, model: str, address: str) -> AsyncIterator[None]:
        """Clients that ask again and again, through the Service. Raises what one of them could not be answered for."""
        over, began = asyncio.Event(), time.monotonic()

        async def ask() -> int:
            answers = 0
            while not over.is_set():
                await infer_rest(f"{address}:9000", model)
                answers += 1
                await asyncio.sleep(0.1)
            return answers

        asking = [asyncio.create_task(ask()) for _ in range(_CLIENTS)]
        try:
            yield
        finally:
            over.set()
            answers = sum(await asyncio.gather(*asking))
        self._report(f"{answers} answers in {time.monotonic() - began:.0f} s, each of them right")

    async def _counts(self, model: str, replicas: int) -> None:
        began = time.monotonic()

        async def counted() -> bool:
            pods = await self._pods(model)
            return len(pods) == replicas and all(map(_is_ready, pods))

        await self._until(f"{replicas} replicas of {model}", counted)
        self._report(f"{replicas} replicas after {time.monotonic() - began:.1f} s")

    def _endpoints(self, name: str) -> str:
        """Where the Service's connections go."""
        return ", ".join(map(str, self.cluster.services.backends(ServicePort("default", name, "http"))))

    async def _show_scaling(self, model: str) -> None:
        """What `berth scale` says."""
        status = await scale.ask(self.cluster.client, scale.ScaleOptions(model=model))
        scale.show(status, self.console, utc_now())

    async def _listens(self, name: str) -> str | None:
        """The Service's address, once connections to it are accepted."""
        with suppress(LookupError, OSError):
            address = self.cluster.services.address("default", name)
            _, writer = await asyncio.open_connection(address, 9000)
            writer.close()
            return address
        return None

    async def _deploy(self, name: str, gpu_mem: str, source: str) -> None:
        started = time.monotonic()
        timeline = self.timelines.setdefault(name, Timeline())
        await self.cluster.apply([model_deployment(name, source=source, gpu_mem=gpu_mem)])

        async def ready() -> bool:
            for pod in await self._pods(name):
                timeline.observe(pod, time.monotonic() - started)
            return timeline.ready is not None

        await self._until(f"{name} to serve", ready)
        self._report(f"{name} serves after {timeline.ready:.1f} s")

    async def _unloaded(self, model: str) -> None:
        """Gone from what its node reports, which comes a moment after the model has gone."""

        async def unloaded() -> bool:
            view = await self._view()
            return not any(m.model_name == model for node in view.nodes for m in node.models)

        await self._until(f"{model} to be unloaded", unloaded)

    async def _ready(self, name: str) -> None:
        async def ready() -> bool:
            return any(_is_ready(pod) for pod in await self._pods(name))

        await self._until(f"{name} to serve", ready)

    async def _unschedulable(self, name: str) -> str | None:
        for pod in await self._pods(name):
            for condition in pod["status"].get("conditions") or []:
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return str(condition["message"])
        return None

    async def _last_words(self, name: str) -> str | None:
        """Why a pod's loader failed, once it has."""
        pod = await self.cluster.client.get(paths.pod("default", name))
        for status in pod["status"].get("initContainerStatuses") or []:
            if ended := status["state"].get("terminated"):
                if ended["exitCode"] == 0:
                    raise StoryFailed(f"{name} was loaded")
                return str(ended["message"]).strip().splitlines()[-1]
        return None

    async def _pods(self, name: str) -> list[Json]:
        listed = await self.cluster.client.get(paths.pods("default"), labelSelector=f"app={name}")
        return [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]

    async def _ip(self, name: str) -> str:
        return str((await self._pods(name))[0]["status"]["podIP"])

    async def _until(self, what: str, check: Callable[[], Awaitable[Any]]) -> Any:
        """The first true answer of `check`, or StoryFailed after a bound."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                if answer := await check():
                    return answer
            except (NotFound, IndexError):
                pass  # between a pod's end and its successor
            await asyncio.sleep(0.05)
        raise StoryFailed(f"waited {_WAIT_SECONDS:g} s for {what}")

    async def _show_gpus(self) -> None:
        """The live table for a moment on a terminal, once elsewhere."""
        if not self.console.is_terminal:
            self.console.print(top.table(await self._view()))
            return
        with Live(top.table(await self._view()), console=self.console, auto_refresh=False) as live:
            for _ in range(8):
                await asyncio.sleep(0.25)
                live.update(top.table(await self._view()), refresh=True)

    async def _view(self) -> top.ClusterView:
        return await top.collect(self.cluster.client, self.keys, "berth-system")

    def _step(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]")

    def _report(self, text: str) -> None:
        self.console.print(f"  {text}", highlight=False, markup=False)


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth demo`."""
    return run_process("demo", SUMMARY, DemoOptions, main, argv)


async def main(options: DemoOptions, stop: asyncio.Event) -> None:
    """Tell the story; SystemExit(1) when it does not hold."""
    console, began = _console(), time.monotonic()
    console.print("[bold]Starting[/bold] a control plane, 3 GPU nodes, and Berth with its autoscaling …")
    async with (
        LocalCluster(ClusterSpec(nodes=NODES, binders=1, scalers=1, activators=1)) as cluster,
        serving() as url,
    ):
        console.print(f"  up after {time.monotonic() - began:.1f} s")
        story = Story(cluster, console, url)
        try:
            await _unless_stopped(story.run(), stop)
        except _GOES_WRONG as error:
            console.print(f"\n[bold red]What went wrong:[/bold red] {error}", highlight=False)
            console.print(f"  logs: {cluster.keep_logs()}", highlight=False)
            raise SystemExit(1) from error
        _summarise(console, story, time.monotonic() - began)
        if options.keep:
            await _keep(console, cluster, stop)


def _console() -> Console:
    """As wide as the terminal; in a log, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


async def _unless_stopped(story: Awaitable[None], stop: asyncio.Event) -> None:
    telling = asyncio.ensure_future(story)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({telling, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not telling.done():
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        raise StoryFailed("interrupted")
    telling.result()


def _summarise(console: Console, story: Story, seconds: float) -> None:
    phases = Table(
        "model", "pod created", "bound", "loaded", "ready", title="\nFrom apply to serving, seconds"
    )
    for name, line in story.timelines.items():
        phases.add_row(name, *(f"{t or 0:.2f}" for t in (line.created, line.bound, line.loaded, line.ready)))
    console.print(phases)
    memory = Table("process", "RSS, MiB", title="\nMemory of each process")
    for name, mebibytes in sorted(story.cluster.rss_mebibytes().items()):
        memory.add_row(name, f"{mebibytes:.0f}")
    console.print(memory)
    console.print(f"\n[bold green]All checks passed.[/bold green] {seconds:.0f} s in all.")


async def _keep(console: Console, cluster: LocalCluster, stop: asyncio.Event) -> None:
    console.print("\nThe cluster stays up until Ctrl-C:", highlight=False)
    for line in cluster.addresses():
        console.print(f"  {line}", highlight=False, markup=False)
    await stop.wait()


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
