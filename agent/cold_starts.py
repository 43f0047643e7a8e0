"""How long replicas took from their placement on this node until their proxy was ready, by phase. Pure.

download  until their files are here: the loader's container, its download, its stream to the agent
load      until Triton serves them, with the time in the load queue
proxy     until the pod's proxy has requested them: its container

With the scaler's phases of a cold start (`scaler.core.cold_starts`) this is where a first request's time goes: its `schedule`
ends where `download` begins, and its `load` is all three and the kubelet's report that the pod is ready.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

from agent.models import Model
from berth.contract.ids import PodUid
from berth.contract.report import ModelState

PHASES: Final = ("download", "load", "proxy")
ALL: Final = "all"
_HERE: Final = (ModelState.STAGED, ModelState.LOADING, ModelState.READY)


class ColdStarts:
    """Of the replicas that were placed while it ran: of others the beginning is unknown."""

    def __init__(self, observe: Callable[[str, float], None]) -> None:
        """`observe(phase, seconds)`: of a replica that has passed all phases, which add up to ALL."""
        self._observe = observe
        # When each one's phases ended, the first time being its place; None: it is over, or was never seen to begin.
        self._ends: dict[PodUid, list[float] | None] | None = None

    def look(self, models: Iterable[Model], now: float) -> None:
        """At all there are, after each change. `now`: seconds on one monotonic clock."""
        before, self._ends = self._ends, {}
        for model in models:
            uid = model.ref.uid
            ends = before[uid] if before is not None and uid in before else None
            if before is not None and uid not in before and not _reached(model) and not model.has_served:
                ends = [now]
            self._ends[uid] = None if ends is None else self._advanced(ends, _reached(model), now)

    def _advanced(self, ends: list[float], reached: int, now: float) -> list[float] | None:
        ends += [now] * (1 + reached - len(ends))
        if len(ends) <= len(PHASES):
            return ends
        for phase, (begin, end) in zip(PHASES, pairwise(ends), strict=True):
            self._observe(phase, end - begin)
        self._observe(ALL, ends[-1] - ends[0])
        return None


def _reached(model: Model) -> int:
    """How many phases are over, as it is now."""
    if model.state is ModelState.READY:
        return len(PHASES) if model.has_proxy else len(PHASES) - 1
    return int(model.state in _HERE)
