"""What is reported of a pod that waits, how often, and how it is written: each report is an event and a write."""

import asyncio
import random
from typing import Any

import pytest

from berth.kube.errors import KubeError, response_error
from binder.loop.conditions import FIGURES_SECONDS, ConditionWriter, LastMessage, statements_of
from binder.pod.conditions import conditions, reported_message
from binder.pod.demand import parse_demand
from tests.fakes.binder import Bench
from tests.fakes.objects import KEYS, pod

Json = dict[str, Any]

NODES, PODS = 20, 50


def test_figures_that_change_are_reported_after_a_while_and_another_reason_at_once() -> None:
    last = LastMessage().then("0/3 nodes: 3 A (1.5 GiB short)", "", now=100.0)
    assert last is not None
    assert last.then("0/3 nodes: 3 A (900 MiB short)", "", now=101.0) is None
    assert last.then("0/4 nodes: 4 A (7 B short)", "", now=99.0 + FIGURES_SECONDS) is None
    assert last.then("0/4 nodes: 4 A (7 B short)", "", now=100.0 + FIGURES_SECONDS) is not None
    assert last.then("0/3 nodes: 3 A (1.5 GiB short)", "", now=1e9) is None
    assert last.then("0/3 nodes: 2 A (1 GiB short), 1 B", "", now=101.0) is not None


def test_reasons_that_come_and_go_are_reported_once() -> None:
    both = "0/3 nodes: 2 A (1 GiB short), 1 B (no heartbeat)"
    last = LastMessage().then(both, "", now=0.0)
    assert last is not None
    assert last.then("0/3 nodes: 3 A (1 GiB short)", "", now=1.0) is None
    assert last.then("0/3 nodes: 3 B (no heartbeat)", "", now=2.0) is None
    third = last.then("0/3 nodes: 3 C", "", now=3.0)
    assert third is not None
    assert third.then(both, "", now=4.0) is None


def test_for_whose_end_a_pod_waits_is_reported_at_once_and_that_it_does_no_more() -> None:
    last = LastMessage().then("3 A", "; waits for preempted pods on node n1 to end: team/a-1", now=0.0)
    assert last is not None
    assert last.then("3 A", "; waits for preempted pods on node n2 to end: team/a-1", now=1.0) is not None
    assert last.then("3 A", "", now=1.0) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 PodAffinityMismatch (node gpu-1)", "3 PodAffinityMismatch (node gpu-2)"),
        ("claim 'c1' is in use", "claim 'c2' is in use"),
        ("zone=a1", "zone=a2"),
        ("version v1.2", "version v1.3"),
    ],
)
def test_names_are_no_figures(one: str, other: str) -> None:
    assert statements_of(one) != statements_of(other)


async def test_pods_that_wait_while_all_figures_change_are_reported_of_once() -> None:
    chance = random.Random(1)
    async with Bench() as bench:
        for i in range(NODES):
            bench.node(f"n{i}", 80, other_use=75 * 2**30)
        for i in range(PODS):
            bench.add(f"p{i}", mem=f"{10 * 1024 + i}Mi")
        for _ in range(300):
            name = f"n{chance.randrange(NODES)}"
            bench.node(name, 80, other_use=chance.randrange(72 * 2**30, 79 * 2**30, 2**26))
            await bench.step(20, seconds=0.05)
        assert len([1 for _, reason, _ in bench.events.said if reason == "FailedScheduling"]) == PODS


async def test_a_new_leader_repeats_nothing_but_what_its_predecessor_did_not_say() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        for uid, message in (
            ("p1", "0/1 nodes: 1 GPUMemoryInsufficient (3 GiB short on the best GPU)"),
            ("p2", "0/1 nodes: 1 TaintNotTolerated (k:NoSchedule)"),
        ):
            condition = {"type": "PodScheduled", "reason": "Unschedulable", "message": message}
            waits = pod(uid, mem="20Gi")
            waits["status"]["conditions"] = [condition]
            bench.tell("pods", waits)
        await bench.until_quiet()
        assert [name for name, _, _ in bench.events.said] == ["p2"]


async def test_a_pod_that_requests_something_else_is_reported_of_that() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.add("p1", mem="20Gi")
        await bench.until_quiet()
        bench.add("p1", mem="90Gi")
        await bench.until_quiet()
        short = [message.partition(" short")[0] for _, _, message in bench.events.said]
        assert [one.rpartition("(")[2] for one in short] == ["4 GiB", "74 GiB"]


class Api:
    """Takes patches; `fails` is raised by the next ones. A patch waits while `answers` is not set."""

    def __init__(self) -> None:
        self.patches: list[Json] = []
        self.fails: list[KubeError] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        await self.answers.wait()
        if self.fails:
            raise self.fails.pop(0)
        assert path == f"/api/v1/namespaces/team/pods/{body['metadata']['uid']}/status"
        assert content_type == "application/strategic-merge-patch+json"
        (condition,) = body["status"]["conditions"]
        self.patches.append({"pod": body["metadata"]["uid"], **condition})
        return {}


