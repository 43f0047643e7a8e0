"""A replica of a model, as its pod shows it. Pure.

Types come from the API server and hold; what a tenant writes are strings.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from berth.contract.keys import Keys
from berth.contract.pod import ENDED_PHASES
from berth.contract.scaling import ModelKey
from berth.contract.text import one_line

JsonObject = Mapping[str, Any]

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_HASH_LABEL: Final = "pod-template-hash"
# Reasons of the condition PodScheduled. A node autoscaler acts on this word alone.
_ASKS_FOR_NODE: Final = "Unschedulable"
_GATED: Final = "SchedulingGated"
_MOST_GATES: Final = 3
# What a kubelet says of a container that makes no progress.
_STUCK: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


class PodState(Enum):
    READY = "ready"
    STARTING = "starting"  # bound
    PENDING = "pending"  # the binder has not decided yet
    UNSCHEDULABLE = "unschedulable"  # the binder has rejected it
    GATED = "gated"  # scheduling gates keep it from the binder, as a quota's do
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """`stuck`: why it makes no progress; `failed_load`: why it never will. `initialised`: its init containers, the loader
    among them, have done their work. `bound_ns`, `ready_ns`: when it was first seen
    to be so. `gates`: of its scheduling gates, the names of the first few. `asks_for_node`: its condition is the one by
    which node autoscalers add a node."""

    uid: str
    name: str
    key: ModelKey
    state: PodState
    node: str = ""
    address: str = ""
    priority: int | None = None
    deletion_cost: str | None = None
    stuck: str = ""
    failed_load: str = ""
    initialised: bool = False
    gates: tuple[str, ...] = ()
    asks_for_node: bool = False
    bound_ns: int | None = None
    ready_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a model's pods. Those that are being deleted are no replicas any more."""

    ready: int = 0
    starting: int = 0
    pending: int = 0
    unschedulable: int = 0
    gated: int = 0
    leaving: int = 0
    # Of those that are starting, how many make no progress.
    stuck: int = 0

    @property
    def bound(self) -> int:
        return self.ready + self.starting

    @property
    def made(self) -> int:
        """Pods, wherever they are."""
        return self.admitted + self.gated

    @property
    def admitted(self) -> int:
        """Pods that have a node or may get one: no gate holds them back."""
        return self.bound + self.pending + self.unschedulable

    @property
    def on_their_way(self) -> int:
        """Not ready, and likely to be."""
        return self.starting + self.pending + self.unschedulable - self.stuck


def keep_pod(item: JsonObject) -> dict[str, Any]:
    """What a mirror needs to keep of a pod."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    kept = picked(meta, "name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
    kept["labels"] = picked(meta.get("labels") or {}, _HASH_LABEL)
    kept["annotations"] = picked(meta.get("annotations") or {}, DELETION_COST)
    kept["ownerReferences"] = [
        picked(owner, "kind", "name", "controller") for owner in meta.get("ownerReferences") or ()
    ]
    containers = {
        key: [picked(one, "state") for one in status.get(key) or ()]
        for key in ("initContainerStatuses", "containerStatuses")
    }
    return {
        "metadata": kept,
        "spec": picked(spec, "nodeName", "priority", "hostNetwork")
        | {"schedulingGates": [picked(gate, "name") for gate in _first_gates(spec)]},
        "status": picked(status, "phase", "podIP", "conditions") | containers,
    }


def picked(data: JsonObject, *names: str) -> dict[str, Any]:
    return {name: data[name] for name in names if name in data}


def read_pod(item: JsonObject, keys: Keys) -> Pod | None:
    """None for a pod that is no replica of a Deployment: not a ReplicaSet's, or ended."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    deployment = _deployment_of(meta)
    if deployment is None or status.get("phase") in ENDED_PHASES:
        return None
    conditions = {one.get("type"): one for one in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    loaded = conditions.get(keys.loaded_condition) or {}
    state = _state(meta, spec, status, conditions)
    is_unschedulable = state is PodState.UNSCHEDULABLE
    return Pod(
        uid=meta.get("uid", ""),
        name=meta["name"],
        key=ModelKey(meta.get("namespace", ""), deployment),
        state=state,
        node=spec.get("nodeName") or "",
        # The node's address is not the replica's: at any port that a tenant names another program may listen.
        address="" if spec.get("hostNetwork") else status.get("podIP") or "",
        priority=spec.get("priority"),
        deletion_cost=(meta.get("annotations") or {}).get(DELETION_COST),
        stuck=_stuck(status) if state is PodState.STARTING else "",
        failed_load=_words(loaded) if loaded.get("status") == "False" else "",
        initialised=(conditions.get("Initialized") or {}).get("status") == "True",
        gates=tuple(gate.get("name") or "" for gate in _first_gates(spec)),
        asks_for_node=is_unschedulable and scheduled.get("reason") == _ASKS_FOR_NODE,
    )


def counted(pods: Iterable[Pod]) -> Counts:
    number, stuck = dict.fromkeys(PodState, 0), 0
    for pod in pods:
        number[pod.state] += 1
        stuck += pod.state is PodState.STARTING and bool(pod.stuck or pod.failed_load)
    return Counts(**{state.value: number[state] for state in PodState}, stuck=stuck)


def _deployment_of(meta: JsonObject) -> str | None:
    """A ReplicaSet of a Deployment has its name and the hash of its template, which its pods have as a label."""
    suffix = f"-{(meta.get('labels') or {}).get(_HASH_LABEL, '')}"
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "ReplicaSet":
            name: str = owner.get("name", "").removesuffix(suffix)
            return name if len(suffix) > 1 and name and name != owner.get("name") else None
    return None


def _state(
    meta: JsonObject, spec: JsonObject, status: JsonObject, conditions: Mapping[str | None, JsonObject]
) -> PodState:
    if meta.get("deletionTimestamp") is not None:
        return PodState.LEAVING
    if not spec.get("nodeName"):
        if spec.get("schedulingGates"):
            return PodState.GATED
        scheduled = conditions.get("PodScheduled") or {}
        # The condition of gates that are gone stands until a scheduler has looked.
        refused = scheduled.get("status") == "False" and scheduled.get("reason") != _GATED
        return PodState.UNSCHEDULABLE if refused else PodState.PENDING
    ready = status.get("phase") == "Running" and (conditions.get("Ready") or {}).get("status") == "True"
    return PodState.READY if ready else PodState.STARTING


def _first_gates(spec: JsonObject) -> Sequence[JsonObject]:
    return (spec.get("schedulingGates") or ())[:_MOST_GATES]


def _stuck(status: JsonObject) -> str:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            reason = ((container.get("state") or {}).get("waiting") or {}).get("reason")
            if reason in _STUCK:
                return str(reason)
    return ""


def _words(condition: JsonObject) -> str:
    return one_line(str(condition.get("message") or condition.get("reason") or "it failed"), limit=512)
