"""How the activator looks for the scaler that leads, and when a scaler counts as silent. No sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from proxy.activator.assignments import Assignments
from proxy.activator.control_client import ControlClient, ScalerAway, StreamHealth

SERVICE, ONE, OTHER = Endpoint("s", 1), Endpoint("one", 1), Endpoint("other", 1)


class Enough(Exception):
    """The test has seen what it wants."""


class Redirected(ControlClient):
    """Its streams last for `seconds`, and end with the name of another replica."""

    def __init__(self, *, most: int, seconds: float = 0.0) -> None:
        plane: Any = None
        super().__init__(SERVICE, Path("token"), "10.0.0.1", Assignments(), plane)
        self.dialled: list[Endpoint] = []
        # After how many streams, and for how long.
        self.pauses: list[tuple[int, float]] = []
        self._most, self._seconds = most, seconds

    async def _stream(self, target: Endpoint) -> tuple[float, ScalerAway]:
        self.dialled.append(target)
        if len(self.dialled) == self._most:
            raise Enough
        away = ScalerAway("this replica does not lead")
        away.leader = OTHER if target == ONE else ONE
        return self._seconds, away

    async def dial(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def pause(seconds: float) -> None:
            self.pauses.append((len(self.dialled), seconds))

        monkeypatch.setattr(asyncio, "sleep", pause)
        with pytest.raises(Enough):
            await self.run()


async def test_replicas_that_name_each_other_are_dialled_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Redirected(most=10)
    await client.dial(monkeypatch)
    assert client.dialled[:4] == [SERVICE, ONE, OTHER, ONE]
    assert [dialled for dialled, _ in client.pauses] == list(range(4, 10))
    assert all(seconds > 0 for _, seconds in client.pauses)


async def test_a_replica_that_has_led_for_a_while_redirects_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Redirected(most=50, seconds=5.0)
    await client.dial(monkeypatch)
    assert client.pauses == []


def test_a_scaler_is_connected_for_as_long_as_its_messages_come() -> None:
    health = StreamHealth()
    assert (health.is_connected, health.connected_for(100)) == (False, None)
    health.began(100)
    assert (health.is_connected, health.connected_for(100)) == (True, 0)
    for now in range(101, 105):
        health.message_received(now)
    assert health.connected_for(104) == 4
    assert health.connected_for(107) == 7
    assert health.connected_for(107.1) is None
    assert health.is_connected
    # What it did not send meanwhile has time to come.
    health.message_received(107.1)
    assert health.connected_for(107.1) == 0


def test_a_stream_lasts_from_its_first_message_on_whether_or_not_it_was_silent() -> None:
    health = StreamHealth()
    assert health.ended(100) == 0
    health.began(100)
    health.message_received(150)
    assert health.ended(160) == 60
    assert not health.is_connected
    assert health.ended(170) == 0
