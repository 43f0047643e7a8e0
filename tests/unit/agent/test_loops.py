"""One pass of each loop, and why the agent is not ready or not alive."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import agent.loops
from agent.loops import ErrorCounter, GpuLoop, LimitsLoop, Readiness, ReconcileLoop, ReportLoop
from agent.metrics import AgentMetrics
from agent.models import Models
from agent.replicas import LimitsFile, Replicas
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import PodUid
from berth.triton.errors import TritonUnavailable
from tests.fakes.agent_node import Node


class Parts:
    """What the loops touch, each with what it was told."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.pods = SimpleNamespace(synced=asyncio.Event())
        self.triton = SimpleNamespace(version=None)
        self.reporter: Any = SimpleNamespace(failure="", has_written=False, wake=asyncio.Event())
        self.heartbeat: Any = SimpleNamespace(passed=self.passed.append)
        self.gpus: Any = SimpleNamespace(
            refresh=self._refresh, have_changed=lambda: False, residency=0, hanging_seconds=0.0
        )
        self.models = Models()
        self.refreshed = 0

    async def _refresh(self) -> None:
        self.refreshed += 1


@pytest.fixture
def parts() -> Parts:
    return Parts()


def test_readiness_names_the_first_that_is_missing(parts: Parts) -> None:
    readiness = Readiness(parts.pods, parts.triton, parts.reporter)  # type: ignore[arg-type]
    assert readiness.not_ready() == "the node's pods are not known yet"
    parts.pods.synced.set()
    assert readiness.not_ready() == "Triton does not answer"
    parts.triton.version = "2.51.0"
    assert readiness.not_ready() == "no report has been written"
    parts.reporter.failure, parts.reporter.has_written = "403", True
    assert readiness.not_ready() == "the report cannot be written: 403"
    parts.reporter.failure = ""
    assert readiness.not_ready() is None


@pytest.mark.parametrize(("seconds", "is_alive"), [(0.0, True), (120.0, True), (120.5, False)])
def test_a_driver_that_hangs_for_long_ends_the_agent(parts: Parts, seconds: float, is_alive: bool) -> None:
    parts.gpus.hanging_seconds = seconds
    reason = GpuLoop(parts.gpus, parts.models, parts.reporter).not_alive()
    assert reason == (None if is_alive else f"NVML has not answered for {seconds:.0f} s")
    assert agent.loops._HANG_SECONDS == 120


@pytest.mark.parametrize("has_changed", [True, False])
async def test_a_gpu_that_breaks_wakes_those_who_watch_models(parts: Parts, has_changed: bool) -> None:
    parts.gpus.have_changed = lambda: has_changed
    change = parts.models.next_change()
    await GpuLoop(parts.gpus, parts.models, parts.reporter).step()
    assert (change.is_set(), parts.refreshed, parts.reporter.wake.is_set()) == (has_changed, 1, True)


@pytest.mark.parametrize(("becomes", "residency"), [("2.51.0", 0), (None, 1), (None, 0)])
async def test_a_pass_reports_what_it_has_changed(parts: Parts, becomes: str | None, residency: int) -> None:
    async def step() -> None:
        parts.triton.version, parts.models.residency = becomes, residency

    gpus = GpuLoop(parts.gpus, parts.models, parts.reporter)
    reconciler: Any = SimpleNamespace(step=step)
    loop = ReconcileLoop(reconciler, parts.triton, gpus, parts.reporter, parts.heartbeat)  # type: ignore[arg-type]
    await loop.step()
    assert parts.reporter.wake.is_set() is bool(becomes or residency)
    assert (parts.refreshed, parts.passed) == (residency, ["reconcile"])


async def test_a_report_that_cannot_be_written_is_a_pass_too(parts: Parts) -> None:
    async def fails() -> None:
        raise OSError("no")

    parts.reporter.step = fails
    with pytest.raises(OSError, match="no"):
        await ReportLoop(parts.reporter, parts.heartbeat).step()
    assert parts.passed == ["report"]


async def test_limits_are_kept_where_they_have_changed(tmp_path: Path) -> None:
    node, file = Node(tmp_path), LimitsFile(tmp_path)
    await node.stage("p1")
    kept = {PodUid("p1"): ReplicaLimits(container_concurrency=2)}
    replicas = Replicas(node.models, b"secret", tuple, kept)
    loop = LimitsLoop(replicas, file, kept)
    await loop.step()
    assert not (tmp_path / "limits.json").exists()  # nothing new
    replicas.set_limits(PodUid("p1"), ReplicaLimits(container_concurrency=3))
    await loop.step()
    assert file.read() == {"p1": ReplicaLimits(container_concurrency=3)}
    (tmp_path / "limits.json").unlink()
    await loop.step()
    assert not (tmp_path / "limits.json").exists()


@pytest.mark.parametrize(("error", "passed"), [(OSError("no"), []), (TritonUnavailable("away"), ["gpus"])])
def test_a_failed_pass_is_counted_and_where_triton_is_away_the_loop_works(
    parts: Parts, error: Exception, passed: list[str]
) -> None:
    registry = CollectorRegistry()
    ErrorCounter(AgentMetrics(registry), parts.reporter, parts.heartbeat).of("gpus")(error)
    assert registry.get_sample_value("berth_agent_loop_errors_total", {"loop": "gpus"}) == 1
    assert (parts.passed, parts.reporter.wake.is_set()) == (passed, bool(passed))
