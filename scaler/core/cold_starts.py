"""How long a cold start takes, from a model's first request at zero to the first answer, by phase. Pure.

decide  until replicas are requested      schedule  until the first one has a node
load    until it is ready                 serve     until a buffered request is forwarded
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from scaler.core.models_view import KEPT, ColdStartView
from scaler.core.pods import Pod
from scaler.go import SECOND_NS

PHASES: Final = ("decide", "schedule", "load", "serve")


class ColdStarts:
    """Of one model. A cold start ends with its last phase, or when no request is served that way any more."""

    __slots__ = ("_ends_ns", "_over")

    def __init__(self) -> None:
        self._over: deque[ColdStartView] = deque(maxlen=KEPT)
        # Of the cold start that is under way: when it began, then the end of each phase that is over.
        self._ends_ns: list[int] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._ends_ns)

    def begin(self, now_ns: int) -> None:
        if not self._ends_ns:
            self._ends_ns = [now_ns]

    def requested(self, now_ns: int) -> None:
        """Replicas are requested."""
        self._reach(1, now_ns)

    def observe(self, pods: Iterable[Pod]) -> None:
        """What has become of them."""
        if not self._ends_ns:
            return
        began_ns = self._ends_ns[0]
        new = [pod for pod in pods if pod.bound_ns is None or pod.bound_ns >= began_ns]
        bound = min((pod.bound_ns for pod in new if pod.bound_ns is not None), default=None)
        ready = min((pod.ready_ns for pod in new if pod.ready_ns is not None), default=None)
        if bound is not None:
            self._reach(2, bound)
        if ready is not None:
            self._reach(3, ready)

    def served(self, at_ns: int) -> ColdStartView | None:
        """A request has been forwarded: the cold start is over, if there was one. A phase whose end was seen later is over
        by then: a replica serves before the kubelet reports that it is ready."""
        if len(self._ends_ns) == 1:  # a replica was there all the time
            self.end()
            return None
        if not self._ends_ns:
            return None
        at_ns = max(at_ns, self._ends_ns[0])
        ends = [min(end_ns, at_ns) for end_ns in self._ends_ns]
        self._ends_ns = ends + [at_ns] * (1 + len(PHASES) - len(ends))
        return self.end()

    def end(self) -> ColdStartView | None:
        """Whatever it has come to."""
        view = self._view()
        if view is not None:
            self._over.append(view)
        self._ends_ns = []
        return view

    def views(self) -> tuple[ColdStartView, ...]:
        """The newest last, the one that is under way among them."""
        view = self._view()
        return (*self._over, view) if view is not None else tuple(self._over)

    def _reach(self, phase: int, at_ns: int) -> None:
        if len(self._ends_ns) == phase:
            self._ends_ns.append(max(at_ns, self._ends_ns[-1]))

    def _view(self) -> ColdStartView | None:
        if not self._ends_ns:
            return None
        ends = self._ends_ns
        seconds = [(end - begin) / SECOND_NS for begin, end in pairwise(ends)]
        return ColdStartView(at_ns=ends[0], phases=tuple(zip(PHASES, seconds, strict=False)))
