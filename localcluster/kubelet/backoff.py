"""How long a container that has ended stays down. Pure.

As in k8s.io/client-go/util/flowcontrol and kubelet's doBackOff: after the first end it is started again
at once, then 10 s after its end, 20 s and so on up to 5 minutes; who has run for twice the most begins anew.
"""

HASTE = 10.0
"""A kubelet's pauses are divided by this, because people and tests are waiting: 1 s to 30 s."""

_INITIAL_SECONDS, _CAP_SECONDS = 10.0, 300.0
_CALM_SECONDS = 2 * _CAP_SECONDS


class CrashBackoff:
    """The pauses of one container."""

    def __init__(self, *, haste: float = HASTE) -> None:
        self._haste, self._next_seconds = haste, 0.0

    def after(self, ran_seconds: float) -> float:
        """Seconds from the end of a run, which lasted `ran_seconds`, to the next start."""
        if self._next_seconds == 0 or ran_seconds > _CALM_SECONDS / self._haste:
            self._next_seconds = _INITIAL_SECONDS
            return 0.0
        pause = self._next_seconds
        self._next_seconds = min(2 * pause, _CAP_SECONDS)
        return pause / self._haste
