"""What is written, in which order, and what is not: newest wins, one at a time, never without certain leadership."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from scaler.activation.route import Apply, Delete
from scaler.activation.slices import BerthSlice, ServiceRef, SlicePort
from scaler.core.pods import DELETION_COST
from scaler.writer import WRITES_AT_ONCE, DeploymentWrite, Writer
from tests.fakes import leaping

A, B = ModelKey("team", "a"), ModelKey("team", "b")
PATH = "/apis/apps/v1/namespaces/team/deployments"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices"


class Api:
    """Notes each write when it is begun; `take` says how it ends."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, Any]] = []
        self.done: list[tuple[str, Any]] = []
        self.take: Callable[[str], Coroutine[Any, Any, None]] = self.at_once
        self.under_way = self.most = 0

    async def at_once(self, path: str) -> None:
        await asyncio.sleep(0)

    async def patch(self, path: str, body: Any) -> dict[str, Any]:
        return await self._write("patch", path, body)

    async def apply(self, path: str, body: Any, *, manager: str) -> dict[str, Any]:
        assert manager == "berth-scaler"
        return await self._write("apply", path, body)

    async def delete(self, path: str) -> dict[str, Any]:
        return await self._write("delete", path, None)

    async def _write(self, verb: str, path: str, body: Any) -> dict[str, Any]:
        self.begun.append((verb, path, body))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.take(path)
        finally:
            self.under_way -= 1
        self.done.append((path, body))
        return {}

    @property
    def replicas(self) -> list[int]:
        return [body["spec"]["replicas"] for _, _, body in self.begun if body and "spec" in body]


def after(seconds: float) -> Callable[[str], Coroutine[Any, Any, None]]:
    """Writes that take so long."""
    return lambda _: asyncio.sleep(seconds)


def failing(error: KubeError) -> Callable[[str], Coroutine[Any, Any, None]]:
    async def fail(_: str) -> None:
        raise error

    return fail


async def opened(gate: asyncio.Event) -> None:
    await gate.wait()


class Metrics:
    def __init__(self) -> None:
        self.results: list[tuple[str, str]] = []

    def wrote(self, what: str, result: str, seconds: float) -> None:
        self.results.append((what, result))


class Here:
    def __init__(self) -> None:
        self.api, self.metrics = Api(), Metrics()
        self.leads = True
        self.writer = Writer(self.api, Keys(), self.metrics, lambda: self.leads, clock=leaping.now)  # type: ignore[arg-type]

    @property
    def scaled(self) -> list[tuple[ModelKey, int]]:
        """The replicas that have been written."""
        return [
            (ModelKey("team", path.rpartition("/")[2]), body["spec"]["replicas"])
            for path, body in self.api.done
            if body and "spec" in body
        ]

    async def settled(self) -> None:
        while self.writer.waiting:
            await asyncio.sleep(0.01)


