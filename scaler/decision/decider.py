"""How many replicas a model is recommended: Knative's decision, to the last rounding.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/scaling/autoscaler.go, `newAutoscaler` and `Scale`. It is decided every two
seconds. Bounds, the capacity limit and the way to zero follow elsewhere, and never reach this one.
"""

from collections import deque
from typing import Final, NamedTuple

from scaler.decision.load import Averages, Load, Stat
from scaler.decision.spec import Spec
from scaler.go import SECOND_NS, ceil, floor, larger, smaller, to_int32

# Knative decides every two seconds, and its slots are as long.
SLOT_SECONDS: Final = 2


class Decision(NamedTuple):
    """How many replicas are recommended, and by how many requests the ready ones could take a burst; less than 0: they could
    not."""

    desired: int
    excess_burst_capacity: int


class Decider:
    """Of one model. One that begins with several ready replicas begins in panic, which keeps them until windows that have
    just begun are filled."""

    __slots__ = ("_delay", "_most_in_panic", "_panic_since_ns", "_spec")

    def __init__(self, spec: Spec, *, ready: int, now_ns: int) -> None:
        self._spec = spec
        self._panic_since_ns = now_ns if ready > 1 else None
        self._most_in_panic = ready
        # A later update neither makes, nor resizes, nor drops it.
        delay = spec.scale_down_delay_seconds
        self._delay = DelayWindow(delay) if delay > 0 else None

    @property
    def in_panic(self) -> bool:
        return self._panic_since_ns is not None

    def update(self, spec: Spec) -> None:
        self._spec = spec

    def decide(self, averages: Averages, *, ready: int, now_ns: int) -> Decision:
        """`ready`: replicas that serve. Without averages there is no decision, and the last one stands."""
        spec, counted = self._spec, float(max(ready, 1))
        stable = ceil(averages.stable / spec.target)
        panic = ceil(averages.panic / spec.target)
        self._panic_or_not(panic / counted >= spec.panic_threshold, now_ns)
        desired = _recommended(spec, stable, counted)
        if self._panic_since_ns is not None:
            self._most_in_panic = max(self._most_in_panic, desired, _recommended(spec, panic, counted))
            desired = self._most_in_panic
        if spec.reachable and self._delay is not None:
            desired = self._delay.largest_with(now_ns // SECOND_NS, desired)
        return Decision(desired, _excess_burst_capacity(spec, ready, averages.panic))

    def _panic_or_not(self, is_over: bool, now_ns: int) -> None:
        if is_over:
            self._panic_since_ns = now_ns
        elif self._panic_since_ns is not None and self._is_over_since(now_ns):
            self._panic_since_ns = None
            self._most_in_panic = 0

    def _is_over_since(self, now_ns: int) -> bool:
        """Whether a whole stable window has passed, so that the surge stands in it."""
        assert self._panic_since_ns is not None
        return self._panic_since_ns + self._spec.stable_window_seconds * SECOND_NS < now_ns


def _recommended(spec: Spec, wanted: float, counted: float) -> int:
    """No faster up or down than the rates allow, and not fewer than the activation scale unless it is none."""
    most = ceil(spec.max_scale_up_rate * counted)
    least = floor(counted / spec.max_scale_down_rate) if spec.reachable else 0.0
    replicas = to_int32(smaller(larger(wanted, least), most))
    return max(replicas, spec.activation_scale) if spec.activation_scale > 1 and wanted > 0 else replicas


def _excess_burst_capacity(spec: Spec, ready: int, panic: float) -> int:
    """By concurrency's panic average, or by that of requests where they are the metric."""
    burst = spec.target_burst_capacity
    if burst == 0:
        return 0
    return to_int32(floor(ready * spec.total - burst - panic)) if burst > 0 else -1


class DelayWindow:
    """The largest of the decisions of a while, so that a smaller one counts only once it has lasted: values in slots of two
    seconds, of which those are kept that may yet be the largest, in descending order.

    Source: knative.dev/serving v0.49.1, pkg/autoscaler/aggregation/max.
    """

    __slots__ = ("_maxima", "_slots")

    def __init__(self, seconds: int) -> None:
        self._slots = -(-seconds // SLOT_SECONDS)
        # Clocks that go back would let it grow: Knative ends there, here the oldest is forgotten.
        self._maxima: deque[tuple[int, int]] = deque(maxlen=self._slots)

    def largest_with(self, second: int, value: int) -> int:
        """Record the decision of this second and give the largest of the window."""
        slot = second // SLOT_SECONDS if second >= 0 else -(-second // SLOT_SECONDS)
        maxima = self._maxima
        while maxima and value >= maxima[-1][1]:
            maxima.pop()
        while maxima and slot - maxima[0][0] >= self._slots:
            maxima.popleft()
        if maxima and maxima[-1][0] == slot:
            value = max(value, maxima.pop()[1])
        maxima.append((slot, value))
        return maxima[0][1]


class ModelDecider:
    """A model's decider with its spec and its load. Times are nanoseconds since 1970."""

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
