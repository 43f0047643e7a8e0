"""Why a load failed, from Triton's text: the only place where it says so.

The table is in the order of its tests; what matches nothing is the model's own fault, because
trying the same files again would fail again.
"""

import re

from berth.contract.report import Failure

_PATTERNS = (
    (r"out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation", Failure.CAPACITY),
    (r"failed to allocate .*(memory|GPU)|memory limit set for", Failure.CAPACITY),
    (r"unable to create (CUDA )?stream|CUDA driver", Failure.CAPACITY),
    (r"shared memory region|No space left on device", Failure.TRANSIENT),
)


def classify(reason: str) -> Failure:
    """The class of a load error's text."""
    for pattern, kind in _PATTERNS:
        if re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return kind
    return Failure.INVALID_MODEL
