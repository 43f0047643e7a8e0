"""The agent's Prometheus metrics."""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from agent.cold_starts import ALL, PHASES
from berth.contract.memory import free_bytes, reserved_bytes
from berth.contract.report import GpuReport, ModelState, NodeReport

TRITON_RESTARTS = ("died", "stuck")
TRITON_DEATHS = ("load", "requests", "load_and_requests", "unknown")
_LOAD_BUCKETS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_COLD_START_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class AgentMetrics:
    """Registered in the given registry. A GPU's series go with the GPU."""

    def __init__(self, registry: CollectorRegistry) -> None:

        def gpu_gauge(name: str, help: str) -> Gauge:
            return Gauge(f"berth_agent_gpu_{name}", help, ("gpu",), registry=registry)

        self._total = gpu_gauge("total_bytes", "GPU memory")
        self._other_use = gpu_gauge("other_use_bytes", "GPU memory used by processes that are not Berth's")
        self._free = gpu_gauge("free_bytes", "GPU memory that models may still request")
        self._healthy = gpu_gauge("healthy", "1 if models may be placed on the GPU")
        self._models = Gauge("berth_agent_models", "models of this node", ("state",), registry=registry)
        self._load_seconds = Histogram(
            "berth_agent_load_seconds",
            "from the start of a load to READY",
            buckets=_LOAD_BUCKETS,
            registry=registry,
        )
        self._cold_start_seconds = Histogram(
            "berth_cold_start_seconds",
            "from a replica's placement on this node until its pod's proxy is ready, and each phase of that",
            ("phase",),
            buckets=_COLD_START_BUCKETS,
            registry=registry,
        )
        for phase in (*PHASES, ALL):
            self._cold_start_seconds.labels(phase)
        self._load_failures = Counter(
            "berth_agent_load_failures", "failed loads", ("kind",), registry=registry
        )
        self._reports = Counter("berth_agent_reports", "reports written to the node", registry=registry)
        self._errors = Counter(
            "berth_agent_loop_errors", "failed passes of a loop", ("loop",), registry=registry
        )
        self._staged = Counter("berth_agent_staged_bytes", "bytes of model files received", registry=registry)
        self._calls = Counter("berth_agent_calls", "API calls", ("method", "code"), registry=registry)
        self._quarantined = Gauge(
            "berth_agent_quarantined_models",
            "model files that are not loaded because Triton crashed while it loaded them",
            registry=registry,
        )
        self._restarts = Counter(
            "berth_agent_triton_restarts",
            "restarts of Triton: it died, or could not unload a model",
            ("reason",),
            registry=registry,
        )
        for reason in TRITON_RESTARTS:
            self._restarts.labels(reason)
        self._deaths = Counter(
            "berth_agent_triton_deaths",
            "Triton's crashes, by what was in it: a load, requests, both, or unknown",
            ("reason",),
            registry=registry,
        )
        for reason in TRITON_DEATHS:
            self._deaths.labels(reason)
        self._known: set[str] = set()

    def loaded(self, seconds: float) -> None:
        self._load_seconds.observe(seconds)

    def cold_start(self, phase: str, seconds: float) -> None:
        """`phase`: one of `cold_starts.PHASES`, or ALL."""
        self._cold_start_seconds.labels(phase).observe(seconds)

    def load_failed(self, kind: str) -> None:
        self._load_failures.labels(kind).inc()

    def quarantined(self, count: int) -> None:
        self._quarantined.set(count)

    def triton_restarted(self, reason: str) -> None:
        """`reason`: one of TRITON_RESTARTS."""
        self._restarts.labels(reason).inc()

    def triton_died(self, reason: str) -> None:
        """`reason`: one of TRITON_DEATHS."""
        self._deaths.labels(reason).inc()

    def loop_failed(self, loop: str) -> None:
        self._errors.labels(loop).inc()

    def staged(self, count: int) -> None:
        self._staged.inc(count)

    def called(self, method: str, code: str) -> None:
        self._calls.labels(method, code).inc()

    def reported(self, report: NodeReport) -> None:
        """Follow a report that was written."""
        self._reports.inc()
        states = Tally(model.state for model in report.models)
        for state in ModelState:
            self._models.labels(state.value).set(states[state])
        for gone in self._known - {gpu.uuid for gpu in report.gpus}:
            for gauge in (self._total, self._other_use, self._free, self._healthy):
                gauge.remove(gone)
        self._known = {gpu.uuid for gpu in report.gpus}
        for gpu in report.gpus:
            self._set_gpu(gpu, report)

    def _set_gpu(self, gpu: GpuReport, report: NodeReport) -> None:
        models = (model for model in report.models if gpu.uuid in model.gpus)
        reserved = sum(reserved_bytes(model.requested_bytes, model.measured_bytes) for model in models)
        free = free_bytes(gpu, reserved)
        unknown = float("nan")
        self._total.labels(gpu.uuid).set(unknown if gpu.total_bytes is None else gpu.total_bytes)
        self._other_use.labels(gpu.uuid).set(unknown if gpu.other_use_bytes is None else gpu.other_use_bytes)
        self._free.labels(gpu.uuid).set(unknown if free is None else free)
        self._healthy.labels(gpu.uuid).set(gpu.healthy)
