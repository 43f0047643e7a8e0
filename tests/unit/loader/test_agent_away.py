"""The loader beside an agent that cannot answer yet."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import loader.app
from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import CannotStart, Failed
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from loader.config import LoaderOptions


class Agent(NodeAgentServicer):
    """Answers the first calls with these codes, then does what it is asked."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes, self.calls = list(codes), 0

    def Stage(self, requests: Any, context: Any) -> pb.StageResponse:  # noqa: N802
        self.calls += 1
        for _ in requests:
            pass
        if self.codes:
            context.abort(self.codes.pop(0), "so it is")
        return pb.StageResponse(digest="d")

    def Load(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield pb.LoadProgress(state=pb.MODEL_STATE_READY)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the loader has waited, without waiting."""
    waited: list[float] = []

    class Asyncio:
        def __getattr__(self, name: str) -> Any:
            return getattr(loader_asyncio, name)

        async def sleep(self, seconds: float) -> None:
            waited.append(seconds)

    loader_asyncio = loader.app.asyncio
    monkeypatch.setattr(loader.app, "asyncio", Asyncio())
    return waited


async def load(tmp_path: Path, agent: Agent) -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "m" / "1" / "model.py").write_text("x")
    options = LoaderOptions(
        model=ModelName("m"), agent=Endpoint("127.0.0.1", port), model_src=tmp_path / "m", work_dir=tmp_path
    )
    try:
        await loader.app._load(options)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,  # the API server cannot review the token
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # gRPC's own answer to one call too many
    ],
)
async def test_an_agent_that_cannot_now_is_asked_again(
    tmp_path: Path, pauses: list[float], code: grpc.StatusCode
) -> None:
    agent = Agent(code, code, code)
    await load(tmp_path, agent)
    assert agent.calls == 4
    assert len(pauses) == 3
    assert pauses == sorted(pauses)


async def test_a_full_agent_is_asked_less_often_and_not_for_ever(tmp_path: Path, pauses: list[float]) -> None:
    agent = Agent(*[grpc.StatusCode.RESOURCE_EXHAUSTED] * 100)
    with pytest.raises(CannotStart, match="so it is"):
        await load(tmp_path, agent)
    assert agent.calls == len(pauses) + 1
    assert agent.calls < 8
    assert sum(pauses) <= 120


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
async def test_a_refusal_is_final(tmp_path: Path, pauses: list[float], code: grpc.StatusCode) -> None:
    agent = Agent(code)
    with pytest.raises(Failed, match=rf"so it is \({code.name}\)"):
        await load(tmp_path, agent)
    assert (agent.calls, pauses) == (1, [])
