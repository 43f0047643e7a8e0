"""Why a node does not take a pod: data, rendered later."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The word that counts in events, metrics and `berth why`. In the order in which they are checked:
    the first that holds is the node's."""

    UNSUPPORTED = "UnsupportedConstraint"
    QUARANTINED = "ModelQuarantined"
    VOLUME_NOT_FOUND = "VolumeClaimNotFound"
    VOLUME_NOT_BOUND = "VolumeClaimNotBound"
    VOLUME_IN_USE = "VolumeInUse"
    NODE_UNSCHEDULABLE = "NodeUnschedulable"
    TAINT_NOT_TOLERATED = "TaintNotTolerated"
    NODE_SELECTOR = "NodeSelectorMismatch"
    NODE_AFFINITY = "NodeAffinityMismatch"
    NO_REPORT = "NoNodeReport"
    UNREADABLE_REPORT = "UnreadableNodeReport"
    TRITON_NOT_READY = "TritonNotReady"
    WRONG_SERVER = "WrongServer"
    MISSING_CAPABILITIES = "MissingCapabilities"
    CODE_NOT_ALLOWED = "CodeNotAllowed"
    STALE = "StaleNodeFacts"
    EXCLUDED = "ExcludedAfterLoadFailure"
    VOLUME_ELSEWHERE = "VolumeNodeAffinityConflict"
    MODEL_ON_NODE = "ModelAlreadyOnNode"
    CODE_OF_ANOTHER = "CodeOfAnotherNamespace"
    AMONG_OTHERS = "ModelsOfOtherNamespaces"
    HOST_PORT = "HostPortTaken"
    RESOURCE = "ResourceInsufficient"
    TOO_MANY_PODS = "TooManyPods"
    NO_GPU = "NoGPU"
    GPU_PRODUCT = "GPUProductMismatch"
    GPU_COUNT = "GPUCountInsufficient"
    GPU_UNHEALTHY = "GPUUnhealthy"
    GPU_UNKNOWN = "GPUFactsUnknown"
    GPU_MEMORY = "GPUMemoryInsufficient"
    POD_AFFINITY = "PodAffinityMismatch"
    POD_ANTI_AFFINITY = "PodAntiAffinity"
    KEPT_AWAY = "ExistingPodAntiAffinity"
    SPREAD = "TopologySpread"


@dataclass(frozen=True, slots=True)
class Reason:
    """One refusal. `short_bytes`: how much GPU memory is missing on the node's best GPU."""

    kind: Kind
    detail: str = ""
    short_bytes: int | None = None
