"""kill -9 of every part, at each step of a model's way up and down: no request is lost."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from bench.scaler.models import echo_request, scaling
from localcluster.cluster import LocalCluster
from tests.fakes.eventually import eventually
from tests.scaling.load import Tally, ask_again, load
from tests.scaling.support import Owner, client_of

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

# Every part at every step takes three rounds.
_ROUNDS: Final = int(os.environ.get("BERTH_KILL_ROUNDS", "1"))
_PER_SECOND: Final = 40.0


class Killer:
    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def scalers(self) -> None:
        """Both: whoever leads."""
        for part in self._cluster.scalers:
            part.kill()

    async def binders(self) -> None:
        for part in self._cluster.binders:
            part.kill()

    async def api_server(self) -> None:
        await self._cluster.restart_api_server()

    def of_round(self, number: int) -> list[Callable[[], Awaitable[None]]]:
        """Whom to kill at each of three steps."""
        parts = [self.scalers, self.api_server, self.binders]
        return [parts[(number + step) % 3] for step in range(3)]


@pytest.mark.parametrize("number", range(_ROUNDS))
async def test_no_request_is_lost_whoever_dies(
    owner: Owner, echo: str, pod_address: str, cluster: LocalCluster, number: int
) -> None:
    while_held, while_served, while_leaving = Killer(cluster).of_round(number)
    await owner.serve("steady", source=echo, annotations=scaling(target="4", max_scale="2"))
    await owner.leads_to("steady")
    request = echo_request("steady", sleep_ms=20)
    async with load(client_of(owner, "steady", pod_address), request, per_second=_PER_SECOND) as tally:
        await asyncio.sleep(0.3)
        await while_held()
        await answered(tally)
        await owner.replicas("steady", 1)
        await while_served()
        await asyncio.sleep(3)
    assert_none_lost(tally)

    async def leads_to_activators() -> None:
        assert {one.port for one in owner.backends("steady")} > {9000}

    await eventually(leads_to_activators)
    await while_leaving()
    async with load(client_of(owner, "steady", pod_address), request, per_second=_PER_SECOND) as tally:
        await asyncio.sleep(3)
    assert_none_lost(tally)
    await owner.replicas("steady", 0, seconds=120)


async def test_an_activator_that_dies_takes_only_what_it_held(
    owner: Owner, echo: str, pod_address: str, cluster: LocalCluster
) -> None:
    """Whose connection breaks asks again, and is answered by the other one."""
    await owner.serve("held", source=echo, annotations=scaling(target="100"))
    await owner.leads_to("held")
    clients = [client_of(owner, "held", pod_address) for _ in range(40)]
    asking = [asyncio.create_task(ask_again(client, echo_request("held"))) for client in clients]
    await asyncio.sleep(0.3)
    cluster.activators[0].kill()
    answers = await asyncio.gather(*asking)
    assert {answer.status for answer in answers} == {200}
    for client in clients:
        await client.close()


async def answered(tally: Tally) -> None:
    async def check() -> None:
        assert tally.answers

    await eventually(check, seconds=90, what="the first answer")


def assert_none_lost(tally: Tally) -> None:
    assert tally.lost == [], tally.lost[:5]
    assert set(tally.statuses()) == {200}, [a for a in tally.answers if a.status != 200][:3]
