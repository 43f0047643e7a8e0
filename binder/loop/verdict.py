"""What is wrong with the place of a bound pod, and whether the pod is replaced because of it. Pure.

The one verdict that the eviction controller acts on, that events and conditions report, and that `berth why` explains.
A pod cannot be moved: it is evicted, and its controller creates another. Where that helps nothing, the pod stays, and the
verdict says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from berth.contract.ids import GpuUuid, NodeName
from berth.contract.keys import Keys
from berth.contract.pod import node_of
from berth.contract.quantity import format_bytes
from berth.contract.report import Failure, GpuReport, ModelReport, ModelState
from binder.cache.load_failures import CURABLE, EXCLUDED_SECONDS, MOST_FAILURES
from binder.pod.conditions import JsonObject, is_true
from binder.pod.demand import controller_of

# As long as an operator needs to reset a GPU; and a GPU that flaps costs no pod its place.
BROKEN_SECONDS = 60.0
# A model that has failed or is lost is not replaced for its GPU's sake as well.
_AT_THE_GPU = frozenset({ModelState.PENDING, ModelState.STAGED, ModelState.LOADING, ModelState.READY})
_BUDGETS = "as far as PodDisruptionBudgets allow"


@dataclass(frozen=True, slots=True)
class PlacementFailure:
    """What is wrong with a pod's place: the reason and the message of an event."""

    reason: str
    message: str


def node_gone(node: str) -> PlacementFailure:
    return PlacementFailure("NodeGone", f"node {node} does not exist any more")


def gpu_failure(
    uuid: GpuUuid, gpu: GpuReport | None, node: str, *, free_bytes: int | None = None
) -> PlacementFailure | None:
    """What is wrong with one GPU of the pod; `gpu`: as the node reports it, None where it does not."""
    if gpu is None:
        return PlacementFailure("GPULost", f"GPU {uuid} is not on node {node} any more")
    name = f"GPU {gpu.index} ({uuid}) of node {node}"
    if not gpu.healthy:
        why = gpu.reason or "no reason is reported"
        return PlacementFailure("GPUUnhealthy", f"{name} is not healthy: {why}")
    if free_bytes is not None and free_bytes < 0:
        return PlacementFailure("GPUOvercommitted", f"{name} is {format_bytes(-free_bytes)} over its memory")
    return None


class Cause(Enum):
    """Why a bound pod's model is not served, where a replacement could help."""

    LOAD_FAILED = "load failed"
    FILES_LOST = "files lost"
    GPU_BROKEN = "gpu broken"


def cause_of(model: ModelReport, gpus: Mapping[GpuUuid, GpuReport]) -> Cause | None:
    """None where nothing calls for a replacement. `gpus`: the node's."""
    if model.state is ModelState.FAILED:
        return Cause.LOAD_FAILED
    if model.state is ModelState.LOST:
        return Cause.FILES_LOST
    return Cause.GPU_BROKEN if broken_gpu(model, gpus) is not None else None


def broken_gpu(model: ModelReport, gpus: Mapping[GpuUuid, GpuReport]) -> GpuReport | None:
    """The first broken GPU that the model is on, or is to be loaded onto."""
    if model.state not in _AT_THE_GPU:
        return None
    there = (gpus[uuid] for uuid in sorted(model.gpus) if uuid in gpus)
    return next((gpu for gpu in there if gpu.broken), None)


@dataclass(frozen=True, slots=True)
class BoundPod:
    """What of a pod decides whether it is replaced. `server`: the Triton that the pod is pinned to."""

    node: NodeName | None
    scheduler_name: str
    server: str | None
    has_controller: bool
    is_initialized: bool

    @classmethod
    def of(cls, pod: JsonObject, *, server: str | None) -> "BoundPod":
        return cls(
            node=node_of(pod),
            scheduler_name=pod["spec"].get("schedulerName") or "",
            server=server,
            has_controller=controller_of(pod) is not None,
            is_initialized=is_true(pod, "Initialized"),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """`stays`: why the pod is not replaced, "" where it is. `waits`: it is not yet, for its own loader still runs.
    `is_reported`: to its owner; a failed load of another scheduler's pod is left to that scheduler."""

    cause: Cause
    node: NodeName | None
    stays: str = ""
    waits: bool = False
    is_reported: bool = True

    @property
    def next_step(self) -> str:
        """What happens to the pod, as a sentence for its owner; "" where nothing does yet."""
        if self.waits:
            return ""
        return f"it stays here: {self.stays}" if self.stays else _REPLACED[self.cause].format(node=self.node)


def verdict(
    pod: BoundPod, cause: Cause, failure: Failure | None, *, keys: Keys, scheduler_name: str
) -> Verdict:
    """`failure`: the class of a failed load. What depends on other nodes and on earlier tries is not decided here."""
    if cause is Cause.FILES_LOST and not pod.is_initialized:
        return Verdict(cause, pod.node, waits=True)  # its own loader may bring them yet
    is_ours = pod.scheduler_name == scheduler_name
    return Verdict(
        cause,
        pod.node,
        stays=next(_reasons_to_stay(pod, cause, failure, keys, is_ours=is_ours), ""),
        is_reported=is_ours or cause is not Cause.LOAD_FAILED,
    )


def _reasons_to_stay(
    pod: BoundPod, cause: Cause, failure: Failure | None, keys: Keys, *, is_ours: bool
) -> Iterator[str]:
    if cause is Cause.LOAD_FAILED:
        if failure is Failure.QUARANTINED:
            yield (
                "no node takes these files while they are quarantined here, nor any pod of this template; to lift"
                f" it: kubectl annotate node {pod.node} {keys.lift_quarantine}=all"
            )
        if failure not in CURABLE:
            yield "the model would fail on every node; correct it, and create the pod again"
    # Files are staged again by a new pod's loader, whichever scheduler binds it.
    if cause is not Cause.FILES_LOST and not is_ours:
        yield f"scheduler {pod.scheduler_name} placed it"
    if cause is Cause.LOAD_FAILED and pod.server is not None:
        yield f"the pod is pinned to server {pod.server}"
    if not pod.has_controller:
        yield "no controller would replace the pod; delete it, and create it again"


_REPLACED = {
    Cause.LOAD_FAILED: (
        f"the binder evicts it, {_BUDGETS}, once another node has room; its controller creates another, which keeps away"
        f" from node {{node}} for {EXCLUDED_SECONDS / 60:g} min. After {MOST_FAILURES} failures it is left where it is"
    ),
    Cause.FILES_LOST: (
        f"the binder evicts it, {_BUDGETS}; its controller creates another, whose loader stages the files again"
    ),
    Cause.GPU_BROKEN: (
        "what a broken GPU serves is not trusted, so the pod is not ready; once that has lasted for"
        f" {BROKEN_SECONDS:g} s and another GPU has room, the binder evicts it, {_BUDGETS}; its controller creates another"
    ),
}
