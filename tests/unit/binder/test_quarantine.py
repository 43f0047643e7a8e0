"""Files that took a Triton down: no other pod of the template is placed, until that ends, is lifted, or the
template is another."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, NodeName
from berth.contract.report import Failure, ModelReport, ModelState
from berth.kube.informer import ChangeKind
from binder.cache.quarantine import QUARANTINE_SECONDS, Quarantines
from binder.engine.cluster import Cluster
from binder.pod.demand import parse_demand
from tests.fakes.binder import PLENTY, Bench
from tests.fakes.objects import GIB, KEYS, Json, gpu, listed, node, pod, report
from tests.fakes.values import replace

DIGEST = "0123456789abcdef"
REASON = f"digest {DIGEST[:12]} took Triton 2.51.0 down, quarantined until 2026-01-02"


class Plague(Bench):
    """Pods of ReplicaSets."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.now

    def says(self, name: str, *models: ModelReport, lifted: str | None = None) -> None:
        one = node(name, says=report(gpu(f"{name}-0"), models=models), allocatable=PLENTY)
        if lifted is not None:
            one["metadata"]["annotations"][KEYS.lift_quarantine] = lifted
        self.tell("nodes", one)
        self.scheduler.cluster.decider.table.beat(NodeName(name), 1e9)

    def replica(
        self, uid: str, *, owner: str = "rs-1", on: str | None = None, labels: Json | None = None
    ) -> Json:
        one = made(uid, owner=owner, on=on)
        one["metadata"]["labels"] = labels or {"pod-template-hash": owner}
        self.api.pods[uid] = one
        self.tell("pods", one)
        return one

    async def outcome(self, uid: str) -> str:
        await self.step(4, seconds=1)
        said = [message for name, reason, message in self.events.said if name == uid]
        return "placed" if self.is_placed(uid) else said[-1] if said else ""


