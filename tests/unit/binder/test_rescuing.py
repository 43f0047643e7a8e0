"""Models on a GPU that is broken: whose pod goes, when, and where it has somewhere to go."""

from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.report import GpuReport, ModelReport, ModelState
from berth.kube.errors import response_error
from berth.kube.informer import ChangeKind
from binder.loop.rescuing import BROKEN_SECONDS, PAUSE_SECONDS
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace


class Ward(Bench):
    """Node n1 with GPUs of 8 GiB, some of them broken; the rescuer is stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.uids: list[str] = []

    def resident_of(self, uid: str, *, slot: int = 0, gib: int = 4, **more: Any) -> None:
        choice = GpuChoice(GpuUuid(f"n1-{slot}"), slot, gib * GIB)
        one = pod(uid, mem=f"{gib}Gi", on="n1", choice=choice, **more)
        one["metadata"]["ownerReferences"] = [{"uid": f"rs-{uid}", "controller": True}]
        self.api.pods[uid] = one
        self.tell("pods", one)
        self.uids.append(uid)

    def report(
        self, *, broken: str = "XID 79", gpus: int = 2, state: ModelState = ModelState.READY, foreign: int = 0
    ) -> None:
        def one(slot: int) -> GpuReport:
            made = gpu(f"n1-{slot}", total=8 * GIB, index=slot, other_use_bytes=foreign * GIB * (slot > 0))
            return replace(made, healthy=False, broken=True, reason=broken) if broken and slot == 0 else made

        models = tuple(self.row(uid, state) for uid in self.uids if uid in self.api.pods)
        self.tell("nodes", node("n1", says=report(*map(one, range(gpus)), models=models)))
        self.scheduler.cluster.decider.table.beat("n1", 1e9)  # type: ignore[arg-type]

    def row(self, uid: str, state: ModelState) -> ModelReport:
        on = GpuChoice.decode(self.api.pods[uid]["metadata"]["annotations"][KEYS.gpu]).uuid
        return replace(listed(uid, on=on, requested=4 * GIB), state=state)

    async def after(self, seconds: float) -> list[str]:
        """Who has been evicted by then."""
        self.now += seconds
        await self.scheduler.rescuer.step()
        return self.api.evicted


async def test_a_pod_leaves_a_gpu_that_has_been_broken_for_a_while() -> None:
    ward = Ward()
    ward.resident_of("p1")
    ward.resident_of("p2", slot=1)
    ward.report()
    assert await ward.after(BROKEN_SECONDS - 1) == []
    ward.report(broken="XID 79, and more")  # other words for it are not another fault
    assert await ward.after(1) == ["p1"]
    assert ("p1", "ModelOnBrokenGPU", "GPU 0 (n1-0): XID 79; replaced") in ward.events.said
    assert await ward.after(10 * BROKEN_SECONDS) == ["p1"]


@pytest.mark.parametrize("state", [ModelState.PENDING, ModelState.STAGED, ModelState.LOADING])
async def test_nobody_waits_to_be_loaded_onto_a_broken_gpu(state: ModelState) -> None:
    ward = Ward()
    ward.resident_of("p1")
    ward.report(state=state)
    assert await ward.after(BROKEN_SECONDS) == ["p1"]


async def test_what_flaps_costs_nobody_his_place() -> None:
    ward = Ward()
    ward.resident_of("p1")
    for _ in range(5):
        ward.report()
        assert await ward.after(BROKEN_SECONDS - 1) == []
        ward.report(broken="")
        assert await ward.after(2) == []


async def test_a_gpu_that_only_cannot_be_read_costs_nobody_his_place() -> None:
    ward = Ward()
    ward.resident_of("p1")
    unread = replace(gpu("n1-0", total=None), healthy=False, reason="NVML has not answered for 5 s")
    models = (ward.row("p1", ModelState.READY),)
    ward.tell("nodes", node("n1", says=report(unread, gpu("n1-1", index=1), models=models)))
    ward.scheduler.cluster.decider.table.beat("n1", 1e9)  # type: ignore[arg-type]
    assert await ward.after(10 * BROKEN_SECONDS) == []


async def test_nobody_goes_who_has_nowhere_to_go() -> None:
    ward = Ward()
    ward.resident_of("p1")
    ward.report(foreign=5)
    assert await ward.after(10 * BROKEN_SECONDS) == []
    ward.node("n2", 8)
    assert await ward.after(10 * BROKEN_SECONDS) == ["p1"]


async def test_where_nobody_has_anywhere_to_go_few_are_looked_at_at_a_time_and_each_in_turn() -> None:
    ward = Ward()
    for number in range(50):
        ward.resident_of(f"p{number}", gib=4)
    ward.report(foreign=5)
    looked: list[str] = []
    get = ward.api.get

    async def counted(path: str, **params: str) -> Any:
        looked.append(path)
        return await get(path, **params)

    ward.api.get = counted  # type: ignore[method-assign]
    await ward.after(BROKEN_SECONDS)
    assert 0 < len(looked) <= 20
    for _ in range(2):
        await ward.after(40)  # the first ones are due again
    assert len(set(looked)) == 50


async def test_they_go_one_after_the_other() -> None:
    ward = Ward()
    ward.resident_of("p1", gib=2)
    ward.resident_of("p2", gib=2)
    ward.report()
    assert len(await ward.after(BROKEN_SECONDS)) == 1
    assert len(await ward.after(PAUSE_SECONDS - 1)) == 1
    assert len(await ward.after(1)) == 2


async def test_a_budget_that_protects_one_pod_does_not_keep_the_others_there() -> None:
    ward = Ward()
    ward.resident_of("p1", gib=2)
    ward.resident_of("p2", gib=2)
    ward.report()
    ward.api.refusals["p1"] = response_error(429, "TooManyRequests", "disruption budget")
    assert await ward.after(BROKEN_SECONDS) == []
    assert await ward.after(PAUSE_SECONDS) == ["p2"]
    del ward.api.refusals["p1"]
    assert await ward.after(10 * PAUSE_SECONDS) == ["p2", "p1"]


@pytest.mark.parametrize("more", [{"schedulerName": "other"}, {"bare": True}])
async def test_who_would_not_be_made_anew_is_told_once_and_stays(more: dict[str, Any]) -> None:
    ward, bare = Ward(), more.pop("bare", False)
    ward.resident_of("p1", **more)
    if bare:
        del ward.api.pods["p1"]["metadata"]["ownerReferences"]
    ward.report()
    for _ in range(3):
        assert await ward.after(BROKEN_SECONDS) == []
    said = [message for name, reason, message in ward.events.said if reason == "ModelOnBrokenGPU"]
    assert said == ["GPU 0 (n1-0): XID 79; nothing would replace the pod"]


async def test_what_has_failed_already_and_what_is_gone_is_not_rescued() -> None:
    ward = Ward()
    ward.resident_of("p1")
    ward.report(state=ModelState.FAILED)
    assert await ward.after(10 * BROKEN_SECONDS) == []
    ward.report()
    ward.begin_to_go("p1")
    assert await ward.after(BROKEN_SECONDS) == []
    ward.tell("nodes", node("n1"), ChangeKind.GONE)
    assert await ward.after(10 * BROKEN_SECONDS) == []
