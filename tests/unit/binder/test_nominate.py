"""A leader that dies while it makes room: its successor goes on with the same victims, whenever that is (binder,
"Nomination")."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from berth.kube.errors import KubeUnreachable
from tests.fakes.binder import Api, Bench
from tests.fakes.objects import KEYS

Json = dict[str, Any]
NODES = ("n1", "n2", "n3")


class Truth(Api):
    """Keeps what is written to pods' statuses; who is evicted begins to go."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        name = path.split("/")[-2]
        if "nominatedNodeName" in body["status"]:
            self.order.append("nominated")
        if name in self.pods:
            self.pods[name]["status"] |= body["status"]
        return await super().patch(path, body, content_type=content_type)

    def _evict(self, name: str, *, rehearsal: bool) -> None:
        super()._evict(name, rehearsal=rehearsal)
        if not rehearsal:
            self.order.append("evicted")
            self.pods[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"


class Mortal(Api):
    """A leader's client: at call `dies_at` the process is gone, before that is written or before its answer comes."""

    def __init__(self, truth: Truth, *, dies_at: int | None, is_written: bool) -> None:
        super().__init__()
        self.pods, self.nodes, self._truth = truth.pods, truth.nodes, truth
        self.calls, self.dies_at, self.is_written = 0, dies_at, is_written
        self.is_dead = False

    async def create(self, path: str, body: Json) -> Json:
        return await self._call(lambda: self._truth.create(path, body))

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        return await self._call(lambda: self._truth.patch(path, body, content_type=content_type))

    async def _call(self, call: Callable[[], Awaitable[Json]]) -> Json:
        self.calls += 1
        if self.calls == self.dies_at and self.is_written:
            await call()
        if self.dies_at is not None and self.calls >= self.dies_at:
            self.is_dead = True
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return await call()


def furnish(bench: Bench) -> None:
    """Each node is full with two pods of low priority, and one of high priority waits for a whole one."""
    for name in NODES:
        bench.node(name, 16)
        for half in "ab":
            bench.resident(f"{name}{half}", name, 8)
    bench.add("vip", mem="16Gi", priority=100)


class Standby(Bench):
    """Has heard of everything from the beginning, and of nothing since; it lists before it leads."""

    def __init__(self, api: Api) -> None:
        super().__init__(api=api)
        before = copy.deepcopy(api.pods)
        furnish(self)
        api.pods.update(before)

    def list_anew(self) -> None:
        for one in copy.deepcopy(list(self.api.pods.values())):
            self.tell("pods", one)


async def life(truth: Truth, *, dies_at: int | None = None, is_written: bool = True) -> tuple[int, Standby]:
    """A leader makes room until it dies, or for a while. How many calls it has made, and its standby."""
    mortal = Mortal(truth, dies_at=dies_at, is_written=is_written)
    async with Bench(api=mortal) as leader:
        furnish(leader)
        standby = Standby(truth)
        for _ in range(10):
            if not mortal.is_dead:
                await leader.step(seconds=1.0)
    assert mortal.is_dead == (dies_at is not None)
    return mortal.calls, standby


async def evicted_in_the_end(truth: Truth, standby: Standby) -> list[str]:
    """Once the successor has placed the pod."""
    standby.list_anew()
    async with standby:
        for _ in range(30):
            await standby.step(2, seconds=1.0)
            for uid in truth.evicted:
                standby.begin_to_go(uid)
        for uid in set(truth.evicted):
            standby.gone(uid)
        await standby.step(12, seconds=2.0)
        assert standby.is_placed("vip")
    return sorted(set(truth.evicted))


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_leader_that_dies_at_any_call_has_one_set_of_victims_evicted(is_written: bool) -> None:
    """The successor has known the pod for long when it first sees the nomination: in its first list (binder,
    "Nomination")."""
    calls, _ = await life(Truth())
    ends = {}
    for dies_at in range(1, calls + 1):
        truth = Truth()
        _, standby = await life(truth, dies_at=dies_at, is_written=is_written)
        ends[dies_at] = await evicted_in_the_end(truth, standby)
    assert ends == {number: ["n1a", "n1b"] for number in range(1, calls + 1)}


async def test_nobody_goes_before_the_api_server_has_answered_that_it_knows_for_whom() -> None:
    """The next leader's list relies on this order (binder, "Nomination")."""
    truth = Truth()
    await life(truth)
    assert truth.order == ["nominated", "evicted", "evicted"]


async def test_a_nomination_that_the_successor_cannot_take_over_is_taken_back() -> None:
    """A cluster autoscaler takes the pod for placed there, and buys nothing for it."""
    truth = Truth()
    _, standby = await life(truth, dies_at=6)
    assert truth.nominated == [("vip", "n1")]
    standby.list_anew()
    for name in NODES:
        standby.node(name, 16, unschedulable=True)
    async with standby:
        await standby.step(1, seconds=1.0)
    assert truth.nominated == [("vip", "n1"), ("vip", None)]


class Deaf(Truth):
    """Nobody hears the answers to so many writes of a nominated node."""

    def __init__(self, silences: int) -> None:
        super().__init__()
        self.silences = silences

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        answer = await super().patch(path, body, content_type=content_type)
        if "nominatedNodeName" in body["status"] and self.silences:
            self.silences -= 1
            raise KubeUnreachable("timed out")
        return answer


@pytest.mark.parametrize("silences", [1, 4])
async def test_a_nomination_without_an_answer_is_taken_back_until_that_is_certain(silences: int) -> None:
    """It may be written: left there, it would be the next leader's, and hide the pod from cluster autoscalers."""
    truth = Deaf(silences)
    async with Bench(api=truth) as leader:
        leader.node("n1", 16)
        leader.resident("low", "n1", 16)
        leader.add("vip", mem="16Gi", priority=100)
        await leader.step()
        leader.node("n1", 16, unschedulable=True)
        await leader.step(200, seconds=1.0)
    assert truth.evicted == []
    assert truth.nominated == [("vip", "n1"), *[("vip", None)] * silences]


async def test_nobody_goes_for_a_pod_that_cannot_be_read_any_more() -> None:
    """Its owner has edited it before the successor led."""
    truth = Truth()
    _, standby = await life(truth, dies_at=5, is_written=False)
    assert (truth.nominated, truth.evicted) == ([("vip", "n1")], [])
    standby.list_anew()
    truth.pods["vip"]["spec"]["containers"][0]["resources"]["limits"][KEYS.gpu_mem] = "1.5.2"
    standby.list_anew()
    async with standby:
        await standby.step(5, seconds=1.0)
    assert truth.evicted == []
