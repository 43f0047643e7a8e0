"""What replicas report of their load: a stat for each model and second, and whether a replica may be removed. Pure.

A gateway reports for the replicas of its node, and is believed about no others. A load that is not recent is unknown, and a
replica whose load is unknown may be busy. Source of the sample and its extrapolation: knative.dev/serving v0.49.1,
pkg/autoscaler/metrics/stats_scraper.go.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.core.cache import Cache
from scaler.core.pods import Pod
from scaler.decision.load import Stat, extrapolated, sample_size
from scaler.go import SECOND_NS

# A gateway is asked each second for the last one that is over; one answer may be lost.
_RECENT_NS: Final = 3 * SECOND_NS
# A pod drains for longer than that before it is ended.
_LONG_SECONDS: Final = 5.0
# To end a replica with long requests is worse than any number of short ones.
_LONG_COST: Final = 1_000_000
_MOST_REQUESTS: Final = 999_999
# Of replicas of a retained model that the binder has not named.
_KEPT_COST: Final = 1_000_000_000


class ReplicaLoads:
    """Of all models, by the pods' uids."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # The last second that was reported of each replica, with when it was; and those since the last `close`.
        self._last: dict[str, tuple[int, ReplicaLoad]] = {}
        self._fresh: dict[str, ReplicaLoad] = {}

    def record(self, loads: Iterable[ReplicaLoad], replicas: Container[str], now_ns: int) -> bool:
        """What one gateway reports, on whose node these replicas are. Whether anything of it was new: a second that is
        reported twice counts once."""
        is_new = False
        for load in loads:
            uid = load.pod_uid
            if uid not in replicas:
                continue
            last = self._last.get(uid)
            # Another second, not a later one: the clock of a node that starts anew may have gone back.
            if last is None or last[1].second != load.second:
                self._last[uid], self._fresh[uid] = (now_ns, load), load
                is_new = True
        return is_new

    def close(self, models: Iterable[ModelKey]) -> dict[ModelKey, Stat]:
        """The load of the second that ends now, of the models whose ready replicas reported enough of it. Of the others it
        is unknown."""
        fresh, self._fresh = self._fresh, {}
        stats = {}
        for model in models:
            ready = self._cache.ready(model)
            sample = [fresh[pod.uid] for pod in ready if pod.uid in fresh]
            if sample and len(sample) >= sample_size(len(ready)):
                stats[model] = extrapolated(_total(sample), len(sample), len(ready))
        return stats

    def forget_gone(self) -> None:
        for uid in [uid for uid in self._last if self._cache.pod(uid) is None]:
            del self._last[uid]
            self._fresh.pop(uid, None)

    def queued(self, model: ModelKey, now_ns: int) -> float | None:
        """In the queues of its replicas; None: that of one is unknown."""
        last, recent_ns, queued = self._last, now_ns - _RECENT_NS, 0
        for pod in self._cache.ready(model):  # as `_recent`, of ten thousand replicas each second
            found = last.get(pod.uid)
            if found is None or found[0] < recent_ns:
                return None
            queued += found[1].waiting
        return float(queued)

    def last_arrival_ns(self, model: ModelKey, now_ns: int) -> int | None:
        """At any of its replicas; 0: none yet. None: that of one is unknown."""
        last = 0
        for pod in self._cache.ready(model):
            if self._recent(pod, now_ns) is None:
                return None
            last = max(last, self._last_used_ns(pod))
        return last

    def idle(self, model: ModelKey, now_ns: int) -> Iterator[tuple[Pod, int]]:
        """With when they were used last."""
        for pod in self._cache.ready(model):
            if not _is_busy(self._recent(pod, now_ns)):
                yield pod, self._last_used_ns(pod)

    def of(self, model: ModelKey, now_ns: int, is_evicted: Callable[[str], bool]) -> "ModelLoads":
        """`is_evicted`: whether the pod of a uid goes for another model."""
        return ModelLoads(self, model, now_ns, is_evicted)

    def spared(self, model: ModelKey, replicas: int, now_ns: int) -> int:
        """How many are not to be removed if only so many are desired: before the last one goes all that may be busy, else
        those whose requests may take longer than a pod drains."""
        is_spared = _is_busy if replicas == 0 else _is_long
        return sum(is_spared(self._recent(pod, now_ns)) for pod in self._cache.ready(model))

    def cost(self, pod: Pod, now_ns: int) -> int:
        """Of its deletion: a ReplicaSet that is to have fewer pods ends the cheapest of those that are ready."""
        load = self._recent(pod, now_ns)
        if load is None:
            return _LONG_COST
        return _requests(load) + (_LONG_COST if _is_long(load) else 0)

    def costs(self, model: ModelKey, now_ns: int, is_evicted: Callable[[str], bool] | None) -> dict[str, int]:
        """By pod, of those in which it differs. `is_evicted`: those go, whatever their load."""

        def cost(pod: Pod) -> int:
            if is_evicted is None:
                return self.cost(pod, now_ns)
            return 0 if is_evicted(pod.uid) else _KEPT_COST

        costs = ((pod, cost(pod)) for pod in self._cache.ready(model))
        return {pod.name: cost for pod, cost in costs if str(cost) != (pod.deletion_cost or "0")}

    def _recent(self, pod: Pod, now_ns: int) -> ReplicaLoad | None:
        last = self._last.get(pod.uid)
        return None if last is None or now_ns - last[0] > _RECENT_NS else last[1]

    def _last_used_ns(self, pod: Pod) -> int:
        """By our clock: as long before it was reported as by the node's own. 0: not yet."""
        heard_ns, load = self._last[pod.uid]
        return heard_ns - load.idle_seconds * SECOND_NS if load.last_arrival else 0


class ModelLoads(NamedTuple):
    """Of one model at one moment, as `reconcile.ReadyLoads`."""

    loads: ReplicaLoads
    model: ModelKey
    now_ns: int
    is_evicted: Callable[[str], bool]

    def spared(self, replicas: int) -> int:
        return self.loads.spared(self.model, replicas, self.now_ns)

    def costs(self, *, evicting: bool) -> Mapping[str, int]:
        return self.loads.costs(self.model, self.now_ns, self.is_evicted if evicting else None)


def _is_busy(load: ReplicaLoad | None) -> bool:
    return load is None or _requests(load) > 0 or load.average_concurrent_requests > 0


def _is_long(load: ReplicaLoad | None) -> bool:
    """Whether its requests take long, by Little's law: as many at once as come in one of them's time."""
    if load is None or _requests(load) == 0:
        return False
    return load.average_concurrent_requests > _LONG_SECONDS * load.request_count


def _requests(load: ReplicaLoad) -> int:
    return min(load.waiting + load.in_triton, _MOST_REQUESTS)


def _total(sample: Iterable[ReplicaLoad]) -> Stat:
    """One after the other: `sum` would lose less than Knative does."""
    concurrency = requests = 0.0
    for load in sample:
        concurrency += load.average_concurrent_requests
        requests += load.request_count
    return Stat(concurrency, 0.0, requests)
