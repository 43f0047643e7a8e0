"""The whole loader beside an agent that does as it is told."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

import loader.app
from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from loader.config import LoaderOptions
from tests.fakes import pauses

READY = pb.LoadProgress(state=pb.MODEL_STATE_READY)
LOADING = pb.LoadProgress(state=pb.MODEL_STATE_LOADING)
UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


class Agent(NodeAgentServicer):
    """Refuses with `codes`, one a call, with its wish `pushback` if it has one, and then answers Load with `words`, one list a call; the last one stays."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []
        self.pushback: str | None = None
        self.words: list[list[pb.LoadProgress]] = [[LOADING, READY]]
        self.staged: list[list[pb.StageRequest]] = []
        self.loaded: list[str] = []
        self.tokens: list[str | None] = []
        self.hangs = False
        self.reached, self.broken_off = asyncio.Event(), asyncio.Event()

    async def Stage(self, requests: Any, context: Any) -> pb.StageResponse:  # noqa: N802
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        self.staged.append([request async for request in requests])
        self.reached.set()
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.broken_off.set()
        if self.codes:
            trailing = () if self.pushback is None else (("grpc-retry-pushback-ms", self.pushback),)
            await context.abort(self.codes.pop(0), "so it is", trailing)
        return pb.StageResponse(digest="d")

    async def Load(self, request: pb.LoadRequest, context: Any) -> AsyncIterator[pb.LoadProgress]:  # noqa: N802
        self.loaded.append(request.model_name)
        for word in self.words.pop(0) if len(self.words) > 1 else self.words[0]:
            yield word


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[Agent]:
    agent, server = Agent(), grpc.aio.server()
    add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    agent.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
    await server.start()
    yield agent
    await server.stop(None)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return pauses.noted(monkeypatch, loader.app)


@pytest.fixture
def options(agent: Agent, tmp_path: Path, waited: list[float]) -> LoaderOptions:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("x")
    endpoint = Endpoint("127.0.0.1", agent.port)  # type: ignore[attr-defined]
    return LoaderOptions(model=ModelName("net"), agent=endpoint, model_src=tmp_path / "m", work_dir=tmp_path)


