"""Why a pod has no node, as the reason of its condition `PodScheduled`: a word for programs, not for people.

Cluster autoscalers buy a node for whatever says `Unschedulable`, and look at nothing else. The binder says it only where
one more node would help.
"""

from enum import Enum


class WaitReason(str, Enum):
    """The words are part of what users see: docs/operating.md explains each."""

    # One more node, as there are or were, would take it; or no node of the pool that it requests is known.
    UNSCHEDULABLE = "Unschedulable"
    MODEL_TOO_LARGE = "ModelTooLarge"  # no known kind of node is large enough, even when empty
    NODES_REFUSE_MODEL = "NodesRefuseModel"  # every known kind of node refuses it, whatever is free there
    POD_REFUSED = "PodRefused"  # something of the pod itself must change, or its quarantine or claim
    WAITING_FOR_CAPACITY = "WaitingForCapacity"  # others must go or come: a new node would not help
    SCHEDULER_ERROR = "SchedulerError"  # it has a place and could not be bound there (Kubernetes' own word)


WAIT_REASONS = frozenset(one.value for one in WaitReason)
