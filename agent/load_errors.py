"""Why a load failed, from Triton's text: the only place where it says so.

The table is in the order of its tests. Only what is known to be the model's own fault is called so,
because its files are deleted and no other node is tried; what matches nothing may be the node's.
The texts are those of Triton 2.51 and of the libraries that its backends pass on.
"""

import re

from berth.contract.report import Failure

_PATTERNS: tuple[tuple[str, Failure], ...] = (
    (r"out.?of.?memory|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED", Failure.CAPACITY),
    (r"failed to allocate (GPU|CUDA|device|memory for requested buffer)", Failure.CAPACITY),
    (r"GPU memory .*could not be allocated|memory limit set for", Failure.CAPACITY),
    # Things that models run into and that pass, in whatever exception they are wrapped.
    (r"connection|timed? ?out|temporary failure|no space left|too many open files", Failure.TRANSIENT),
    (r"input/output error|shared memory|cannot open shared object|gpu id|CUDA", Failure.TRANSIENT),
    (r"UNAVAILABLE state: Invalid argument:", Failure.INVALID_MODEL),
    (
        r"at least one version must be available|unable to find (backend|'.*' for model)",
        Failure.INVALID_MODEL,
    ),
    # INVALID_ARGUMENT, NO_SUCHFILE, NO_MODEL, INVALID_PROTOBUF, NOT_IMPLEMENTED, INVALID_GRAPH
    (r"onnx runtime error (2|3|4|7|9|10):", Failure.INVALID_MODEL),
    (
        r"\b(Syntax|Indentation|Tab|Import|ModuleNotFound|FileNotFound|Name|UnboundLocal|Attribute|Type|Value"
        r"|Key|Index|Assertion|ZeroDivision|NotImplemented|UnicodeDecode|JSONDecode)Error\b",
        Failure.INVALID_MODEL,
    ),
)
_POLL = "failed to poll from model repository"


def classify(reason: str) -> Failure:
    """The class of a load error's text."""
    for pattern, kind in _PATTERNS:
        if re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return kind
    return Failure.TRANSIENT


def explain(reason: str) -> str:
    """The text, with a hint where Triton keeps the cause to itself."""
    if _POLL not in reason:
        return reason
    return f"{reason} (the cause is in Triton's log only: mostly a setting of config.pbtxt that it does not take)"
