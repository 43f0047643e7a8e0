"""While replicas come and go and the Service leads here and elsewhere, no request of a client that asks on is lost."""

import asyncio
from collections import Counter
from itertools import cycle

import aiohttp

from berth.contract.activation import RouteMode
from tests.fakes.eventually import until
from tests.loopback.activator.clients import channel, post, request, stub
from tests.loopback.activator.conftest import Place


async def test_nothing_is_lost_while_replicas_come_and_go(place: Place) -> None:
    await place.limits(
        cold_starts_per_second=1000, cold_start_burst=1000
    )  # they come and go faster than in any cluster
    pods = [await place.pod(name, slots=3, seconds=0.001) for name in "pqr"]
    counted: Counter[object] = Counter()
    ends = asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def by_rest() -> None:
            while not ends.is_set():
                status, _, _ = await post(session, place)
                counted[status] += 1

        async def by_grpc() -> None:
            async with channel(place) as over:
                while not ends.is_set():
                    answer = await stub(over).ModelInfer(request(id="x"))
                    counted[answer.id] += 1

        async with asyncio.TaskGroup() as clients:
            for ask in (by_rest, by_rest, by_rest, by_grpc, by_grpc):
                clients.create_task(ask())
            endpoints = cycle([(0,), (), (0, 1), (1, 2), (2,)])
            modes = cycle([RouteMode.PROXY, RouteMode.SERVE, RouteMode.PROXY])
            for _ in range(20):
                chosen = [pods[place_of] for place_of in next(endpoints)]
                await place.assign(endpoints=tuple(pod.as_endpoint() for pod in chosen), mode=next(modes))
                if chosen:
                    await until(lambda: place.own.pods.any_open)
                before = counted.total()
                if chosen:
                    await until(lambda before=before: counted.total() > before + 20)
                else:
                    await until(lambda: place.own.throttler.buffered == 5)
            await place.serve(*pods)
            ends.set()
    assert counted.keys() == {200, "x"}
    assert all(pod.most_inside <= pod.slots for pod in pods)
    assert sum(pod.served for pod in pods) == counted.total()