async def run(options: LoaderOptions, stop: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(20):
        await loader.app.main(options, stop or asyncio.Event())


@pytest.mark.parametrize("by", ["model_src", "uri"])
async def test_the_model_is_staged_loaded_and_told(
    agent: Agent, options: LoaderOptions, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    caplog.set_level(logging.INFO, "loader.app")
    if by == "uri":
        options = replace(options, model_src=None, uri=f"file://{options.model_src}")
    await run(options)
    (requests,) = agent.staged
    assert requests[0].header.model_name == "net"
    assert requests[0].header.digest == requests[-1].commit.digest
    assert len(requests[-1].commit.digest) == 64
    assert [request.file.path for request in requests if request.HasField("file")] == ["1/model.py"]
    assert agent.loaded == ["net"]
    told = {record.getMessage(): record.__dict__["fields"] for record in caplog.records}
    assert (told["sending"]["files"], told["sending"]["size"]) == (1, "1 B")
    assert told["loading"] == {"state": "ready", "reason": "-"}
    assert 0 <= told["model is served"]["seconds"] < 20


@pytest.mark.parametrize(("uri", "model_src"), [(None, None), ("file:///m", Path("/m"))])
async def test_one_source_is_needed(options: LoaderOptions, uri: str | None, model_src: Path | None) -> None:
    with pytest.raises(ConfigError, match="--uri or --model-src is required, and not both"):
        await run(replace(options, uri=uri, model_src=model_src))


async def test_a_source_that_cannot_be_is_named_before_anything_is_done(
    agent: Agent, options: LoaderOptions
) -> None:
    with pytest.raises(ConfigError, match="scheme 's3' is not supported"):
        await run(replace(options, model_src=None, uri="s3://bucket/m"))
    with pytest.raises(ConfigError, match="--model-src: /nowhere: no such directory"):
        await run(replace(options, model_src=Path("/nowhere")))
    assert agent.staged == []


async def test_a_model_that_triton_does_not_load_fails_with_the_reason(
    agent: Agent, options: LoaderOptions
) -> None:
    agent.words = [[LOADING, pb.LoadProgress(state=pb.MODEL_STATE_FAILED, reason="no such layer")]]
    with pytest.raises(Failed, match="Triton does not load net: no such layer"):
        await run(options)
    assert agent.loaded == ["net"]


@pytest.mark.parametrize("words", [[LOADING], []])
async def test_a_word_that_breaks_off_is_requested_again(
    agent: Agent, options: LoaderOptions, words: list[pb.LoadProgress], waited: list[float]
) -> None:
    agent.words = [words, [READY]]
    await run(options)
    assert agent.loaded == ["net", "net"]
    assert len(waited) == 1


@pytest.mark.parametrize(
    "code", [UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, FULL], ids=lambda code: code.name
)
async def test_an_agent_that_cannot_now_is_asked_again(
    agent: Agent, options: LoaderOptions, waited: list[float], code: grpc.StatusCode
) -> None:
    """The API server cannot review the token, or gRPC itself has one call too many."""
    agent.codes = [code] * 3
    await run(options)
    assert (len(agent.staged), len(waited)) == (4, 3)
    assert waited == sorted(waited)
    assert (waited[0] < 1.0) is (code is not FULL)  # one that breaks off is asked soon


@pytest.mark.parametrize(("code", "calls", "pause"), [(UNAVAILABLE, 20, 5.0), (FULL, 4, 60.0)])
async def test_an_agent_that_stays_away_is_given_up_in_time_and_a_full_one_is_asked_less_often(
    agent: Agent, options: LoaderOptions, waited: list[float], code: grpc.StatusCode, calls: int, pause: float
) -> None:
    agent.codes = [code] * 1000
    with pytest.raises(CannotStart, match=rf"--agent {options.agent}: not .* for 120 s: so it is"):
        await run(options)
    assert len(agent.staged) == len(waited) + 1
    assert calls <= len(waited) <= 2 * calls
    assert sum(waited) <= 120
    assert max(waited) < 2 * pause


async def test_a_busy_node_is_waited_for_as_long_as_it_asks_and_told_of(
    agent: Agent, options: LoaderOptions, waited: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    agent.codes, agent.pushback = [UNAVAILABLE] * 40, "3000"
    await run(options)
    assert len(agent.staged) == 41
    assert sum(waited) > 120  # longer than for an agent that is away
    assert min(waited) > 3
    assert max(waited) < 3 + 10 * 1.9 + 0.1
    assert len({round(pause, 3) for pause in waited}) > 20  # no two loaders in step
    told = [record for record in caplog.records if record.getMessage() == "waiting: the node is busy"]
    assert len(told) == 40
    assert str(told[0].__dict__["fields"]["reason"]) == "so it is"


async def test_a_node_that_is_busy_for_ever_is_given_up(
    agent: Agent, options: LoaderOptions, waited: list[float]
) -> None:
    agent.codes, agent.pushback = [UNAVAILABLE] * 10_000, "60000000"
    with pytest.raises(CannotStart, match="not to be had for 3600 s: so it is"):
        await run(options)
    assert 3000 < sum(waited) <= 3600
    assert max(waited) < 80  # whatever the agent asks for


async def test_a_wish_that_is_no_number_is_none(
    agent: Agent, options: LoaderOptions, waited: list[float]
) -> None:
    agent.codes, agent.pushback = [UNAVAILABLE], "soon"
    await run(options)
    assert max(waited) < 1


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
async def test_a_refusal_is_final(
    agent: Agent, options: LoaderOptions, waited: list[float], code: grpc.StatusCode
) -> None:
    agent.codes = [code]
    with pytest.raises(Failed, match=rf"so it is \({code.name}\)"):
        await run(options)
    assert (len(agent.staged), waited) == (1, [])


@pytest.mark.parametrize("word", ["x", "\u4e2d", "\U0001f600"])
async def test_the_last_words_are_one_line_that_the_pods_status_has_room_for(
    agent: Agent, options: LoaderOptions, waited: list[float], word: str
) -> None:
    """The kubelet keeps the end of the log, 2048 bytes: of a longer reason its beginning would be lost."""
    reason = f"load failed: RuntimeError: no weights\n\nAt:\n  model.py(18): initialize\n{word * 5000}\n;\n"
    agent.words = [[pb.LoadProgress(state=pb.MODEL_STATE_FAILED, reason=reason)]]
    with pytest.raises(Failed) as failed:
        await run(options)
    said = str(failed.value)
    assert said.startswith(
        "Triton does not load net: load failed: RuntimeError: no weights At: model.py(18): "
    )
    assert "\n" not in said
    assert len(said.encode()) < 2000


async def test_the_pods_token_is_read_anew_for_each_call(
    agent: Agent, options: LoaderOptions, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    await run(replace(options, token_file=tmp_path / "token"))
    assert agent.tokens == ["Bearer secret"]
    (tmp_path / "token").unlink()
    with pytest.raises(Failed, match=r"the agent refuses: --token-file: .*token: No such file"):
        await run(replace(options, token_file=tmp_path / "token"))


async def test_a_pod_that_is_stopped_breaks_its_stream_off_and_leaves_nothing(
    agent: Agent, options: LoaderOptions, tmp_path: Path
) -> None:
    agent.hangs, stop, work = True, asyncio.Event(), tmp_path / "work"
    work.mkdir()
    (tmp_path / "m.py").write_text("x")
    running = asyncio.create_task(
        run(replace(options, model_src=None, uri=f"file://{tmp_path}/m.py", work_dir=work), stop)
    )
    await agent.reached.wait()
    assert list(work.iterdir())
    stop.set()
    with pytest.raises(Failed, match="stopped before the model was loaded"):
        await running
    assert not list(work.iterdir())
    async with asyncio.timeout(10):
        await agent.broken_off.wait()


def test_the_process_says_what_it_is_for_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert loader.app.run(["--model=m"]) == 2
    assert capsys.readouterr().err.startswith("berth loader: --agent is required (or set BERTH_LOADER_AGENT)")
