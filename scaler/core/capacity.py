"""No copy is asked for that cannot be placed: what of a wanted number is written. Pure.

What the binder has answered is a capacity: the copies that it was told of and those that it has room for. It is made once,
when the question is asked, so that copies that come and go meanwhile are not counted twice. Nothing of it is told to the
decider.
"""

from dataclasses import dataclass
from typing import Final

from berth.contract.scaling import Schedulable, SchedulableModel
from scaler.core.cache import Counts
from scaler.go import SECOND_NS

# A binder that has been silent for so long is away; what it said last still counts.
SILENT_NS: Final = 30 * SECOND_NS
# Then nobody knows what there is room for, and one copy is tried.
FORGOTTEN_NS: Final = 300 * SECOND_NS
NOT_ASKED: Final = "the binder has not been asked yet"


@dataclass(frozen=True, slots=True)
class Capacity:
    """As many copies as have a place, or are promised one; `why` there is none for more, `never`: there never is."""

    copies: int
    why: str = ""
    never: bool = False


@dataclass(frozen=True, slots=True)
class CapacityLimited:
    """As many copies as are asked for, by how many that is less than wanted, and why."""

    copies: int
    by: int = 0
    why: str = ""


def capacity_of(asked: SchedulableModel, answer: Schedulable) -> Capacity:
    """`never` is of interest where not even one copy has a place."""
    bound = asked.running + asked.starting
    missing = max(asked.desired - bound, 0)
    now = min(max(answer.now, 0), missing)
    return Capacity(bound + now, answer.reason, never=bound + now == 0 and answer.never >= missing > 0)


def limit(
    wanted: int,
    counts: Counts,
    capacity: Capacity | None,
    *,
    promised: int,
    silent_ns: int,
    overflow: int = 0,
) -> CapacityLimited:
    """`promised`: what has been asked for already; `silent_ns`: for how long the binder has not answered; `overflow`:
    so many copies may wait for room.

    Whatever has a place is never given up for want of room for more, nor what has been promised one, pods that nobody
    has seen yet among them, until the binder refuses it.
    """
    there = max(counts.bound + counts.pending, promised - counts.unschedulable - counts.gated)
    room, why = _room(counts, capacity, silent_ns)
    copies = min(wanted, max(there, room + overflow))
    return CapacityLimited(copies, wanted - copies, why) if copies < wanted else CapacityLimited(copies)


def _room(counts: Counts, capacity: Capacity | None, silent_ns: int) -> tuple[int, str]:
    if silent_ns > FORGOTTEN_NS:
        return (
            counts.bound + 1,
            f"the binder has not answered for {silent_ns // SECOND_NS} s: one copy at a time",
        )
    if capacity is None:
        return 0, NOT_ASKED
    if silent_ns > SILENT_NS:
        said = f": {capacity.why}" if capacity.why else ""
        return (
            capacity.copies,
            f"the binder has not answered for {silent_ns // SECOND_NS} s, as it said then{said}",
        )
    return capacity.copies, capacity.why
