"""The eviction controller: whose pod is replaced, when, at what rate, and what its owner is told."""

from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.report import Failure, GpuReport, ModelReport, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind
from binder.loop.evict import LOOK_AGAIN_SECONDS, PAUSE_SECONDS
from binder.loop.verdict import BROKEN_SECONDS
from binder.pod.demand import parse_demand
from binder.rules.registry import RULES
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
BUDGET = response_error(429, "TooManyRequests", "disruption budget")


class Controller(Bench):
    """Node n1 with GPUs of 8 GiB, some of them broken, and a node n2 that takes any pod; stepped by hand."""

    def __init__(self, *, elsewhere: bool = True) -> None:
        super().__init__()
        self.uids: list[str] = []
        self.generation = 0
        if elsewhere:
            self.node("n2", 64)

    def resident_of(
        self, uid: str, *, slot: int = 0, gib: int = 4, owner: bool = True, done: bool = True, **more: Any
    ) -> Json:
        """`done`: its loader has ended."""
        choice = GpuChoice(GpuUuid(f"n1-{slot}"), slot, gib * GIB)
        labels = more.pop("labels", {})
        annotations = {KEYS.model_id: f"m-{uid}", **more.pop("annotations", {})}
        one = pod(
            uid, **{"mem": f"{gib}Gi", "on": "n1", "choice": choice, "annotations": annotations, **more}
        )
        one["metadata"]["labels"] = labels
        if owner:
            one["metadata"]["ownerReferences"] = [{"uid": f"rs-{uid}", "controller": True}]
        if done:
            one["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        self.api.pods[uid] = one
        self.tell("pods", one)
        self.uids.append(uid)
        return one

    def report(
        self,
        *,
        broken: str = "",
        state: ModelState = ModelState.READY,
        failure: Failure | None = None,
        full: int = 0,
        **more: Any,
    ) -> None:
        """Of all residents. `broken`: why GPU 0 is; `full`: GiB of GPU 1 that others use."""

        def one(slot: int) -> GpuReport:
            made = gpu(f"n1-{slot}", total=8 * GIB, index=slot, other_use_bytes=full * GIB * slot)
            return replace(made, healthy=False, broken=True, reason=broken) if broken and slot == 0 else made

        self.generation += 1
        models = tuple(self.row(uid, state, failure) for uid in self.uids if uid in self.api.pods)
        says = report(one(0), one(1), models=models, generation=self.generation)
        self.tell("nodes", node("n1", says=says, **more))
        self.scheduler.cluster.decider.table.beat("n1", 1e9)  # type: ignore[arg-type]

    def row(self, uid: str, state: ModelState, failure: Failure | None = None) -> ModelReport:
        choice = self.api.pods[uid]["metadata"]["annotations"].get(KEYS.gpu)
        on = GpuUuid("n1-0") if choice is None else GpuChoice.decode(choice).uuid
        reason = "out of memory" if failure else ""
        made = listed(uid, on=on, requested=4 * GIB)
        return replace(made, state=state, reason=reason, failure=failure)

    def fails(self, failure: Failure = Failure.CAPACITY) -> None:
        self.report(state=ModelState.FAILED, failure=failure)

    async def after(self, seconds: float) -> list[str]:
        """Who has been evicted by then."""
        self.now += seconds
        await self.scheduler.evictions.step()
        return self.api.evicted

    def left_out(self, uid: str) -> list[str]:
        """Nodes that the successor of this pod keeps away from."""
        decider = self.scheduler.cluster.decider
        one = pod("next", annotations={KEYS.model_id: f"m-{uid}"})
        codes = decider.codes(parse_demand(one, KEYS)).tolist()
        rows = [row for row, code in enumerate(codes) if code == RULES.codes["ExcludedAfterLoadFailure"]]
        return [decider.table.view(row).facts.name for row in rows]

    def recorded(self) -> list[tuple[str, str]]:
        return [(reason, message) for _, reason, message in self.events.said]


# Failed loads and lost files.

LOST = {"state": ModelState.LOST}
REPLACED: dict[str, tuple[Json, Json, str, list[str]]] = {
    "capacity": (
        {},
        {"state": ModelState.FAILED, "failure": Failure.CAPACITY},
        "ModelLoadFailedHere",
        ["n1"],
    ),
    "transient": (
        {},
        {"state": ModelState.FAILED, "failure": Failure.TRANSIENT},
        "ModelLoadFailedHere",
        ["n1"],
    ),
    "lost": ({}, LOST, "ModelLost", []),
    "lost, pinned": ({"annotations": {KEYS.server: "triton"}}, LOST, "ModelLost", []),
    "lost, another scheduler's": ({"schedulerName": "other"}, LOST, "ModelLost", []),
}


@pytest.mark.parametrize("case", REPLACED)
async def test_a_pod_is_replaced_once_and_its_successor_keeps_away(case: str) -> None:
    more, row, event, left_out = REPLACED[case]
    controller = Controller()
    controller.resident_of("p1", **more)
    for _ in range(2):
        controller.report(**row)
        assert await controller.after(0) == ["p1"]
    assert controller.left_out("p1") == left_out
    assert controller.api.conditions == []
    ((reason, message),) = controller.recorded()
    assert reason == event
    assert "replaced" in message


# The pod, the report; the reason of the event and what it says.
STAYS: dict[str, tuple[Json, Json, str, str]] = {
    "invalid": ({}, {"failure": Failure.INVALID_MODEL}, "ModelLoadFailed", "every node"),
    "quarantined": (
        {},
        {"failure": Failure.QUARANTINED},
        "ModelQuarantined",
        "while they are quarantined here",
    ),
    "pinned": (
        {"annotations": {KEYS.server: "triton"}},
        {"failure": Failure.CAPACITY},
        "ModelLoadFailed",
        "pinned",
    ),
    "bare": ({"owner": False}, {"failure": Failure.CAPACITY}, "ModelLoadFailed", "no controller would"),
    "lost, bare": ({"owner": False}, LOST, "ModelLoadFailed", "no controller would"),
}


@pytest.mark.parametrize("case", STAYS)
async def test_the_condition_of_a_pod_that_stays_says_why_once_whichever_binder_leads(case: str) -> None:
    more, row, reason, words = STAYS[case]
    first, successor = Controller(), Controller()
    for controller in (first, successor):
        one = controller.resident_of("p1", **more)
        one["status"].setdefault("conditions", []).extend(first.api.conditions)
        for _ in range(2):
            controller.report(**{"state": ModelState.FAILED, **row})
            assert await controller.after(LOOK_AGAIN_SECONDS) == []
    (condition,) = first.api.conditions
    assert (condition["type"], condition["status"]) == (KEYS.loaded_condition, "False")
    assert condition["reason"] == reason
    assert words in condition["message"]
    assert condition["message"].startswith("out of memory (" if "failure" in row else "the load failed (")
    assert first.recorded() == [(reason, condition["message"])]
    assert (successor.api.conditions, successor.recorded()) == ([], [])
    assert first.left_out("p1") == []


IGNORED: dict[str, tuple[Json, Json]] = {
    "moved": ({"on": "n2"}, {"state": ModelState.FAILED, "failure": Failure.CAPACITY}),
    "another scheduler's": (
        {"schedulerName": "other"},
        {"state": ModelState.FAILED, "failure": Failure.CAPACITY},
    ),
    "its loader still runs": ({"done": False}, LOST),
    "bare, its loader still runs": ({"done": False, "owner": False}, LOST),
    "no model pod": ({"choice": None}, LOST),
    "served": ({}, {}),
}


@pytest.mark.parametrize("case", IGNORED)
async def test_whom_nothing_is_done_to(case: str) -> None:
    more, row = IGNORED[case]
    controller = Controller()
    one = controller.resident_of("p1", **more)
    if case == "no model pod":
        one["spec"]["containers"][0]["resources"] = {}
    controller.report(**row)
    assert await controller.after(10 * BROKEN_SECONDS) == []
    assert (controller.api.conditions, controller.recorded()) == ([], [])


async def test_a_pod_that_is_gone_is_not_looked_for_again() -> None:
    controller = Controller()
    controller.resident_of("p1")
    controller.fails()
    del controller.api.pods["p1"]
    assert await controller.after(0) == []
    controller.resident_of("p1")
    assert await controller.after(LOOK_AGAIN_SECONDS) == []


async def test_after_so_many_failures_the_pod_stays() -> None:
    controller = Controller()
    same = {"annotations": {KEYS.model_id: "m"}}
    for uid in ("p1", "p2", "p3"):
        controller.resident_of(uid, gib=2, **same)
    controller.fails()
    assert await controller.after(0) == ["p1", "p2"]
    (condition,) = controller.api.conditions
    assert "it failed on other nodes, too" in condition["message"]


@pytest.mark.parametrize("error", [BUDGET, response_error(500, "", "x"), KubeUnreachable("timed out")])
async def test_an_eviction_that_is_refused_is_tried_again_soon_and_then_later_and_later(
    error: Exception,
) -> None:
    controller = Controller()
    controller.resident_of("p1", gib=2)
    controller.resident_of("p2", gib=2)
    controller.fails()
    controller.api.refusals["p1"] = error
    assert await controller.after(0) == []
    assert await controller.after(1) == ["p2"]  # one that is refused does not keep the others waiting
    assert await controller.after(1) == ["p2"]
    del controller.api.refusals["p1"]
    assert await controller.after(5) == ["p2", "p1"]
    assert controller.api.conditions == []


async def test_a_defect_over_one_pod_does_not_stop_the_others() -> None:
    controller = Controller()
    controller.resident_of("p1", gib=2)
    controller.resident_of("p2", gib=2)
    controller.fails()
    controller.api.refusals["p1"] = ValueError("strange")
    assert await controller.after(0) == ["p2"]


async def test_a_pod_is_moved_only_where_another_node_has_room() -> None:
    controller = Controller(elsewhere=False)
    controller.resident_of("p1")
    controller.fails()
    for _ in range(3):
        assert await controller.after(LOOK_AGAIN_SECONDS) == []
    (condition,) = controller.api.conditions
    assert "no other node has room" in condition["message"]
    controller.node("n2", 8)
    assert await controller.after(LOOK_AGAIN_SECONDS) == ["p1"]


async def test_the_pod_itself_does_not_stand_in_the_way_of_its_move() -> None:
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "m"}}}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    controller = Controller()
    controller.node("n2", 64, labels={"zone": "a"})
    controller.resident_of("p1", affinity=apart, labels={"app": "m"})
    controller.report(state=ModelState.FAILED, failure=Failure.CAPACITY, labels={"zone": "a"})
    assert await controller.after(0) == ["p1"]


