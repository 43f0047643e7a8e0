"""Every write of the binder goes only while nobody else can lead, whichever of its parts writes (binder L7)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import Failure, GpuReport, ModelReport, ModelState
from binder.loop.bind import may_have_happened
from binder.loop.fenced import FencedClient, NotLeading
from binder.loop.verdict import BROKEN_SECONDS
from tests.fakes.binder import Api, Bench
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]


class Fencing(Api):
    """Leadership ends while the answer to call number `until` is on its way: what is written from then on is a fault."""

    def __init__(self, until: int | None) -> None:
        super().__init__()
        self.until, self.calls, self.leads = until, 0, True
        self.written: list[str] = []
        self.faults: list[str] = []

    async def get(self, path: str) -> Json:
        return await self._counted(lambda: super(Fencing, self).get(path))

    async def create(self, path: str, body: Json) -> Json:
        rehearsal = "rehearsed " if "dryRun" in body.get("deleteOptions", {}) else ""
        return await self._written(
            rehearsal + path.rpartition("/")[2], lambda: super(Fencing, self).create(path, body)
        )

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        kind = "nomination" if "nominatedNodeName" in body["status"] else ""
        kind = kind or str(body["status"]["conditions"][0]["type"])
        return await self._written(
            kind, lambda: super(Fencing, self).patch(path, body, content_type=content_type)
        )

    async def _written(self, kind: str, call: Callable[[], Awaitable[Json]]) -> Json:
        self.written.append(kind)
        if not self.leads:
            self.faults.append(kind)
        return await self._counted(call)

    async def _counted(self, call: Callable[[], Awaitable[Json]]) -> Json:
        self.calls += 1
        if self.calls == self.until:
            self.leads = False
        await asyncio.sleep(0)
        return await call()


class Office(Bench):
    """A binder with work for each of its writers."""

    def __init__(self, until: int | None) -> None:
        self.ledger = Fencing(until)
        super().__init__(api=self.ledger)
        self.may_write = lambda: self.ledger.leads

    def owned(self, uid: str, on: str, gib: int, **more: Any) -> None:
        choice = GpuChoice(GpuUuid(f"{on}-0"), 0, gib * GIB)
        one = pod(uid, mem=f"{gib}Gi", on=on, choice=choice, **more)
        one["metadata"]["ownerReferences"] = [{"uid": f"rs-{uid}", "controller": True}]
        one["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        self.api.pods[uid] = one
        self.tell("pods", one)

    def says(self, name: str, models: tuple[ModelReport, ...], *, broken: bool = False) -> None:
        def one(slot: int) -> GpuReport:
            made = gpu(f"{name}-{slot}", total=16 * GIB, index=slot)
            return replace(made, healthy=False, broken=True, reason="XID 79") if broken and not slot else made

        self.tell("nodes", node(name, says=report(one(0), one(1), models=models)))
        self.scheduler.cluster.decider.table.beat(NodeName(name), 1e9)

    async def work(self) -> None:
        row = replace(listed("x"), requested_bytes=GIB)
        for uid in ("failed", "lost", "kept"):
            self.owned(uid, "n1", 1, priority=500)
        self.owned("stranded", "n2", 1, priority=500)
        self.says(
            "n1",
            tuple(
                replace(row, pod_uid=uid, pod_name=uid, gpu="n1-0", state=state, failure=why, reason="why")  # type: ignore[arg-type]
                for uid, state, why in (
                    ("failed", ModelState.FAILED, Failure.CAPACITY),
                    ("lost", ModelState.LOST, None),
                    ("kept", ModelState.FAILED, Failure.INVALID_MODEL),
                )
            ),
        )
        stranded = replace(row, pod_uid="stranded", pod_name="stranded", gpu="n2-0")  # type: ignore[arg-type]
        self.says("n2", (stranded,), broken=True)
        self.node("n3", 64)
        self.resident("low", "n3", 60)
        self.add("fits")
        self.add("too-large", mem="900Gi")
        self.add("vip", mem="62Gi", priority=100)
        for _ in range(6):
            await self.step(4, seconds=BROKEN_SECONDS / 4)
            await self.scheduler.evictions.step()
        kept = replace(row, pod_uid="kept", pod_name="kept", gpu="n1-0")  # type: ignore[arg-type]
        self.says("n1", (kept,))  # loaded after all
        self.node("n3", 64, unschedulable=True)  # nobody waits for this place any more
        await self.step(12, seconds=BROKEN_SECONDS / 4)


WRITES = {"binding", "rehearsed eviction", "eviction", "nomination", "PodScheduled", KEYS.loaded_condition}


async def test_all_writers_are_at_work_here() -> None:
    """Else the test below would say nothing of one of them (binder L7)."""
    async with Office(None) as office:
        await office.work()
    assert set(office.ledger.written) == WRITES
    assert {"failed", "lost", "stranded", "low"} <= set(office.api.evicted)
    assert {node for _, node in office.api.nominated} == {"n3", None}
    assert office.ledger.faults == []


async def test_nothing_is_written_once_another_may_lead_whenever_that_is() -> None:
    """Leadership ends during each call in turn; the eviction controller did not ask, nor did conditions (binder L7)."""
    async with Office(None) as office:
        await office.work()
    faults = {}
    for until in range(1, office.ledger.calls + 1):
        async with Office(until) as office:
            await office.work()
        if office.ledger.faults:
            faults[until] = office.ledger.faults
    assert faults == {}


async def test_a_write_that_was_not_sent_cannot_have_happened() -> None:
    fenced = FencedClient(Api(), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(NotLeading) as raised:
        await fenced.create("/x", {})
    assert not may_have_happened(raised.value)
    with pytest.raises(NotLeading):
        await fenced.patch("/x", {})
