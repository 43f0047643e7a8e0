"""What is written to the node, when, and who waits for it."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import agent.reporter
from agent.gpus import (
    GpuReading,
)
from agent.metrics import AgentMetrics
from agent.reporter import Reporter, gauge_annotations, last_report, node_total
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.report import NodeReport
from berth.kube.errors import KubeUnreachable
from tests.fakes.objects import GIB, gpu, listed, node, report
from tests.fakes.values import replace

KEYS = Keys()


class Bench:
    """A reporter, the node that it writes to, and a clock."""

    def __init__(self) -> None:
        self.content = report()
        self.used = GIB
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.away = False
        self.writes: list[dict[str, Any]] = []
        self.annotations: dict[str, Any] = {}
        self.reporter = Reporter(
            self,  # type: ignore[arg-type]
            node=NodeName("n1"),
            keys=KEYS,
            build=lambda: self.content,
            readings=lambda: [GpuReading(GpuUuid("GPU-a"), 0, "T4", 16 * GIB, self.used, 0.0)],
            metrics=AgentMetrics(CollectorRegistry()),
            now=lambda: self.now,
        )

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/api/v1/nodes/n1"
        if self.away:
            raise KubeUnreachable("connection refused")
        self.writes.append(body["metadata"]["annotations"])
        self.annotations |= self.writes[-1]
        return {}

    async def get(self, path: str) -> dict[str, Any]:
        return {"metadata": {"annotations": self.annotations}}

    @property
    def said(self) -> NodeReport:
        return NodeReport.decode(self.annotations[KEYS.report])


async def test_only_what_has_changed_is_written() -> None:
    bench = Bench()
    for _ in range(3):
        await bench.reporter.step()
    assert len(bench.writes) == 1
    bench.content = report(models=(listed("p1"),))
    bench.now += timedelta(seconds=1)
    await bench.reporter.step()
    assert (len(bench.writes), bench.said.generation) == (2, 2)
    assert bench.said.observed_at == "2026-01-01T00:00:01Z"


async def test_gauges_alone_are_written_every_half_minute_at_most() -> None:
    bench = Bench()
    for second in range(90):
        bench.used = GIB + second
        await bench.reporter.step()
        bench.now += timedelta(seconds=1)
    assert [one[KEYS.node_used] for one in bench.writes] == [str(GIB), str(GIB + 30), str(GIB + 60)]


async def test_a_write_that_failed_is_made_again_and_counts_as_none() -> None:
    bench = Bench()
    bench.away = True
    with pytest.raises(KubeUnreachable):
        await bench.reporter.step()
    assert not bench.reporter.has_written
    bench.away = False
    await bench.reporter.step()
    assert bench.reporter.has_written


async def test_who_waits_for_a_model_waits_for_the_report_that_lists_it() -> None:
    bench = Bench()
    await bench.reporter.step()
    waiting = asyncio.create_task(bench.reporter.covers(PodUid("p1")))
    await asyncio.sleep(0)
    assert bench.reporter.wake.is_set()  # it does not wait for the next round
    bench.content = report(models=(listed("p2"),))
    await bench.reporter.step()
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.content = report(models=(listed("p1"), listed("p2")))
    bench.away = True
    with pytest.raises(KubeUnreachable):
        await bench.reporter.step()
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.away = False
    await bench.reporter.step()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(bench.reporter.covers(PodUid("p2")), 1)


async def test_who_waits_is_told_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.reporter, "COVER_TIMEOUT_SECONDS", 0.02)
    with pytest.raises(TimeoutError):
        await Bench().reporter.covers(PodUid("p1"))


async def test_a_report_that_somebody_has_changed_is_written_again() -> None:
    bench = Bench()
    await bench.reporter.verify()  # nothing has been said yet
    await bench.reporter.step()
    await bench.reporter.verify()
    await bench.reporter.step()
    assert len(bench.writes) == 1
    for damage in ({KEYS.report: "{}"}, {KEYS.report: None}):
        bench.annotations |= damage
        bench.reporter.wake.clear()
        await bench.reporter.verify()
        assert bench.reporter.wake.is_set()
        await bench.reporter.step()
        assert replace(bench.said, generation=0, observed_at="") == bench.content


def test_the_last_report_of_the_agent_before() -> None:
    said = report(models=(listed("p1"),))
    assert last_report(node(says=said), KEYS) == said
    assert last_report(node(), KEYS) is None
    assert last_report(node(says="{}"), KEYS) is None
    assert last_report({"metadata": {"name": "n1"}}, KEYS) is None


async def test_what_was_written_during_a_look_at_the_node_is_nobody_elses_doing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    await bench.reporter.step()

    async def late(path: str) -> dict[str, Any]:
        found = {"metadata": {"annotations": dict(bench.annotations)}}
        bench.content = report(models=(listed("p1"),))
        await bench.reporter.step()
        return found

    bench.get = late  # type: ignore[method-assign]
    bench.reporter.wake.clear()
    await bench.reporter.verify()
    assert not bench.reporter.wake.is_set()
    assert "somebody else" not in caplog.text


async def test_a_change_is_written_at_once_and_takes_the_gauges_along() -> None:
    bench = Bench()
    await bench.reporter.step()
    first = bench.writes[-1]
    assert first[KEYS.node_total] == str(16 * GIB)
    assert (first[KEYS.node_used], first[KEYS.node_util]) == (str(GIB), "0.00")
    assert bench.said.generation == 1
    bench.used, bench.now = 2 * GIB, bench.now + timedelta(seconds=20)
    bench.content = report(models=(listed("p1"),))
    await bench.reporter.step()
    assert bench.writes[-1][KEYS.node_used] == str(2 * GIB)
    # The half minute counts from then.
    for after, writes in ((20, 2), (9.9, 2), (0.1, 3)):
        bench.used += 1
        bench.now += timedelta(seconds=after)
        await bench.reporter.step()
        assert len(bench.writes) == writes


async def test_gauges_that_stand_still_are_not_written_again() -> None:
    bench = Bench()
    await bench.reporter.step()
    bench.now += timedelta(hours=1)
    await bench.reporter.step()
    assert len(bench.writes) == 1


async def test_what_was_damaged_is_said_again_by_who_wakes_up_and_not_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    await bench.reporter.step()
    bench.annotations[KEYS.report] = "{}"
    await bench.reporter.verify()
    assert not bench.reporter.has_written  # whoever waits for a model waits for the next report
    assert "changed by another writer" in caplog.text
    await bench.reporter.step()
    assert (bench.reporter.has_written, bench.said.generation) == (True, 2)


async def test_a_failure_is_known_while_it_lasts() -> None:
    bench = Bench()
    assert bench.reporter.failure == ""
    bench.away = True
    with pytest.raises(KubeUnreachable):
        await bench.reporter.step()
    assert bench.reporter.failure == "connection refused"
    bench.away = False
    await bench.reporter.step()
    assert bench.reporter.failure == ""


A = GpuUuid("GPU-a")


def reading(used: int | None) -> GpuReading:
    return GpuReading(A, 0, "A10", 24 * GIB, used, 0.0)


def test_the_annotations_of_the_proof_of_concept() -> None:
    assert node_total(report(gpu("a"), gpu("b", index=1), gpu("c", index=2, healthy=False))) == str(32 * GIB)
    assert node_total(report(gpu(total=None))) is None  # unknown, not 0
    keys = Keys()
    gauges = gauge_annotations([reading(3), reading(4)], keys)
    assert gauges == {keys.node_used: "7", keys.node_util: "0.00"}
    assert gauge_annotations([], keys) == {keys.node_used: None, keys.node_util: None}


def test_what_is_not_healthy_or_not_known_is_in_no_gauge() -> None:
    keys = Keys()
    ill = replace(reading(5), healthy=False)
    blind = replace(reading(None), utilization=None)
    busy = replace(reading(6), utilization=0.5)
    assert gauge_annotations([ill, blind], keys) == {keys.node_used: None, keys.node_util: None}
    assert gauge_annotations([ill, blind, busy, reading(1)], keys) == {
        keys.node_used: "7",
        keys.node_util: "0.25",
    }