async def test_a_standby_remembers_only_the_failures_that_there_are() -> None:
    """For weeks it hears of failed loads whose pods come and go, and then it leads."""
    controller = Controller()
    for number in range(60):
        controller.uids.clear()
        controller.resident_of(f"p{number}")
        controller.fails(Failure.INVALID_MODEL)
    gone = report(gpu("n3-0"), models=(controller.row("p59", ModelState.LOST),))
    controller.tell("nodes", node("n3", says=gone))
    controller.tell("nodes", node("n3"), ChangeKind.GONE)
    await controller.after(0)
    assert [name for name, *_ in controller.events.said] == ["p59"]


async def test_the_condition_is_corrected_once_when_the_model_is_loaded_after_all() -> None:
    controller = Controller()
    controller.resident_of("p1")
    controller.fails(Failure.QUARANTINED)
    await controller.after(0)
    for _ in range(2):
        controller.report()
        await controller.after(0)
    assert [(one["status"], one["reason"]) for one in controller.api.conditions] == [
        ("False", "ModelQuarantined"),
        ("True", "ModelLoaded"),
    ]


ENDS: dict[str, tuple[Json, Failure, list[str]]] = {
    "capacity": ({}, Failure.CAPACITY, ["n1"]),
    "another scheduler's": ({"schedulerName": "other"}, Failure.CAPACITY, ["n1"]),
    "invalid": ({}, Failure.INVALID_MODEL, []),
    "quarantined": ({}, Failure.QUARANTINED, []),
    "pinned": ({"annotations": {KEYS.server: "triton"}}, Failure.CAPACITY, []),
}


