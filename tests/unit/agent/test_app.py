"""The whole agent in one process, between an API server and a Triton that live in memory."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

import agent.app
import agent.gateway_link
import agent.loops
import agent.parts
from agent.app import main
from agent.cold_starts import ALL, PHASES
from agent.config import AgentOptions
from agent.gpus import GpuReading, GpusHang
from agent.keys import make_keys, read_ticket_secret
from berth.contract.endpoint import Address, Endpoint
from berth.contract.gateway import ReplicaSpec, ticket_of
from berth.contract.keys import Keys
from berth.contract.report import Failure, ModelState, NodeReport
from berth.kube import paths
from berth.kube.errors import response_error
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.options import parse_options
from berth.triton.admin import IndexState
from berth.triton.keys import TritonKeys
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentStub
from localcluster.addresses import free_ports
from tests.fakes.agent_api import CHUNK, COMMIT, DIGEST, FILE, HEADER, file, header, stream
from tests.fakes.agent_node import GPU, FakeTriton, on_server
from tests.fakes.api_server import AGENT_LEASE, EVENTS, NODE, NodeApiServer
from tests.fakes.eventually import until
from tests.fakes.gateway_control import FakeGateway
from tests.fakes.objects import GIB, Json, listed, pod
from tests.fakes.values import replace

KEYS = Keys()
FORBIDDEN = response_error(403, "Forbidden", "no")
NAME, ON_SERVER = "model-p1", on_server("p1")
SCENARIO = 'gpus: [{uuid: GPU-a, product: T4, total: 16Gi}]\nmodels: {"*": requested}\n'


class World:
    """What is outside the agent, and the flags that it is started with. `directory`/repository is its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.api, self.triton = directory, NodeApiServer(), FakeTriton()
        self.triton.unload_seconds = 0.01
        self.repository = directory / "repository"
        self.repository.mkdir()
        self.scenario = directory / "gpus.yaml"
        self.scenario.write_text(SCENARIO)
        self.listen, self.admin = (Endpoint("127.0.0.1", port) for port in free_ports("127.0.0.1", 2))
        self.asked_triton_with: list[tuple[str, str]] = []

    def options(self, *flags: str) -> AgentOptions:
        """Those of a node, with periods that suit a test."""
        argv = [
            "--node-name=n1",
            f"--repository={self.repository}",
            f"--nvml=mock:{self.scenario}",
            f"--listen={self.listen}",
            f"--admin-listen={self.admin}",
            "--kubeconfig=the-kubeconfig",
            *flags,
        ]
        parsed = parse_options(AgentOptions, process="agent", summary="", argv=argv, environ={})
        return replace(parsed, poll_seconds=0.02, heartbeat_seconds=0.05)

    @asynccontextmanager
    async def open_admin(self, endpoint: Address, keys: TritonKeys) -> AsyncIterator[FakeTriton]:
        self.asked_triton_with.append((str(endpoint), keys.admin))
        yield self.triton

    @asynccontextmanager
    async def running(self, *flags: str) -> AsyncIterator["World"]:
        """An agent for the length of the block; it ends when it is told to, and soon."""
        stop = asyncio.Event()
        work = asyncio.create_task(main(self.options(*flags), stop))
        try:
            yield self
            assert not work.done() or work.result()
        finally:
            stop.set()
            async with asyncio.timeout(5):
                await work

    @property
    def said(self) -> NodeReport:
        return NodeReport.decode(self.api.annotations[KEYS.report])

    def state(self, uid: str = "p1") -> ModelState | None:
        if KEYS.report not in self.api.annotations:
            return None
        return next((model.state for model in self.said.models if model.pod_uid == uid), None)

    async def asks(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.admin}{path}") as answer:
            return answer.status, await answer.text()

    async def metrics(self) -> dict[str, float]:
        lines = (await self.asks("/metrics"))[1].splitlines()
        rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {series: float(value) for series, _, value in rows}

    async def until_ready(self) -> None:
        await until(lambda: KEYS.report in self.api.annotations and self.said.triton.ready)


