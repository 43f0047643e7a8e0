"""The scheduler beside an API server that fails as real ones do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from binder.engine.score import Strategy
from tests.fakes.binder import Events, scheduler_of
from tests.fakes.eventually import until
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


class Api:
    """Holds pods; takes Bindings as the API server does. `fail` is raised by the next Binding, before
    or after it has taken effect."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.bindings: list[dict[str, Any]] = []
        self.conditions: list[str] = []
        self.fail_before: list[Exception] = []
        self.fail_after: list[Exception] = []

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/binding"), path
        await asyncio.sleep(0)
        self.bindings.append(body)
        if self.fail_before:
            raise self.fail_before.pop(0)
        self._bind(body)
        if self.fail_after:
            raise self.fail_after.pop(0)
        return {}

    def _bind(self, body: dict[str, Any]) -> None:
        meta = body["metadata"]
        found = self.pods.get(meta["name"])
        if found is None:
            raise response_error(404, "NotFound", meta["name"])
        if found["metadata"]["uid"] != meta["uid"] or found["spec"].get("nodeName"):
            raise response_error(409, "Conflict", meta["name"])
        found["spec"]["nodeName"] = body["target"]["name"]
        found["metadata"]["annotations"].update(meta["annotations"])

    async def get(self, path: str) -> dict[str, Any]:
        found = self.pods.get(path.rpartition("/")[2])
        if found is None:
            raise response_error(404, "NotFound", path)
        return found

    async def patch(self, path: str, body: dict[str, Any], *, content_type: str) -> dict[str, Any]:
        self.conditions.append(body["status"]["conditions"][0]["message"])
        return {}


