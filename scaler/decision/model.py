"""One model as the scaler knows it: its spec, its load, its decider."""

from scaler.decision.decider import Decider, Decision
from scaler.decision.load import Averages, Load, Stat
from scaler.decision.spec import Spec


class Model:
    """Times are nanoseconds since 1970."""

    __slots__ = ("_decider", "_load", "spec")

    def __init__(self, spec: Spec, *, ready: int, now_ns: int) -> None:
        self.spec = spec
        self._load = Load(spec)
        self._decider = Decider(spec, ready=ready, now_ns=now_ns)

    @property
    def in_panic(self) -> bool:
        return self._decider.in_panic

    def update(self, spec: Spec, now_ns: int) -> None:
        self.spec = spec
        self._decider.update(spec)
        self._load.update(spec, now_ns)

    def record(self, stat: Stat, now_ns: int) -> None:
        self._load.record(stat, now_ns)

    def decide(self, *, ready: int, now_ns: int) -> Decision | None:
        """None while nothing is known of its load: the last decision stands."""
        averages = self._load.averages(now_ns)
        if averages is None:
            return None
        return self._decider.decide(averages, ready=ready, now_ns=now_ns)

    def averages(self, now_ns: int) -> tuple[Averages | None, Averages | None]:
        """Of concurrency and of requests."""
        return self._load.of_both(now_ns)