def bound(uid: str = "p1", **more: Any) -> Json:
    return pod(uid, on="n1", choice=GPU, phase="Running", **more)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.setattr(agent.app, "open_client", world.api.opened)
    monkeypatch.setattr(agent.app, "open_admin", world.open_admin)
    return world


@asynccontextmanager
async def calling(world: World) -> AsyncIterator[NodeAgentStub]:
    # The agent may not listen yet: try again at once.
    options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.min_reconnect_backoff_ms", 20)]
    async with grpc.aio.insecure_channel(str(world.listen), options) as channel:
        stub: NodeAgentStub = NodeAgentStub(channel)  # type: ignore[no-untyped-call]
        yield stub


def by(uid: str) -> Any:
    return (("authorization", f"Bearer {uid}"),)


async def stage(stub: NodeAgentStub, uid: str = "p1") -> pb.StageResponse:
    parts = stream(header(f"model-{uid}"), FILE, CHUNK, COMMIT)
    answer: pb.StageResponse = await stub.Stage(parts, metadata=by(uid), wait_for_ready=True)
    return answer


def watch_of(stub: NodeAgentStub, uid: str = "p1", name: str = NAME, **more: Any) -> Any:
    return stub.WatchModel(pb.WatchModelRequest(model_name=name, **more), metadata=by(uid))


async def load(stub: NodeAgentStub, uid: str = "p1") -> list[int]:
    call = stub.Load(pb.LoadRequest(model_name=f"model-{uid}"), metadata=by(uid))
    return [progress.state async for progress in call]


async def test_a_pods_model_from_its_binding_to_its_end(world: World) -> None:
    make_keys(world.directory)
    keys, secret = TritonKeys.read(world.directory), read_ticket_secret(world.directory)
    flags = (f"--triton-keys={world.directory}", "--gateway=10.0.0.7:81", "--triton-grpc=unix:/t/grpc:81")
    async with world.running(*flags), calling(world) as stub:
        await world.until_ready()
        world.api.bind(bound())
        await until(lambda: world.state() is ModelState.PENDING)
        assert (await stage(stub)).bytes == 1
        assert (await load(stub))[-1] == pb.MODEL_STATE_READY
        await until(lambda: world.state() is ModelState.READY)
        assert world.said.models[0].measured_bytes == GIB
        watch = watch_of(stub)
        status = await anext(aiter(watch))
        assert status.gateway == pb.Gateway(endpoint="10.0.0.7:81", ticket=ticket_of(secret, "p1"))
        metrics = await world.metrics()
        phases = [metrics[f'berth_cold_start_seconds_sum{{phase="{name}"}}'] for name in (*PHASES, ALL)]
        assert sum(phases[:-1]) == pytest.approx(phases[-1])
        assert metrics['berth_cold_start_seconds_count{phase="all"}'] == 1
        assert metrics['berth_agent_calls_total{code="OK",method="Load"}'] == 1
        assert metrics['berth_agent_gpu_free_bytes{gpu="GPU-a"}'] == 15 * GIB - 256 * 1024**2
        world.api.delete("p1")
        await until(lambda: world.state() is None)
        assert list((world.repository / "models").iterdir()) == []
        assert world.triton.loaded[ON_SERVER] is IndexState.UNAVAILABLE
    assert world.asked_triton_with == [("unix:/t/grpc:81", keys.admin)]
    (event,) = world.api.events
    assert (event["reason"], event["involvedObject"]["uid"]) == ("ModelLoaded", "p1")
    assert event["source"] == {"component": "berth-agent", "host": "n1"}


