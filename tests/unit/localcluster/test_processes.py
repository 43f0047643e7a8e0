"""Children that are kept alive until they are told to stop."""

import asyncio
import os
from pathlib import Path

from localcluster.processes import Supervised


async def test_what_is_stopped_while_it_starts_again_stays_away(tmp_path: Path) -> None:
    starts = 0
    stopping: list[asyncio.Task[None]] = []
    begun_again = asyncio.Event()

    def before() -> None:
        nonlocal starts
        starts += 1
        if starts == 2:
            stopping.append(asyncio.create_task(part.stop(grace_seconds=0)))
            begun_again.set()

    part = Supervised(
        "part", ["sleep", "1000"], log=tmp_path / "log", env={"PATH": os.environ["PATH"]}, before=before
    )
    await part.start()
    part.kill()
    async with asyncio.timeout(30):
        await begun_again.wait()
        await stopping[0]
    assert (part.pid, starts) == (None, 2)
