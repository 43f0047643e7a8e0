"""Averages over the last seconds, in buckets of one second as Knative keeps them: to the last rounding.

Source: knative.dev/serving v0.49.1, pkg/autoscaler/aggregation/bucketing.go. Times are whole seconds since 1970, windows
are in seconds. What is recorded twice in one second adds up. No clock is read here.
"""

import math
from functools import lru_cache
from operator import mul
from typing import Final

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
# Of a sum, not more than half of its last bit.
_NOTHING: Final = 2.0**-54
# So many values make a sum of which the others are nothing, unless they were far larger.
_MOSTLY_ENOUGH: Final = 176


class _Plainly(float):
    """Where `sum` begins with one, it adds one after the other, as Knative does; else it would lose less (Python 3.12)."""

    __slots__ = ()


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

    def reads_as(self, other: "LinearWindow", second: int) -> bool:
        """Whether its average is that which `other` has just read. It is not looked for where it is made at once."""
        return False

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

    __slots__ = ("_is_resized", "_largest", "_loaded", "_read")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        # No value since the beginning was larger, and none later than this one is other than 0.
        self._largest, self._loaded = 0.0, _NEVER
        # How many values the last average was made of: none older could have changed it.
        self._read = 0
        # What one has dropped of its values another may have kept.
        self._is_resized = False

    def record(self, second: int, value: float) -> None:
        super().record(second, value)
        bucket = self._buckets[second % self._size]
        if bucket:
            if abs(bucket) > self._largest:
                self._largest = abs(bucket)
            if second > self._loaded:
                self._loaded = second

    def average(self, second: int) -> float:
        late = max(second - self._last, 0)
        count = self._size - late
        # Zeros weigh nothing: a model that has been idle for an hour is read at once.
        self._read = begin = min(self._last - self._loaded, max(count, 0))
        average: float = 0.0
        weights = _weights(self._size, late) if begin < count else ()
        while begin < count:
            values = self._before(begin, min(_MOSTLY_ENOUGH, count - begin))
            average = sum(map(mul, reversed(values), weights[begin : begin + len(values)]), _Plainly(average))
            self._read = begin = begin + len(values)
            if self._largest * weights[begin - 1] < abs(average) * _NOTHING:
                break
        return average

    def reads_as(self, other: LinearWindow, second: int) -> bool:
        """Whether its average is that which `other` has just read, which is no shorter and recorded the same: nothing
        of which that was made has left this one. One that is so long weighs its values as all longer ones do."""
        if not isinstance(other, WeightedWindow) or self._is_resized or other._is_resized:
            return False
        return other._read <= self._size - max(second - self._last, 0)

    def resize(self, size: int, second: int) -> None:
        self._is_resized = self._is_resized or size != self._size
        super().resize(size, second)

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
