"""Whether Triton has died: by who listens there, and who was inside at the first sign."""

import asyncio
import socket
from collections.abc import Collection

import pytest

from berth.contract.endpoint import Endpoint
from proxy.gateway import crash_detection as module
from proxy.gateway.crash_detection import CrashDetector, refuses


class Triton:
    def __init__(self, *refuses: bool) -> None:
        self.inside: set[str] = set()
        self.deaths: list[set[str]] = []
        self._refuses = list(refuses)
        self.watch = CrashDetector(lambda: self.inside, self.refuses, self.died)

    async def refuses(self) -> bool:
        return self._refuses.pop(0) if self._refuses else False

    def died(self, inside: Collection[str]) -> None:
        self.deaths.append(set(inside))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOKS_SECONDS", (0.0, 0.0, 0.01))


async def test_all_who_were_inside_at_the_first_sign_are_named_once() -> None:
    triton = Triton(False, True, True)
    triton.inside = {"a", "b", "d"}
    triton.watch.broke({"a"})
    triton.inside = set()  # their requests end with their connections
    triton.watch.broke({"b"})
    triton.watch.broke({"c"})
    await asyncio.sleep(0.05)
    assert triton.deaths == [{"a", "b", "c", "d"}]
    await triton.watch.close()


async def test_a_connection_that_broke_is_no_death_while_somebody_listens() -> None:
    triton = Triton()
    triton.inside = {"a"}
    triton.watch.broke({"a"})
    await asyncio.sleep(0.05)
    assert triton.deaths == []
    triton._refuses = [True]
    triton.inside = {"b"}
    triton.watch.broke({"b"})
    await asyncio.sleep(0.05)
    assert triton.deaths == [{"b"}]  # of the break before nothing is left


async def test_the_end_of_the_gateway_waits_for_nothing() -> None:
    triton = Triton()
    triton.watch.broke(())
    await triton.watch.close()
    assert triton.deaths == []


async def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        at = Endpoint("127.0.0.1", one.getsockname()[1])
        assert not await refuses(at)
    assert await refuses(at)
