"""What the copies tell of themselves: their load, and whether one of them may go. Pure.

What a copy has not said lately is not known, and who says nothing may be busy.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Final

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.core.cache import Cache, Pod
from scaler.core.seconds import Seconds
from scaler.decision.load import Stat
from scaler.go import SECOND_NS

# A gateway is asked each second, and tells of the last one that is over; one answer may be lost.
_LATELY_NS: Final = 3 * SECOND_NS
# A pod drains for longer than that before it is ended.
_LONG_SECONDS: Final = 5.0
# What ends a copy with long requests is worse than any number of short ones.
_LONG_COST: Final = 1_000_000
_MOST_REQUESTS: Final = 999_999


class ReplicaLoads:
    """Of all models."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._seconds = Seconds()
        self._heard_ns: dict[str, int] = {}

    def heard(self, loads: Iterable[ReplicaLoad], copies: Container[str], now_ns: int) -> bool:
        """What one gateway says of its copies; whether anything of it was new."""
        loads = list(loads)
        news = self._seconds.take(loads, copies)
        for load in loads:
            if self._seconds.latest.get(load.pod_uid) is load:
                self._heard_ns[load.pod_uid] = now_ns
        return news

    def second(self, models: Iterable[ModelKey]) -> dict[ModelKey, Stat]:
        """The load of the second that ends now, of the models whose ready copies told enough of it."""
        return self._seconds.close({key: [pod.uid for pod in self._cache.ready(key)] for key in models})

    def forget_gone(self) -> None:
        gone = [uid for uid in self._heard_ns if self._cache.pod(uid) is None]
        for uid in gone:
            del self._heard_ns[uid]
        if gone:
            self._seconds.keep(self._heard_ns)

    def load(self, pod: Pod, now_ns: int) -> ReplicaLoad | None:
        heard_ns = self._heard_ns.get(pod.uid)
        return None if heard_ns is None or now_ns - heard_ns > _LATELY_NS else self._seconds.latest[pod.uid]

    def waiting(self, key: ModelKey, now_ns: int) -> float | None:
        """In the queues of its copies; None: one of them does not say."""
        heard_ns, latest, lately_ns = self._heard_ns, self._seconds.latest, now_ns - _LATELY_NS
        waiting = 0
        for pod in self._cache.ready(key):  # as `load`, of ten thousand copies each second
            uid = pod.uid
            if uid not in heard_ns or heard_ns[uid] < lately_ns:
                return None
            waiting += latest[uid].waiting
        return float(waiting)

    def last_arrival_ns(self, key: ModelKey, now_ns: int) -> int | None:
        """At any of its copies; 0: none yet. None: one of them does not say."""
        last = 0
        for pod in self._cache.ready(key):
            load = self.load(pod, now_ns)
            if load is None:
                return None
            last = max(last, self._last_used_ns(load))
        return last

    def _last_used_ns(self, load: ReplicaLoad) -> int:
        """By our clock: as long before it was told as by the node's own. 0: not yet."""
        if not load.last_arrival:
            return 0
        return self._heard_ns[load.pod_uid] - load.idle_seconds * SECOND_NS

    def spared(self, key: ModelKey, copies: int, now_ns: int) -> int:
        """How many are not to go, if only so many are wanted: before the last one goes all that may be busy, else
        those whose requests may take longer than a pod drains."""
        is_spared = is_busy if copies == 0 else is_long
        return sum(is_spared(self.load(pod, now_ns)) for pod in self._cache.ready(key))

    def idle(self, key: ModelKey, now_ns: int) -> Iterator[tuple[Pod, int]]:
        """With when they were used last."""
        for pod in self._cache.ready(key):
            load = self.load(pod, now_ns)
            if load is not None and not is_busy(load):
                yield pod, self._last_used_ns(load)

    def cost(self, pod: Pod, now_ns: int) -> int:
        """Of its end: a ReplicaSet that is to have fewer pods ends the cheapest of those that are ready."""
        load = self.load(pod, now_ns)
        if load is None:
            return _LONG_COST
        return _requests(load) + (_LONG_COST if is_long(load) else 0)


def is_busy(load: ReplicaLoad | None) -> bool:
    return load is None or _requests(load) > 0 or load.average_concurrent_requests > 0


def is_long(load: ReplicaLoad | None) -> bool:
    """Whether its requests take long, by Little's law: as many at once as come in one of them's time."""
    if load is None or _requests(load) == 0:
        return False
    return load.average_concurrent_requests > _LONG_SECONDS * load.request_count


def _requests(load: ReplicaLoad) -> int:
    return min(load.waiting + load.in_triton, _MOST_REQUESTS)
