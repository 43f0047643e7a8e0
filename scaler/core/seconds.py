"""From what gateways tell of single copies to one stat a model and second. Pure.

Source of the sample and of what becomes of it: knative.dev/serving v0.49.1, pkg/autoscaler/metrics/stats_scraper.go.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.decision.load import Stat, extrapolated, sample_size

_LOADS: Final = msgspec.json.Decoder(list[ReplicaLoad])
_ROWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_LOAD: Final = msgspec.json.Decoder(ReplicaLoad)


def read_loads(body: bytes) -> tuple[list[ReplicaLoad], int]:
    """What a gateway tells, and how many of its rows say nothing that can be. Raises msgspec.DecodeError for what is
    no list."""
    try:
        return _LOADS.decode(body), 0
    except msgspec.ValidationError:
        rows = _ROWS.decode(body)
    loads = list(_readable(rows))
    return loads, len(rows) - len(loads)


def _readable(rows: Iterable[msgspec.Raw]) -> Iterator[ReplicaLoad]:
    for row in rows:
        try:
            yield _LOAD.decode(row)
        except msgspec.DecodeError:
            continue


class Seconds:
    """By the copies' pod uids."""

    def __init__(self) -> None:
        # The last second that was told of each copy, and those of them that came since the last `close`.
        self.latest: dict[str, ReplicaLoad] = {}
        self._fresh: dict[str, ReplicaLoad] = {}

    def take(self, loads: Iterable[ReplicaLoad], copies: Container[str]) -> bool:
        """What one gateway has told, of whose node these are the copies: it is not believed about others.

        Returns whether anything of it was new: a second that is told twice counts once.
        """
        news = False
        for load in loads:
            uid = load.pod_uid
            if uid not in copies:
                continue
            known = self.latest.get(uid)
            # Another, not a later one: the clock of a node that starts anew may have gone back.
            if known is None or known.second != load.second:
                self.latest[uid] = self._fresh[uid] = load
                news = True
        return news

    def close(self, ready: Mapping[ModelKey, Sequence[str]]) -> dict[ModelKey, Stat]:
        """The load of a second of those models whose ready copies told enough of it. Of the others nothing is known."""
        fresh, self._fresh = self._fresh, {}
        stats = {}
        for model, copies in ready.items():
            sample = [fresh[uid] for uid in copies if uid in fresh]
            if sample and len(sample) >= sample_size(len(copies)):
                stats[model] = extrapolated(_total(sample), len(sample), len(copies))
        return stats

    def keep(self, copies: Container[str]) -> None:
        """All others have ended."""
        for uid in [uid for uid in self.latest if uid not in copies]:
            del self.latest[uid]
            self._fresh.pop(uid, None)


def _total(sample: Iterable[ReplicaLoad]) -> Stat:
    """One after the other: `sum` would lose less than Knative does."""
    concurrency = requests = 0.0
    for load in sample:
        concurrency += load.average_concurrent_requests
        requests += load.request_count
    return Stat(concurrency, 0.0, requests)
