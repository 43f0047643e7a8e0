"""Bindings that the API server does not answer, or answers late, and what each answer says. Time is the test's."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.pod import PodRef, node_of
from berth.kube.client import WRITE_SECONDS
from berth.kube.election import ElectionTimes
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind
from binder.engine.decision import Placement
from binder.loop.bind import BINDS_AT_ONCE, current_pod, is_answer, may_have_happened, post_binding
from tests.fakes.binder import scheduler_of
from tests.fakes.kube import Answers
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.unit.binder.test_scheduler import Api, Events

Json = dict[str, Any]


class LateApi(Api):
    """Keeps what it does not answer, and writes it when it is told to. `silent`: what those that come are
    told instead, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: list[KubeError] = []
        self.kept: list[Json] = []

    async def create(self, path: str, body: Json) -> Json:
        if self.silent:
            await asyncio.sleep(0)
            self.bindings.append(body)
            self.kept.append(body)
            raise self.silent.pop(0)
        return await super().create(path, body)

    def write(self) -> None:
        """What was kept lands now; what cannot any more does not."""
        for body in self.kept:
            with contextlib.suppress(KubeError):
                self._bind(body)
        self.kept.clear()


class Bench:
    """One node with one GPU of 16 GiB."""

    def __init__(self) -> None:
        self.now, self.api, self.events = 1000.0, LateApi(), Events()
        self.sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self.may_write: Callable[[], bool] = lambda: True
        self.scheduler = scheduler_of(
            self.api,
            events=self.events,
            monotonic=lambda: self.now,
            sleep=self.sleep,
            may_write=lambda: self.may_write(),
        )
        self.hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        allocatable = {"cpu": "1000", "memory": "1Ti", "pods": "1000"}
        self.tell("nodes", node("n1", says=report(gpu("G1")), allocatable=allocatable))
        self.scheduler.cluster.decider.table.beat("n1", float("inf"))  # type: ignore[arg-type]

    async def sleep(self, seconds: float) -> None:
        until = asyncio.get_running_loop().create_future()
        self.sleeping.append((self.now + seconds, until))
        await until

    def tell(self, source: str, one: Json, kind: ChangeKind = ChangeKind.SET) -> None:
        self.hear[source](Change(kind, one))

    def add(self, uid: str, **asks: Any) -> None:
        self.api.pods[uid] = pod(uid, **asks)
        self.tell("pods", pod(uid, **asks))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def step(self, seconds: float = 0.0) -> None:
        """Time passes, then there is one decision, and everything goes as far as it can."""
        self.now += seconds
        due = [future for until, future in self.sleeping if until <= self.now and not future.done()]
        for future in due:
            future.set_result(None)
        await self.settle()
        self.scheduler.step()
        await self.settle()

    def used(self) -> int:
        """GiB that the API server says are given out."""
        sizes = {"p1": 12, "p2": 12}
        return sum(sizes[uid] for uid, one in self.api.pods.items() if node_of(one))


SILENCES = {
    "timeout": KubeUnreachable("TimeoutError"),
    "reset": KubeUnreachable("ClientOSError: reset"),
    **{str(status): response_error(status, "", "x") for status in (500, 502, 503, 504)},
}


@pytest.mark.parametrize("silence", sorted(SILENCES))
@pytest.mark.parametrize("lands", ["never", "at once", "after the second pod came"])
async def test_bytes_of_a_binding_without_an_answer_are_not_given_to_another(
    silence: str, lands: str
) -> None:
    bench = Bench()
    bench.api.silent = [SILENCES[silence]] * 3
    bench.add("p1", mem="12Gi", created="2026-01-02T00:00:00Z")
    await bench.step()
    if lands == "at once":
        bench.api.write()
    bench.add("p2", mem="12Gi", created="2026-01-01T00:00:00Z")
    for _ in range(4):
        await bench.step(0.1)
    if lands == "after the second pod came":
        bench.api.write()
    for _ in range(20):
        await bench.step(20.0)
    assert bench.used() == 12
    assert node_of(bench.api.pods["p1"]) == "n1"
    assert bench.api.bindings[0]["metadata"]["name"] == "p1"
    assert all(body == bench.api.bindings[0] for body in bench.api.bindings)
    assert not bench.scheduler.bindings.in_doubt
    assert ("p1", "Scheduled") in [said[:2] for said in bench.events.said]
    await bench.scheduler.abandon()


