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

    def __init__(self, *codes: grpc.StatusCode, reason: str = "", pushback: str | None = None) -> None:
        self.codes, self.calls, self.reason = list(codes), 0, reason
        self.trailing = () if pushback is None else (("grpc-retry-pushback-ms", pushback),)

    def Stage(self, requests: Any, context: Any) -> pb.StageResponse:  # noqa: N802
        self.calls += 1
        for _ in requests:
            pass
        if self.codes:
            context.set_trailing_metadata(self.trailing)
            context.abort(self.codes.pop(0), "so it is")
        return pb.StageResponse(digest="d")

    def Load(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = pb.MODEL_STATE_FAILED if self.reason else pb.MODEL_STATE_READY
        yield pb.LoadProgress(state=state, reason=self.reason)


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


async def test_a_busy_node_is_waited_for_as_long_as_it_asks_and_told_of(
    tmp_path: Path, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    agent = Agent(*[grpc.StatusCode.UNAVAILABLE] * 40, pushback="3000")
    await load(tmp_path, agent)
    assert agent.calls == 41
    assert sum(pauses) > 120  # longer than for an agent that is away
    assert min(pauses) > 3
    assert max(pauses) < 3 + 10 * 1.9 + 0.1
    assert len({round(pause, 3) for pause in pauses}) > 20  # no two loaders in step
    told = [record for record in caplog.records if record.getMessage() == "waiting: the node is busy"]
    assert len(told) == 40
    assert str(told[0].__dict__["fields"]["reason"]) == "so it is"


async def test_a_node_that_is_busy_for_ever_is_given_up(tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(CannotStart, match="not to be had for 3600 s: so it is"):
        await load(tmp_path, Agent(*[grpc.StatusCode.UNAVAILABLE] * 10_000, pushback="60000000"))
    assert 3000 < sum(pauses) <= 3600
    assert max(pauses) < 80  # whatever the agent asks for


async def test_a_wish_that_is_no_number_is_none(tmp_path: Path, pauses: list[float]) -> None:
    await load(tmp_path, Agent(grpc.StatusCode.UNAVAILABLE, pushback="soon"))
    assert max(pauses) < 1


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


@pytest.mark.parametrize("word", ["x", "\u4e2d", "\U0001f600"])
async def test_the_last_words_are_one_line_that_the_pods_status_has_room_for(
    tmp_path: Path, pauses: list[float], word: str
) -> None:
    """The kubelet keeps the end of the log, 2048 bytes: of a longer reason its beginning would be lost."""
    reason = f"load failed: RuntimeError: no weights\n\nAt:\n  model.py(18): initialize\n{word * 5000}\n;\n"
    with pytest.raises(Failed) as failed:
        await load(tmp_path, Agent(reason=reason))
    said = str(failed.value)
    assert said.startswith("Triton does not load m: load failed: RuntimeError: no weights At: model.py(18): ")
    assert "\n" not in said
    assert len(said.encode()) < 2000