def on_a_loop_that_leaps(test: Callable[[Here], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def work() -> None:
            here = Here()
            await test(here)
            await here.writer.close()

        leaping.run(work())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def scale(copies: int, model: ModelKey = A, **more: Any) -> DeploymentWrite:
    return DeploymentWrite(model=model, uid=f"uid-{model.name}", replicas=copies, **more)


def status(wanted: int, model: ModelKey = A) -> DeploymentWrite:
    return DeploymentWrite(model=model, uid=f"uid-{model.name}", scaled=Scaled(desired=wanted))


@on_a_loop_that_leaps
async def test_replicas_and_annotation_are_one_write_with_the_uid_as_its_condition(here: Here) -> None:
    here.writer.put(scale(3))
    here.writer.put(status(5))
    await here.settled()
    text = Scaled(desired=5).to_text()
    body = {
        "metadata": {"uid": "uid-a", "annotations": {"seldon.io/trtis-scaled": text}},
        "spec": {"replicas": 3},
    }
    assert here.api.begun == [("patch", f"{PATH}/a", body)]
    assert here.scaled == [(A, 3)]
    assert here.metrics.results == [("scale", "written")]


@on_a_loop_that_leaps
async def test_one_write_of_a_model_is_under_way_and_the_newest_follows(here: Here) -> None:
    gate = asyncio.Event()
    here.api.take = lambda _: opened(gate)
    here.writer.put(scale(1))
    await asyncio.sleep(0.1)
    for copies in range(2, 50):
        here.writer.put(scale(copies))
        await asyncio.sleep(0)
    here.writer.put(status(49))
    assert (here.api.replicas, here.api.most) == ([1], 1)
    here.writer.put(scale(9, B))  # another's does not wait for it
    await asyncio.sleep(0.1)
    assert here.api.replicas == [1, 9]
    gate.set()
    await here.settled()
    assert here.api.replicas == [1, 9, 49]


@on_a_loop_that_leaps
async def test_what_failed_is_tried_again_after_pauses_that_grow(here: Here) -> None:
    times: list[float] = []

    async def away(_: str) -> None:
        times.append(leaping.now())
        if len(times) < 5:
            raise KubeUnreachable("away")

    here.api.take = away
    here.writer.put(scale(2))
    await here.settled()
    pauses = [after - before for before, after in pairwise(times)]
    assert all(later > sooner for sooner, later in pairwise(pauses))
    assert pauses[0] >= 0.18
    assert here.api.replicas == [2] * 5
    assert here.metrics.results == [("scale", "failed")] * 4 + [("scale", "written")]


@on_a_loop_that_leaps
async def test_what_failed_gives_way_to_what_is_newer(here: Here) -> None:
    async def away(path: str) -> None:
        if path.endswith("/a") and len(here.api.replicas) == 1:
            raise KubeUnreachable("away")

    here.api.take = away
    here.writer.put(scale(2, costs={"pod": 7}))
    here.writer.put(status(2))
    await asyncio.sleep(0.01)
    here.writer.put(scale(7))
    await here.settled()
    assert here.api.replicas == [2, 7]
    last = here.api.begun[-1][2]
    assert "annotations" in last["metadata"]  # what nobody has said anything newer of


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (response_error(404, "NotFound", ""), 1),
        (response_error(409, "Conflict", ""), 1),
        (response_error(422, "Invalid", ""), 1),
        (response_error(403, "Forbidden", ""), 8),
        (response_error(500, "", ""), 8),
        (response_error(429, "TooManyRequests", ""), 8),
    ],
    ids=lambda value: str(getattr(value, "status", value)),
)
def test_what_is_of_no_use_is_not_tried_again_and_nothing_is_tried_for_ever(
    error: KubeError, tries: int
) -> None:
    async def work() -> None:
        here = Here()
        here.api.take = failing(error)
        here.writer.put(scale(2))
        await here.settled()
        assert tries <= len(here.api.begun) <= tries + 4 * (tries > 1)
        assert here.scaled == []
        await here.writer.close()

    leaping.run(work())


@on_a_loop_that_leaps
async def test_nothing_is_written_without_certain_leadership(here: Here) -> None:
    here.leads = False
    here.writer.put(scale(1, costs={"pod": 3}))
    here.writer.put(Apply(a_slice()))
    await asyncio.sleep(20)
    assert here.api.begun == []
    here.leads = True
    await here.settled()
    assert [verb for verb, _, _ in here.api.begun].count("apply") == 1


@on_a_loop_that_leaps
async def test_costs_come_before_the_replicas_and_hold_nothing_up(here: Here) -> None:
    async def take(path: str) -> None:
        if path.endswith("/stuck"):
            await asyncio.Event().wait()
        if path.endswith("/gone"):
            raise response_error(404, "NotFound", path)

    here.api.take = take
    began = leaping.now()
    here.writer.put(scale(1, costs={"busy": 9, "gone": 1, "stuck": 2}))
    await here.settled()
    *costs, last = here.api.begun
    assert {path.rsplit("/", 1)[1] for _, path, _ in costs} == {"busy", "gone", "stuck"}
    assert costs[0][2] == {"metadata": {"annotations": {DELETION_COST: "9"}}}
    assert last[2]["spec"] == {"replicas": 1}
    assert leaping.now() - began < 3


