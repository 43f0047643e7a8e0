"""The loop of tests whose clock leaps."""

import asyncio
import threading

from tests.fakes import leaping


def test_the_clock_leaps_when_all_wait_and_not_while_a_thread_works() -> None:
    """A slow disk is no long wait."""

    async def story() -> tuple[float, float]:
        begun, done = leaping.now(), threading.Event()
        async with asyncio.timeout(3000):
            # Far longer than the grace, and ended by this thread's own clock.
            await asyncio.to_thread(done.wait, 0.3)
        worked = leaping.now() - begun
        await asyncio.sleep(3000)
        return worked, leaping.now() - begun

    worked, slept = leaping.run(story(), grace_seconds=0.01)
    assert worked < 1000
    assert slept >= 3000
