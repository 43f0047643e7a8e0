"""Loads of one client, and what became of their requests."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from bench.scaler.traffic import Answer, Client, Lost

_TRIES, _PAUSE_SECONDS = 20, 0.3


@dataclass
class Tally:
    """What has come of many requests."""

    answers: list[Answer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers)

    def slowest(self, part: float) -> float:
        """So long at most took this part of the answers."""
        times = sorted(answer.seconds for answer in self.answers)
        return times[min(int(len(times) * part), len(times) - 1)]


async def ask_again(client: Client, request: bytes) -> Answer:
    """As clients do whose request may be made twice: until it is answered. Raises Lost."""
    for _ in range(_TRIES - 1):
        with suppress(Lost):
            return await client.ask(request)
        await asyncio.sleep(_PAUSE_SECONDS)
    return await client.ask(request)


async def at_once(clients: Sequence[Client], request: bytes) -> Tally:
    """One request of each at the same time."""
    tally = Tally()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(_counted(client, request, tally))
    return tally


@asynccontextmanager
async def load(
    client: Client, request: bytes, *, per_second: float, tally: Tally | None = None
) -> AsyncIterator[Tally]:
    """So many requests a second, whatever becomes of them, for the length of the block; then all are waited for."""
    tally, over = tally or Tally(), asyncio.Event()

    async def send() -> None:
        began, sent = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while not over.is_set():
                due = int((time.monotonic() - began) * per_second)
                for _ in range(due - sent):
                    group.create_task(_counted(client, request, tally))
                sent = due
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), 1 / min(per_second, 200))

    sending = asyncio.create_task(send())
    try:
        yield tally
    finally:
        over.set()
        await sending
        await client.close()


@asynccontextmanager
async def in_flight(client: Client, request: bytes, count: int) -> AsyncIterator[Tally]:
    """So many requests at any moment: each answer is followed by the next request."""
    tally, over = Tally(), asyncio.Event()

    async def one() -> None:
        while not over.is_set():
            await _counted(client, request, tally)

    sending = [asyncio.create_task(one()) for _ in range(count)]
    try:
        yield tally
    finally:
        over.set()
        await asyncio.gather(*sending)
        await client.close()


async def _counted(client: Client, request: bytes, tally: Tally) -> None:
    try:
        tally.answers.append(await client.ask(request))
    except Lost as error:
        tally.lost.append(str(error))
