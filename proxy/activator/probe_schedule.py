"""When a pod is probed next: whether it serves is asked of the pod itself, because the cluster's word of it comes late.
Pure.
"""

from typing import Final

from berth.runtime.backoff import Backoff
from proxy.activator.bounds import ProbeLoad

# A pod whose proxy alone is not ready yet, for so many probes; one that does not serve yet, at first and after a while;
# and one that does.
_HURRY_SECONDS: Final = 0.01
_HURRIES: Final = 500
_SOON_SECONDS: Final = 0.05
_SOON_TIMES: Final = 1200
_LATER_SECONDS: Final = 0.2
_OPEN_SECONDS: Final = 1.0
# A pod that stops serving soon after it has begun to is left alone for a while, and for longer each time.
_STEADY_SECONDS: Final = 5.0
_LONGEST_REST: Final = 2.0
# So many pods of one namespace are probed as often as that.
_OFTEN: Final = 16


class ProbeSchedule:
    """Of one pod. `load`: of all pods of its namespace."""

    def __init__(self, load: ProbeLoad) -> None:
        self._load = load
        self._is_counted = self._has_served = False
        self._opened_at = 0.0
        self._rests = Backoff(initial_seconds=_SOON_SECONDS, cap_seconds=_LONGEST_REST)
        self._rest_seconds = 0.0
        # Probes since it began or stopped to serve, and what is left of those in a hurry. A request that waits for the pod
        # renews neither: clients that come and leave would keep them up for ever.
        self._probes, self._hurries_left = 0, _HURRIES
        self._count(True)

    def take_rest(self) -> float:
        """Seconds before the next probe, whether or not a request waits for it."""
        rest, self._rest_seconds = self._rest_seconds, 0.0
        return rest

    def pause(self, *, is_open: bool, nearly_ready: bool) -> float:
        """Seconds after a probe, unless a request needs the next one earlier."""
        self._probes += 1
        if is_open:
            return _OPEN_SECONDS
        if nearly_ready and not self._has_served and self._hurries_left > 0:
            self._hurries_left -= 1
            pause = _HURRY_SECONDS
        else:
            pause = _SOON_SECONDS if self._probes < _SOON_TIMES else _LATER_SECONDS
        return pause * max(1.0, self._load.probed / _OFTEN)

    def changed(self, *, is_open: bool, now: float) -> None:
        """It serves from now on, or no more."""
        self._has_served = True
        self._count(not is_open)
        self._probes = 0
        if is_open:
            self._opened_at = now
        elif now - self._opened_at < _STEADY_SECONDS:
            self._rest_seconds = self._rests.next()
        else:
            self._rests.reset()

    def end(self) -> None:
        self._count(False)

    def _count(self, is_counted: bool) -> None:
        """Whether it is one of the pods that do not serve yet."""
        self._load.probed += is_counted - self._is_counted
        self._is_counted = is_counted
