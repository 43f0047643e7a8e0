"""The loops of the agent: what each does in one pass, and why the agent is not ready or not alive."""

from collections.abc import Callable, Mapping

from agent.gpu_facts import GpuFacts
from agent.heartbeat import AgentHeartbeat
from agent.metrics import AgentMetrics
from agent.models import Models
from agent.replicas import LimitsFile, Replicas
from agent.reporter import Reporter
from agent.serving.reconcile import Reconciler
from agent.serving.triton_sync import TritonSync
from berth.contract.gateway import ReplicaLimits
from berth.contract.ids import PodUid
from berth.kube.informer import Informer
from berth.runtime.tasks import in_thread
from berth.triton.errors import TritonError

# A driver that is busy takes seconds; a call that has not returned for so long never does.
_HANG_SECONDS = 120.0


class GpuLoop:
    def __init__(self, gpus: GpuFacts, models: Models, reporter: Reporter) -> None:
        self._gpus, self._models, self._reporter = gpus, models, reporter

    async def step(self) -> None:
        await self._gpus.refresh()
        if self._gpus.have_changed():
            self._models.touch()  # clients that watch a model on such a GPU must be notified
        self._reporter.wake.set()

    @property
    def is_stale(self) -> bool:
        """A model has come or gone since the last reading."""
        return self._gpus.residency != self._models.residency

    def not_alive(self) -> str | None:
        """Why the agent must be restarted, for `/livez`."""
        seconds = self._gpus.hanging_seconds
        return f"NVML has not answered for {seconds:.0f} s" if seconds > _HANG_SECONDS else None


class Readiness:
    def __init__(self, pods: Informer, triton: TritonSync, reporter: Reporter) -> None:
        self._pods, self._triton, self._reporter = pods, triton, reporter

    def not_ready(self) -> str | None:
        """Why the agent is not ready, for `/readyz`."""
        if not self._pods.synced.is_set():
            return "the node's pods are not known yet"
        if self._triton.version is None:
            return "Triton does not answer"
        if self._reporter.failure:
            return f"the report cannot be written: {self._reporter.failure}"
        return None if self._reporter.has_written else "no report has been written"


class ReconcileLoop:
    def __init__(
        self,
        reconciler: Reconciler,
        triton: TritonSync,
        gpus: GpuLoop,
        reporter: Reporter,
        heartbeat: AgentHeartbeat,
    ) -> None:
        self._reconciler, self._triton, self._gpus = reconciler, triton, gpus
        self._reporter, self._heartbeat = reporter, heartbeat

    async def step(self) -> None:
        before = self._triton.version
        await self._reconciler.step()
        if self._triton.version != before:
            self._reporter.wake.set()  # the binder places nothing here before the report says that Triton is ready
        if self._gpus.is_stale:
            await self._gpus.step()
        self._heartbeat.passed("reconcile")


class ReportLoop:
    def __init__(self, reporter: Reporter, heartbeat: AgentHeartbeat) -> None:
        self._reporter, self._heartbeat = reporter, heartbeat

    async def step(self) -> None:
        try:
            await self._reporter.step()
        finally:
            self._heartbeat.passed("report")  # also where it may not write: the heartbeat says so


class LimitsLoop:
    """Keeps the limits that pods have requested, over a restart of the agent. `kept`: those in the file."""

    def __init__(self, replicas: Replicas, file: LimitsFile, kept: Mapping[PodUid, ReplicaLimits]) -> None:
        self._replicas, self._file, self._kept = replicas, file, dict(kept)

    async def step(self) -> None:
        limits = dict(self._replicas.limits())
        if limits != self._kept:
            await in_thread(self._file.write, limits.items())
            self._kept = limits


class ErrorCounter:
    """What follows when a pass of a loop has failed."""

    def __init__(self, metrics: AgentMetrics, reporter: Reporter, heartbeat: AgentHeartbeat) -> None:
        self._metrics, self._reporter, self._heartbeat = metrics, reporter, heartbeat

    def of(self, loop: str) -> Callable[[Exception], None]:
        def count(error: Exception) -> None:
            self._metrics.loop_failed(loop)
            if isinstance(error, TritonError):
                self._heartbeat.passed(
                    loop
                )  # the loop works; it is Triton that does not, and the report says so
                self._reporter.wake.set()

        return count