async def test_the_gateway_learns_of_a_pods_model_from_its_name_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.gateway_link, "_RECONNECT_SECONDS", 0.01)
    make_keys(world.directory)
    gateway = FakeGateway(world.directory / "control")
    flags = (f"--triton-keys={world.directory}", f"--gateway-control=unix:{gateway.path}", "--gateway=h:1")

    def current() -> list[tuple[str, str, int]]:
        replicas = (ReplicaSpec.from_json(one) for one in gateway.replicas)
        return [(one.model, one.server_name, one.limits.container_concurrency) for one in replicas]

    await gateway.start()
    async with world.running(*flags), calling(world) as stub:
        await gateway.until(lambda _: gateway.received == [{"replicas": []}])
        world.api.bind(bound())
        await gateway.until(lambda _: current() == [(NAME, ON_SERVER, 0)])
        await stage(stub)
        await load(stub)
        watch = watch_of(stub, limits=pb.ReplicaLimits(container_concurrency=2))
        ticket = (await anext(aiter(watch))).gateway.ticket
        await gateway.until(lambda _: current() == [(NAME, ON_SERVER, 2)])
        assert ReplicaSpec.from_json(gateway.replicas[0]).ticket == ticket
        kept = world.repository / "limits.json"
        await until(lambda: kept.exists() and "p1" in kept.read_text())
        await gateway.stop()
        gateway.received.clear()
        await gateway.start()  # the gateway has started anew
        await gateway.until(lambda _: current() == [(NAME, ON_SERVER, 2)])
        watch.cancel()
    gateway.received.clear()
    # And so has the agent: no door has told it anything.
    async with world.running(*flags), calling(world) as stub:
        await gateway.until(lambda _: current() == [(NAME, ON_SERVER, 2)])
        assert all(line.get("replicas") for line in gateway.received)  # never none before it knows its pods
        assert ReplicaSpec.from_json(gateway.replicas[0]).ticket == ticket
        gateway.say(b'{"tritonDied": {"suspects": ["p1"]}}')
        await until(lambda: "TritonDied" in [event["reason"] for event in world.api.events])
        await until(lambda: world.state() is ModelState.READY)
        world.api.delete("p1")  # without a word of its own
        await until(lambda: world.triton.loaded[ON_SERVER] is not IndexState.READY)
        assert gateway.wishes == ["p1"]
        await gateway.until(lambda _: current() == [])
    await gateway.stop()


async def test_who_calls_for_a_pod_that_is_gone_is_told_no_ticket(world: World) -> None:
    async with world.running("--gateway=h:1"), calling(world) as stub:
        await world.until_ready()
        world.api.bind(bound())
        await until(lambda: world.state() is ModelState.PENDING)
        watch = watch_of(stub)
        assert len((await anext(aiter(watch))).gateway.ticket) == 32
        for name, uid in ((NAME, "p2"), ("model-p2", "p1")):
            refused = watch_of(stub, uid, name)
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(refused))
        world.api.delete("p1")
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await until(lambda: world.state() is None)
            await anext(aiter(watch_of(stub)))
        assert gone.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


async def test_a_node_says_what_it_is(world: World) -> None:
    (world.directory / "backends" / "python").mkdir(parents=True)
    (world.directory / "backends" / "README").write_text("")
    flags = (f"--backend-directory={world.directory}/backends", "--server-name=big", "--headroom=1Gi")
    async with world.running(*flags):
        await world.until_ready()
        said = world.said
        assert (said.server, said.capabilities) == ("big", ("python",))
        assert (said.triton.version, said.triton.backends) == ("2.51.0", ("python",))
        (gpu,) = said.gpus
        assert (gpu.uuid, gpu.total_bytes, gpu.headroom_bytes, gpu.other_use_bytes) == (
            "GPU-a",
            16 * GIB,
            GIB,
            0,
        )
        assert world.api.annotations[KEYS.node_total] == str(16 * GIB)
        await until(lambda: world.api.lease is not None)
        assert world.api.lease is not None
        assert world.api.lease["spec"]["holderIdentity"] == "n1"
        assert world.api.lease["metadata"]["ownerReferences"][0]["uid"] == "uid-n1"


async def test_facts_follow_gpus_and_triton(world: World) -> None:
    async with world.running():
        await world.until_ready()
        world.scenario.write_text(SCENARIO.replace("16Gi", "16Gi, other_use: 2Gi"))
        await until(lambda: world.said.gpus[0].other_use_bytes == 2 * GIB)
        world.scenario.write_text("gpus: [")
        await until(lambda: not world.said.gpus[0].healthy)
        assert world.said.gpus[0].total_bytes is None
        assert KEYS.node_total not in world.api.annotations
        world.triton.restart_seconds = 60
        world.triton.die()
        await until(lambda: not world.said.triton.ready)


