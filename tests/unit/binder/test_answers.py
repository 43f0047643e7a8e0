"""What the API server's answers mean to the binder: to a Binding, to an eviction, to a question about a pod or a
node."""

import asyncio
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.pod import PodRef
from berth.kube.errors import KubeError, KubeUnreachable, response_error
from berth.kube.informer import Change
from binder.cache.state import STALE_MODEL_GRACE_SECONDS, ClusterState
from binder.engine.decision import Placement
from binder.loop.bind import current_pod, is_answer, may_have_happened, post_binding
from binder.loop.pod_writes import evict, set_nominated_node
from binder.loop.resync import OVERDUE_SECONDS, AssumedPodResync
from binder.pod.demand import parse_demand
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]
REF = PodRef("team", "p1", PodUid("p1"))


class Api:
    """Gives these answers, one after the other; the last one again and again."""

    def __init__(self, *answers: Json | Exception) -> None:
        self._answers, self.calls = list(answers), list[tuple[str, Any]]()

    async def _next(self, path: str, body: Any = None) -> Json:
        self.calls.append((path, body))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    get = create = _next

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        return await self._next(path, body)


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
    api, choice = Api({}), GpuChoice(GpuUuid("GPU-a"), 0, GIB, (GpuRef(GpuUuid("GPU-b"), 1),))
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


async def test_a_pod_is_asked_for_until_there_is_an_answer(pauses: list[float]) -> None:
    api = Api(*[KubeUnreachable("away")] * 9, pod("p1"))
    assert await current_pod(api, REF) == pod("p1")  # type: ignore[arg-type]
    assert [round(pause / 0.2) for pause in pauses[:3]] == [1, 2, 4]
    assert 10 < max(pauses) < 20
    assert {path for path, _ in api.calls} == {"/api/v1/namespaces/team/pods/p1"}


@pytest.mark.parametrize("answer", [response_error(404, "NotFound", ""), {"metadata": {"uid": "successor"}}])
async def test_a_pod_that_is_gone_is_none_although_it_has_a_successor(answer: Any) -> None:
    assert await current_pod(Api(answer), REF) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("rehearse", [True, False])
async def test_an_eviction_is_of_this_pod_and_rehearsed_where_it_is_to_be(rehearse: bool) -> None:
    api = Api({})
    await evict(api, REF, dry_run=rehearse)  # type: ignore[arg-type]
    ((path, body),) = api.calls
    assert path == "/api/v1/namespaces/team/pods/p1/eviction"
    dry = {"dryRun": ["All"]} if rehearse else {}
    assert body == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "p1", "namespace": "team"},
        "deleteOptions": {"preconditions": {"uid": "p1"}, **dry},
    }


async def test_whoever_is_gone_already_is_evicted() -> None:
    await evict(Api(response_error(404, "NotFound", "")), REF)  # type: ignore[arg-type]
    with pytest.raises(KubeError, match="429"):
        await evict(Api(response_error(429, "", "")), REF)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "written"), [("n1", "n1"), ("", None)])
async def test_the_nominated_node_is_said_of_this_pod(name: str, written: str | None) -> None:
    api = Api({})
    await set_nominated_node(api, REF, name)  # type: ignore[arg-type]
    path, body = api.calls[0]
    assert path == "/api/v1/namespaces/team/pods/p1/status"
    assert body == {"metadata": {"uid": "p1"}, "status": {"nominatedNodeName": written}}


