"""What the agent says of its node, and what its heartbeat says of that."""

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from agent.heartbeat import AgentHeartbeat, Stalled
from agent.metrics import AgentMetrics
from agent.reporter import Reporter
from berth.contract.errors import ReportTooLarge
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.report import NodeReport
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from berth.kube.lease import Heartbeat
from tests.fakes.api_server import AGENT_LEASE, AGENT_LEASES, NODE, NodeApiServer
from tests.fakes.objects import listed, report
from tests.fakes.values import replace

KEYS = Keys()
REFUSED = response_error(403, "Forbidden", "nodes n1 is forbidden")
TOO_LONG = response_error(422, "Invalid", "annotations: Too long")


class Agent:
    """A reporter and a heartbeat; `now` is their clock, `report` what there is to say."""

    def __init__(self) -> None:
        self.api, self.report, self.now = NodeApiServer(), report(models=(listed("p1"),)), 0.0
        client = cast(KubeClient, self.api)
        self.reporter = Reporter(
            client,
            node=NodeName("n1"),
            keys=KEYS,
            build=lambda: self.report,
            readings=list,
            metrics=AgentMetrics(CollectorRegistry()),
        )
        heartbeat = Heartbeat(
            client,
            namespace="berth-system-nodes",
            name="berth-agent-n1",
            holder="n1",
            duration_seconds=40,
            node="n1",
        )
        self.heartbeat = AgentHeartbeat(
            heartbeat, self.reporter, keys=KEYS, patience_seconds=40.0, clock=lambda: self.now
        )

    def refuse_reports(self, error: KubeError | None) -> None:
        self.api.refuses = {} if error is None else {f"PATCH {NODE}": error}

    @property
    def said(self) -> NodeReport:
        return NodeReport.decode(self.api.annotations[KEYS.report])

    @property
    def behind(self) -> str | None:
        assert self.api.lease is not None
        mark: str | None = self.api.lease["metadata"]["annotations"].get(KEYS.report_behind)
        return mark


@pytest.fixture
def agent() -> Agent:
    return Agent()


async def test_no_heartbeat_before_the_first_report(agent: Agent) -> None:
    with pytest.raises(Stalled, match="before the first report"):
        await agent.heartbeat.beat()
    assert agent.api.lease is None
    await agent.reporter.step()
    await agent.heartbeat.beat()
    assert agent.behind is None


async def test_a_lease_is_made_with_its_node_as_owner(agent: Agent) -> None:
    await agent.reporter.step()
    await agent.heartbeat.beat()
    assert agent.api.lease is not None
    assert agent.api.lease["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-n1"}
    ]
    # The Node was deleted and made anew, and its Lease collected.
    agent.api.collections[AGENT_LEASES].clear()
    agent.api.node["metadata"]["uid"] = "uid-2"
    await agent.heartbeat.beat()
    assert agent.api.lease["metadata"]["ownerReferences"][0]["uid"] == "uid-2"


@pytest.mark.parametrize("error", [REFUSED, TOO_LONG, KubeUnreachable("webhook")])
async def test_a_report_that_is_refused_is_reported_by_a_heartbeat_that_goes_on(
    agent: Agent, error: KubeError
) -> None:
    await agent.reporter.step()
    await agent.heartbeat.beat()
    agent.report = replace(agent.report, server="other")
    agent.refuse_reports(error)
    for beat in range(10):
        agent.now = beat * 10.0
        with pytest.raises(type(error)):
            await agent.reporter.step()
        agent.heartbeat.passed("report")
        await agent.heartbeat.beat()
        assert agent.behind == str(error)
    agent.refuse_reports(None)
    await agent.reporter.step()
    await agent.heartbeat.beat()
    assert (agent.said.server, agent.behind) == ("other", None)


async def test_a_report_that_is_refused_from_the_start_is_told_too(agent: Agent) -> None:
    agent.refuse_reports(REFUSED)
    with pytest.raises(KubeError):
        await agent.reporter.step()
    await agent.heartbeat.beat()
    assert agent.behind == "403 Forbidden: nodes n1 is forbidden"


async def test_more_models_than_fit_are_reported_like_a_refusal(agent: Agent) -> None:
    agent.report = report(models=tuple(listed(f"{i:036d}") for i in range(2000)))
    with pytest.raises(ReportTooLarge):
        await agent.reporter.step()
    await agent.heartbeat.beat()
    assert "2000 models" in (agent.behind or "")


async def test_the_heartbeat_is_due_at_once_when_the_failure_begins_and_when_it_ends(agent: Agent) -> None:
    wake = agent.reporter.failure_changed
    await agent.reporter.step()
    assert not wake.is_set()
    agent.report = replace(agent.report, server="other")
    for error, due in ((REFUSED, True), (TOO_LONG, False)):  # once, not at every try
        agent.refuse_reports(error)
        with pytest.raises(KubeError):
            await agent.reporter.step()
        assert wake.is_set() is due
        wake.clear()
    agent.refuse_reports(None)
    await agent.reporter.step()
    assert wake.is_set()


async def test_a_loop_that_is_stuck_ends_the_heartbeat(agent: Agent) -> None:
    await agent.reporter.step()
    for loop in ("reconcile", "report"):
        agent.heartbeat.passed(loop)
    agent.now = 40.0
    await agent.heartbeat.beat()
    agent.now = 40.5
    with pytest.raises(Stalled, match="these do not work: reconcile, report"):
        await agent.heartbeat.beat()
    for loop in ("reconcile", "report"):
        agent.heartbeat.passed(loop)
    await agent.heartbeat.beat()


async def is_covered(agent: Agent, uid: str) -> bool:
    waiting = asyncio.ensure_future(agent.reporter.covers(PodUid(uid)))
    for _ in range(3):
        await asyncio.sleep(0)
    done = waiting.done()
    waiting.cancel()
    return done


async def test_a_model_loads_where_no_report_can_be_written_once_that_is_told(agent: Agent) -> None:
    """Nobody places anything on a node whose facts are stale: what loads there takes nobody's memory."""
    agent.report = report()
    await agent.reporter.step()
    agent.report = report(models=(listed("p1"),))
    agent.refuse_reports(REFUSED)
    with pytest.raises(KubeError):
        await agent.reporter.step()
    assert not await is_covered(agent, "p1")
    agent.api.refuses[f"PATCH {AGENT_LEASE}"] = KubeUnreachable("refused")
    with pytest.raises(KubeUnreachable):
        await agent.heartbeat.beat()
    assert not await is_covered(agent, "p1")
    del agent.api.refuses[f"PATCH {AGENT_LEASE}"]
    await agent.heartbeat.beat()
    assert await is_covered(agent, "p1")
    agent.refuse_reports(None)
    await agent.reporter.step()
    assert not await is_covered(agent, "p2")  # it came after the report that is there again


async def test_a_trouble_is_told_as_far_as_a_lease_has_room_for_it(agent: Agent) -> None:
    agent.refuse_reports(response_error(422, "Invalid", "x" * 5000))
    with pytest.raises(KubeError):
        await agent.reporter.step()
    await agent.heartbeat.beat()
    assert agent.behind == ("422 Invalid: " + "x" * 5000)[:512]
