"""How the activator looks for the scaler that leads. No sockets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.v1 import scaler_pb2 as pb
from proxy.activator import attend
from proxy.activator.assign import Assigned

SERVICE, ONE, OTHER = Endpoint("s", 1), Endpoint("one", 1), Endpoint("other", 1)


class Enough(Exception):
    """The test has seen what it wants."""


class Looking(attend.Link):
    """Its streams last for `seconds`, and end with the name of another replica."""

    def __init__(self, *, most: int, seconds: float = 0.0) -> None:
        self.now = 100.0
        plane: Any = None
        super().__init__(SERVICE, Path("token"), "10.0.0.1", Assigned(), plane, clock=lambda: self.now)
        self.asked: list[Endpoint] = []
        # After how many questions, and for how long.
        self.pauses: list[tuple[int, float]] = []
        self._most, self._seconds = most, seconds

    async def _attend(self, target: Endpoint) -> None:
        self.asked.append(target)
        self._lasted_seconds = self._seconds
        away = attend._Away("this replica does not lead")
        away.leader = OTHER if target == ONE else ONE
        if len(self.asked) == self._most:
            raise Enough
        raise away

    async def looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def pause(seconds: float) -> None:
            self.pauses.append((len(self.asked), seconds))

        monkeypatch.setattr(asyncio, "sleep", pause)
        with pytest.raises(Enough):
            await self.run()


async def test_replicas_that_name_each_other_are_asked_no_oftener_than_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Looking(most=10)
    await link.looks(monkeypatch)
    assert link.asked[:4] == [SERVICE, ONE, OTHER, ONE]
    assert [asked for asked, _ in link.pauses] == list(range(4, 10))
    assert all(seconds > 0 for _, seconds in link.pauses)


async def test_who_leads_no_more_after_a_while_sends_it_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Looking(most=50, seconds=5.0)
    await link.looks(monkeypatch)
    assert link.pauses == []


async def hears(link: Looking, after: float) -> None:
    async def messages() -> AsyncIterator[pb.AttendResponse]:
        link.now += after
        yield pb.AttendResponse()

    await link._read(messages())


async def test_a_scaler_tells_for_as_long_as_it_says_something() -> None:
    link = Looking(most=1)
    assert link.told_for is None
    link._told_since = link._heard_at = link.now
    assert link.told_for == 0
    for _ in range(4):
        await hears(link, after=1.0)
    assert link.told_for == 4
    link.now += 3
    assert link.told_for == 7
    link.now += 0.1
    assert link.told_for is None
    assert link.is_attached
    # What it has not told meanwhile has time to come.
    await hears(link, after=0.0)
    assert link.told_for == 0
