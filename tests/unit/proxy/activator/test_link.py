"""How the activator looks for the scaler that leads. No sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
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
        self.now += self._seconds
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