def made(uid: str, *, owner: str = "rs-1", on: str | None = None) -> Json:
    places: Json = {"on": on, "choice": GpuChoice(GpuUuid(f"{on}-0"), 0, GIB)} if on else {}
    one = pod(uid, **places)
    one["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    return one


def row(uid: str, on: str = "n1", *, bad: bool = True, state: ModelState = ModelState.FAILED) -> ModelReport:
    failure = Failure.QUARANTINED if bad else None
    return replace(listed(uid, on=f"{on}-0"), state=state, failure=failure, reason=REASON if bad else "")


async def test_no_other_replica_is_placed_and_another_template_is() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n2")
        bench.replica("p2")
        bench.replica("p3", owner="rs-2")
        assert (
            "0/2 nodes: ModelQuarantined: the files of this pod took Triton down on node n1"
            in await bench.outcome("p2")
        )
        assert await bench.outcome("p3") == "placed"
        bench.gone("p1")  # the row goes with the pod; the files are as bad as before
        bench.says("n1")
        bench.replica("p4")
        assert "ModelQuarantined" in await bench.outcome("p4")


def of(
    bench: Plague, uid: str, owner: str, *, id: str = "m", on: str | None = None, ns: str = "team"
) -> None:
    """A pod of a Deployment's ReplicaSet ("web/v1"), of another controller ("set"), or on its own ("")."""
    one = made(uid, on=on)
    name, _, revision = owner.partition("/")
    kind, full = ("ReplicaSet", f"{name}-{revision}") if revision else ("StatefulSet", name)
    owners = [{"uid": f"{ns}/{owner}", "kind": kind, "name": full, "controller": True}] if owner else []
    one["metadata"] |= {"namespace": ns, "ownerReferences": owners}
    one["metadata"]["labels"] = {"pod-template-hash": revision} if revision else {}
    one["metadata"]["annotations"][KEYS.model_id] = id
    bench.api.pods[uid] = one
    bench.tell("pods", one)


def bad(uid: str, *, id: str = "m") -> ModelReport:
    return replace(row(uid), model_id=ModelId(id))


@pytest.mark.parametrize("first", ["web/v1", "set", ""])
@pytest.mark.parametrize("second", ["green/v1", "other", ""])
async def test_no_pod_of_the_same_model_id_is_placed_whoever_made_it(first: str, second: str) -> None:
    """A bare pod, or a second controller, took the next node's Triton down (binder M6)."""
    async with Plague() as bench:
        of(bench, "p1", first, on="n1")
        bench.says("n1", bad("p1"))
        bench.says("n2")
        of(bench, "p2", second)
        assert "took Triton down on node n1; none is placed until" in await bench.outcome("p2")
        of(bench, "p3", second, id="another")
        assert await bench.outcome("p3") == "placed"
        bench.gone("p1")
        bench.says("n1")
        of(bench, "p4", second)
        assert "ModelQuarantined" in await bench.outcome("p4")
        await bench.grow_patient()
        bench.says("n1", lifted="all")
        assert await bench.outcome("p2") == "placed"


async def test_no_other_namespace_hears_of_it() -> None:
    async with Plague() as bench:
        of(bench, "p1", "", on="n1")
        bench.says("n1", replace(bad("p1"), namespace="victim"))  # whatever a report says
        bench.says("n2")
        of(bench, "p2", "", ns="victim")
        assert await bench.outcome("p2") == "placed"


@pytest.mark.parametrize(("first", "second"), [("web/v1", "web/v2"), ("web-v1/v1", "web-v1/v2")])
async def test_another_template_of_the_same_controller_is_a_model_that_was_mended(
    first: str, second: str
) -> None:
    async with Plague() as bench:
        of(bench, "p1", first, on="n1")
        bench.says("n1", bad("p1"))
        bench.says("n2")
        of(bench, "p2", second)
        assert await bench.outcome("p2") == "placed"


async def test_what_two_brought_down_is_known_of_each() -> None:
    """The mended template was as bad: neither the first nor a third one is placed, until both are lifted."""
    async with Plague() as bench:
        of(bench, "p1", "web/v1", on="n1")
        of(bench, "p2", "web/v2", on="n2")
        bench.says("n1", bad("p1"))
        bench.says("n2", replace(bad("p2"), gpu=GpuUuid("n2-0")))
        of(bench, "p3", "green/v1")
        assert "on node n1" in await bench.outcome("p3")
        await bench.grow_patient()
        bench.gone("p1")
        bench.says("n1", lifted="all")
        because = bench.scheduler.cluster.decider.because(parse_demand(bench.api.pods["p3"], KEYS))
        assert because is not None
        assert "on node n2" in str(because)
        await bench.grow_patient()
        bench.gone("p2")
        bench.says("n2", lifted="all")
        assert await bench.outcome("p3") == "placed"
        assert len(bench.scheduler.cluster.facts.quarantines._of_model) == 0


async def test_a_report_that_has_no_room_for_ids_keeps_what_was_known() -> None:
    async with Plague() as bench:
        of(bench, "p1", "web/v1", on="n1")
        bench.says("n1", bad("p1"))
        bench.says("n1", replace(bad("p1"), model_id=None, namespace=""))
        bench.says("n2")
        of(bench, "p2", "")
        assert "ModelQuarantined" in await bench.outcome("p2")


async def test_a_model_that_was_mended_may_be_requested_by_the_scaler() -> None:
    from berth.contract.scaling import SchedulableModel
    from binder.engine.schedulable import _replica_of

    async with Plague() as bench:
        of(bench, "p1", "web/v1", on="n1")
        bench.says("n1", bad("p1"))
        template: Json = {"metadata": {"annotations": {KEYS.model_id: "m"}}, "spec": pod("x")["spec"]}
        answers = []
        for name in ("web", "green"):
            asks = SchedulableModel(
                name=f"team/{name}",
                desired=1, running=0, starting=0, priority=0, template=template, template_hash="h",
            )  # fmt: skip
            answers.append(bench.scheduler.cluster.decider.because(_replica_of(asks, KEYS)) is None)
        assert answers == [True, False]


async def test_the_report_may_come_before_the_pod() -> None:
    async with Plague() as bench:
        bench.says("n2")
        bench.says("n1", row("p1"))
        bench.replica("p1", on="n1")
        bench.replica("p2")
        assert "ModelQuarantined" in await bench.outcome("p2")


async def test_it_ends_by_itself_after_a_day_where_nobody_tells_of_it_any_more() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.replica("p2")
        assert "until 2026-01-02T00:00:00Z" in await bench.outcome("p2")
        await bench.grow_patient()
        bench.says("n1", row("p1"), lifted="")  # told again: it is not another one
        bench.gone("p1")
        bench.says("n1")
        bench.now = bench.began + QUARANTINE_SECONDS - 20
        assert "ModelQuarantined" in await bench.outcome("p2")
        bench.now = bench.began + QUARANTINE_SECONDS
        assert await bench.outcome("p2") == "placed"


async def test_it_stands_as_long_as_a_node_says_so() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n2")
        bench.replica("p2")
        bench.now = bench.began + 2 * QUARANTINE_SECONDS
        assert "ModelQuarantined" in await bench.outcome("p2")


@pytest.mark.parametrize("state", [ModelState.LOADING, ModelState.READY])
async def test_a_quarantine_that_is_lifted_lets_the_others_in(state: ModelState) -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n2")
        bench.replica("p2")
        assert "ModelQuarantined" in await bench.outcome("p2")
        await bench.grow_patient()
        bench.says("n1", row("p1", bad=False, state=state))
        assert await bench.outcome("p2") == "placed"


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        (ModelState.PENDING, None),
        (ModelState.STAGED, None),
        (ModelState.LOST, None),
        (ModelState.FAILED, Failure.TRANSIENT),
    ],
)
async def test_an_agent_that_starts_anew_lifts_nothing(state: ModelState, failure: Failure | None) -> None:
    """It lists the files that it finds before it has come to what it knows of them."""
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n2")
        bench.replica("p2")
        assert "ModelQuarantined" in await bench.outcome("p2")
        await bench.grow_patient()
        bench.says("n1", replace(row("p1", bad=False, state=state), failure=failure))
        assert "ModelQuarantined" in await bench.outcome("p2")


