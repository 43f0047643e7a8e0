"""The sidecar and the agent of its node: a word that holds, pauses, and the model given back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import ModelName
from berth.v1 import node_agent_pb2 as pb
from proxy.sidecar import agent as module
from proxy.sidecar import messages
from proxy.sidecar.agent import UNLOAD_SECONDS, NodeAgent, follow, give_back
from proxy.sidecar.calls import CallFailed
from proxy.sidecar.gateway import GatewayAccess, NodeGateway
from proxy.sidecar.messages import ModelStatus
from proxy.wire.grpc_status import Status
from proxy.wire.protobuf import BadMessage

TICKET, OTHER = bytes(32), bytes(range(32))
AWAY = CallFailed(Status.UNAVAILABLE, "gone")


def status(endpoint: str = "10.0.0.1:8470", ticket: bytes = TICKET) -> ModelStatus:
    return ModelStatus(endpoint=endpoint, ticket=ticket)


class Agent:
    """Says, call by call, these statuses; an error ends the call, and the last the test."""

    def __init__(
        self, *calls: Sequence[ModelStatus | CallFailed], unloads: Sequence[str | CallFailed] = ()
    ) -> None:
        self.calls, self.unloads, self.unloaded = list(calls), list(unloads), 0

    async def watch(self) -> AsyncIterator[ModelStatus]:
        if not self.calls:
            raise asyncio.CancelledError
        for said in self.calls.pop(0):
            if isinstance(said, CallFailed):
                raise said
            yield said

    async def unload(self) -> str:
        self.unloaded += 1
        said = self.unloads.pop(0)
        if isinstance(said, CallFailed):
            raise said
        return said


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


async def followed(*calls: Sequence[ModelStatus | CallFailed]) -> NodeGateway:
    gateway = NodeGateway()
    with suppress(asyncio.CancelledError):
        await follow(Agent(*calls), gateway)
    return gateway


async def test_what_the_agent_says_is_where_the_gateway_is(pauses: list[float]) -> None:
    gateway = await followed([status()])
    assert gateway.access == GatewayAccess(Endpoint("10.0.0.1", 8470), TICKET)
    assert repr(TICKET) not in repr(gateway.access)  # a ticket is never logged


async def test_its_last_word_holds_until_there_is_news(pauses: list[float]) -> None:
    for last in (
        [status(endpoint="")],
        [status(endpoint="nonsense")],
        [status("10.0.0.2:1", b"short")],
        [AWAY],
    ):
        assert (await followed([status()], last)).access == GatewayAccess(Endpoint("10.0.0.1", 8470), TICKET)
    moved = await followed([status(), status("10.0.0.2:1", OTHER)])
    assert moved.access == GatewayAccess(Endpoint("10.0.0.2", 1), OTHER)


async def test_only_news_are_reported() -> None:
    gateway = NodeGateway()
    change = gateway.next_change()
    module.apply(gateway, status())
    assert change.is_set()
    change = gateway.next_change()
    module.apply(gateway, status())
    assert not change.is_set()
    module.apply(gateway, status(ticket=OTHER))
    assert change.is_set()


async def test_what_the_agent_calls_failed_is_withheld_until_it_says_otherwise(pauses: list[float]) -> None:
    broken, silent = ModelStatus(has_failed=True, reason="GPU 0: XID 79"), ModelStatus(has_failed=True)
    assert (await followed([status(), broken])).withheld == "GPU 0: XID 79"
    assert (await followed([silent])).withheld == "the agent calls the model failed"
    assert (await followed([broken], [AWAY])).withheld is not None
    assert (await followed([broken, status()])).withheld is None


async def test_an_agent_that_is_away_is_asked_again_less_and_less_often(pauses: list[float]) -> None:
    await followed([status()], *[[AWAY]] * 12, [status(), AWAY], [AWAY])
    assert pauses[0] < 0.3
    for earlier, later in pairwise(pauses[:5]):
        assert later > 1.5 * earlier
    assert 4 < pauses[12] < 6
    assert pauses[13] < 0.3  # it was there again
    assert pauses[14] > pauses[13] * 1.5


async def test_a_busy_agent_is_given_the_time_that_it_requests(pauses: list[float]) -> None:
    await followed([CallFailed(Status.UNAVAILABLE, "busy", 7.0)], [AWAY], [status()])
    assert pauses[0] == 7
    assert pauses[1] < 1
    assert pauses[2] < 1


async def test_a_failure_with_the_agent_is_logged_once_for_each_reason(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=module.log.name)
    one, other = CallFailed(Status.UNAVAILABLE, "one"), CallFailed(Status.UNAVAILABLE, "other")
    await followed([one], [one], [other], [other], [status()], [other])
    levels = [record.levelname for record in caplog.records if record.message == "agent is away"]
    assert levels == ["WARNING", "DEBUG", "WARNING", "DEBUG", "WARNING"]


@pytest.mark.parametrize(("failures", "asked"), [(0, 1), (1, 2), (2, 3), (3, 3)])
async def test_a_model_is_given_back_in_a_few_tries(pauses: list[float], failures: int, asked: int) -> None:
    agent = Agent(unloads=[*[AWAY] * failures, "OUTCOME_UNLOADED", "OUTCOME_UNLOADED"])
    await give_back(agent)
    assert agent.unloaded == asked
    assert len(pauses) == asked - 1  # none after the last
    assert pauses == sorted(pauses)
    assert all(pause > 0.1 for pause in pauses)
    assert sum(pauses) < UNLOAD_SECONDS / 2  # there is time left to be answered in


async def test_a_token_that_cannot_be_read_names_its_flag(tmp_path: Path) -> None:
    for content in (None, b"\xff"):
        if content is not None:
            (tmp_path / "token").write_bytes(content)
        agent = NodeAgent(Endpoint("h", 1), tmp_path / "token", ModelName("m"), ReplicaLimits())
        with pytest.raises(CallFailed, match="--token-file"):
            await agent.unload()


@pytest.mark.parametrize("depth", [None, 0, 300])
def test_requests_are_the_messages_of_the_contract(depth: int | None) -> None:
    limits = ReplicaLimits(container_concurrency=300, queue_depth=depth, request_timeout_seconds=1.5)
    read = pb.WatchModelRequest.FromString(messages.watch_request("model", limits))
    assert read.model_name == "model"
    assert read.limits.container_concurrency == 300
    assert (read.limits.queue_depth if read.limits.HasField("queue_depth") else None) == depth
    assert read.limits.request_timeout_seconds == 1.5
    assert read.limits.max_json_bytes == limits.max_json_bytes
    assert read.limits.max_request_bytes == limits.max_request_bytes
    assert pb.UnloadRequest.FromString(messages.unload_request("m")) == pb.UnloadRequest(model_name="m")


@pytest.mark.parametrize("state", pb.ModelState.values())
def test_a_status_is_read_as_it_was_written(state: pb.ModelState) -> None:
    written = pb.ModelStatus(model_name="m", state=state, reason="ü", gpu_uuid="G", measured_bytes=2**40)
    assert messages.read_status(written.SerializeToString()) == ModelStatus(
        has_failed=state == pb.MODEL_STATE_FAILED, reason="ü"
    )
    written.gateway.endpoint, written.gateway.ticket = "h:1", OTHER
    read = messages.read_status(written.SerializeToString())
    assert (read.endpoint, read.ticket) == ("h:1", OTHER)
    whole = written.SerializeToString()
    for size in range(len(whole)):
        with suppress(BadMessage):  # and nothing else
            messages.read_status(whole[:size])


@pytest.mark.parametrize("outcome", pb.UnloadResponse.Outcome.values())
def test_an_outcome_is_reported_by_its_name(outcome: pb.UnloadResponse.Outcome) -> None:
    written = pb.UnloadResponse(outcome=outcome).SerializeToString()
    assert messages.read_outcome(written) == pb.UnloadResponse.Outcome.Name(outcome)
    assert messages.read_outcome(b"\x08\x07") == "7"
    assert messages.read_outcome(b"\xff") == "-1"
