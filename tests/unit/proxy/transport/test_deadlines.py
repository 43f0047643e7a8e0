"""Deadlines: told when they have passed, never before, and forgotten when they are taken back."""

import gc
import weakref

from proxy.transport.deadlines import STEP_SECONDS, Deadlines


class One:
    told = 0

    def too_late(self) -> None:
        self.told += 1


async def test_what_is_taken_back_is_told_of_nothing_and_kept_no_longer() -> None:
    deadlines = Deadlines(lambda: 0.0)
    ended, waits = One(), One()
    deadlines.unset(deadlines.set(5.0, ended), ended)
    step = deadlines.set(5.0, ended)
    assert step == deadlines.set(5.0, waits)
    deadlines.unset(step, ended)
    kept = weakref.ref(ended)
    deadlines.look(4.99)
    assert waits.told == 0
    deadlines.look(5.0 + STEP_SECONDS)
    deadlines.look(6.0)
    assert (ended.told, waits.told) == (0, 1)
    deadlines.unset(step, waits)  # over already
    del ended
    gc.collect()
    assert kept() is None