class Asking:
    """AssumedPodResync about a node n1, at `now`. `freed`: what was said to have come free."""

    def __init__(self, *answers: Json | Exception) -> None:
        self.now = 0.0
        self.state = ClusterState(KEYS, clock=lambda: self.now)
        self.state.set_node(node(says=report(gpu())))
        self.api, self.freed, self.pods = Api(*answers), list[bool](), list[Json]()
        self.doubts = AssumedPodResync(
            self.api,  # type: ignore[arg-type]
            self.state,
            on_pod=self._on_pod,
            on_node=lambda change: self.state.set_node(change.object),
            freed=self.freed.append,
            clock=lambda: self.now,
        )

    def _on_pod(self, change: Change) -> bool:
        self.pods.append(change.object)
        return self.state.set_pod(change.object)

    def assume(self) -> None:
        demand = parse_demand(pod("p1", mem="4Gi"), KEYS)
        self.state.assume(demand, NodeName("n1"), GpuChoice(GpuUuid("GPU-a"), 0, 4 * GIB))

    def reserved(self) -> int:
        return self.state.view(NodeName("n1")).reserved_on(GpuUuid("GPU-a"))

    async def look(self) -> int:
        """How many questions that takes."""
        task, before = asyncio.create_task(self.doubts.run()), len(self.api.calls)
        self.doubts.look()
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(self.api.calls) - before


async def test_a_pod_that_no_watch_has_shown_is_asked_for_when_it_is_overdue() -> None:
    asking = Asking(pod("p1", mem="4Gi", on="n1", choice="{", serviceAccountName="x"))
    asking.assume()
    asking.now = OVERDUE_SECONDS - 1
    assert await asking.look() == 0
    asking.now = OVERDUE_SECONDS
    assert await asking.look() == 1
    assert [one["spec"].get("serviceAccountName") for one in asking.pods] == [None]  # as the mirror keeps it
    assert asking.reserved() == 4 * GIB
    assert await asking.look() == 0


async def test_an_overdue_pod_without_a_node_waits_on() -> None:
    """Its Binding may still be on its way."""
    asking = Asking(pod("p1", mem="4Gi"))
    asking.assume()
    asking.now = OVERDUE_SECONDS
    assert await asking.look() == 1
    assert (asking.pods, asking.freed, asking.reserved()) == ([], [], 4 * GIB)


async def test_an_overdue_pod_that_is_gone_is_a_stale_model_until_its_node_was_asked() -> None:
    asking = Asking(response_error(404, "NotFound", ""), node(says=report(gpu())))
    asking.assume()
    asking.now = OVERDUE_SECONDS
    assert await asking.look() == 1
    assert (asking.freed, asking.reserved()) == ([True], 4 * GIB)
    asking.now += STALE_MODEL_GRACE_SECONDS - 1
    assert await asking.look() == 0
    asking.now += 1
    assert await asking.look() == 1
    assert asking.api.calls[-1][0] == "/api/v1/nodes/n1"
    assert (asking.freed, asking.reserved()) == ([True, True], 0)


async def test_what_stays_in_doubt_is_asked_less_and_less_often_and_anew_when_it_is_another() -> None:
    asking = Asking(pod("p1", mem="4Gi"))
    asking.assume()
    asking.now = OVERDUE_SECONDS
    questions = 0
    for _ in range(600):
        questions += await asking.look()
        asking.now += 1
    assert 10 <= questions <= 30  # and not 600
    asking.state.forget(PodUid("p1"))
    assert await asking.look() == 0
    asking.assume()
    asking.now += OVERDUE_SECONDS
    assert [await asking.look() for _ in range(2)] == [1, 0]
    asking.now += 2  # its pauses have begun anew
    assert await asking.look() == 1


NODES: dict[str, tuple[Json | Exception, list[bool], int]] = {
    "away": (KubeUnreachable("away"), [], 4),
    "gone": (response_error(404, "NotFound", ""), [True], 0),
    "strange": ({"metadata": {}}, [], 4),
}


@pytest.mark.parametrize("case", NODES)
async def test_what_a_stale_model_s_node_may_answer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, freed, gib = NODES[case]
    asking = Asking(answer)
    asking.assume()
    asking.state.remove_pod(PodUid("p1"))
    asking.now = STALE_MODEL_GRACE_SECONDS
    assert [await asking.look() for _ in range(2)] == [1, 0]
    asking.now += 2
    assert await asking.look() == (0 if case == "gone" else 1)
    assert asking.freed == freed
    assert asking.state.stale_model_count == bool(gib)
    assert ("answer not taken" in caplog.text) is (case == "strange")
