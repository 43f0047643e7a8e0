"""Pods and nodes that no watch settles: when they are read, and what is made of the answer."""

import asyncio
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change
from binder.cache.state import STALE_MODEL_GRACE_SECONDS, ClusterState
from binder.loop.resync import OVERDUE_SECONDS, AssumedPodResync
from binder.pod.demand import parse_demand
from tests.fakes.kube import Answers
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]


class Resync:
    """An AssumedPodResync with a node n1, at `now`. `freed`: what was said to have come free."""

    def __init__(self, *answers: Json | Exception) -> None:
        self.now = 0.0
        self.state = ClusterState(KEYS, clock=lambda: self.now)
        self.state.set_node(node(says=report(gpu())))
        self.api, self.freed, self.pods = Answers(*answers), list[bool](), list[Json]()
        self.resync = AssumedPodResync(
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
        task, before = asyncio.create_task(self.resync.run()), len(self.api.calls)
        self.resync.look()
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return len(self.api.calls) - before


async def test_a_pod_that_no_watch_has_shown_is_requested_when_it_is_overdue() -> None:
    resync = Resync(pod("p1", mem="4Gi", on="n1", choice="{", serviceAccountName="x"))
    resync.assume()
    resync.now = OVERDUE_SECONDS - 1
    assert await resync.look() == 0
    resync.now = OVERDUE_SECONDS
    assert await resync.look() == 1
    assert [one["spec"].get("serviceAccountName") for one in resync.pods] == [None]  # as the mirror keeps it
    assert resync.reserved() == 4 * GIB
    assert await resync.look() == 0


async def test_an_overdue_pod_without_a_node_waits_on() -> None:
    """Its Binding may still be on its way."""
    resync = Resync(pod("p1", mem="4Gi"))
    resync.assume()
    resync.now = OVERDUE_SECONDS
    assert await resync.look() == 1
    assert (resync.pods, resync.freed, resync.reserved()) == ([], [], 4 * GIB)


async def test_an_overdue_pod_that_is_gone_is_a_stale_model_until_its_node_was_asked() -> None:
    resync = Resync(response_error(404, "NotFound", ""), node(says=report(gpu())))
    resync.assume()
    resync.now = OVERDUE_SECONDS
    assert await resync.look() == 1
    assert (resync.freed, resync.reserved()) == ([True], 4 * GIB)
    resync.now += STALE_MODEL_GRACE_SECONDS - 1
    assert await resync.look() == 0
    resync.now += 1
    assert await resync.look() == 1
    assert resync.api.calls[-1][0] == "/api/v1/nodes/n1"
    assert (resync.freed, resync.reserved()) == ([True, True], 0)


async def test_what_stays_unsettled_is_read_less_and_less_often_and_soon_again_when_it_is_another() -> None:
    resync = Resync(pod("p1", mem="4Gi"))
    resync.assume()
    resync.now = OVERDUE_SECONDS
    questions = 0
    for _ in range(600):
        questions += await resync.look()
        resync.now += 1
    assert 10 <= questions <= 30  # and not 600
    resync.state.forget(PodUid("p1"))
    assert await resync.look() == 0
    resync.assume()
    resync.now += OVERDUE_SECONDS
    assert [await resync.look() for _ in range(2)] == [1, 0]
    resync.now += 2  # its pauses have begun anew
    assert await resync.look() == 1


NODES: dict[str, tuple[Json | Exception, list[bool], int]] = {
    "away": (KubeUnreachable("away"), [], 4),
    "gone": (response_error(404, "NotFound", ""), [True], 0),
    "strange": ({"metadata": {}}, [], 4),
}


@pytest.mark.parametrize("case", NODES)
async def test_what_a_stale_model_s_node_may_answer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, freed, gib = NODES[case]
    resync = Resync(answer)
    resync.assume()
    resync.state.remove_pod(PodUid("p1"))
    resync.now = STALE_MODEL_GRACE_SECONDS
    assert [await resync.look() for _ in range(2)] == [1, 0]
    resync.now += 2
    assert await resync.look() == (0 if case == "gone" else 1)
    assert resync.freed == freed
    assert resync.state.stale_model_count == bool(gib)
    assert ("answer not taken" in caplog.text) is (case == "strange")
