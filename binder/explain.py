"""Reasons in words, for events, conditions and `berth why`."""

from collections import Counter
from collections.abc import Iterable

from berth.contract.quantity import format_bytes
from binder.filters import NodeVerdict
from binder.reasons import Kind, Reason


def summary(verdicts: Iterable[NodeVerdict]) -> str:
    """`0/5 nodes: 3 GPUMemoryInsufficient (1.2 GiB short on the best GPU), 1 TaintNotTolerated (…)`."""
    reasons = [verdict.reason for verdict in verdicts if verdict.reason is not None]
    if not reasons:
        return "0/0 nodes: there is no node"
    counted = Counter(reason.kind for reason in reasons)
    parts = [f"{count} {kind.value}{_best(kind, reasons)}" for kind, count in counted.most_common()]
    return f"0/{len(reasons)} nodes: {', '.join(parts)}"


def sentence(reason: Reason) -> str:
    """One reason with its detail."""
    return f"{reason.kind.value}: {reason.detail}" if reason.detail else reason.kind.value


def _best(kind: Kind, reasons: list[Reason]) -> str:
    """The figure that helps most, in brackets."""
    alike = [reason for reason in reasons if reason.kind is kind]
    shortages = [reason.short_bytes for reason in alike if reason.short_bytes is not None]
    if shortages:
        return f" ({format_bytes(min(shortages))} short on the best GPU)"
    details = sorted({reason.detail for reason in alike if reason.detail})
    if kind in _TOLD and len(details) == 1:
        return f" ({details[0][:200]})"
    return ""


# Kinds whose detail is the same for all nodes or says what to change.
_TOLD = frozenset(
    {
        Kind.TAINT_NOT_TOLERATED,
        Kind.UNSUPPORTED,
        Kind.MISSING_CAPABILITIES,
        Kind.RESOURCE,
        Kind.UNREADABLE_REPORT,
    }
)