@pytest.mark.parametrize(
    "error", [KubeUnreachable("reset"), *(response_error(s, "", "") for s in (429, 408, 503))]
)
async def test_the_same_binding_is_sent_again_after_growing_pauses(error: KubeError) -> None:
    bench = Bench()
    bench.api.silent = [error] * 10_000
    bench.add("p1", mem="12Gi")
    for _ in range(600):
        await bench.step(0.1)  # a minute: 0.5, 1, 2, 4, 8, 15, 15 s
    assert 6 <= len(bench.api.bindings) <= 9
    assert all(body == bench.api.bindings[0] for body in bench.api.bindings)
    assert [said[:2] for said in bench.events.said] == [("p1", "FailedScheduling")]
    assert bench.scheduler.state.has_place("p1")  # type: ignore[arg-type]
    await bench.scheduler.abandon()


@pytest.mark.parametrize("status", [400, 401, 403, 409, 422])
async def test_a_refusal_is_final_where_nothing_was_left_open(status: int) -> None:
    bench = Bench()
    bench.api.fail_before = [response_error(status, "", "no")]
    bench.add("p1", mem="12Gi")
    await bench.step()
    assert not bench.scheduler.state.has_place("p1")  # type: ignore[arg-type]
    assert not bench.scheduler.bindings.in_doubt
    for _ in range(4):
        await bench.step(1.0)
    assert node_of(bench.api.pods["p1"]) == "n1"


@pytest.mark.parametrize("status", [400, 401, 403, 409, 422])
async def test_a_refusal_does_not_close_an_earlier_try(status: int) -> None:
    """A webhook holds the first and refuses the second; then it lets the first through."""
    bench = Bench()
    bench.api.silent = [KubeUnreachable("TimeoutError")]
    bench.add("p1", mem="12Gi", created="2026-01-02T00:00:00Z")
    await bench.step()
    bench.api.fail_before = [response_error(status, "", "no")] * 3
    bench.add("p2", mem="12Gi", created="2026-01-01T00:00:00Z")
    for _ in range(5):
        await bench.step(2.0)
    bench.api.write()
    for _ in range(10):
        await bench.step(20.0)
    assert (bench.used(), node_of(bench.api.pods["p1"])) == (12, "n1")
    await bench.scheduler.abandon()


@pytest.mark.parametrize("how", ["gone", "deleting", "successor", "gone unheard"])
async def test_a_pod_that_is_deleted_meanwhile_ends_the_tries(how: str) -> None:
    bench = Bench()
    bench.api.silent = [KubeUnreachable("TimeoutError")]
    bench.add("p1", mem="12Gi")
    await bench.step()
    old = bench.api.pods.pop("p1")
    if how == "deleting":
        old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        bench.api.pods["p1"] = old
        bench.tell("pods", old)
        bench.api.fail_before = [response_error(409, "Conflict", "is being deleted")] * 99
    elif how == "successor":
        bench.api.pods["p1"] = {**pod("p1"), "metadata": {**pod("p1")["metadata"], "uid": "other"}}
    if how != "gone unheard" and how != "deleting":
        bench.tell("pods", old, ChangeKind.GONE)
    for _ in range(5):
        await bench.step(5.0)
    assert not bench.scheduler.bindings.in_doubt
    assert len(bench.api.bindings) <= 2
    assert not bench.scheduler.state.has_place("p1")  # type: ignore[arg-type]
    # It may have been bound and loaded before it went: only its node can tell.
    if how != "deleting":
        assert bench.scheduler.state.stale_model_count == 1