@pytest.mark.parametrize("kind", ChangeKind)
@pytest.mark.parametrize("case", ENDS)
async def test_a_standby_knows_where_the_successor_of_a_replaced_pod_is_not_to_go(
    case: str, kind: ChangeKind
) -> None:
    """It never dealt with the failed load itself, and leads from now on."""
    more, failure, left_out = ENDS[case]
    controller = Controller()
    going = controller.resident_of("p1", **more)
    controller.fails(failure)
    assert controller.left_out("p1") == []
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    controller.scheduler.on_pod(Change(kind, going))
    assert controller.left_out("p1") == left_out


# Broken GPUs.

XID = "XID 79"
EVENT = "GPU 0 (n1-0) of node n1 is not healthy: XID 79"


async def test_a_pod_leaves_a_gpu_that_has_been_broken_for_a_while() -> None:
    controller = Controller()
    controller.resident_of("p1")
    controller.resident_of("p2", slot=1)
    controller.report(broken=XID)
    assert await controller.after(BROKEN_SECONDS - 1) == []
    controller.report(broken=f"{XID}, and more")  # other words for it are not another fault
    assert await controller.after(1) == ["p1"]
    assert ("ModelOnBrokenGPU", f"{EVENT}; replaced") in controller.recorded()
    assert await controller.after(10 * BROKEN_SECONDS) == ["p1"]


