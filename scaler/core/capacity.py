"""No replica is requested that cannot be scheduled: the capacity limit on a number of desired replicas. Pure.

The binder's answer becomes a capacity: the replicas that it was asked about and those that it can schedule. It is made once, when
the binder is asked, so that replicas that come and go meanwhile are not counted twice.
"""

from typing import Final

import msgspec

from berth.contract.scaling import Schedulable, SchedulableModel
from scaler.core.pods import Counts
from scaler.go import SECOND_NS

# A binder that has been silent for so long is away; its last answer still counts.
SILENT_NS: Final = 30 * SECOND_NS
# Then the capacity is unknown, and one replica is tried.
FORGOTTEN_NS: Final = 300 * SECOND_NS


class Capacity(msgspec.Struct, frozen=True):
    """The replicas that have a node, or are promised one; `why` no more can be scheduled, `never`: none ever can."""

    replicas: int
    why: str = ""
    never: bool = False


class CapacityLimited(msgspec.Struct, frozen=True):
    """The replicas to request, by how many that is less than desired, and why."""

    replicas: int
    by: int = 0
    why: str = ""


NOT_ASKED: Final = Capacity(0, "the binder has not been asked yet")


def capacity_of(asked: SchedulableModel, answer: Schedulable) -> Capacity:
    """`never` matters only where not even one replica can be scheduled."""
    bound = asked.running + asked.starting
    missing = max(asked.desired - bound, 0)
    now = min(max(answer.now, 0), missing)
    return Capacity(bound + now, answer.reason, never=bound + now == 0 and answer.never >= missing > 0)


def limit(
    desired: int,
    counts: Counts,
    capacity: Capacity,
    *,
    promised: int,
    silent_ns: int,
    overflow: int = 0,
) -> CapacityLimited:
    """`promised`: replicas requested before; `silent_ns`: since when the binder has not answered; `overflow`: so many
    replicas may wait for a node.

    A replica that has a node is never given up because there is no capacity for more, nor is one that is promised a node,
    pods that are not seen yet among them, until the binder rejects it.
    """
    there = max(counts.bound + counts.pending, promised - counts.unschedulable - counts.gated)
    if desired <= there:
        return CapacityLimited(desired)
    most, why = _most(counts, capacity, silent_ns)
    replicas = min(desired, max(there, most + overflow))
    return (
        CapacityLimited(replicas, desired - replicas, why)
        if replicas < desired
        else CapacityLimited(replicas)
    )


def _most(counts: Counts, capacity: Capacity, silent_ns: int) -> tuple[int, str]:
    away = f"the binder has not answered for {silent_ns // SECOND_NS} s"
    if silent_ns > FORGOTTEN_NS:
        return counts.bound + 1, f"{away}: one replica at a time"
    if silent_ns > SILENT_NS and capacity is not NOT_ASKED:
        last = f": {capacity.why}" if capacity.why else ""
        return capacity.replicas, f"{away}; its last answer is in effect{last}"
    return capacity.replicas, capacity.why
