"""One node with what is on it. Frozen values; made by `state`, turned into a row by `table`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from msgspec import structs

from berth.contract.errors import InvalidValue, UnreadableReport
from berth.contract.ids import GpuUuid, ModelId, NodeName
from berth.contract.keys import Keys
from berth.contract.memory import free_bytes
from berth.contract.report import CodeRule, GpuReport, NodeReport
from binder.pod.resources import units

JsonObject = Mapping[str, Any]
HostPort = tuple[str, str, int]
# (key, value, effect)
Taint = tuple[str, str, str]
NOT_KNOWN: Final = -1  # no free bytes are known: no such GPU, not healthy, or a fact is missing


class ReportState(Enum):
    """Whether the node's report can be gone by."""

    READY = "ready"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    TRITON_NOT_READY = "Triton is not ready"


@dataclass(frozen=True, slots=True)
class Service:
    """What the node's report says beside its GPUs: decides together, so it is one fact."""

    state: ReportState
    server: str = ""
    capabilities: frozenset[str] = frozenset()
    code: CodeRule = CodeRule.ANY


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the Node object says; `version`: which of its states. `report_error`: the annotation is there and cannot be read."""

    name: NodeName
    labels: Mapping[str, str]
    taints: tuple[JsonObject, ...]
    unschedulable: bool
    allocatable: Mapping[str, int]
    report: NodeReport | None
    report_error: str = ""
    version: int = field(default=0, compare=False)
    lifted: str = ""  # quarantines that an operator has ended

    @property
    def service(self) -> "Service":
        """What is not known is not there."""
        if self.report_error:
            return Service(ReportState.UNREADABLE)
        if self.report is None:
            return Service(ReportState.MISSING)
        report = self.report
        state = ReportState.READY if report.triton.ready else ReportState.TRITON_NOT_READY
        return Service(state, report.server, frozenset(report.capabilities), report.code.rule)

    @property
    def taint_keys(self) -> tuple[Taint, ...]:
        return tuple((t["key"], t.get("value") or "", t.get("effect") or "") for t in self.taints)

    @property
    def content(self) -> "NodeFacts":
        """All but when and for which time it was reported: what a decision can depend on."""
        if self.report is None:
            return self
        return replace(self, report=structs.replace(self.report, generation=0, observed_at=""))


# A model's id is its namespace's own: no other namespace can take it.
NamespacedId = tuple[str, ModelId]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with what its pods and models take.

    `reserved`: bytes on each GPU. `reserved_anywhere`: bytes of pods whose GPU cannot be read. They are counted on every GPU, because
    they are on one of them and it is unknown on which. `tenants`: whose models are here or on their way, `coders`:
    those of them who bring code. `loads`: how many models are to be loaded on a GPU or are being loaded.
    """

    facts: NodeFacts
    used: Mapping[str, int] = field(default_factory=dict)
    reserved: Mapping[GpuUuid, int] = field(default_factory=dict)
    reserved_anywhere: int = 0
    model_ids: frozenset[NamespacedId] = frozenset()
    host_ports: frozenset[HostPort] = frozenset()
    tenants: frozenset[str] = frozenset()
    coders: frozenset[str] = frozenset()
    loads: Mapping[GpuUuid, int] = field(default_factory=dict)

    def reserved_on(self, gpu: GpuUuid) -> int:
        """Bytes that models hold on one GPU, or may hold there."""
        return self.reserved.get(gpu, 0) + self.reserved_anywhere

    def free_on(self, gpu: GpuReport) -> int | None:
        """The memory rule for one GPU of this node; None when it is not known."""
        return free_bytes(gpu, self.reserved_on(gpu.uuid))

    def left_of(self, resource: str) -> int:
        """What is left of the node's allocatable; negative where it has been given out twice."""
        return self.facts.allocatable.get(resource, 0) - self.used.get(resource, 0)

    @property
    def gpus(self) -> tuple[GpuReport, ...]:
        return () if self.facts.report is None else self.facts.report.gpus


def eases(before: NodeView | None, after: NodeView) -> bool:
    """Whether a pod that the node refused may fit there now: something was given back, or moved."""
    if before is None or (before.facts is not after.facts and moves(before.facts, after.facts)):
        return True
    if before.facts is after.facts and before.reserved == after.reserved and before.used == after.used:
        return not (before.reserved_anywhere <= after.reserved_anywhere and _names_more(before, after))
    free = {gpu.uuid: _free_or_unknown(before, gpu) for gpu in before.gpus}
    return (
        any(_free_or_unknown(after, gpu) > free.get(gpu.uuid, NOT_KNOWN) for gpu in after.gpus)
        or any(after.left_of(name) > before.left_of(name) for name in before.used.keys() | after.used.keys())
        or any(after.left_of(name) > before.left_of(name) for name in after.facts.allocatable)
        or not _names_more(before, after)
    )


def moves(before: NodeFacts, after: NodeFacts) -> bool:
    """Whether what only people change is another: labels, taints, cordon, what the node serves, which GPUs it has."""
    return (
        before.labels != after.labels
        or before.taints != after.taints
        or before.unschedulable != after.unschedulable
        or before.service != after.service
        or _gpu_set(before) != _gpu_set(after)
    )


def _free_or_unknown(view: NodeView, gpu: GpuReport) -> int:
    free = view.free_on(gpu)
    return NOT_KNOWN if free is None else free


def _names_more(before: NodeView, after: NodeView) -> bool:
    """All names and ports that were taken still are, and every pod that was there still is."""
    return (
        before.tenants <= after.tenants
        and before.coders <= after.coders
        and before.model_ids <= after.model_ids
        and before.host_ports <= after.host_ports
    )


def _gpu_set(facts: NodeFacts) -> "frozenset[tuple[str, str]]":
    gpus = () if facts.report is None else facts.report.gpus
    return frozenset((gpu.uuid, gpu.product) for gpu in gpus)


def parse_node(node: JsonObject, keys: Keys) -> NodeFacts:
    """Never fails: what cannot be read is unknown, and says so."""
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    report, error = _report((meta.get("annotations") or {}).get(keys.report))
    return NodeFacts(
        name=NodeName(meta["name"]),
        labels=meta.get("labels") or {},
        taints=tuple(spec.get("taints") or ()),
        unschedulable=bool(spec.get("unschedulable")),
        allocatable=_allocatable(status.get("allocatable") or {}),
        report=report,
        report_error=error,
        lifted=(meta.get("annotations") or {}).get(keys.lift_quarantine) or "",
        version=_version(meta.get("resourceVersion")),
    )


def _version(text: str | None) -> int:
    """Versions of one object grow (KEP-5504); 0 where that is not a number."""
    return int(text) if text and text.isdecimal() else 0


def _report(text: str | None) -> tuple[NodeReport | None, str]:
    if text is None:
        return None, ""
    try:
        return NodeReport.decode(text), ""
    except UnreadableReport as error:
        return None, str(error)


def _allocatable(quantities: Mapping[str, str]) -> dict[str, int]:
    """A quantity that cannot be read is none at all."""
    amounts = {}
    for resource, quantity in quantities.items():
        try:
            amounts[resource] = units(resource, quantity)
        except InvalidValue:
            amounts[resource] = 0
    return amounts