async def test_a_gpu_that_breaks_is_reported_at_once_to_who_watches_a_model_on_it_and_its_cure_too(
    world: World,
) -> None:
    world.api.bind(bound())
    async with world.running(), calling(world) as stub:
        await stage(stub)
        await load(stub)
        watch = aiter(watch_of(stub))
        broken = SCENARIO.replace("16Gi", "16Gi, xid: 79")
        gone = 'gpus: [{uuid: GPU-b, total: 16Gi}]\nmodels: {"*": requested}\n'
        async with asyncio.timeout(5):
            for scenario, state in ((broken, "FAILED"), (SCENARIO, "READY"), (gone, "FAILED")):
                world.scenario.write_text(scenario)
                while (status := await anext(watch)).state != pb.ModelState.Value(f"MODEL_STATE_{state}"):
                    pass
        assert "GPU-a is not on this node any more" in status.reason
        await until(lambda: [(one.uuid, one.broken) for one in world.said.gpus][1:] == [("GPU-a", True)])
        assert world.state() is ModelState.READY  # Triton holds it


async def test_a_restarted_agent_takes_what_it_finds_and_knows_what_has_been_lost(world: World) -> None:
    world.api.bind(bound())
    async with world.running(), calling(world) as stub:
        await stage(stub)
        await until(lambda: world.state() is ModelState.READY)  # loaded without being asked
    said = replace(world.said, models=(*world.said.models, replace(listed("p2"), state=ModelState.READY)))
    world.api.node["metadata"]["annotations"][KEYS.report] = said.encode()
    world.api.bind(bound("p2"))
    async with world.running():
        await until(lambda: world.state("p2") is ModelState.LOST and world.state() is ModelState.READY)
    assert world.triton.loads == [ON_SERVER]


async def test_one_pod_that_cannot_be_read_hides_no_other(world: World) -> None:
    world.api.bind(bound("bad", mem="lots"))
    world.api.bind(bound())
    world.api.bind(bound("other", mem=None) | {"metadata": pod("other", mem=None)["metadata"]})
    async with world.running():
        await until(lambda: world.state() is ModelState.PENDING)
        assert [model.pod_uid for model in world.said.models] == ["p1"]


async def test_readiness_says_what_is_missing(world: World) -> None:
    world.api.unanswered = {paths.PODS}
    async with world.running():
        await until_asked(world, "/readyz", (503, "the node's pods are not known yet\n"))
    world.api.unanswered, world.api.refuses = set(), {f"PATCH {NODE}": FORBIDDEN}
    world.triton.restart_seconds = 60
    world.triton.die()
    async with world.running():
        await until_asked(world, "/readyz", (503, "Triton does not answer\n"))
        world.triton.restart_seconds = 0
        world.triton.die()
        refused = "the report cannot be written: 403 Forbidden: no\n"
        await until_asked(world, "/readyz", (503, refused))
        world.api.refuses = {}
        await until_asked(world, "/readyz", (200, "ok\n"))
        assert await world.asks("/livez") == (200, "ok\n")


async def until_asked(world: World, path: str, answer: tuple[int, str]) -> None:
    """Its status, and what its text begins with."""
    async with asyncio.timeout(20):
        while True:
            with suppress(aiohttp.ClientConnectionError):  # it does not listen yet
                found, text = await world.asks(path)
                if found == answer[0] and text.startswith(answer[1]):
                    return
            await asyncio.sleep(0.01)


async def test_a_driver_that_hangs_for_long_ends_the_agent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        instance_kind = "KIND_GPU"

        async def read(self) -> tuple[GpuReading, ...]:
            raise GpusHang("NVML has not answered for 5 s")

    monkeypatch.setattr(agent.parts, "NvmlGpus", Hanging)
    async with world.running("--nvml=auto"):
        await world.until_ready()
        await asyncio.sleep(0.01)
        assert await world.asks("/livez") == (200, "ok\n")  # it may come back
    monkeypatch.setattr(agent.loops, "_HANG_SECONDS", 0.3)
    async with world.running("--nvml=auto"):
        await until_asked(world, "/livez", (503, "NVML has not answered for "))


