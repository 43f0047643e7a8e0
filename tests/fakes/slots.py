"""Slots that a test holds."""

from collections.abc import Iterator
from contextlib import contextmanager

from proxy.request.admission import Admissions


def _nobody() -> None:
    raise AssertionError("no slot was free when the test wanted it")


@contextmanager
def held(admissions: Admissions, count: int = 1) -> Iterator[None]:
    had = [admissions.admit(0.0, _nobody) for _ in range(count)]
    assert all(one.is_running for one in had)
    try:
        yield
    finally:
        for one in had:
            one.release(0.0)
