"""What a pod's processes say to their node's agent, and what they make of its answers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.nodeagent.client import AgentConnection, AgentRefused, AgentUnavailable, connect
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from tests.fakes.grpcs import reached, serving

MODEL = ModelName("net")


class Agent(NodeAgentServicer):
    """Notes who calls, about what and with how much time; refuses with `code` if it has one."""

    def __init__(self, code: grpc.StatusCode | None = None, words: str = "so it is") -> None:
        self.code, self.words = code, words
        self.calls: list[tuple[str, str | None, float | None]] = []

    async def Stage(self, requests: Any, context: Any) -> pb.StageResponse:  # noqa: N802
        names = [request.header.model_name async for request in requests]
        await self._note(names[0], context)
        return pb.StageResponse(digest="d", already_staged=True)

    async def Load(self, request: Any, context: Any) -> AsyncIterator[pb.LoadProgress]:  # noqa: N802
        yield pb.LoadProgress(state=pb.MODEL_STATE_LOADING)
        await self._note(request.model_name, context)
        yield pb.LoadProgress(state=pb.MODEL_STATE_READY)

    async def Unload(self, request: Any, context: Any) -> pb.UnloadResponse:  # noqa: N802
        await self._note(request.model_name, context)
        return pb.UnloadResponse()

    async def WatchModel(self, request: Any, context: Any) -> AsyncIterator[pb.ModelStatus]:  # noqa: N802
        await self._note(request.model_name, context)
        for state in (pb.MODEL_STATE_READY, pb.MODEL_STATE_UNLOADING):
            yield pb.ModelStatus(state=state)

    async def _note(self, model: str, context: Any) -> None:
        token = dict(context.invocation_metadata()).get("authorization")
        self.calls.append((model, token, context.time_remaining()))
        if self.code is not None:
            await context.abort(self.code, self.words)


@asynccontextmanager
async def connected(agent: Agent, token_file: Path | None = None) -> AsyncIterator[AgentConnection]:
    async with (
        serving(lambda server: add_NodeAgentServicer_to_server(agent, server)) as port,  # type: ignore[no-untyped-call]
        connect(Endpoint("127.0.0.1", port), token_file) as connection,
    ):
        yield connection


def requests() -> Iterator[pb.StageRequest]:
    yield pb.StageRequest(header=pb.StageHeader(model_name=MODEL))


async def all_of(connection: AgentConnection) -> list[Any]:
    return [
        (await connection.stage(requests())).already_staged,
        [progress.state async for progress in connection.load(MODEL)],
        [status.state async for status in connection.watch(MODEL)],
        await connection.unload(MODEL),
    ]


async def test_every_call_names_the_model_and_gives_the_answer() -> None:
    agent = Agent()
    async with connected(agent) as connection:
        assert await all_of(connection) == [
            True,
            [pb.MODEL_STATE_LOADING, pb.MODEL_STATE_READY],
            [pb.MODEL_STATE_READY, pb.MODEL_STATE_UNLOADING],
            pb.UnloadResponse(),
        ]
    assert [call[:2] for call in agent.calls] == [(MODEL, None)] * 4


async def test_what_may_take_an_hour_has_no_deadline_and_an_unload_one_beyond_the_agents() -> None:
    agent = Agent()
    async with connected(agent) as connection:
        await all_of(connection)
    *long, unload = (seconds for _, _, seconds in agent.calls)
    assert long == [None] * 3
    assert unload is not None
    assert 125 < unload < 600  # the agent waits 120 s for requests in flight


async def test_every_call_carries_the_token_of_its_time(tmp_path: Path) -> None:
    agent = Agent()
    async with connected(agent, tmp_path / "token") as connection:
        for token in ("one", "two"):
            (tmp_path / "token").write_text(token + "\n")
            await all_of(connection)
    assert [token for _, token, _ in agent.calls] == ["Bearer one"] * 4 + ["Bearer two"] * 4


async def test_a_token_that_is_not_there_is_a_refusal_that_names_its_flag(tmp_path: Path) -> None:
    agent = Agent()
    async with connected(agent, tmp_path / "token") as connection:
        with pytest.raises(AgentRefused, match=r"--token-file: .*token: No such file") as caught:
            await connection.unload(MODEL)
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert agent.calls == []


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_what_may_pass_is_distinguished(code: grpc.StatusCode) -> None:
    async with connected(Agent(code)) as connection:
        with pytest.raises(AgentUnavailable, match=r"^so it is$"):
            await connection.stage(requests())
        with pytest.raises(AgentUnavailable, match=r"^so it is$"):
            await connection.unload(MODEL)
        for stream in (connection.load(MODEL), connection.watch(MODEL)):
            with pytest.raises(AgentUnavailable, match=r"^so it is$"):
                async for _ in stream:
                    pass


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL]
)
async def test_a_refusal_tells_its_code(code: grpc.StatusCode) -> None:
    async with connected(Agent(code)) as connection:
        with pytest.raises(AgentRefused, match=rf"^so it is \({code.name}\)$") as caught:
            await connection.stage(requests())
        assert caught.value.code is code


class Refusing(NodeAgentServicer):
    """Ends every stream of files before it has read any of it."""

    async def Stage(self, requests: Any, context: Any) -> pb.StageResponse:  # noqa: N802
        await anext(requests)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "so it is", ())
        raise AssertionError


async def test_a_stream_that_is_refused_while_it_is_sent_gets_the_reason() -> None:
    def large() -> Iterator[pb.StageRequest]:
        yield from requests()
        for _ in range(1000):
            yield pb.StageRequest(chunk=b"x" * 100_000)

    async with connected(Refusing()) as connection:  # type: ignore[arg-type]
        for _ in range(20):
            with pytest.raises(AgentRefused, match=r"^so it is \(INVALID_ARGUMENT\)$"):
                await connection.stage(large())


async def test_what_breaks_the_stream_on_our_side_is_reported_as_it_is() -> None:
    def broken() -> Iterator[pb.StageRequest]:
        yield from requests()
        raise OSError(5, "Input/output error")

    async with connected(Agent()) as connection:
        with pytest.raises(OSError, match="Input/output error"):
            await connection.stage(broken())


async def test_an_agent_that_says_no_word_is_reported_by_its_code() -> None:
    async with connected(Agent(grpc.StatusCode.UNAVAILABLE, "")) as connection:
        with pytest.raises(AgentUnavailable, match=r"^UNAVAILABLE$"):
            await connection.stage(requests())


async def test_a_web_proxy_of_the_environment_is_none_of_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with connected(Agent()) as connection:
        await connection.unload(MODEL)


async def test_an_agent_that_comes_back_is_found_soon() -> None:
    async def call(endpoint: Endpoint, tries: Any) -> None:
        async with connect(endpoint, None) as connection:
            await tries(lambda: connection.unload(MODEL), AgentUnavailable)

    await reached(lambda server: add_NodeAgentServicer_to_server(Agent(), server), call)  # type: ignore[no-untyped-call]


async def test_an_agent_at_an_ipv6_address_is_reached() -> None:
    agent, server = Agent(), grpc.aio.server()
    add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    try:
        port = server.add_insecure_port("[::1]:0")
    except RuntimeError:
        pytest.skip("no IPv6 on this machine")
    await server.start()
    try:
        async with connect(Endpoint.parse(f"[::1]:{port}"), None) as connection:
            assert (await connection.stage(requests())).digest == "d"
            await connection.unload(MODEL)
    finally:
        await server.stop(None)
