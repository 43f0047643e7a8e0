"""Every request of a load has one fate, in the phase in which it was sent."""

import asyncio
from collections.abc import Sequence

import pytest

from bench.scaler import counting
from bench.scaler.counting import Load, Refused, RestCaller
from bench.scaler.traffic import Answer, Lost


class Scripted:
    """Does the next of some things with each request."""

    name = "scripted"

    def __init__(self, *then: Exception | None) -> None:
        self._then = list(then)
        self.release = asyncio.Event()

    async def ask(self, data: Sequence[int]) -> None:
        then = self._then.pop(0) if self._then else None
        await self.release.wait()
        if then is not None:
            raise then

    async def close(self) -> None: ...


async def test_each_request_has_one_fate() -> None:
    caller = Scripted(None, Refused("full"), Lost("reset"), ValueError("no JSON"))
    load = Load([caller], 1000)
    load.phase = "down"
    load.start()
    while load.fates.get("down", counting.Fates()).sent < 5:
        await asyncio.sleep(0.001)
    load.phase = "up"
    caller.release.set()
    await load.stop()
    fates = load.fates["down"]
    assert (fates.refused.total(), dict(fates.lost)) == (
        1,
        {"scripted: reset": 1, "scripted: ValueError('no JSON')": 1},
    )
    assert fates.sent == fates.answered + 3
    await load.close()


class Answering:
    """In a client's place."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def ask(self, request: bytes) -> Answer:
        return self._answer

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        (Answer(503, b"full", 0.0, retry_after=True), Refused),
        (Answer(503, b"full", 0.0), Lost),
        (Answer(500, b"", 0.0, retry_after=True), Lost),
        (Answer(200, b'{"outputs":[{"data":[9]}]}', 0.0), Lost),
        (Answer(200, b'{"outputs":[{"data":[7]}]}', 0.0), None),
    ],
)
async def test_what_is_no_answer_is_lost_unless_it_says_when_to_ask_again(
    answer: Answer, fate: type[Exception] | None
) -> None:
    caller = RestCaller("m", Answering(answer), keeps=True)  # type: ignore[arg-type]
    if fate is None:
        await caller.ask([7])
        return
    with pytest.raises(fate):
        await caller.ask([7])