async def test_a_reason_that_a_report_has_no_room_for_is_known_from_before() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n1", replace(row("p1"), reason=""))
        bench.gone("p1")
        bench.replica("p2")
        assert "ModelQuarantined" in await bench.outcome("p2")
        await bench.grow_patient()
        bench.says("n1", lifted=DIGEST)
        assert await bench.outcome("p2") == "placed"


@pytest.mark.parametrize(
    ("annotation", "ends"),
    [
        ("all", True),
        (f"ffffffff, {DIGEST}", True),
        (DIGEST[:8], True),
        ("ffffffff", False),
        (DIGEST[:7], False),
    ],
)
async def test_an_operator_can_lift_what_no_pod_tells_of_any_more(annotation: str, ends: bool) -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.replica("p2")
        bench.gone("p1")
        bench.says("n1")
        assert "ModelQuarantined" in await bench.outcome("p2")
        await bench.grow_patient()
        bench.says("n1", lifted=annotation)
        assert (await bench.outcome("p2") == "placed") is ends


async def test_a_word_that_stood_there_before_lifts_nothing_later() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"), lifted="all")
        bench.replica("p2")
        bench.gone("p1")
        bench.says("n1", lifted="all")
        assert "ModelQuarantined" in await bench.outcome("p2")


async def test_a_node_that_is_gone_lifts_nothing() -> None:
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.says("n2")
        bench.tell("nodes", node("n1"), ChangeKind.GONE)
        bench.replica("p2")
        assert "ModelQuarantined" in await bench.outcome("p2")


