"""Averages over the last seconds, in buckets of one second as Knative keeps them: to the last rounding.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/aggregation/bucketing.go. Times are whole seconds since 1970, windows
are in seconds. What is recorded twice in one second adds up. No clock is read here.
"""

import math
from functools import lru_cache, reduce
from operator import add, mul
from typing import Final, Protocol

from scaler.go import power, round_to_micro

# Longer ago than any window: nothing has been written yet.
_NEVER: Final = -(1 << 62)
# The weights of a window sum up to this much of 1; in a very long one each still loses a fifth a second.
_LEFT_OUT: Final = 0.0001
_LEAST_COEFFICIENT: Final = 0.2
# Where Go's exp (on amd64 with FMA) is a unit in the last place from the C library's; longer windows do not get here.
_EXP_OF_GO: Final = {
    24: 0.6812920690579612,
    25: 0.6918309709189364,
    31: 0.7429639507594947,
    34: 0.7626985859023445,
    35: 0.768624610039774,
}
# Of a sum, less than half of its last bit.
_NOTHING: Final = 2.0**-60
_AT_ONCE: Final = 64


class Window(Protocol):
    """What a model's load is averaged over."""

    def record(self, second: int, value: float) -> None: ...
    def average(self, second: int) -> float: ...
    def is_empty(self, second: int) -> bool: ...
    def resize(self, size: int, second: int) -> None: ...


class LinearWindow:
    """The plain average. A young window averages over what it has; seconds without a value count as 0 between two
    others, and not at all at the end."""

    __slots__ = ("_buckets", "_first", "_last", "_size", "_total")

    def __init__(self, size: int) -> None:
        self._size = size
        self._buckets = [0.0] * size
        self._first = self._last = _NEVER
        # Of all buckets. Sums and differences are made in Knative's order, as each rounds.
        self._total = 0.0

    def record(self, second: int, value: float) -> None:
        """Older values count as long as they are within a window of the newest."""
        last, size = self._last, self._size
        if second == last + 1 and size > 1 and self._first != _NEVER:  # nearly always: as below, at once
            place = second % size
            self._total = self._total - self._buckets[place] + value
            self._buckets[place] = 0.0 + value
            self._last = second
            return
        if second != last:
            if second + size <= last:
                return
            if self._first == _NEVER or second < self._first:
                self._first = second
            if second > last:
                self._advance(second)
        self._buckets[second % size] += value
        self._total += value

    def _advance(self, second: int) -> None:
        if second - self._last >= self._size:
            self._first = second
            self._buckets = [0.0] * self._size
            self._total = 0.0
        else:
            for passed in range(self._last + 1, second + 1):
                self._total -= self._buckets[passed % self._size]
                self._buckets[passed % self._size] = 0.0
        self._last = second

    def average(self, second: int) -> float:
        """At most as many seconds are averaged over as lie between the first and the last value."""
        late = second - self._last
        seconds = self._last - self._first + 1
        if late <= 0:
            return round_to_micro(self._total / min(seconds, self._size))
        if late >= self._size:
            return 0.0
        total = self._total
        for passed in range(self._last + 1, second + 1):
            total -= self._buckets[passed % self._size]
        return round_to_micro(total / min(seconds, self._size - late))

    def is_empty(self, second: int) -> bool:
        """Whether the last value is older than the window. One second earlier it is not, and averages 0."""
        return second - self._last > self._size

    def resize(self, size: int, second: int) -> None:
        """Another length from `second` on. The newest values stay, as if they had come all through the old window;
        those of a window that had no value for its whole length do not."""
        if size == self._size:
            return
        buckets, total = [0.0] * size, 0.0
        if second - self._last <= self._size:
            for place in range(self._last, self._last - min(size, self._size), -1):
                buckets[place % size] = self._buckets[place % self._size]
                total += self._buckets[place % self._size]
            self._first = self._last - (self._size - 1)
        else:
            self._first = _NEVER
        self._size, self._buckets, self._total = size, buckets, total


class WeightedWindow(LinearWindow):
    """Each second weighs less than the next one, by a constant factor. A young window reads low."""

    __slots__ = ("_largest",)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # No value since the beginning was larger.
        self._largest = 0.0

    def record(self, second: int, value: float) -> None:
        super().record(second, value)
        self._largest = max(self._largest, abs(self._buckets[second % self._size]))

    def average(self, second: int) -> float:
        late = max(second - self._last, 0)
        if late > self._size:
            return 0.0
        weights = _weights(self._size, late)
        average, count = 0.0, len(weights)
        for begin in range(0, count, _AT_ONCE):
            values = self._before(begin, min(_AT_ONCE, count - begin))
            # One after the other: `sum` would lose less than Knative does.
            average = reduce(add, map(mul, reversed(values), weights[begin : begin + _AT_ONCE]), average)
            # None of those that are left could change the last bit.
            if self._largest * weights[begin + len(values) - 1] < abs(average) * _NOTHING:
                break
        return average

    def _before(self, age: int, count: int) -> list[float]:
        """So many values in the order of their time; the last of them is `age` seconds older than the newest."""
        end = (self._last - age) % self._size + 1
        begin = end - count
        return self._buckets[begin:end] if begin >= 0 else self._buckets[begin:] + self._buckets[:end]


@lru_cache(maxsize=64)
def _weights(size: int, late: int) -> tuple[float, ...]:
    """Of the values of a window that is read so many seconds late, the newest first."""
    newest = coefficient(size)
    decay = 1 - newest
    weight = newest * power(decay, late) if late else newest
    weights = []
    for _ in range(size - late):
        weights.append(weight)
        weight *= decay
    return tuple(weights)


def coefficient(size: int) -> float:
    """The weight of the newest second in a window of `size` (computeSmoothingCoeff)."""
    return max(1 - _root_of_left_out(size), _LEAST_COEFFICIENT)


def _root_of_left_out(degree: int) -> float:
    """math.Pow of Go, which is e to the logarithm's share; the C library's pow rounds otherwise."""
    if degree <= 2:
        return math.sqrt(_LEFT_OUT) if degree == 2 else _LEFT_OUT
    return _EXP_OF_GO.get(degree) or math.exp(1 / degree * math.log(_LEFT_OUT))
