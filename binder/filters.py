"""Whether a node can take a pod, and on which GPUs. Pure; the first reason found is the node's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from berth.contract.quantity import format_bytes
from berth.contract.report import GpuReport, NodeReport
from binder.demand import PODS, Demand
from binder.matching import matches_affinity, matches_selector, untolerated_taint
from binder.reasons import Kind, Reason
from binder.view import NodeView

_ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - the API's wildcard
_CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """One GPU for one pod: what would be free on it afterwards, or why not."""

    gpu: GpuReport
    free_after_bytes: int | None
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """One node for one pod: the GPUs that fit, or the reason. `gpus` is empty where none was looked at."""

    view: NodeView
    reason: Reason | None
    gpus: tuple[GpuVerdict, ...] = ()

    @property
    def fitting(self) -> Iterator[GpuVerdict]:
        return (gpu for gpu in self.gpus if gpu.reason is None)


def judge(demand: Demand, view: NodeView, *, fresh: bool) -> NodeVerdict:
    """The verdict on one node. `fresh`: its agent's heartbeat is alive."""
    for check in _NODE_CHECKS:
        if reason := check(demand, view):
            return NodeVerdict(view, reason)
    report = view.facts.report
    if reason := _facts(view, fresh=fresh):
        return NodeVerdict(view, reason)
    assert report is not None
    for report_check in _REPORT_CHECKS:
        if reason := report_check(demand, view, report):
            return NodeVerdict(view, reason)
    gpus = tuple(_judge_gpu(demand, view, gpu) for gpu in report.gpus)
    return NodeVerdict(view, _gpu_reason(gpus), gpus)


def _cordon(demand: Demand, view: NodeView) -> Reason | None:
    """Whoever tolerates the cordon's taint may pass, as with Kubernetes' own NodeUnschedulable."""
    if not view.facts.unschedulable or untolerated_taint((_CORDON,), demand.tolerations) is None:
        return None
    return Reason(Kind.NODE_UNSCHEDULABLE)


def _taints(demand: Demand, view: NodeView) -> Reason | None:
    taint = untolerated_taint(view.facts.taints, demand.tolerations)
    if taint is None:
        return None
    value = f"={taint['value']}" if taint.get("value") else ""
    return Reason(Kind.TAINT_NOT_TOLERATED, f"{taint['key']}{value}:{taint['effect']}")


def _selector(demand: Demand, view: NodeView) -> Reason | None:
    if matches_selector(view.facts.labels, demand.node_selector):
        return None
    return Reason(Kind.NODE_SELECTOR, ",".join(f"{k}={v}" for k, v in sorted(demand.node_selector.items())))


def _affinity(demand: Demand, view: NodeView) -> Reason | None:
    matches = matches_affinity(view.facts.name, view.facts.labels, demand.affinity)
    return None if matches else Reason(Kind.NODE_AFFINITY)


def _unsupported(demand: Demand, _: NodeView) -> Reason | None:
    return None if demand.unsupported is None else Reason(Kind.UNSUPPORTED, demand.unsupported)


def _resources(demand: Demand, view: NodeView) -> Reason | None:
    for resource, asked in sorted(demand.amounts.items()):
        left = view.facts.allocatable.get(resource, 0) - view.used.get(resource, 0)
        if asked > 0 and asked > left:
            if resource == PODS:
                return Reason(Kind.TOO_MANY_PODS, f"{view.used.get(resource, 0)} pods are on the node")
            return Reason(Kind.RESOURCE, f"{resource}: {asked} asked, {max(0, left)} left")
    return None


def _host_ports(demand: Demand, view: NodeView) -> Reason | None:
    for address, protocol, port in sorted(demand.host_ports):
        for taken_address, taken_protocol, taken_port in view.host_ports:
            same = (protocol, port) == (taken_protocol, taken_port)
            if same and (_ANY_ADDRESS in (address, taken_address) or address == taken_address):
                return Reason(Kind.HOST_PORT, f"{protocol} {port}")
    return None


def _facts(view: NodeView, *, fresh: bool) -> Reason | None:
    """What is not known is not free."""
    facts = view.facts
    if facts.report_error:
        return Reason(Kind.UNREADABLE_REPORT, facts.report_error)
    if facts.report is None:
        return Reason(Kind.NO_REPORT)
    if not fresh:
        return Reason(Kind.STALE, f"last report of {facts.report.observed_at}")
    return None if facts.report.triton.ready else Reason(Kind.TRITON_NOT_READY)


def _server(demand: Demand, _: NodeView, report: NodeReport) -> Reason | None:
    wanted = demand.model.server
    if wanted is None or wanted == report.server:
        return None
    return Reason(Kind.WRONG_SERVER, f"{wanted} wanted, {report.server} is here")


def _capabilities(demand: Demand, _: NodeView, report: NodeReport) -> Reason | None:
    missing = sorted(set(demand.model.requirements) - set(report.capabilities))
    return Reason(Kind.MISSING_CAPABILITIES, ",".join(missing)) if missing else None


def _model(demand: Demand, view: NodeView, _: NodeReport) -> Reason | None:
    model = demand.model
    if model.model_id is not None and model.model_id in view.model_ids:
        return Reason(Kind.MODEL_ON_NODE, f"id {model.model_id}")
    if model.model_name is not None and model.model_name in view.model_names:
        return Reason(Kind.MODEL_ON_NODE, f"name {model.model_name} in Triton")
    return None


def _judge_gpu(demand: Demand, view: NodeView, gpu: GpuReport) -> GpuVerdict:
    """A pod that asks for no memory still needs a GPU that is healthy, known and not over its memory."""
    if not gpu.healthy:
        return GpuVerdict(gpu, None, Reason(Kind.GPU_UNHEALTHY, gpu.reason))
    free = view.free_on(gpu)
    if free is None:
        return GpuVerdict(gpu, None, Reason(Kind.GPU_UNKNOWN, gpu.reason))
    after = free - demand.model.request_bytes
    if after >= 0:
        return GpuVerdict(gpu, after, None)
    return GpuVerdict(gpu, after, Reason(Kind.GPU_MEMORY, f"{format_bytes(-after)} short", -after))


def _gpu_reason(gpus: tuple[GpuVerdict, ...]) -> Reason | None:
    """None if one fits; else the reason of the GPU that comes closest."""
    if not gpus:
        return Reason(Kind.NO_GPU)
    if any(gpu.reason is None for gpu in gpus):
        return None
    reasons = [gpu.reason for gpu in gpus if gpu.reason is not None]
    return min(reasons, key=lambda r: (r.short_bytes is None, r.short_bytes or 0))


_NODE_CHECKS: tuple[Callable[[Demand, NodeView], Reason | None], ...] = (
    _cordon,
    _taints,
    _selector,
    _affinity,
    _unsupported,
    _resources,
    _host_ports,
)
_REPORT_CHECKS: tuple[Callable[[Demand, NodeView, NodeReport], Reason | None], ...] = (
    _server,
    _capabilities,
    _model,
)