class Bench:
    def __init__(
        self,
        *,
        total_gib: int = 16,
        clock: Callable[[], float] = time.monotonic,
        strategy: Strategy | None = None,
    ) -> None:
        self.api, self.events = Api(), Events()
        self.may_write: Callable[[], bool] = lambda: True
        self.scheduler = scheduler_of(
            self.api,
            strategy=strategy or "binpack",
            events=self.events,
            monotonic=clock,
            may_write=lambda: self.may_write(),
        )
        self.hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        self.tell("nodes", node(says=report(gpu(total=total_gib * GIB))))
        spec = {"renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 40}
        self.tell("leases", {"metadata": {"name": "berth-agent-n1"}, "spec": spec})

    def tell(self, source: str, item: dict[str, Any], kind: ChangeKind = ChangeKind.SET) -> None:
        self.hear[source](Change(kind, item))

    def add(self, uid: str, **requests: Any) -> None:
        self.api.pods[uid] = pod(uid, **requests)
        self.tell("pods", pod(uid, **requests))

    def echo(self, uid: str) -> None:
        """The watch delivers the pod as it is now."""
        self.tell("pods", self.api.pods[uid])

    def reserved(self) -> int:
        (view,) = self.scheduler.state.views()
        return int(view.reserved_on(gpu().uuid))


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    task = asyncio.create_task(bench.scheduler.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_binding_carries_the_uid_and_the_gpu() -> None:
    bench = Bench()
    async with running(bench):
        bench.add("p1", mem="4Gi")
        await until(lambda: bench.events.said)
    (body,) = bench.api.bindings
    assert body["metadata"]["uid"] == "p1"
    assert GpuChoice.decode(body["metadata"]["annotations"][KEYS.gpu]) == GpuChoice(gpu().uuid, 0, 4 * GIB)
    assert body["target"]["name"] == "n1"
    assert bench.events.said == [("p1", "Scheduled", "placed team/p1 on n1, GPU 0 (GPU-a), 4 GiB")]
    assert bench.reserved() == 4 * GIB
    bench.echo("p1")
    assert bench.reserved() == 4 * GIB


async def test_a_binding_that_happened_without_an_answer_is_not_made_twice() -> None:
    bench = Bench()
    bench.api.fail_after = [KubeUnreachable("timed out")]
    async with running(bench):
        bench.add("p1")
        await until(lambda: bench.api.bindings and not bench.scheduler.state.assumed_count)
        await asyncio.sleep(0.8)  # longer than the first backoff
    assert len(bench.api.bindings) == 1
    assert bench.reserved() == GIB


async def test_a_pod_that_is_gone_frees_what_was_assumed_and_lets_the_next_in() -> None:
    bench = Bench(total_gib=4)
    bench.api.fail_before = [response_error(404, "NotFound", "p1")]
    async with running(bench):
        bench.add("p1", mem="4Gi")
        bench.add("p2", mem="4Gi")
        await until(lambda: ("p2", "Scheduled") in [said[:2] for said in bench.events.said])
    assert bench.reserved() == 4 * GIB


async def test_another_of_the_same_name_is_not_bound_by_mistake() -> None:
    bench = Bench()
    async with running(bench):
        bench.api.pods["p1"] = {**pod("p1"), "metadata": {**pod("p1")["metadata"], "uid": "successor"}}
        bench.tell("pods", pod("p1"))
        await until(lambda: bench.api.bindings and not bench.scheduler.state.assumed_count)
    assert "nodeName" not in bench.api.pods["p1"]["spec"]
    assert bench.reserved() == 0


async def test_unschedulable_is_said_once_and_a_change_lets_the_pod_in() -> None:
    bench = Bench(total_gib=2)
    async with running(bench):
        bench.add("p1", mem="4Gi")
        await until(lambda: bench.api.conditions)
        await asyncio.sleep(1.5)  # several tries
        assert bench.api.conditions == [
            "0/1 nodes: 1 GPUMemoryInsufficient (2 GiB short on the best GPU); "
            "no GPU is large enough: 4 GiB asked, 2 GiB on the largest when empty"
        ]
        bench.tell("nodes", node(says=report(gpu(total=8 * GIB))))
        await until(lambda: bench.api.bindings)


async def test_a_pod_that_cannot_be_read_is_reported_once_and_not_tried() -> None:
    bench = Bench()
    async with running(bench):
        bench.add("p1", annotations={KEYS.model_id: "a/b"})
        bench.echo("p1")
        await until(lambda: bench.api.conditions)
        await asyncio.sleep(0.2)
    assert bench.api.bindings == []
    assert len(bench.api.conditions) == 1
    assert KEYS.model_id in bench.api.conditions[0]


async def test_pods_of_other_schedulers_are_left_alone() -> None:
    bench = Bench()
    async with running(bench):
        bench.add("theirs", schedulerName="default-scheduler")
        bench.add("mine")
        await until(lambda: bench.events.said)
    assert [body["metadata"]["name"] for body in bench.api.bindings] == ["mine"]


async def test_a_standby_writes_nothing() -> None:
    bench = Bench()
    bench.add("unreadable", annotations={KEYS.model_id: "a/b"})
    bench.add("fine")
    await asyncio.sleep(0.2)
    assert (bench.api.conditions, bench.api.bindings, bench.events.said) == ([], [], [])
    async with running(bench):
        await until(lambda: bench.api.conditions and bench.api.bindings)


async def test_a_deposed_leader_does_not_go_on_binding() -> None:
    bench = Bench()
    answer = asyncio.Event()
    create = bench.api.create

    async def slow(path: str, body: dict[str, Any]) -> dict[str, Any]:
        await answer.wait()
        return await create(path, body)

    bench.api.create = slow  # type: ignore[method-assign]
    async with running(bench):
        bench.add("p1")
        await until(lambda: bench.scheduler.state.assumed_count)
    answer.set()
    await asyncio.sleep(0.1)
    assert bench.api.bindings == []


async def test_a_pod_bound_and_deleted_before_the_answer_holds_its_memory_as_a_stale_model() -> None:
    bench = Bench()
    bench.api.fail_after = [KubeUnreachable("timed out")]
    get = bench.api.get

    async def gone(path: str) -> dict[str, Any]:
        bench.api.pods.pop("p1", None)
        return await get(path)

    bench.api.get = gone  # type: ignore[method-assign]
    async with running(bench):
        bench.add("p1", mem="4Gi")
        await until(lambda: bench.api.bindings and not bench.scheduler.state.assumed_count)
    assert bench.reserved() == 4 * GIB


async def test_an_old_event_of_a_bound_pod_does_not_queue_it_again() -> None:
    bench = Bench()
    async with running(bench):
        bench.add("p1")
        await until(lambda: bench.events.said)
        bench.echo("p1")
        bench.tell("pods", pod("p1"))
        await asyncio.sleep(0.1)
    assert len(bench.api.bindings) == 1