@on_a_loop_that_leaps
async def test_costs_are_those_of_the_newest_number(here: Here) -> None:
    here.api.take = after(1)
    here.writer.put(scale(3))
    await asyncio.sleep(0.1)
    here.writer.put(scale(2, costs={"one": 1}))
    here.writer.put(scale(1, costs={"other": 2}))
    here.writer.put(status(1))
    await here.settled()
    assert [path.rsplit("/", 1)[1] for _, path, _ in here.api.begun] == ["a", "other", "a"]
    assert here.api.replicas == [3, 1]


def a_slice(address: str = "10.0.0.1") -> BerthSlice:
    return BerthSlice(ServiceRef("team", "svc"), "uid-svc", (SlicePort("http", 20000),), (address,))


@on_a_loop_that_leaps
async def test_of_a_slice_the_newest_word_counts_be_it_that_it_goes(here: Here) -> None:
    gate = asyncio.Event()
    here.api.take = lambda _: opened(gate)
    here.writer.put(Apply(a_slice()))
    await asyncio.sleep(0.01)
    here.writer.put(Apply(a_slice("10.0.0.2")))
    here.writer.put(Delete(a_slice()))
    gate.set()
    await here.settled()
    assert [(verb, path) for verb, path, _ in here.api.begun] == [
        ("apply", f"{SLICES}/svc-berth"),
        ("delete", f"{SLICES}/svc-berth"),
    ]


@on_a_loop_that_leaps
async def test_of_a_slice_that_could_not_be_written_the_newest_word_counts_as_well(here: Here) -> None:
    async def fails_late(path: str) -> None:
        await asyncio.sleep(1)
        if here.api.begun[-1][0] == "apply":
            raise response_error(500, "InternalError", path)

    here.api.take = fails_late
    here.writer.put(Apply(a_slice()))
    await asyncio.sleep(0.1)
    here.writer.put(Delete(a_slice()))
    await here.settled()
    assert [verb for verb, _, _ in here.api.begun] == ["apply", "delete"]


@on_a_loop_that_leaps
async def test_a_crowd_of_writes_leaves_connections_for_the_lease(here: Here) -> None:
    here.api.take = after(1)
    for number in range(500):
        here.writer.put(status(1, ModelKey("team", f"m{number}")))
    here.writer.put(scale(1))
    began = leaping.now()
    while not here.scaled:  # what people read holds nobody up
        await asyncio.sleep(0.1)
    assert leaping.now() - began < 3
    await here.settled()
    assert here.api.most <= WRITES_AT_ONCE


@on_a_loop_that_leaps
async def test_the_end_waits_for_what_is_under_way_and_begins_nothing_more(here: Here) -> None:
    here.api.take = after(3)
    here.writer.put(scale(1))
    await asyncio.sleep(0.1)
    here.writer.put(scale(2))
    assert here.writer.in_doubt
    await here.writer.drain()
    assert not here.writer.in_doubt, "it has been answered"
    here.writer.put(scale(3, B))
    await asyncio.sleep(30)
    assert here.api.replicas == [1]
    assert here.scaled == [(A, 1)]
    assert not here.writer.in_doubt


@on_a_loop_that_leaps
async def test_what_waits_for_its_turn_is_not_begun_after_the_end(here: Here) -> None:
    here.api.take = after(3)
    for number in range(WRITES_AT_ONCE + 5):
        here.writer.put(scale(1, ModelKey("team", f"m{number}")))
    await asyncio.sleep(0.1)
    await here.writer.drain()
    assert len(here.api.begun) == WRITES_AT_ONCE


