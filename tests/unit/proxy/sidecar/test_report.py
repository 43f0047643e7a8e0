"""The sidecar's line to the gateway: what was said on one that has gone does not count on the next."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from proxy.sidecar.gateway import GatewayAccess, NodeGateway
from proxy.sidecar.report import ReportClient
from tests.fakes.gateway import FakeGateway


@asynccontextmanager
async def following(
    there: FakeGateway, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[ReportClient, NodeGateway]]:
    gateway = NodeGateway(clock)
    gateway.access = GatewayAccess(there.endpoint, there.ticket)
    report = ReportClient(gateway)
    work = asyncio.create_task(report.follow())
    try:
        yield report, gateway
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await there.stop()


async def heard(gateway: NodeGateway) -> None:
    gateway.status = None
    async with asyncio.timeout(5):
        while gateway.status is None:
            await asyncio.sleep(0.005)


async def test_a_drain_is_over_when_the_gateway_that_was_asked_says_so() -> None:
    there = FakeGateway()
    there.is_drained = False
    await there.start()
    async with following(there) as (report, gateway):
        await heard(gateway)
        there.drained()  # somebody else had asked: the agent
        there.tell()
        await heard(gateway)
        await there.stop()
        await there.start()
        await heard(gateway)
        drain = asyncio.create_task(report.drain(lambda: False))
        async with asyncio.timeout(5):
            while "drain" not in there.words:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert not drain.done()
        there.drained()
        async with asyncio.timeout(5):
            await drain


async def test_while_somebody_waits_a_silent_gateway_may_still_answer() -> None:
    """It hangs for longer than its word is good: whoever has a request there is not left for that."""
    there, waits = FakeGateway(), [True]
    there.is_drained = False
    await there.start()
    now = [0.0]
    async with following(there, clock=lambda: now[0]) as (report, gateway):
        await heard(gateway)
        there.is_silent = True
        now[0] = 100.0
        drain = asyncio.create_task(report.drain(lambda: waits[0]))
        await asyncio.sleep(0.05)
        assert gateway.fresh_status() is None
        assert not drain.done()
        waits[0] = False
        async with asyncio.timeout(5):
            await drain


async def test_what_was_wished_is_said_again_to_a_gateway_that_restarts() -> None:
    there = FakeGateway()
    await there.start()
    async with following(there) as (report, gateway):
        await heard(gateway)
        report.leave()
        async with asyncio.timeout(5):
            while there.words != ["leaving"]:
                await asyncio.sleep(0.005)
        await there.stop()
        await there.start()
        async with asyncio.timeout(5):
            while there.words != ["leaving", "leaving"]:
                await asyncio.sleep(0.005)