async def test_the_heartbeat_goes_on_without_triton_and_not_with_a_loop_that_is_stuck(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.running():
        await world.until_ready()
        world.triton.restart_seconds = 60
        world.triton.die()
        await asyncio.sleep(0.4)  # twice as long as a loop may be silent
        beats = world.api.beats
        await until(lambda: world.api.beats > beats)
        world.triton.restart_seconds = 0
        world.triton.die()
        await world.until_ready()
        stuck = asyncio.Event()

        async def index() -> Any:
            await stuck.wait()

        monkeypatch.setattr(world.triton, "index", index)
        await asyncio.sleep(0.4)
        beats = world.api.beats
        await asyncio.sleep(0.2)
        assert world.api.beats == beats
        monkeypatch.undo()
        stuck.set()
        await until(lambda: world.api.beats > beats)


async def test_each_loop_that_fails_is_counted_under_its_name_and_ends_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.app, "_VERIFY_EVERY", 0.1)
    async with world.running():
        await world.until_ready()
        world.api.refuses = dict.fromkeys((f"PATCH {NODE}", f"PATCH {AGENT_LEASE}", f"GET {NODE}"), FORBIDDEN)
        world.triton.restart_seconds = 60
        world.triton.die()
        missing = {"reconcile", "report", "heartbeat", "verify"}
        async with asyncio.timeout(5):
            while missing:
                metrics = await world.metrics()
                missing = {
                    one
                    for one in missing
                    if not metrics.get(f'berth_agent_loop_errors_total{{loop="{one}"}}')
                }
        world.api.refuses, world.triton.restart_seconds = {}, 0
        world.triton.die()
        await world.until_ready()
        beats = world.api.beats
        await until(lambda: world.api.beats > beats)


async def test_an_agent_that_ends_before_it_knows_its_pods_takes_no_model_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        """A server with calls in progress."""

        async def stop(self, seconds: float) -> None:
            await asyncio.sleep(0.2)

    async def serve(*_: Any) -> Busy:
        return Busy()

    world.api.bind(bound())
    async with world.running(), calling(world) as stub:
        await stage(stub)
        await until(lambda: world.state() is ModelState.READY)
    world.api.unanswered = {paths.PODS}
    monkeypatch.setattr(agent.app, "serve", serve)
    async with world.running():
        await until_asked(world, "/livez", (200, "ok\n"))
    assert world.triton.loaded == {ON_SERVER: IndexState.READY}
    assert [entry.name for entry in (world.repository / "models").iterdir()] == [ON_SERVER]


async def test_the_end_does_not_wait_for_an_api_server_that_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.app, "_FLUSH_SECONDS", 0.05)
    world.api.unanswered = {EVENTS}
    world.api.bind(bound())
    async with world.running(), calling(world) as stub:
        await stage(stub)
        await until(lambda: world.state() is ModelState.READY)
    assert world.api.events == []


async def test_a_stage_that_is_under_way_is_finished_before_the_end(world: World) -> None:
    world.api.bind(bound())
    begun, ending = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield HEADER
        yield FILE
        begun.set()
        await ending.wait()
        await asyncio.sleep(0.1)
        yield CHUNK
        yield COMMIT

    async with calling(world) as stub:
        async with world.running():
            await world.until_ready()
            stage_ = asyncio.ensure_future(stub.Stage(parts(), metadata=by("p1")))
            await begun.wait()
            await until(lambda: any((world.repository / "staging").iterdir()))
            ending.set()
        assert (await stage_).digest == DIGEST
    assert [entry.name for entry in (world.repository / "models").iterdir()] == [ON_SERVER]


