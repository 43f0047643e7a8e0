"""Slots of a breaker that a test holds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from proxy.exchange.breaker import Breaker


class _Holder:
    def granted(self) -> None:
        raise AssertionError("no slot was free when the test wanted it")


@contextmanager
def held(breaker: Breaker, count: int = 1) -> Iterator[None]:
    for _ in range(count):
        assert breaker.enter(_Holder(), time.monotonic())
    try:
        yield
    finally:
        for _ in range(count):
            breaker.leave(time.monotonic())
