"""Which of the models that wait may be loaded now. Pure.

A load that is measured has its GPUs for itself; those whose bytes are known go side by side. Models that
have served come first. A suspect is loaded when nothing else is and nothing has come to serve just before,
so that Triton's death has one culprit; who comes after it waits for it, so that its turn does come. What
hangs is not waited for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from berth.contract.ids import GpuUuid, ServerName

# Of known size, on one GPU. Triton has threads for more (--model-load-thread-count).
MOST_ON_A_GPU = 4
ON_ITS_GPU = "waits until another model has been loaded on its GPU, or taken from it"
BEHIND_SUSPECTS = "waits while models that were being loaded when Triton died are tried one at a time"
SUSPECT = "was being loaded when Triton died: it is loaded alone, a while after all others"


@dataclass(frozen=True, slots=True)
class Waiting:
    """`order`: who came first. `is_known`: its bytes were measured before."""

    name: ServerName
    gpus: frozenset[GpuUuid]
    order: int
    is_known: bool = False
    has_served: bool = False
    is_suspect: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        return (self.is_suspect or not self.has_served, self.order)


@dataclass(frozen=True, slots=True)
class Busy:
    """A load or an unload that is under way and does not hang."""

    gpus: frozenset[GpuUuid]
    is_load: bool
    is_known: bool = False
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """The next to begin, if any may, and why the others wait."""

    next: ServerName | None
    waits: dict[ServerName, str]


def next_turn(waiting: Iterable[Waiting], busy: Sequence[Busy], *, is_quiet: bool = True) -> Turns:
    """Called again once the next has begun. `is_quiet`: no model has come to serve just before, which might
    kill Triton by what it does then."""
    first: ServerName | None = None
    waits: dict[ServerName, str] = {}
    taken: set[GpuUuid] = set()
    behind_suspect = False
    for one in sorted(waiting, key=lambda one: one.rank):
        why = BEHIND_SUSPECTS if behind_suspect else _why_not(one, busy, taken, is_quiet=is_quiet)
        if not why and first is None:
            first = one.name
        else:
            waits[one.name] = why or ON_ITS_GPU
        # Whoever waits keeps its place before those behind it.
        taken |= one.gpus
        behind_suspect |= one.is_suspect
    return Turns(first, waits)


def _why_not(one: Waiting, busy: Sequence[Busy], taken: set[GpuUuid], *, is_quiet: bool) -> str:
    loads = [other for other in busy if other.is_load]
    if any(other.is_suspect for other in loads):
        return BEHIND_SUSPECTS
    if one.is_suspect:
        return SUSPECT if loads or taken or not is_quiet else ""
    if taken & one.gpus:
        return ON_ITS_GPU
    here = [other for other in busy if other.gpus & one.gpus]
    if not one.is_known:
        return ON_ITS_GPU if here else ""
    if any(other.is_load and not other.is_known for other in here):
        return ON_ITS_GPU
    crowded = any(sum(gpu in other.gpus for other in loads) >= MOST_ON_A_GPU for gpu in one.gpus)
    return ON_ITS_GPU if crowded else ""
