"""What the gateway is told, and when: against a control socket that records it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import agent.gateway_link
from agent.gateway_link import GatewayLink
from berth.contract.endpoint import UnixSocket
from berth.contract.gateway import ReplicaSpec, server_name_of, ticket_of
from berth.contract.ids import PodUid
from tests.fakes.gateway_control import FakeGateway

A, B = PodUid("a"), PodUid("b")


def replica(uid: str, **more: str) -> ReplicaSpec:
    made = ReplicaSpec(
        ticket=ticket_of(b"secret", uid),
        namespace="team",
        pod=uid,
        pod_uid=uid,
        model="net",
        server_name=server_name_of("net", uid),
    )
    return replace(made, **more)  # type: ignore[arg-type]


class Side:
    """Both ends of the line."""

    def __init__(self, directory: Path) -> None:
        self.gateway = FakeGateway(directory / "control")
        self.replicas = [replica("a"), replica("b")]
        self.deaths: list[list[PodUid]] = []
        self.link = GatewayLink(
            UnixSocket(str(self.gateway.path)),
            self.listed,
            lambda uids: self.deaths.append(list(uids)),
            drain_seconds=0.1,
        )

    def listed(self, but: Collection[PodUid]) -> tuple[ReplicaSpec, ...]:
        return tuple(one for one in self.replicas if one.pod_uid not in but)

    def uids(self) -> list[str]:
        return [one["podUid"] for one in self.gateway.replicas]

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Side"]:
        work = asyncio.create_task(self.link.run())
        try:
            yield self
            assert not work.done() or work.result()
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await self.gateway.stop()


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    monkeypatch.setattr(agent.gateway_link, "_RECONNECT_SECONDS", 0.01)
    return Side(Path(tempfile.mkdtemp()))


async def test_all_replicas_are_sent_at_once_and_at_each_change_and_not_without_one(side: Side) -> None:
    await side.gateway.start()
    async with side.running():
        await side.gateway.until(lambda gateway: len(gateway.received) == 1)
        assert [ReplicaSpec.from_json(one) for one in side.gateway.replicas] == side.replicas
        side.link.wake.set()
        await asyncio.sleep(0.02)
        assert len(side.gateway.received) == 1
        side.replicas = [replica("a", withheld="GPU 0 has fallen off")]
        side.link.wake.set()
        await side.gateway.until(lambda gateway: len(gateway.received) == 2)
        assert [ReplicaSpec.from_json(one) for one in side.gateway.replicas] == side.replicas


async def test_a_gateway_that_starts_again_gets_all_again(side: Side) -> None:
    async with side.running():  # which is not there yet
        await asyncio.sleep(0.03)
        await side.gateway.start()
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        for _ in range(3):
            await side.gateway.stop()
            side.gateway.received.clear()
            await side.gateway.start()
            await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
    assert side.gateway.connections == 4


def test_a_gateway_waits_for_the_agent_for_less_than_a_second() -> None:
    assert agent.gateway_link._RECONNECT_SECONDS < 0.5


async def test_a_drain_is_over_when_the_gateway_says_so_and_it_is_left_out_until_it_may_be_used(
    side: Side,
) -> None:
    await side.gateway.start()
    side.gateway.drains = False
    async with side.running():
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        drain = asyncio.create_task(side.link.drain(A))
        await side.gateway.until(lambda gateway: gateway.wishes == ["a"])
        assert not drain.done()
        assert side.uids() == ["a", "b"]  # what is under way goes on
        side.gateway.say(b'{"drained": "b"}')
        side.gateway.say(b'{"drained": "a"}')
        await drain
        await side.gateway.until(lambda gateway: side.uids() == ["b"])
        side.link.resume(A)
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        assert side.gateway.wishes == ["a"]


async def test_a_drain_that_is_not_answered_ends(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.gateway_link, "_GRACE_SECONDS", 0.0)
    await side.gateway.start()
    side.gateway.drains = False
    async with side.running():
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        async with asyncio.timeout(2):
            await side.link.drain(A)
        await side.gateway.until(lambda gateway: side.uids() == ["b"])


async def test_of_a_gateway_that_is_away_there_is_nothing_to_drain(side: Side) -> None:
    async with side.running(), asyncio.timeout(0.09):
        await side.link.drain(A)
        await side.link.drain(PodUid("nobody"))
    side.gateway.drains = False
    await side.gateway.start()
    side.link = GatewayLink(UnixSocket(str(side.gateway.path)), side.listed, lambda _: None, drain_seconds=60)
    async with side.running():
        await side.gateway.until(lambda gateway: "a" in side.uids())
        drain = asyncio.create_task(side.link.drain(A))
        await side.gateway.until(lambda gateway: gateway.wishes == ["a"])
        await side.gateway.stop()  # it dies over it
        async with asyncio.timeout(2):
            await drain
        await side.gateway.start()
        side.gateway.received.clear()
        await side.gateway.until(lambda gateway: side.uids() == ["b"])
        assert side.gateway.wishes == []


async def test_what_the_gateway_is_told_no_more_is_drained_and_each_wish_is_said_once(side: Side) -> None:
    side.gateway.drains = False
    await side.gateway.start()
    async with side.running():
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        drain = asyncio.create_task(side.link.drain(A))
        await side.gateway.until(lambda gateway: gateway.wishes == ["a"])
        side.link.wake.set()
        await asyncio.sleep(0.02)
        assert side.gateway.wishes == ["a"]
        side.replicas = [replica("b")]  # its pod has gone, and what Triton had of it
        side.link.wake.set()
        async with asyncio.timeout(1):
            await drain


async def test_who_was_in_triton_when_it_died_is_heard(side: Side) -> None:
    await side.gateway.start()
    async with side.running():
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        for nonsense in (
            b"",
            b"no JSON",
            b"[]",
            b'{"drained": 5}',
            b'{"tritonDied": []}',
            b"\xff",
            b"[" * 9999,
        ):
            side.gateway.say(nonsense)
        side.gateway.say(b'{"tritonDied": {"suspects": ["a", 7, "b"]}}')
        await side.gateway.until(lambda _: bool(side.deaths))
    assert side.deaths == [[A, B]]
    assert side.gateway.connections == 1


async def test_a_line_without_an_end_and_one_who_does_not_read_are_given_up(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.gateway_link, "_WRITE_SECONDS", 0.05)
    await side.gateway.start()
    async with side.running():
        await side.gateway.until(lambda gateway: side.uids() == ["a", "b"])
        side.gateway.say(b"x" * 300_000)
        await side.gateway.until(lambda gateway: gateway.connections == 2)
    deaf = await asyncio.start_unix_server(lambda r, w: accepted.append(w), side.gateway.path)
    accepted: list[asyncio.StreamWriter] = []
    side.replicas = [replica(f"p{n}", withheld="x" * 500) for n in range(4000)]
    async with side.running():
        async with asyncio.timeout(5):
            while len(accepted) < 3:
                await asyncio.sleep(0.01)
    deaf.close()
    for writer in accepted:
        writer.transport.abort()
