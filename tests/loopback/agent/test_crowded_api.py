"""A pod that takes all it can get of the agent, over real gRPC, and another that comes meanwhile."""

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.connection
import h2.events
import pytest

import agent.api
import agent.interceptor
import agent.stage
import agent.stage_queue
import agent.staging
from agent.api import serve
from agent.auth import Authenticator, TokenAuthenticator, TrustingAuthenticator
from agent.limits import OPEN_CALLS, READ_CALLS
from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.nodeagent.client import AgentBusy, AgentConnection, AgentFull, AgentRefused
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentStub
from localcluster.addresses import free_port
from tests.fakes.agent_api import LivingPods, api_of
from tests.fakes.agent_node import GPU, Node
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

Metadata = tuple[tuple[str, str], ...]
SOON = 10.0  # for what takes milliseconds; a hanging call is what fails


class Pod(AgentConnection):
    """A pod that says by itself who it is, as it may under `--auth none`."""

    def __init__(self, channel: grpc.aio.Channel, threads: grpc.Channel, uid: str, namespace: str) -> None:
        super().__init__(channel, threads, None)
        self.model, self._caller = ModelName(f"model-{uid}"), caller(uid, namespace)

    def _metadata(self) -> Metadata:
        return self._caller


class Agent:
    """A node's agent with its API on a port, and who calls it."""

    def __init__(self, node: Node, port: int, channel: grpc.aio.Channel, threads: grpc.Channel) -> None:
        self.node, self.port, self.channel, self._threads = node, port, channel, threads
        self.stub: Any = NodeAgentStub(channel)  # type: ignore[no-untyped-call]

    def pod(self, uid: str, namespace: str = "team") -> Pod:
        return Pod(self.channel, self._threads, uid, namespace)

    def stage(
        self, uid: str, parts: Iterator[pb.StageRequest], namespace: str = "team"
    ) -> "asyncio.Task[pb.StageResponse]":
        return asyncio.create_task(self.pod(uid, namespace).stage(parts))

    def watch(self, uid: str) -> Any:
        return self.stub.WatchModel(pb.WatchModelRequest(model_name=f"model-{uid}"), metadata=caller(uid))

    async def serve_a_pod(self, uid: str, namespace: str = "team") -> None:
        """What a well-behaved pod does: stage a byte, load it, look at it."""
        pod = self.pod(uid, namespace)
        async with asyncio.timeout(SOON):
            assert (await pod.stage(whole(uid))).bytes == 1
            words = [word async for word in pod.load(pod.model)]
            assert words[-1].state == pb.MODEL_STATE_READY, words[-1].reason
            async for status in pod.watch(pod.model):
                assert status.state == pb.MODEL_STATE_READY
                break

    def staging(self) -> list[Path]:
        return list((self.node.repository.models.parent / "staging").iterdir())


@asynccontextmanager
async def serving(directory: Path, authenticator: Authenticator | None = None) -> AsyncIterator[Agent]:
    node = Node(directory, code=CodeRule.ANY)
    # Room for every pod of a crowd: it is not memory that they fight for.
    node.gpus.readings = [replace(gpu, total_bytes=1024 * GIB) for gpu in node.gpus.readings]
    api = api_of(
        node,
        authenticator or TrustingAuthenticator(),
        LivingPods(choice=GPU),
        max_model_bytes=512 * GIB,
    )
    endpoint = Endpoint("127.0.0.1", free_port("127.0.0.1"))
    server = await serve(api, endpoint)
    try:
        async with grpc.aio.insecure_channel(str(endpoint)) as channel:
            with grpc.insecure_channel(str(endpoint)) as threads:
                yield Agent(node, endpoint.port, channel, threads)
    finally:
        await server.stop(0)


def caller(uid: str, namespace: str = "team") -> Metadata:
    return (("berth-pod", f"{namespace}/{uid}/{uid}"),)


def header(uid: str) -> pb.StageRequest:
    return pb.StageRequest(header=pb.StageHeader(model_name=f"model-{uid}"))


def file(path: str, size: int) -> pb.StageRequest:
    return pb.StageRequest(file=pb.StageFile(path=path, size=size))


def whole(uid: str) -> Iterator[pb.StageRequest]:
    """A model of one byte."""
    yield from (header(uid), file("1/model.py", 1), pb.StageRequest(chunk=b"y"))
    yield pb.StageRequest(
        commit=pb.StageCommit(digest=hashlib.sha256(b"1/model.py\0" + b"1\0" + b"y").hexdigest())
    )