async def test_pods_whose_bindings_get_no_answer_take_nobody_s_turn() -> None:
    """A webhook of one namespace that is down must not stop all the others."""
    bench = Bench()
    for number in range(BINDS_AT_ONCE + 5):
        bench.api.silent = [response_error(500, "InternalError", "failed calling webhook")]
        bench.add(f"stuck{number}", mem="1Mi", created=f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z")
        await bench.step()
    bench.add("fine", mem="1Mi")
    await bench.step()
    assert node_of(bench.api.pods["fine"]) == "n1"
    await bench.scheduler.abandon()


async def test_while_it_is_not_sure_to_lead_nothing_is_sent_again_and_the_bytes_are_kept() -> None:
    bench = Bench()
    bench.api.silent = [KubeUnreachable("TimeoutError")]
    bench.add("p1", mem="12Gi")
    await bench.step()
    bench.may_write = lambda: False
    for _ in range(10):
        await bench.step(10.0)
    assert len(bench.api.bindings) == 1
    assert bench.scheduler.state.has_place("p1")  # type: ignore[arg-type]
    bench.may_write = lambda: True  # renewed after all
    for _ in range(3):
        await bench.step(10.0)
    assert node_of(bench.api.pods["p1"]) == "n1"


async def test_a_pod_that_was_decided_while_the_lease_was_late_is_tried_again() -> None:
    bench = Bench()
    bench.add("p1", mem="12Gi")
    bench.scheduler.step()
    bench.may_write = lambda: False
    await bench.settle()
    assert not bench.scheduler.state.has_place("p1")  # type: ignore[arg-type]
    bench.may_write = lambda: True
    for _ in range(3):
        await bench.step(1.0)
    assert node_of(bench.api.pods["p1"]) == "n1"


async def test_a_process_that_ends_does_not_wait_for_what_nobody_answers_and_says_so() -> None:
    """Its Lease is not let go, then: what it has sent may still be written."""
    bench = Bench()
    bench.api.silent = [KubeUnreachable("TimeoutError")] * 99
    bench.add("p1", mem="12Gi")
    await bench.step()
    async with asyncio.timeout(1):
        await bench.scheduler.drain()
    assert bench.scheduler.bindings.in_doubt
    assert len(bench.api.bindings) == 1


async def test_a_binding_that_is_cut_off_leaves_a_doubt() -> None:
    bench = Bench()
    never = asyncio.Event()

    async def hangs(path: str, body: Json) -> Json:
        await never.wait()
        return {}

    bench.api.create = hangs  # type: ignore[method-assign]
    bench.add("p1", mem="12Gi")
    await bench.step()
    await bench.scheduler.abandon()
    assert bench.scheduler.bindings.in_doubt


async def test_a_process_whose_bindings_are_answered_leaves_no_doubt() -> None:
    bench = Bench()
    bench.add("p1", mem="12Gi")
    await bench.step()
    await bench.scheduler.drain()
    assert not bench.scheduler.bindings.in_doubt


def test_what_a_leader_writes_last_is_written_before_its_lease_ends() -> None:
    times = ElectionTimes()
    sure_for = times.lease_seconds - WRITE_SECONDS
    assert sure_for > 2 * times.retry_seconds  # one renewal may be late and the leader goes on
    assert sure_for <= times.renew_deadline_seconds


async def test_a_leader_that_is_not_sure_waits_instead_of_looking_again_and_again() -> None:
    bench = Bench()
    bench.may_write = lambda: False
    bench.add("p1", mem="12Gi")
    steps, step = list[int](), bench.scheduler.step

    def counted() -> None:
        steps.append(1)
        step()

    bench.scheduler.step = counted  # type: ignore[method-assign]
    task = asyncio.create_task(bench.scheduler.run())
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 1 <= len(steps) <= 3


# What an answer says, and what is asked after none.

REF = PodRef("team", "p1", PodUid("p1"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of the code under test, which take no time."""
    found: list[float] = []
    rest = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            found.append(seconds)
        await rest(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


# Status, whether it is an answer to the Binding, whether it may have been written.
STATUSES: list[tuple[int | None, bool, bool]] = [
    (None, False, True),
    (400, True, False),
    (404, True, False),
    (408, False, False),
    (409, True, False),
    (429, False, False),
    (499, True, False),
    (500, False, True),
    (504, False, True),
]


@pytest.mark.parametrize(("status", "answers", "open_"), STATUSES)
def test_what_an_error_says_of_a_binding(status: int | None, answers: bool, open_: bool) -> None:
    error: KubeError = KubeUnreachable("x") if status is None else response_error(status, "", "")
    assert (is_answer(error), may_have_happened(error)) == (answers, open_)


async def test_a_binding_is_one_write_for_this_pod_and_no_other() -> None:
    api, choice = Answers({}), GpuChoice(GpuUuid("GPU-a"), 0, GIB, (GpuRef(GpuUuid("GPU-b"), 1),))
    await post_binding(api, KEYS, REF, Placement(NodeName("n1"), choice))  # type: ignore[arg-type]
    ((path, body),) = api.calls
    assert path == "/api/v1/namespaces/team/pods/p1/binding"
    assert body == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "p1",
            "namespace": "team",
            "uid": "p1",
            "annotations": {KEYS.gpu: choice.encode()},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
    }


async def test_a_pod_is_requested_until_there_is_an_answer(pauses: list[float]) -> None:
    api = Answers(*[KubeUnreachable("away")] * 9, pod("p1"))
    assert await current_pod(api, REF) == pod("p1")  # type: ignore[arg-type]
    assert [round(pause / 0.2) for pause in pauses[:3]] == [1, 2, 4]
    assert 10 < max(pauses) < 20
    assert {path for path, _ in api.calls} == {"/api/v1/namespaces/team/pods/p1"}


@pytest.mark.parametrize("answer", [response_error(404, "NotFound", ""), {"metadata": {"uid": "successor"}}])
async def test_a_pod_that_is_gone_is_none_although_it_has_a_successor(answer: Any) -> None:
    assert await current_pod(Answers(answer), REF) is None  # type: ignore[arg-type]