class Writing:
    """A ConditionWriter at work, and the events beside the conditions."""

    def __init__(self) -> None:
        self.api, self.events = Api(), list[tuple[str, ...]]()
        self.conditions = ConditionWriter(self.api, self)  # type: ignore[arg-type]
        self._task: asyncio.Task[None] | None = None

    def record(self, ref: Any, *said: str) -> None:
        self.events.append((ref.name, *said))

    def report(self, uid: str, message: str, *, first: bool = True) -> None:
        self.conditions.report(parse_demand(pod(uid), KEYS).model.ref, message, first=first)

    async def __aenter__(self) -> "Writing":
        self._task = asyncio.create_task(self.conditions.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def written(self) -> list[Json]:
        for _ in range(20):
            await asyncio.sleep(0)
        return self.api.patches


async def test_a_pod_s_condition_says_why_it_waits_and_since_when_it_does() -> None:
    async with Writing() as writing:
        writing.report("p1", "no room")
        ((one),) = await writing.written()
        assert one.pop("lastTransitionTime").endswith("Z")
        assert one == {
            "pod": "p1",
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "no room",
        }
        writing.report("p1", "no GPU", first=False)
        *_, last = await writing.written()
        assert last["message"] == "no GPU"
        assert "lastTransitionTime" not in last  # the status is what it was
        assert writing.events == [
            ("p1", "Warning", "FailedScheduling", "no room"),
            ("p1", "Warning", "FailedScheduling", "no GPU"),
        ]


async def test_only_the_last_message_is_written_and_the_first_time_is_kept() -> None:
    writing = Writing()
    writing.report("p1", "one")
    writing.report("p1", "two", first=False)
    writing.report("p2", "other", first=False)
    async with writing:
        one, other = await writing.written()
        assert (one["message"], "lastTransitionTime" in one) == ("two", True)
        assert (other["message"], "lastTransitionTime" in other) == ("other", False)


@pytest.mark.parametrize("status", [404, 409, 422])
async def test_a_pod_that_has_a_successor_by_now_is_dropped(status: int) -> None:
    async with Writing() as writing:
        writing.api.fails = [response_error(status, "", "")]
        writing.report("p1", "gone")
        writing.report("p2", "there")
        assert [one["pod"] for one in await writing.written()] == ["p2"]


async def test_what_is_not_written_is_written_later_and_a_newer_message_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    rest = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await rest(0)

    monkeypatch.setattr("binder.loop.conditions.asyncio.sleep", sleep)
    async with Writing() as writing:
        writing.api.fails = [response_error(503, "", "") for _ in range(3)]
        writing.report("p1", "one")
        assert [one["message"] for one in await writing.written()] == ["one"]
        assert [round(pause / 0.2) for pause in pauses] == [1, 2, 4]
        writing.api.answers.clear()
        writing.api.fails = [response_error(503, "", "")]
        writing.report("p1", "two")
        await writing.written()
        writing.report("p1", "three", first=False)
        writing.api.answers.set()
        assert [one["message"] for one in await writing.written()] == ["one", "three"]
        assert round(pauses[-1] / 0.2) == 1  # after a success the pauses are short again


async def test_nothing_is_written_over_what_the_binding_writes() -> None:
    async with Writing() as writing:
        writing.api.answers.clear()
        writing.report("p1", "no room")
        await writing.written()
        writing.report("p1", "no room, still", first=False)
        writing.report("p2", "other")
        withdrawn = asyncio.create_task(writing.conditions.withdraw(pod("p1")["metadata"]["uid"]))
        await writing.conditions.withdraw(pod("p3")["metadata"]["uid"])  # nothing to wait for
        await writing.written()
        assert not withdrawn.done()
        writing.api.answers.set()
        assert [one["message"] for one in await writing.written()] == ["no room", "other"]
        assert withdrawn.done()


REPORTED: list[tuple[list[Json], str]] = [
    ([], ""),
    ([{"type": "PodScheduled", "status": "True"}], ""),
    ([{"type": "PodScheduled", "reason": "SchedulingGated", "message": "x"}], ""),
    ([{"type": "Ready", "reason": "Unschedulable", "message": "x"}], ""),
    ([{"type": "PodScheduled", "reason": "Unschedulable"}], ""),
    ([{"type": "Ready"}, {"type": "PodScheduled", "reason": "Unschedulable", "message": "x"}], "x"),
]


@pytest.mark.parametrize(("written", "message"), REPORTED)
def test_what_an_earlier_leader_has_reported(written: list[Json], message: str) -> None:
    assert reported_message({"status": {"conditions": written}}) == message
    assert set(conditions({"status": {"conditions": written}})) == {one["type"] for one in written}
    assert reported_message({"status": {}}) == reported_message({}) == ""