def trickle(uid: str, size: int = 10**9) -> Iterator[pb.StageRequest]:
    yield header(uid)
    yield file("1/model.py", size)
    while True:
        yield pb.StageRequest(chunk=b"x")
        time.sleep(0.05)


async def errors_of(*calls: Awaitable[Any]) -> list[Any]:
    """The errors that these calls end with, each soon."""
    async with asyncio.timeout(SOON):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return outcomes


async def first_done(calls: Sequence[Any], count: int) -> list[Any]:
    await until(lambda: sum(call.done() for call in calls) >= count)
    return [call for call in calls if call.done()]


async def test_a_hundred_pods_of_one_namespace_hold_up_no_other(tmp_path: Path) -> None:
    async with serving(tmp_path) as agent:
        evil = [agent.stage(f"evil{n}", trickle(f"evil{n}"), "crowd") for n in range(100)]
        busy = await errors_of(*await first_done(evil, 64))
        assert all(isinstance(error, AgentBusy) and "the node is busy" in str(error) for error in busy)
        await agent.serve_a_pod("good", "quiet")
        assert sum(not one.done() for one in evil) == 36  # four send, half of the places are taken
        for one in evil:
            one.cancel()
        await until(lambda: agent.staging() == [])
        await agent.serve_a_pod("late", "crowd")


async def test_a_thousand_watches_of_one_pod_leave_the_others_theirs(tmp_path: Path) -> None:
    async with serving(tmp_path) as agent:
        await agent.serve_a_pod("evil")
        watches = [agent.watch("evil") for _ in range(1000)]
        over = await first_done(watches, 1000 - OPEN_CALLS)
        assert 0 < 1000 - len(over) <= OPEN_CALLS
        assert {(await one.code()).name for one in over} == {"UNAVAILABLE"}
        await agent.serve_a_pod("good")
        for one in watches:
            one.cancel()


async def test_many_small_files_and_sizes_that_are_not_meant(tmp_path: Path) -> None:
    released = threading.Event()

    def empty_files(depth: int) -> Iterator[pb.StageRequest]:
        yield header("evil")
        for number in itertools.count():
            yield file("/".join([f"{number:07}", *["d"] * (depth - 2), "f"]), 0)

    def huge(size: int) -> Iterator[pb.StageRequest]:
        yield header("evil")
        yield file("1/model.py", size)
        released.wait(SOON)

    async with serving(tmp_path) as agent:
        (deep,) = await errors_of(agent.stage("evil", empty_files(500)))
        assert isinstance(deep, AgentRefused)
        assert "500 parts; 32 are allowed" in str(deep)
        (full,) = await errors_of(agent.stage("evil", huge(511 * GIB)))
        assert isinstance(full, AgentFull)
        assert "No space left on device: 511 GiB are to come" in str(full)
        announced = agent.stage("evil", huge(GIB))
        await until(lambda: agent.staging() != [])
        await agent.serve_a_pod("good")
        announced.cancel()
        released.set()
        await until(lambda: agent.staging() == [])


@pytest.mark.parametrize(
    ("files", "code"),
    [(2 * 1024 * 1024 - 100, grpc.StatusCode.INVALID_ARGUMENT), (1024 * 1024, grpc.StatusCode.OUT_OF_RANGE)],
)
async def test_a_header_of_many_empty_files_is_refused_by_its_bytes(
    tmp_path: Path, files: int, code: grpc.StatusCode
) -> None:
    """node D2: parsed, each of these two bytes would be fifty."""
    name = b"\x0a\x0amodel-evil"
    body = name + b"\x1a\x00" * files
    size = bytes([len(body) & 0x7F | 0x80, len(body) >> 7 & 0x7F | 0x80, len(body) >> 14 & 0x7F | 0x80])
    message = b"\x0a" + size + bytes([len(body) >> 21]) + body

    async def parts() -> AsyncIterator[bytes]:
        yield message

    async with serving(tmp_path) as agent, asyncio.timeout(4 * SOON):
        call = agent.channel.stream_unary("/berth.v1.NodeAgent/Stage")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(parts(), metadata=caller("evil"))
        assert refused.value.code() is code
        await agent.serve_a_pod("good")