@pytest.mark.parametrize("state", [ModelState.PENDING, ModelState.STAGED, ModelState.LOADING])
async def test_no_pod_waits_to_be_loaded_onto_a_broken_gpu(state: ModelState) -> None:
    controller = Controller()
    controller.resident_of("p1")
    controller.report(broken=XID, state=state)
    assert await controller.after(BROKEN_SECONDS) == ["p1"]


async def test_a_gpu_that_flaps_costs_no_pod_its_place() -> None:
    controller = Controller()
    controller.resident_of("p1")
    for _ in range(5):
        controller.report(broken=XID)
        assert await controller.after(BROKEN_SECONDS - 1) == []
        controller.report()
        assert await controller.after(2) == []


async def test_a_gpu_that_only_cannot_be_read_costs_no_pod_its_place() -> None:
    controller = Controller()
    controller.resident_of("p1")
    unread = replace(gpu("n1-0", total=None), healthy=False, reason="NVML has not answered for 5 s")
    models = (controller.row("p1", ModelState.READY),)
    controller.tell("nodes", node("n1", says=report(unread, gpu("n1-1", index=1), models=models)))
    assert await controller.after(10 * BROKEN_SECONDS) == []


async def test_no_pod_goes_that_has_nowhere_to_go() -> None:
    controller = Controller(elsewhere=False)
    controller.resident_of("p1")
    controller.report(broken=XID, full=5)
    assert await controller.after(10 * BROKEN_SECONDS) == []
    controller.node("n2", 8)
    assert await controller.after(10 * BROKEN_SECONDS) == ["p1"]


async def test_where_no_pod_has_anywhere_to_go_few_are_tried_at_a_time_and_each_in_turn() -> None:
    controller = Controller(elsewhere=False)
    for number in range(50):
        controller.resident_of(f"p{number}")
    controller.report(broken=XID, full=5)
    looked: list[str] = []
    get = controller.api.get

    async def counted(path: str, **params: str) -> Any:
        looked.append(path)
        return await get(path, **params)

    controller.api.get = counted  # type: ignore[method-assign]
    await controller.after(BROKEN_SECONDS)
    assert 0 < len(looked) <= 20
    for _ in range(2):
        await controller.after(40)  # the first ones are due again
    assert len(set(looked)) == 50


async def test_pods_leave_a_broken_gpu_one_after_the_other() -> None:
    controller = Controller()
    controller.resident_of("p1", gib=2)
    controller.resident_of("p2", gib=2)
    controller.report(broken=XID)
    assert len(await controller.after(BROKEN_SECONDS)) == 1
    assert len(await controller.after(PAUSE_SECONDS - 1)) == 1
    assert len(await controller.after(1)) == 2


async def test_a_budget_that_protects_one_pod_does_not_keep_the_others_there() -> None:
    controller = Controller()
    controller.resident_of("p1", gib=2)
    controller.resident_of("p2", gib=2)
    controller.report(broken=XID)
    controller.api.refusals["p1"] = BUDGET
    assert await controller.after(BROKEN_SECONDS) == []
    assert await controller.after(PAUSE_SECONDS) == ["p2"]
    del controller.api.refusals["p1"]
    assert await controller.after(10 * PAUSE_SECONDS) == ["p2", "p1"]


@pytest.mark.parametrize(
    ("more", "why"),
    [({"schedulerName": "other"}, "scheduler other placed it"), ({"owner": False}, "no controller would")],
)
async def test_the_owner_of_a_pod_that_would_not_be_replaced_is_reported_once(more: Json, why: str) -> None:
    controller = Controller()
    controller.resident_of("p1", **more)
    controller.report(broken=XID)
    for _ in range(3):
        assert await controller.after(BROKEN_SECONDS) == []
    (message,) = [message for reason, message in controller.recorded() if reason == "ModelOnBrokenGPU"]
    assert message.startswith(f"{EVENT}; {why}")


async def test_a_model_that_has_failed_and_a_pod_that_ends_are_not_replaced_for_the_gpu_s_sake() -> None:
    controller = Controller()
    controller.resident_of("p1")
    controller.report(broken=XID, state=ModelState.UNLOADING)
    assert await controller.after(10 * BROKEN_SECONDS) == []
    controller.report(broken=XID)
    controller.begin_to_go("p1")
    assert await controller.after(BROKEN_SECONDS) == []
    controller.tell("nodes", node("n1"), ChangeKind.GONE)
    assert await controller.after(10 * BROKEN_SECONDS) == []
