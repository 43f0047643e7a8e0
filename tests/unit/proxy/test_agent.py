"""The proxy and the agent of its node."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.nodeagent.client import AgentBusy, AgentUnavailable
from berth.v1 import node_agent_pb2 as pb
from proxy import agent as module
from proxy.agent import UNLOAD_SECONDS, Agent, open_agent
from proxy.exchange.access import Whereabouts
from proxy.fronts.rest.upstream import UpstreamPool
from proxy.upstream import Upstream
from tests.fakes.data_plane import own_copy

HERE, THERE = Endpoint("10.0.0.1", 1), Endpoint("10.0.0.1", 2)


def status(http: str = str(HERE), grpc: str = str(THERE), key: str = "k") -> pb.ModelStatus:
    told = pb.TritonAccess(
        http_endpoint=http, grpc_endpoint=grpc, http_headers={"h": key}, grpc_metadata={"g": key}
    )
    return pb.ModelStatus(triton=told)


class Connection:
    """An agent that says, call by call, these statuses; an error ends the call, and the last the test."""

    def __init__(self, *calls: Sequence[pb.ModelStatus | Exception], unloads: Sequence[Any] = ()) -> None:
        self.calls, self.unloads = list(calls), list(unloads)
        self.models: list[ModelName] = []

    async def watch(self, model: ModelName) -> AsyncIterator[pb.ModelStatus]:
        self.models.append(model)
        if not self.calls:
            raise asyncio.CancelledError
        for said in self.calls.pop(0):
            if isinstance(said, Exception):
                raise said
            yield said

    async def unload(self, model: ModelName) -> pb.UnloadResponse:
        self.models.append(model)
        said = self.unloads.pop(0)
        if isinstance(said, Exception):
            raise said
        return pb.UnloadResponse(outcome=said)


class Own(Upstream):
    """Counts its nudges."""

    def __init__(self) -> None:
        where = Whereabouts()
        super().__init__(own_copy(), where, UpstreamPool(where))
        self.nudges = 0
        self.had: list[object] = []

    def nudge(self) -> None:
        self.nudges += 1
        self.had.append(self.access)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the agent's part of the proxy has waited, without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


async def followed(*calls: Sequence[pb.ModelStatus | Exception], **fixed: Endpoint) -> Own:
    upstream, connection = Own(), Connection(*calls)
    agent = Agent(connection, http=fixed.get("http"), grpc=fixed.get("grpc"))  # type: ignore[arg-type]
    with suppress(asyncio.CancelledError):
        await agent.follow(upstream)
    assert set(connection.models) == {"own"}
    return upstream


async def test_what_the_agent_says_is_where_triton_is(pauses: list[float]) -> None:
    upstream = await followed([status()])
    assert upstream.access is not None
    assert (upstream.access.http, upstream.access.grpc) == (HERE, THERE)
    assert (upstream.access.http_headers, upstream.access.grpc_metadata) == ({"h": "k"}, {"g": "k"})
    assert "'k'" not in repr(upstream.access)  # a key is never logged


async def test_each_word_is_a_reason_to_look_but_only_news_is_taken(pauses: list[float]) -> None:
    """What was looked up for one way of reaching Triton is good as long as it is the same object."""
    upstream = await followed([status(), status(), status(key="new"), status(http="nonsense", key="new")])
    first, second, third, fourth = upstream.had
    assert first is second
    assert third != second
    assert fourth is third  # what cannot be read changes nothing
    assert upstream.nudges == 4


async def test_what_the_agent_calls_failed_is_withheld_until_it_says_otherwise(pauses: list[float]) -> None:
    broken, silent, well = status(), status(), status()
    broken.state, broken.reason = pb.MODEL_STATE_FAILED, "GPU 0: XID 79"
    silent.state = pb.MODEL_STATE_FAILED
    well.state = pb.MODEL_STATE_READY
    assert (await followed([status(), broken])).copy.withheld == "GPU 0: XID 79"
    assert (await followed([silent])).copy.withheld == "the agent calls the model failed"
    assert (
        await followed([broken], [AgentUnavailable("gone")])
    ).copy.withheld is not None  # its last word holds
    assert (await followed([broken, well])).copy.withheld is None


async def test_given_endpoints_hold_whatever_the_agent_says(pauses: list[float]) -> None:
    fixed = Endpoint("127.0.0.1", 7)
    for name, ports in (("http", (7, 2)), ("grpc", (1, 7))):
        upstream = await followed([status(**{name: ""})], **{name: fixed})
        assert upstream.access is not None
        assert (upstream.access.http.port, upstream.access.grpc.port) == ports


async def test_an_agent_that_is_away_is_asked_again_less_and_less_often(pauses: list[float]) -> None:
    away = AgentUnavailable("gone")
    upstream = await followed([status()], *[[away]] * 12, [status(), away], [away])
    assert upstream.access is not None  # what it said last holds
    assert pauses[0] < 0.3
    for earlier, later in pairwise(pauses[:5]):
        assert later > 1.5 * earlier
    assert 4 < pauses[12] < 6
    assert pauses[13] < 0.3  # it was there again
    assert pauses[14] > pauses[13] * 1.5


async def test_a_busy_agent_is_given_the_time_that_it_asks_for(pauses: list[float]) -> None:
    await followed([AgentBusy("busy", 7.0)], [AgentUnavailable("gone")], [status()])
    assert pauses[0] == 7
    assert pauses[1] < 1
    assert pauses[2] < 1


async def test_trouble_with_the_agent_is_told_once_for_each_reason(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=module.log.name)
    one, other = AgentUnavailable("one"), AgentUnavailable("other")
    await followed([one], [one], [other], [other], [status()], [other])
    levels = [record.levelname for record in caplog.records if record.message == "agent is away"]
    assert levels == ["WARNING", "DEBUG", "WARNING", "DEBUG", "WARNING"]


@pytest.mark.parametrize(("failures", "asked"), [(0, 1), (1, 2), (2, 3), (3, 3)])
async def test_a_model_is_given_back_in_a_few_tries(
    pauses: list[float], failures: int, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=module.log.name)
    said = [*[AgentUnavailable("gone")] * failures, *[pb.UnloadResponse.OUTCOME_UNLOADED] * 2]
    connection = Connection(unloads=said)
    await Agent(connection, http=None, grpc=None).unload(ModelName("own"))  # type: ignore[arg-type]
    assert connection.models == ["own"] * asked
    assert len(pauses) == asked - 1  # none after the last
    assert pauses == sorted(pauses)
    assert all(pause > 0.1 for pause in pauses)
    assert sum(pauses) < UNLOAD_SECONDS / 2  # there is time left to be answered in
    told = [(record.message, getattr(record, "fields", {})) for record in caplog.records]
    assert [message for message, _ in told] == ["unload not taken"] * failures + ["unload"] * (failures < 3)
    assert [of["attempt"] for message, of in told if message != "unload"] == [1, 2, 3][:failures]


async def test_the_agent_is_reached_with_the_pods_token(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    @asynccontextmanager
    async def connect(*what: object) -> AsyncIterator[Connection]:
        opened.append(what)
        yield Connection([status(http="", grpc="")], unloads=[pb.UnloadResponse.OUTCOME_UNLOADED])
        opened.append("closed")

    monkeypatch.setattr(module, "connect", connect)
    upstream = Own()
    async with open_agent(Endpoint("node", 9), Path("/token"), http=HERE, grpc=THERE) as agent:
        agent._take(upstream, status(http="", grpc=""))
        assert opened == [(Endpoint("node", 9), Path("/token"))]
    assert upstream.access is not None
    assert (upstream.access.http, upstream.access.grpc) == (HERE, THERE)
    assert opened[1:] == ["closed"]