async def accepted(port: int, uid: str, *, calls: int, size: int) -> int:
    """How much of calls that each begin a message of `size` bytes and never end it is taken, until one of them is
    answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wire = h2.connection.H2Connection()
    wire.initiate_connection()
    left = {}
    for _ in range(calls):
        stream = wire.get_next_available_stream_id()
        path = (":path", "/berth.v1.NodeAgent/Load")
        named = [(":method", "POST"), (":scheme", "http"), path, (":authority", "a"), ("te", "trailers")]
        wire.send_headers(stream, [*named, ("content-type", "application/grpc"), *caller(uid)])
        wire.send_data(stream, b"\0" + size.to_bytes(4, "big"))
        left[stream] = size - 1
    try:
        while True:
            for stream in left:
                while count := min(left[stream], wire.local_flow_control_window(stream), 16384):
                    wire.send_data(stream, bytes(count))
                    left[stream] -= count
            writer.write(wire.data_to_send())
            for event in wire.receive_data(await reader.read(65536)):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    return sum(size - 1 - more for more in left.values())
    finally:
        writer.close()


async def test_what_nobody_reads_yet_is_not_taken_from_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """node D2: eight calls of a pod had 32 MiB taken, fourteen pods were more than the agent may use."""
    monkeypatch.setattr(agent.interceptor, "_REQUEST_SECONDS", 3.0)
    size = agent.api._MESSAGE_BYTES
    async with serving(tmp_path) as node, asyncio.timeout(6 * SOON):
        taken = await accepted(node.port, "evil", calls=OPEN_CALLS, size=size)
        assert taken < READ_CALLS * size + OPEN_CALLS * 256 * 1024


class Reviews:
    """An API server's TokenReview: `good-UID` is that pod's, in 10 ms. Counts."""

    def __init__(self) -> None:
        self.reviewed = 0

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.reviewed += 1
        await asyncio.sleep(0.01)
        kind, _, uid = body["spec"]["token"].partition("-")
        if kind != "good":
            return {"status": {"authenticated": False, "error": f"no: {body['spec']['token']}"}}
        extra = {f"authentication.kubernetes.io/pod-{key}": [uid] for key in ("name", "uid")}
        user = {"username": "system:serviceaccount:team:default", "extra": extra}
        return {"status": {"authenticated": True, "audiences": ["berth-agent"], "user": user}}


async def test_calls_without_a_good_token_cost_little_and_stop_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    api = Reviews()
    async with serving(tmp_path, TokenAuthenticator(api)) as agent:  # type: ignore[arg-type]

        async def listed(token: str | None) -> str:
            metadata = () if token is None else (("authorization", f"Bearer {token}"),)
            try:
                await agent.stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=SOON)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        assert await listed("good-early") == "OK"
        outcomes = await asyncio.gather(
            *(listed(None) for _ in range(200)),
            *(listed("secret-same") for _ in range(200)),
            *(listed(f"secret-{n}") for n in range(500)),
            listed("good-early"),
        )
        assert set(outcomes[:200]) == {"UNAUTHENTICATED"}
        assert set(outcomes[200:900]) <= {"UNAUTHENTICATED", "UNAVAILABLE"}
        assert outcomes[-1] == "OK"  # who is known is not asked about
        assert api.reviewed < 100
    assert "secret" not in caplog.text
    assert sum(record.getMessage() == "call refused" for record in caplog.records) < 100


async def test_a_call_whose_request_never_comes_ends_and_is_refused_before_that_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.interceptor, "_REQUEST_SECONDS", 0.05)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with serving(tmp_path) as node:
        channel: Any = node.channel
        method = channel.stream_unary("/berth.v1.NodeAgent/ListModels")
        (stranger,) = await errors_of(method(never()))
        assert stranger.code() is grpc.StatusCode.UNAUTHENTICATED
        (silent,) = await errors_of(method(never(), metadata=caller("p1")))
        assert silent.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "without a request" in (silent.details() or "")
        single = channel.unary_unary("/berth.v1.NodeAgent/ListModels")
        large, garbage = await errors_of(
            single(b"\n" * 20_000, metadata=caller("p1")), single(b"\xff\xff", metadata=caller("p1"))
        )
        assert {large.code(), garbage.code()} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert "20000 bytes; at most 16384" in (large.details() or "")
        unknown = channel.unary_unary("/berth.v1.NodeAgent/Other")
        (error,) = await errors_of(unknown(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