@pytest.mark.parametrize(("extra", "taken"), [(0, True), (128 * 1024, False)])
async def test_a_chunk_may_have_four_mebibytes(world: World, extra: int, taken: bool) -> None:
    world.api.bind(bound())
    size = 4 * 1024**2 + extra
    parts = stream(HEADER, file("1/model.py", size), pb.StageRequest(chunk=bytes(size)))
    async with world.running(), calling(world) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Stage(parts, metadata=by("p1"), wait_for_ready=True)
    code, details = refused.value.code(), refused.value.details() or ""
    assert ("without a commit" in details) is taken, details
    assert taken or code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_open_watch_does_not_hold_up_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.app, "_DRAIN_SECONDS", 0.05)
    world.api.bind(bound())
    async with calling(world) as stub:
        async with world.running():
            await stage(stub)
            watch = watch_of(stub)
            await anext(aiter(watch))
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            while True:
                await anext(aiter(watch))


@pytest.mark.parametrize(
    ("flag", "error", "why"),
    [
        ("--repository=DIR/missing", CannotStart, "--repository: .*/missing: no such directory"),
        ("--node-name=n2", CannotStart, "--node-name n2: API server https://fake: 404"),
        ("--triton-keys=DIR/missing", ConfigError, "--triton-keys: .*/missing/admin"),
    ],
)
async def test_a_start_that_fails_says_which_flag_and_why(
    world: World, flag: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await main(world.options(flag.replace("DIR", str(world.directory))), asyncio.Event())


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
async def test_a_port_that_is_taken_is_named(world: World, flag: str) -> None:
    """Also by one who would share it, as another agent of this node."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises((ExceptionGroup, CannotStart)) as refused:
            await main(world.options(f"{flag}={endpoint}"), asyncio.Event())
    (reason,) = _leaves(refused.value)
    assert isinstance(reason, CannotStart)
    assert f"{flag}: cannot listen on {endpoint}" in str(reason)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


@pytest.mark.parametrize(("auth", "is_believed"), [("none", True), ("token", False)])
async def test_who_calls_is_believed_only_if_that_is_requested(
    world: World, caplog: pytest.LogCaptureFixture, auth: str, is_believed: bool
) -> None:
    world.api.bind(bound())
    async with world.running(f"--auth={auth}"), calling(world) as stub:
        call = stub.ListModels(
            pb.ListModelsRequest(), metadata=(("berth-pod", "team/p1/p1"),), wait_for_ready=True
        )
        if is_believed:
            assert [model.model_name for model in (await call).models] == [NAME]
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="Bearer"):
                await call
    assert ("--auth none" in caplog.text) is is_believed


async def test_a_quarantine_ends_when_the_nodes_annotation_says_so_and_only_then(world: World) -> None:
    """The annotation is a command: it is taken away once it is done."""
    world.triton.deadly = {ON_SERVER}
    world.api.bind(bound())
    world.api.node["metadata"]["resourceVersion"] = "7"
    async with world.running(), calling(world) as agent:
        await world.until_ready()
        await stage(agent)
        await until(lambda: world.state() is ModelState.FAILED)
        (said,) = world.said.models
        assert said.failure is Failure.QUARANTINED
        assert f"{KEYS.lift_quarantine}={DIGEST[:12]}" in said.reason
        world.triton.deadly = set()
        deaths = world.triton.deaths
        world.api.node["metadata"]["annotations"][KEYS.lift_quarantine] = DIGEST[:12]
        await until(lambda: world.state() is ModelState.READY)
        assert KEYS.lift_quarantine not in world.api.annotations
        assert world.triton.deaths == deaths


@pytest.mark.parametrize(
    ("flag", "code", "why"),
    [
        ("--keep-free=99%", grpc.StatusCode.RESOURCE_EXHAUSTED, "99% stay free for the node"),
        (
            "--max-model-bytes=0",
            grpc.StatusCode.OUT_OF_RANGE,
            "at most 100000 files and directories and 0 bytes",
        ),
    ],
)
async def test_what_the_flags_say_of_the_disk_holds_for_who_stages(
    world: World, flag: str, code: grpc.StatusCode, why: str
) -> None:
    world.api.bind(bound())
    async with world.running(flag), calling(world) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
            await stage(stub)
    assert refused.value.code() is code