@on_a_loop_that_leaps
async def test_a_write_without_an_answer_is_in_doubt_until_it_cannot_be_carried_out_any_more(
    here: Here,
) -> None:
    here.api.take = failing(KubeUnreachable("no answer"))
    here.writer.put(scale(1))
    await asyncio.sleep(0.01)
    await here.writer.drain()
    assert here.writer.in_doubt
    await asyncio.sleep(11)
    assert not here.writer.in_doubt


@on_a_loop_that_leaps
async def test_a_write_that_was_refused_is_not_in_doubt(here: Here) -> None:
    here.api.take = failing(response_error(500, "InternalError", "no"))
    here.writer.put(scale(1))
    await asyncio.sleep(0.01)
    await here.writer.drain()
    assert (len(here.api.begun), here.writer.in_doubt) == (1, False)


@on_a_loop_that_leaps
async def test_a_defect_in_one_write_is_no_others_end(here: Here) -> None:
    async def breaks(path: str) -> None:
        if path.endswith("/a"):
            raise RuntimeError("boom")

    here.api.take = breaks
    here.writer.put(scale(1))
    here.writer.put(scale(1, B))
    await here.settled()
    assert here.scaled == [(B, 1)]
    here.api.take = here.api.at_once
    here.writer.put(scale(2))
    await here.settled()
    assert here.scaled[-1] == (A, 2)


@on_a_loop_that_leaps
async def test_a_successor_of_a_deployment_gets_nothing_of_its_predecessors(here: Here) -> None:
    gate = asyncio.Event()
    here.api.take = lambda _: opened(gate)
    here.writer.put(status(0, B))
    here.writer.put(status(1))
    await asyncio.sleep(0.01)
    here.writer.put(scale(1))
    here.writer.put(DeploymentWrite(model=A, uid="another", scaled=Scaled(desired=4)))
    gate.set()
    await here.settled()
    last = [body for _, path, body in here.api.begun if path.endswith("/a")][-1]
    assert last["metadata"]["uid"] == "another"
    assert "spec" not in last


@on_a_loop_that_leaps
async def test_what_is_discarded_is_not_written_when_it_could_be_again(here: Here) -> None:
    """By then it is decided anew, or another has led since."""
    here.leads = False
    here.writer.put(scale(3))
    await asyncio.sleep(1)
    here.writer.discard()
    here.leads = True
    await here.settled()
    assert here.api.replicas == []


@pytest.mark.parametrize("newer", [None, DeploymentWrite(model=A, uid="1", scaled=Scaled(desired=0))])
def test_what_fails_after_a_discard_is_not_written_when_it_could_be_again(
    newer: DeploymentWrite | None,
) -> None:
    """It was under way, or waited for its turn, when the API server went: requests may have come since."""

    @on_a_loop_that_leaps
    async def test(here: Here) -> None:
        answered = asyncio.Event()

        async def unreachable(path: str) -> None:
            await answered.wait()
            raise KubeUnreachable("away")

        here.api.take = unreachable
        for number in range(WRITES_AT_ONCE):  # these are under way, and one waits for its turn
            here.writer.put(DeploymentWrite(model=ModelKey("team", f"m{number}"), uid="1", replicas=0))
        here.writer.put(DeploymentWrite(model=A, uid="1", replicas=0))
        while here.api.under_way < WRITES_AT_ONCE:
            await asyncio.sleep(0.01)
        here.leads = False
        here.writer.discard()
        if newer is not None:
            here.writer.put(newer)
        here.leads, here.api.take = True, here.api.at_once
        answered.set()
        await here.settled()
        assert here.api.replicas == [0] * WRITES_AT_ONCE
        told = [path for _, path, body in here.api.begun if "spec" not in body]
        assert told == ([] if newer is None else [f"{PATH}/a"])

    test()
