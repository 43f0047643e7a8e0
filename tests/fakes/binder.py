"""A binder beside an API server that answers at once, with a clock that the test moves."""

import asyncio
import copy
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.pod import PodRef
from berth.kube.errors import response_error
from berth.kube.informer import Change, ChangeKind
from binder.engine.score import Strategy, make_strategy
from binder.loop.fenced import FencedClient
from binder.loop.metrics import BinderMetrics
from binder.loop.scheduler import Clocks, Scheduler
from tests.fakes.objects import GIB, KEYS, budget, gpu, node, pod, report

Json = dict[str, Any]
PLENTY = {"cpu": "128", "memory": "1Ti", "pods": "2000"}


class Api:
    """Takes Bindings, evictions and patches. `refusals`: what the eviction of a pod raises, in rehearsals
    too; `late_refusals`: only when it is meant."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self.nodes: dict[str, Json] = {}
        self.rehearsed: list[str] = []
        self.evicted: list[str] = []
        self.nominated: list[tuple[str, str | None]] = []
        self.conditions: list[Json] = []
        self.refusals: dict[str, Exception] = {}
        self.late_refusals: dict[str, Exception] = {}

    async def create(self, path: str, body: Json) -> Json:
        name = body["metadata"]["name"]
        if path.endswith("/eviction"):
            self._evict(name, rehearsal=body["deleteOptions"].get("dryRun") == ["All"])
        elif path.endswith("/binding"):
            self.pods[name]["spec"]["nodeName"] = body["target"]["name"]
            self.pods[name]["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return {}

    def _evict(self, name: str, *, rehearsal: bool) -> None:
        if name in self.refusals:
            raise self.refusals[name]
        if rehearsal:
            self.rehearsed.append(name)
            return
        if name in self.late_refusals:
            raise self.late_refusals[name]
        self.evicted.append(name)

    async def get(self, path: str) -> Json:
        kind, name = path.split("/")[-2:]
        if (found := (self.nodes if kind == "nodes" else self.pods).get(name)) is None:
            raise response_error(404, "NotFound", path)
        return copy.deepcopy(found)

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        if "nominatedNodeName" in body["status"]:
            self.nominated.append((path.split("/")[-2], body["status"]["nominatedNodeName"]))
        self.conditions += body["status"].get("conditions", ())
        return {}


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []

    def record(self, ref: PodRef, kind: str, reason: str, message: str) -> None:
        self.said.append((ref.name, reason, message))


def scheduler_of(
    api: Any,
    *,
    events: Any = None,
    strategy: str | Strategy = "binpack",
    seed: int = 1,
    metrics: BinderMetrics | None = None,
    may_write: Callable[[], bool] = lambda: True,
    **clocks: Any,
) -> Scheduler:
    """A scheduler of the pods of `trtis-scheduler` before this API server. `clocks`: of `Clocks`."""
    if isinstance(strategy, str):
        strategy = make_strategy(strategy, np.random.default_rng(seed))
    return Scheduler(
        FencedClient(api, may_write),
        keys=KEYS,
        scheduler_name="trtis-scheduler",
        strategy=strategy,
        events=events or Events(),
        metrics=metrics or BinderMetrics(CollectorRegistry()),
        clocks=Clocks(**clocks),
    )


class Bench:
    """`step` is what the binder's loop does once; `now` stands still unless it is moved."""

    def __init__(self, *, strategy: str = "binpack", api: Api | None = None) -> None:
        self.api, self.events, self.now, self.steps = api or Api(), Events(), 1000.0, 0
        self.may_write: Callable[[], bool] = lambda: True
        self.scheduler = scheduler_of(
            self.api,
            events=self.events,
            strategy=strategy,
            may_write=lambda: self.may_write(),
            monotonic=lambda: self.now,
            now=self.wall,
        )
        self._hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        self._version = 0
        self._tasks: list[asyncio.Task[Any]] = []

    def wall(self) -> datetime:
        """The time of day; it goes with `now`."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now - 1000.0)

    async def __aenter__(self) -> "Bench":
        self._tasks = [asyncio.create_task(work) for work in self.scheduler.background().values()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.scheduler.abandon()

    def tell(self, source: str, item: Json, kind: ChangeKind = ChangeKind.SET) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        if source == "nodes":
            self.api.nodes[item["metadata"]["name"]] = copy.deepcopy(item)
            if kind is ChangeKind.GONE:
                del self.api.nodes[item["metadata"]["name"]]
        self._hear[source](Change(kind, copy.deepcopy(item)))

    def node(self, name: str, *sizes: int, other_use: int = 0, beats: bool = True, **more: Any) -> None:
        """A node with GPUs of so many GiB, `other_use` bytes taken on the first. It is told anew each time."""
        gpus = [gpu(f"{name}-{i}", total=size * GIB, index=i) for i, size in enumerate(sizes)]
        if other_use:
            gpus[0] = gpu(f"{name}-0", total=sizes[0] * GIB, other_use_bytes=other_use)
        self.tell("nodes", node(name, says=report(*gpus), **{"allocatable": PLENTY, **more}))
        if beats:
            self.scheduler.cluster.decider.table.beat(NodeName(name), math.inf)

    def add(self, uid: str, *, labels: Json | None = None, **asks: Any) -> Json:
        """A pod that waits, or, with `on`, one that is bound."""
        one = pod(uid, **asks)
        one["metadata"]["labels"] = labels or {}
        self.api.pods[uid] = one
        self.tell("pods", one)
        return one

    def resident(self, uid: str, on: str, gib: int, *, slot: int = 0, **more: Any) -> Json:
        choice = GpuChoice(GpuUuid(f"{on}-{slot}"), slot, gib * GIB)
        return self.add(uid, mem=f"{gib}Gi", on=on, choice=choice, **more)

    def begin_to_go(self, uid: str) -> None:
        """The API server has taken the pod's deletion: its grace has begun."""
        self.api.pods[uid]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.tell("pods", self.api.pods[uid])

    def gone(self, uid: str, *, unloaded: bool = True) -> None:
        one = self.api.pods.pop(uid)
        self.tell("pods", one, ChangeKind.GONE)
        if unloaded and "nodeName" in one["spec"]:
            self.scheduler.state.settle(one["spec"]["nodeName"], asked_at=math.inf)

    def budget(self, allowed: int, *, app: str = "web", name: str = "pdb", gone: bool = False) -> None:
        kind = ChangeKind.GONE if gone else ChangeKind.SET
        self.tell("poddisruptionbudgets", budget(allowed, app, name), kind)

    async def step(self, times: int = 1, *, seconds: float = 0.0) -> None:
        for _ in range(times):
            self.now += seconds
            self.scheduler.step()
            self.steps += 1
            for _ in range(12):
                await asyncio.sleep(0)

    async def until_quiet(self, *, most: int = 5000) -> None:
        """Until nobody is due."""
        for _ in range(most):
            await self.step()
            if self.scheduler.queue.seconds_to_next() != 0.0:
                return
        raise AssertionError("never quiet")

    async def grow_patient(self) -> None:
        """Let who waits be refused so often that he is tried anew of himself every two minutes only."""
        await self.step(12, seconds=130)

    def is_placed(self, *uids: str) -> bool:
        return all(self.scheduler.state.has_place(uid) for uid in uids)  # type: ignore[arg-type]
