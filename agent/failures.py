"""Why a load failed, from Triton's text: the only place where it says so.

The table is in the order of its tests; what matches nothing is the model's own fault, because
trying the same files again would fail again.
"""

import re
from enum import Enum

from berth.v1 import node_agent_pb2 as pb


class FailureClass(Enum):
    """What a failed load means for the next try."""

    CAPACITY = pb.FAILURE_CLASS_CAPACITY
    INVALID_MODEL = pb.FAILURE_CLASS_INVALID_MODEL
    TRANSIENT = pb.FAILURE_CLASS_TRANSIENT


_PATTERNS = (
    (r"out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation", FailureClass.CAPACITY),
    (r"failed to allocate .*(memory|GPU)|memory limit set for", FailureClass.CAPACITY),
    (r"unable to create (CUDA )?stream|CUDA driver", FailureClass.CAPACITY),
    (r"shared memory region|No space left on device", FailureClass.TRANSIENT),
)


def classify(reason: str) -> FailureClass:
    """The class of a load error's text."""
    for pattern, kind in _PATTERNS:
        if re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return kind
    return FailureClass.INVALID_MODEL