def waiting(uid: str, message: str) -> Json:
    one = made(uid)
    one["metadata"]["labels"] = {"pod-template-hash": "rs-1"}
    one["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ]
    return one


async def test_a_binder_that_starts_anew_knows_it_from_the_pods_that_wait() -> None:
    async with Plague() as before:
        before.replica("p1", on="n1")
        before.says("n1", row("p1"))
        before.replica("p2")
        message = await before.outcome("p2")
    async with Plague() as bench:
        bench.says("n1")
        bench.says("n2")
        bench.api.pods["p2"] = waiting("p2", message)
        bench.tell("pods", bench.api.pods["p2"])
        bench.replica("p3")
        assert "ModelQuarantined" in await bench.outcome("p3")
        bench.now = bench.began + QUARANTINE_SECONDS + 1
        assert await bench.outcome("p3") == "placed"


@pytest.mark.parametrize(
    ("last", "ends"),
    [
        (lambda: row("p1", bad=False, state=ModelState.READY), True),
        (lambda: row("p1"), False),
        (lambda: row("p9", bad=False, state=ModelState.READY), False),  # of somebody else
    ],
)
async def test_what_was_said_before_is_checked_with_the_node(
    last: Callable[[], ModelReport], ends: bool
) -> None:
    async with Plague() as before:
        before.replica("p1", on="n1")
        before.says("n1", row("p1"))
        before.replica("p2")
        message = await before.outcome("p2")
    async with Plague() as bench:
        bench.says("n1", last())
        bench.says("n2")
        bench.replica("p1", on="n1")
        bench.api.pods["p2"] = waiting("p2", message)
        bench.tell("pods", bench.api.pods["p2"])
        assert (await bench.outcome("p2") == "placed") is ends


@pytest.mark.parametrize(
    "message",
    [
        "0/1 nodes: 1 GPUMemoryInsufficient",
        "ModelQuarantined: the files of this pod took Triton down on node n1; none is placed until soon",
        "took Triton down on node n1; none is placed until 2025-01-01T00:00:00Z, unless",
    ],
)
def test_a_condition_that_says_nothing_of_it_is_not_believed(message: str) -> None:
    known = Quarantines(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    assert known.remember(("team", "rs-1", ""), message) is None
    assert (len(known), known.because(("team", "rs-1", ""))) == (0, "")


def test_a_condition_holds_for_a_day_at_most_and_only_for_pods_of_a_controller() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    known = Quarantines(lambda: now)
    message = "took Triton down on node n1; none is placed until 2036-01-01T00:00:00Z, unless"
    assert known.remember(None, message) is None
    assert known.remember(("team", "rs-1", ""), message) == "n1"
    assert "until 2026-01-02T00:00:00Z" in known.because(("team", "rs-1", ""))
    assert known.because(None) == ""


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binder.cache.quarantine._MOST_TEMPLATES", 3)
    known = Quarantines(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    for number in range(9):
        said = f"took Triton down on node n{number % 2}; none is placed until 2026-01-01T01:00:00Z, unless"
        known.remember(("team", f"rs-{number}", ""), said)
    assert len(known) == 3
    assert known.because(("team", "rs-8", ""))


async def test_a_condition_of_what_has_been_lifted_brings_nothing_back() -> None:
    """Many pods wait, and each one's condition says so until its own turn comes."""
    async with Plague() as bench:
        bench.replica("p1", on="n1")
        bench.says("n1", row("p1"))
        bench.replica("p2")
        message = await bench.outcome("p2")
        bench.gone("p1")
        bench.says("n1", lifted="all")
        bench.says("n1")
        bench.tell("pods", waiting("p3", message))
        assert bench.scheduler.cluster.facts.quarantines.because(("team", "rs-1", "rs-1")) == ""
        bench.replica("p4", on="n1")
        bench.now += 60
        bench.says("n1", row("p4"))  # it is another one, and is told as well
        assert bench.scheduler.cluster.facts.quarantines.because(("team", "rs-1", "rs-1"))


def test_one_namespace_pushes_out_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binder.cache.quarantine._MOST_TEMPLATES", 3)
    known = Quarantines(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    said = "took Triton down on node n1; none is placed until 2026-01-01T01:00:00Z, unless"
    known.remember(("victim", "rs", ""), said)
    for number in range(9):
        known.remember(("hostile", f"rs-{number}", ""), said)
    assert len(known) == 3
    assert known.because(("victim", "rs", ""))


def test_a_snapshot_for_people_knows_it_too_and_what_serves_stays() -> None:
    cluster = Cluster(KEYS)
    bench = Plague()
    bench.scheduler.cluster = cluster
    bench._hear = {source.name: source.hear for source in cluster.sources("berth-system")}
    for one in (made("p1", on="n1"), made("p2", on="n2")):
        bench.tell("pods", one)
    for name, models in (("n1", row("p1")), ("n2", row("p2", "n2", bad=False, state=ModelState.READY))):
        bench.tell("nodes", node(name, says=report(gpu(f"{name}-0"), models=(models,)), allocatable=PLENTY))
    because = cluster.decider.because(parse_demand(made("p3"), KEYS))
    assert because is not None
    assert because.rule == "ModelQuarantined"
    assert cluster.state.has_place("p2")  # type: ignore[arg-type]


async def test_the_metric_counts_templates() -> None:
    from binder.cache.state import ClusterState
    from binder.loop.metrics import BinderMetrics
    from binder.loop.queue import SchedulingQueue

    registry, known = CollectorRegistry(), Quarantines()
    BinderMetrics(registry).follow(SchedulingQueue(lambda: 0.0), ClusterState(KEYS, clock=lambda: 0.0), known)
    assert registry.get_sample_value("berth_binder_quarantined_templates") == 0
    known.follow(NodeName("n1"), report(models=(row("p1"), row("p2"))), "", lambda _: ("team", "rs-1", ""))
    assert registry.get_sample_value("berth_binder_quarantined_templates") == 1
