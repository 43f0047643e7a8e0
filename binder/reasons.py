"""Why a node does not take a pod: data, rendered later."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The word that counts in events, metrics and `berth why`. In the order in which they are checked."""

    NODE_UNSCHEDULABLE = "NodeUnschedulable"
    TAINT_NOT_TOLERATED = "TaintNotTolerated"
    NODE_SELECTOR = "NodeSelectorMismatch"
    NODE_AFFINITY = "NodeAffinityMismatch"
    UNSUPPORTED = "UnsupportedConstraint"
    NO_REPORT = "NoNodeReport"
    UNREADABLE_REPORT = "UnreadableNodeReport"
    STALE = "StaleNodeFacts"
    TRITON_NOT_READY = "TritonNotReady"
    WRONG_SERVER = "WrongServer"
    MISSING_CAPABILITIES = "MissingCapabilities"
    MODEL_ON_NODE = "ModelAlreadyOnNode"
    RESOURCE = "ResourceInsufficient"
    TOO_MANY_PODS = "TooManyPods"
    HOST_PORT = "HostPortTaken"
    NO_GPU = "NoGPU"
    GPU_UNHEALTHY = "GPUUnhealthy"
    GPU_UNKNOWN = "GPUFactsUnknown"
    GPU_MEMORY = "GPUMemoryInsufficient"


@dataclass(frozen=True, slots=True)
class Reason:
    """One refusal. `short_bytes`: how much GPU memory is missing on the node's best GPU."""

    kind: Kind
    detail: str = ""
    short_bytes: int | None = None
