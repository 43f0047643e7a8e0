"""All models of one leader: how they share the cluster, the binder's answers, idle memory, and what a restart keeps."""

from collections.abc import Callable
from itertools import pairwise
from math import copysign
from random import Random
from typing import Any

import msgspec
import pytest

from berth.contract.scaling import ModelKey, Scaled, SchedulableAnswer
from berth.contract.text import one_line
from scaler.core import reconcile
from scaler.core.actions import Event, RouteChanged, WriteScale, WriteStatus
from scaler.core.autoscaler import ModelAutoscaler
from scaler.core.deployments import CLASS
from scaler.core.reconcile import RouteStatus
from scaler.core.scaler import Scaler
from scaler.decision.bounds import Activity
from scaler.decision.defaults import HPA, KPA
from scaler.export.figures import figure, is_active
from tests.fakes.scaled_cluster import BEGAN, GROUP, ONE, SECOND, Cluster, FakeModel, FakePod, report
from tests.fakes.values import replace

WINDOW, GRACE = 60, 30


def loaded(cluster: Cluster, load: float, **options: Any) -> FakeModel:
    """A model with so many steady requests, a while later."""
    model = cluster.add("m", replicas=1, **ONE, **options)
    model.load = load
    cluster.run(20)
    return model


def at_zero(cluster: Cluster, name: str = "m", **options: Any) -> FakeModel:
    model = cluster.add(name, **ONE, **options)
    cluster.run(4)
    return model


def scales(actions: list[Any]) -> list[int]:
    return [action.replicas for action in actions if isinstance(action, WriteScale)]


@pytest.mark.parametrize("breaks", ["decide", "record", "configure", "limit"])
def test_an_unforeseen_error_of_one_model_does_not_end_the_scaling_of_the_others(
    monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    def broken(self: Any, *args: Any, **more: Any) -> Any:
        if self.key.name == "odd":
            raise ZeroDivisionError
        return whole(self, *args, **more)

    whole = getattr(ModelAutoscaler, breaks)
    cluster = Cluster()
    odd, good = cluster.add("odd", load=3.0, **ONE), cluster.add("good", load=3.0, **ONE)
    monkeypatch.setattr(ModelAutoscaler, breaks, broken)
    for _ in range(40):
        cluster.annotate(odd, max_scale=str(cluster.now))
        cluster.second()
    assert good.replicas == 3


def test_no_average_is_shown_below_zero() -> None:
    """What is left of a window of sums and differences may round to -0.0."""
    cluster, chance = Cluster(), Random(0)
    model = cluster.add("a")
    for second in range(200):
        model.load, model.rate = int(second < 5), chance.random() * 3 if second < 100 else 0.0
        cluster.second()
        shown = cluster.view(model).requests_per_second
        assert all(copysign(1.0, value) == 1.0 for value in (shown.stable, shown.panic) if value is not None)


def test_a_forwarded_request_that_no_replica_has_counted_yet_is_shown_as_none() -> None:
    cluster = Cluster()
    model = at_zero(cluster)
    cluster.report(model)
    cluster.report(model, buffered=0, arrived=0.0, forwarded=9.0)
    cluster.second()
    _, requests = cluster.scaler._autoscalers[model.key]._decider.averages(cluster.ns)
    assert requests is not None
    assert requests.stable < 0
    shown = cluster.view(model).requests_per_second
    assert (shown.stable, shown.panic) == (0.0, 0.0)


@pytest.mark.parametrize("deadline", [60, 600])
def test_a_pod_that_waits_for_a_node_outlives_the_requests_that_wait_for_it(deadline: int) -> None:
    """A node takes longer than a client waits. Its progress deadline after the last of them, and no later."""
    cluster = Cluster(places=0)
    model = at_zero(cluster)
    model.annotations["seldon.io/trtis-overflow-pods"] = "2"
    model.annotations["serving.knative.dev/progress-deadline"] = f"{deadline}s"
    cluster.change(model)
    model.load = 1
    cluster.run(700)
    assert model.replicas == 1
    model.load = 0
    passed = cluster.until(lambda: model.replicas == 0, most=2000)
    assert deadline + 30 <= passed <= deadline + 30 + WINDOW + 10
    cluster.run(100)
    assert model.replicas == 0


def test_a_thousand_gated_pods_cost_a_step_no_more_text_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had its gates' names read in each step: ten models of a thousand held the loop up for a tenth of a second."""
    cluster = Cluster(places=9)
    model = cluster.add("m", replicas=1000, quota=0)
    cluster.run(2)
    assert cluster.view(model).pods.gated == 1000
    read: list[str] = []

    def noted(text: str, **options: Any) -> str:
        read.append(text)
        return one_line(text, **options)

    monkeypatch.setattr(reconcile, "one_line", noted)
    cluster.run(2)
    assert 0 < len(read) <= 3
    assert {*read} == {"kueue.x-k8s.io/admission"}


def test_no_capacity_is_reserved_for_a_gated_pod() -> None:
    """A place that is kept for one is taken from others for nothing."""
    cluster = Cluster(places=4)
    behind = cluster.add("a", min_scale="4", quota=1, priority=9)
    cluster.until(lambda: behind.replicas == 2, most=60)
    other = cluster.add("b", min_scale="3")
    cluster.until(lambda: len(cluster.ready(other)) == 3, most=60)
    assert len(cluster.ready(behind)) == 1


def test_capacity_goes_to_the_higher_priority_first() -> None:
    cluster = Cluster(places=6)
    low, high = cluster.add("a", min_scale="6"), cluster.add("b", min_scale="4", priority=5)
    cluster.run(6)
    assert (high.replicas, low.replicas) == (4, 2)


def test_models_of_one_priority_share() -> None:
    cluster = Cluster(places=6)
    models = [cluster.add(name, min_scale="6") for name in ("a", "b", "c")]
    cluster.run(6)
    assert [model.replicas for model in models] == [2, 2, 2]


def test_capacity_that_is_promised_to_one_model_is_not_given_to_another() -> None:
    """A replica that was asked for has its place, though its pod is not there yet."""
    cluster = Cluster(places=1)
    first = at_zero(cluster)
    cluster.report(first)
    assert first.replicas == 1
    second = cluster.add("z", min_scale="1", priority=9)
    cluster.do(cluster.scaler.step(cluster.ns))
    assert second.replicas == 0
    cluster.run(6)
    assert (first.replicas, second.replicas) == (1, 0)


def test_a_pod_that_the_binder_has_rejected_is_owed_nothing() -> None:
    cluster = Cluster(places=1)
    first = at_zero(cluster)
    cluster.report(first)
    cluster._follow(first)
    cluster.taken_by_others = 1
    cluster._bind()
    assert [pod.refused for pod in cluster.living(first)] == [True]
    cluster.taken_by_others = 0
    second = cluster.add("z", min_scale="1", priority=9)
    cluster.do(cluster.scaler.step(cluster.ns))
    assert second.replicas == 1


def test_the_binder_learns_how_many_replicas_there_are() -> None:
    cluster = Cluster()
    model = cluster.add("m", min_scale="3", load_seconds=5)
    cluster.run(8)
    model.load_seconds = 100
    cluster.annotate(model, min_scale="5")
    cluster.run(4)
    cluster.annotate(model, min_scale="6")
    cluster.scaler.step(cluster.ns)
    question = cluster.question()
    (asked,) = question.models
    assert (asked.desired, asked.running, asked.starting) == (6, 3, 2)


def test_a_binder_that_is_silent_for_long_is_tried_with_one_replica_at_a_time() -> None:
    cluster = Cluster(places=3)
    cluster.binder_answers = False
    model = cluster.add("m", min_scale="7", load_seconds=1)
    cluster.run(310)
    most = 0
    for _ in range(60):
        cluster.second()
        most = max(most, sum(not pod.node for pod in cluster.living(model)))
    assert len(cluster.ready(model)) == 3
    assert most == 1
    assert "has not answered for" in cluster.view(model).message
    cluster.binder_answers = True
    cluster.run(6)
    assert model.replicas == 3


def test_promised_replicas_that_do_not_come_are_waited_for_ten_seconds() -> None:
    cluster = Cluster(places=3)
    model = cluster.add("m", min_scale="3", most_pods=0)
    cluster.run(4)
    assert model.replicas == 3
    other = cluster.add("other", min_scale="3", priority=9)
    cluster.run(4)
    assert other.replicas == 0
    cluster.run(8)
    assert other.replicas == 3


def test_pods_behind_gates_are_owed_nothing() -> None:
    """What was promised to them a moment ago keeps nobody else from a place."""
    cluster = Cluster(places=9)
    behind = cluster.add("a", min_scale="4", quota=0)
    cluster.now += 1
    cluster.do(cluster.scaler.step(cluster.ns))
    assert behind.replicas == 4
    cluster._follow(behind)
    first, *_ = cluster.of(behind)
    first.gated = False  # and the binder has not spoken yet
    cluster._show(first)
    other = cluster.add("b", min_scale="3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert other.replicas == 3


def hindered(cluster: Cluster, **options: Any) -> FakeModel:
    """It may have two pods, wants as many as there are places, and more than others."""
    model = cluster.add("m", min_scale="6", priority=5, most_pods=2, load_seconds=1, **options)
    cluster.run(10)
    assert (model.replicas, len(cluster.living(model))) == (6, 2)
    return model


def test_pods_that_a_quota_forbids_keep_no_capacity_from_others() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    other = cluster.add("other", min_scale="3", load_seconds=1)
    cluster.run(10)
    assert other.replicas == 0, "they may still be made"
    cluster.run(20)
    assert (other.replicas, len(cluster.ready(other))) == (3, 3)
    assert model.replicas == 6
    assert "not created" in cluster.view(model).message
    assert "not created" in Scaled.from_text(model.scaled or "").message


def test_a_model_that_may_have_no_more_pods_asks_again_now_and_then() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    cluster.run(30)
    asked = 0
    for second in range(300):
        model.replicas = (2, 6)[second // 4 % 2]  # whatever its owner writes
        cluster.change(model)
        cluster.second()
        cluster._carry_out(cluster.scaler.step(cluster.ns))
        asked += cluster.scaler.question(cluster.ns) is not None
    assert 0 < asked < 100


def test_once_a_pod_is_created_after_all_the_others_are_requested() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    cluster.run(30)
    model.most_pods = 9
    cluster.annotate(model, min_scale="8")
    cluster.run(4)
    assert (model.replicas, cluster.view(model).message) == (6, "1 GPUMemoryInsufficient")
    cluster.places = 8
    cluster.run(4)
    assert model.replicas == 8


def test_pods_that_are_created_slowly_are_waited_for() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    other = cluster.add("other", min_scale="1", load_seconds=1)
    for _ in range(4):
        cluster.run(15)
        model.most_pods += 1
    assert (other.replicas, model.most_pods) == (0, 6)


def test_a_second_request_decides_nothing_before_the_next_step() -> None:
    cluster = Cluster()
    model = at_zero(cluster)
    cluster.report(model)
    before = cluster.scaler.view(model.key)
    cluster.report(model, buffered=9, average_buffered=9.0, arrived=8.0)
    after = cluster.scaler.view(model.key)
    assert before is not None
    assert after is not None
    assert before.decisions == after.decisions
    cluster.run(2)
    assert model.replicas > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"average_buffered": float("nan")},
        {"arrived": -1.0},
        {"forwarded": float("inf")},
        {"served_ago": float("nan")},
        {"model": ModelKey("x", "y")},
    ],
)
def test_an_invalid_report_starts_no_replica(fields: dict[str, Any]) -> None:
    cluster = Cluster()
    model = at_zero(cluster)
    assert cluster.scaler.report("act", report(model, **fields), cluster.ns) == []
    assert model.replicas == 0


@pytest.mark.parametrize(
    ("served_ago", "found"),
    [
        (0.0, {"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.5}),
        (0.25, {"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.25}),
        (1.0, {"decide": 0.0, "schedule": 1.0, "load": 4.5, "serve": 0.0}),  # before it was seen to be ready
        (1e6, {"decide": 0.0, "schedule": 0.0, "load": 0.0, "serve": 0.0}),
    ],
)
def test_a_cold_start_ends_when_a_replica_has_served_and_not_when_that_is_reported(
    served_ago: float, found: dict[str, float]
) -> None:
    cluster = Cluster()
    model = at_zero(cluster, load_seconds=5)
    began_ns = cluster.ns
    cluster.scaler.report("act", report(model, buffered=1, cold_start=True), began_ns)
    cold_starts = cluster.scaler._autoscalers[model.key]._cold_starts
    cold_starts.requested(began_ns)
    cold_starts._reach(2, began_ns + SECOND)
    cold_starts._reach(3, began_ns + 6 * SECOND)
    reported = report(model, buffered=0, forwarded=1.0, served_ago=served_ago)
    cluster.scaler.report("act", reported, began_ns + 13 * SECOND // 2)
    (wake,) = cluster.view(model).cold_starts
    assert dict(wake.phases) == found


def test_a_kept_replica_is_shown_as_kept_and_why() -> None:
    """Not as one that is wanted now and is not the next moment, each window anew."""
    cluster = Cluster()
    model = loaded(cluster, 1, has_service=False)
    model.load = 0
    cluster.until(lambda: cluster.events_of("ScaleToZeroBlocked"))
    shown = set()
    for _ in range(5 * WINDOW):
        cluster.second()
        view = cluster.view(model)
        shown.add((view.desired, view.requested, view.activity, view.message))
    assert shown == {(1, 1, Activity.INACTIVE, "no Service leads to its replicas")}


def test_the_replicas_with_the_least_deletion_cost_go() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4)

    def unevenly(model: FakeModel, ready: list[FakePod]) -> None:
        for place, pod in enumerate(ready):
            pod.busy, pod.rate = (1, 20.0) if place < 2 else (0, 0.0)

    busy = cluster.ready(model)[:2]
    cluster.spread = unevenly
    model.load = 2
    cluster.until(lambda: model.replicas < 4)
    cluster.run(4)
    assert {pod.uid for pod in cluster.ready(model)} >= {pod.uid for pod in busy}
    assert all(pod.cost == "1" for pod in busy)


def test_no_deletion_cost_is_written_when_no_replica_goes() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    model.load = 4
    cluster.run(20)
    assert len(cluster.ready(model)) == 4
    assert not any(action.costs for action in cluster.actions if isinstance(action, WriteScale))


def test_only_deletion_costs_that_differ_are_written() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4)
    first, *others = cluster.ready(model)
    first.cost = "1"
    cluster._show(first)
    cluster.annotate(model, max_scale="3")
    cluster.run(2)
    (write,) = [one for one in cluster.actions if isinstance(one, WriteScale) and one.replicas == 3]
    assert write.costs == {pod.name: 1 for pod in others}


def test_without_the_class_the_replicas_stay_as_they_are() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    del model.annotations[GROUP + "class"]
    cluster.change(model)
    cluster.actions.clear()
    model.load = 0
    cluster.run(3 * WINDOW)
    assert model.replicas == 3
    assert cluster.actions == [RouteChanged(model=model.key)]
    assert cluster.scaler.asked(model.key, cluster.ns) is None
    assert cluster.scaler.view(model.key) is None


def test_a_deleted_deployment_is_forgotten_and_a_successor_is_another() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    cluster.remove(model)
    cluster.report(model)
    cluster.run(2)
    assert cluster.scaler.asked(model.key, cluster.ns) is None
    successor = cluster.add("m", **ONE)
    cluster.run(2)
    assert cluster.view(successor).recommended is None


def test_a_successor_whose_predecessor_was_not_seen_to_go_is_another() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    model.uid, model.scaled = "another", None
    cluster.change(model)
    cluster.report(model, buffered=0)
    assert cluster.view(model).since_ns == cluster.ns
    assert cluster.view(model).decisions == ()


def retained(cluster: Cluster, name: str, **options: Any) -> FakeModel:
    usual = {"scale_to_zero_pod_retention_period": "until-needed", "load_seconds": 1}
    model = cluster.add(name, replicas=1, **ONE, **(usual | options))
    model.load = 1
    return model


def test_idle_models_stay_until_their_memory_is_needed() -> None:
    cluster = Cluster(places=3)
    old, young, busy = (retained(cluster, name) for name in ("old", "young", "busy"))
    cluster.run(10)
    old.load = 0
    cluster.run(20)
    young.load = 0
    cluster.run(20 * WINDOW)
    assert [len(cluster.ready(model)) for model in (old, young, busy)] == [1, 1, 1]
    new = cluster.add("new", load_seconds=1, **ONE)
    new.load = 1
    cluster.run(20)
    assert [len(cluster.ready(model)) for model in (old, young, busy, new)] == [0, 1, 1, 1]
    assert cluster.events_of("IdleReplicaEvicted") == ["old-5f-4 was idle, and a/new needs its memory"]
    assert cluster.events_of("ScaledToZero") == ["its memory was needed"]
    cluster.run(5 * WINDOW)
    assert len(cluster.ready(young)) == 1, "more than needed went"


def offered(cluster: Cluster) -> tuple[str, ...]:
    """What the binder is told of idle replicas, as somebody has no place."""
    needy = cluster.add("needy", min_scale="1", **ONE)
    cluster._carry_out(cluster.scaler.step(cluster.ns))
    question = cluster.question()
    assert needy.key in {one.model for one in question.models}
    return question.idle


def all_idle_for_long(cluster: Cluster, *models: FakeModel) -> None:
    cluster.run(10)
    for model in models:
        model.load = 0
    cluster.run(5 * WINDOW)
    assert [len(cluster.ready(model)) for model in models] == [1] * len(models)


def idle_for_long(cluster: Cluster, **options: Any) -> FakeModel:
    model = retained(cluster, "kept", **options)
    all_idle_for_long(cluster, model)
    return model


def route_is_unknown(cluster: Cluster, model: FakeModel) -> None:
    cluster._lead = lambda: None  # type: ignore[method-assign]
    cluster.scaler.set_route(model.key, RouteStatus())


def request_waits(cluster: Cluster, model: FakeModel) -> None:
    """For a slot of it, so that no replica has to be started."""
    cluster.scaler.report("act", report(model, cold_start=False), cluster.ns)


def stream_opens(cluster: Cluster, _: FakeModel) -> None:
    usual = cluster._load
    cluster._load = lambda pod: msgspec.structs.replace(usual(pod), in_triton=1)  # type: ignore[method-assign]
    cluster.run(1)


def nothing(cluster: Cluster, model: FakeModel) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "happens", "is_offered"),
    [
        ({}, nothing, True),
        ({}, route_is_unknown, False),
        ({}, request_waits, False),
        ({}, stream_opens, False),
        ({"scale_to_zero_pod_retention_period": "1h"}, nothing, False),
        ({"kind": HPA}, nothing, False),
        ({"kind": "external"}, nothing, False),
    ],
)
def test_a_replica_is_offered_that_is_idle_and_stays_until_its_memory_is_needed(
    options: dict[str, Any], happens: Callable[[Cluster, FakeModel], None], is_offered: bool
) -> None:
    cluster = Cluster(places=1)
    model = idle_for_long(cluster, **options)
    happens(cluster, model)
    assert offered(cluster) == ((f"a/{cluster.ready(model)[0].name}",) if is_offered else ())


def two_idle(cluster: Cluster) -> FakeModel:
    """Replicas, as somebody wants a second one; nobody has ever asked that. By the usual rate one would be left."""
    model = idle_for_long(cluster)
    model.replicas = 2
    cluster.change(model)
    cluster.run(6)
    assert len(cluster.ready(model)) == 2
    return model


def test_the_replica_that_the_binder_names_goes_and_no_other_of_its_model() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    first, _ = cluster.ready(model)
    cluster.add("needy", min_scale="1", load_seconds=1, **ONE)
    cluster.run(20)
    assert cluster.ready(model) == [first]


def test_two_replicas_of_one_model_go_for_two_others() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    for name in ("needy", "other"):
        cluster.add(name, min_scale="1", **ONE)
    cluster._carry_out(cluster.scaler.step(cluster.ns))
    question = cluster.question()
    answer = cluster.answer(question)
    for asked, name in zip(question.models, question.idle, strict=True):
        answer.models[asked.model] = replace(answer.models[asked.model], if_idle_go=(name,))
    actions = cluster.scaler.answered(question, answer, cluster.ns)
    assert scales([one for one in actions if one.model == model.key])[-1] == 0


def test_an_evicted_model_that_is_used_again_is_retained_again() -> None:
    cluster = Cluster(places=1)
    kept = idle_for_long(cluster)
    cluster.add("needy", min_scale="1", load_seconds=1, **ONE)
    cluster.until(lambda: kept.replicas == 0, most=30)
    cluster.places, kept.load = 2, 1
    cluster.run(20)
    kept.load = 0
    cluster.run(5 * WINDOW)
    assert len(cluster.ready(kept)) == 1


def test_an_evicted_model_gets_no_more_replicas_than_were_left_by_hand() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    cluster.add("needy", min_scale="1", load_seconds=1, **ONE)
    cluster.until(lambda: model.replicas == 1)
    model.replicas = 0
    cluster.change(model)
    model.written.clear()
    cluster.run(20)
    assert max(model.written, default=0) == 0


def test_no_replica_goes_for_a_model_whose_pods_are_not_created() -> None:
    """Else a tenant without a pod could empty all caches."""
    cluster = Cluster(places=3)
    kept = [retained(cluster, name) for name in ("a", "b")]
    all_idle_for_long(cluster, *kept)
    needy = cluster.add("needy", min_scale="9", most_pods=0)
    for cluster.taken_by_others in (0, 1):  # the place that it has not used goes to somebody else
        cluster.run(4 * WINDOW)
        assert (needy.replicas, [len(cluster.ready(model)) for model in kept]) == (1, [1, 1])
    cluster.taken_by_others, needy.most_pods = 0, 9
    cluster.run(20)
    assert [len(cluster.ready(model)) for model in kept] == [0, 0]


def test_a_retained_replica_serves_at_once() -> None:
    cluster = Cluster(places=1)
    model = idle_for_long(cluster)
    assert cluster.view(model).activity is Activity.INACTIVE
    model.load = 1
    cluster.run(4)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert not asked.needs_proxy
    assert set(model.written) <= {1}


def test_an_idle_replica_that_has_lost_its_node_is_not_requested_again() -> None:
    cluster = Cluster(places=1)
    model = idle_for_long(cluster)
    cluster._end(cluster.ready(model)[0])
    cluster.places = 0
    cluster.run(10)
    assert (model.replicas, cluster.living(model)) == (0, [])


def test_no_replica_goes_for_a_lower_priority() -> None:
    cluster = Cluster(places=1)
    kept = idle_for_long(cluster, priority=5)
    new = cluster.add("new", **ONE)
    new.load = 1
    cluster.run(30)
    assert (kept.replicas, new.replicas) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value", "is_new"),
    [
        ("scale-down-delay", "10m", True),
        ("metric-aggregation-algorithm", "weighted-exponential", True),
        ("target", "2", False),
    ],
)
def test_an_annotation_that_a_decider_reads_at_its_beginning_makes_a_new_one(
    name: str, value: str, is_new: bool
) -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.annotate(model, **{name: value})
    cluster.scaler.step(cluster.ns)
    assert (cluster.view(model).concurrency.stable is None) == is_new


def test_a_restart_goes_on_where_the_last_one_was() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    cluster.run(GRACE // 2)
    since = cluster.view(model).since_ns
    cluster.restart()
    cluster.run(2)
    assert (cluster.view(model).activity, cluster.view(model).since_ns) == (Activity.INACTIVE, since)
    assert cluster.until(lambda: model.replicas == 0) <= GRACE


def asked_each(cluster: Cluster, model: FakeModel, period: int, seconds: int) -> None:
    """A request of a second, as often."""
    for passed in range(seconds):
        model.load = model.rate = float(passed % period == 0)
        cluster.second()


def another_leads(cluster: Cluster, model: FakeModel) -> None:
    cluster.restart()


def another_leads_and_hears_nothing(cluster: Cluster, model: FakeModel) -> None:
    """For a while."""
    cluster.restart()
    record, cluster.scaler.record_loads = cluster.scaler.record_loads, lambda *_: False  # type: ignore[method-assign]
    asked_each(cluster, model, 50, 30)
    cluster.scaler.record_loads = record  # type: ignore[method-assign]


def another_decider(cluster: Cluster, model: FakeModel) -> None:
    cluster.annotate(model, metric_aggregation_algorithm="weighted-exponential")


@pytest.mark.parametrize("begins", [another_leads, another_leads_and_hears_nothing, another_decider])
def test_windows_that_have_just_begun_remove_no_last_replica(
    begins: Callable[[Cluster, FakeModel], None],
) -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=1, **ONE)
    asked_each(cluster, model, 50, 200)
    model.written.clear()
    begins(cluster, model)
    cluster.run(49)
    asked_each(cluster, model, 50, 200)
    assert (model.written, cluster.view(model).activity) == ([], Activity.ACTIVE)


@pytest.mark.parametrize("begins", [another_leads, another_leads_and_hears_nothing, another_decider])
def test_a_model_that_gets_idle_goes_a_window_after_its_windows_began(
    begins: Callable[[Cluster, FakeModel], None],
) -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=1, **ONE)
    asked_each(cluster, model, 50, 200)
    begins(cluster, model)
    model.load = model.rate = 0.0
    cluster.run(1)
    away = cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    assert WINDOW - 1 <= away <= WINDOW + 3
    assert GRACE <= cluster.until(lambda: model.replicas == 0) <= GRACE + 4


def test_empty_windows_that_have_just_begun_are_not_known_to_be_idle() -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=1, kind="keda", **ONE)
    cluster.run(2 * WINDOW)
    assert is_active(cluster.view(model)) is False
    cluster.restart()
    cluster.run(WINDOW)
    assert is_active(cluster.view(model)) is None
    cluster.run(2)
    assert is_active(cluster.view(model)) is False
    model.load = 1
    cluster.restart()
    cluster.run(3)
    assert figure(cluster.view(model), "concurrency") == 1.0


def test_no_model_is_known_to_be_idle_before_the_activators_are_back() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind="keda", **ONE)
    cluster.restart()
    cluster.run(10)
    assert is_active(cluster.view(model)) is None
    cluster.run(2)
    assert is_active(cluster.view(model)) is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        '{"activity": "Maybe", "since": -1e300}',
        '{"activity": "False", "since": 1e12, "wanted": "x"}',
        Scaled(desired=0, activity="False", since=9e9).to_text(),
    ],
)
def test_an_invalid_status_does_no_harm(text: str) -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=1, scaled=text, **ONE)
    cluster.scaler.step(cluster.ns)
    assert cluster.view(model).since_ns <= cluster.ns
    model.load = 3
    cluster.run(20)
    assert model.replicas == 3


def test_an_action_is_repeated_until_it_is_written() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.api_works = False
    model.load = 5
    cluster.run(10)
    cluster.actions.clear()
    cluster.run(4)
    assert scales(cluster.actions) == [5, 5]
    cluster.api_works = True
    cluster.run(10)
    cluster.actions.clear()
    cluster.run(10)
    assert scales(cluster.actions) == []


def test_a_number_that_is_right_again_replaces_one_that_waits_to_be_written() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.api_works = False
    model.load = 5
    cluster.run(10)
    cluster.annotate(model, max_scale="2")
    cluster.actions.clear()
    cluster.run(4)
    assert scales(cluster.actions) == [2]


def test_the_status_is_written_on_change_alone() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.run(2 * WINDOW)
    cluster.actions.clear()
    cluster.run(10)
    assert not [action for action in cluster.actions if isinstance(action, WriteStatus)]
    scaled = Scaled.from_text(model.scaled or "")
    assert (scaled.desired, scaled.requested, scaled.ready, scaled.activity, scaled.initialised) == (
        2,
        2,
        2,
        "True",
        True,
    )


def test_the_status_is_written_no_oftener_than_a_step_is_made() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    written: list[int] = []
    (pod, _), began = cluster.ready(model), cluster.ns
    for quarter in range(40):
        pod.ready = not pod.ready
        cluster._show(pod)
        now_ns = began + quarter * SECOND // 4
        for action in cluster.scaler.step(now_ns):
            if isinstance(action, WriteStatus):
                written.append(now_ns)
    assert len(written) > 2
    assert min(after - before for before, after in pairwise(written)) >= 1.5 * SECOND


def test_a_scaler_without_models_has_nothing_to_ask() -> None:
    cluster = Cluster()
    scaler = Scaler(cluster.cache, BEGAN * SECOND)
    assert scaler.step(cluster.ns) == []
    assert scaler.question(cluster.ns) is None


def crowd(cluster: Cluster, count: int, *, padding: int, namespace: str) -> None:
    """Models that want a replica, of templates that are so much larger than they need to be."""
    for number in range(count):
        item = cluster.add(f"m{number}", namespace=namespace, min_scale="1").json()
        item["spec"]["template"]["metadata"]["annotations"] = {"x": "y" * padding}
        cluster.cache.observe_deployment(item)


@pytest.mark.parametrize(("count", "padding"), [(200, 100_000), (120, 0)])
def test_a_tenant_with_more_models_than_one_question_holds_leaves_room_for_others(
    count: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaler.core.scaler.MOST_ASKED", 90)
    cluster = Cluster()
    crowd(cluster, count, padding=padding, namespace="hostile")
    other = cluster.add("m", namespace="z", min_scale="1")
    cluster.scaler.step(cluster.ns)
    question = cluster.question()
    models = [asked.model for asked in question.models]
    assert other.key in models
    assert 1 < len(models) < count
    assert len(models) <= 90
    assert len(question.encode()) < 16 * 1024**2
    # Its own have their turn one after the other.
    cluster.scaler.answered(question, SchedulableAnswer(generation=1), cluster.ns)
    cluster.scaler.step(cluster.ns + SECOND)
    again = cluster.scaler.question(cluster.ns + SECOND)
    assert again is not None
    new = {asked.model for asked in again.models} - set(models)
    assert len(new) == min(len(models) - 1, count - len(models) + 1)


def test_a_template_that_is_too_large_is_not_sent_and_its_user_gets_an_event() -> None:
    cluster = Cluster()
    model = cluster.add("m", min_scale="1")
    item = model.json()
    item["spec"]["template"]["metadata"]["annotations"] = {"x": "y" * 200_000}
    cluster.cache.observe_deployment(item)
    (event,) = [action for action in cluster.scaler.step(cluster.ns) if isinstance(action, Event)]
    assert "the pod template has 200" in event.message
    assert cluster.scaler.question(cluster.ns) is None


def scaled_by_another(cluster: Cluster, model: FakeModel, time: str) -> None:
    """An HPA has written its replicas then, as the scaler sees at its next step."""
    item = model.json()
    fields = {"f:spec": {"f:replicas": {}}}
    item["metadata"]["managedFields"] = [
        {"manager": "kube-controller-manager", "subresource": "scale", "time": time, "fieldsV1": fields}
    ]
    cluster.cache.observe_deployment(item)


def test_another_autoscaler_of_the_same_deployment_is_reported() -> None:
    """Class kpa beside an HPA was neither detected nor told. What it wrote before Berth scaled is no
    conflict, nor what a class leaves to it."""
    cluster = Cluster()
    ours, theirs = cluster.add("m", **ONE, min_scale="1"), cluster.add("n", kind=HPA, min_scale="1")
    for model in (ours, theirs):
        scaled_by_another(cluster, model, "1")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert not cluster.events_of("ReplicasConflict")
    for model in (ours, theirs):
        scaled_by_another(cluster, model, "2")
    cluster.do(cluster.scaler.step(cluster.ns))
    (said,) = cluster.events_of("ReplicasConflict")
    assert "kube-controller-manager writes replicas as well" in said
    assert [event.model for event in cluster.events if event.reason == "ReplicasConflict"] == [ours.key]
    cluster.now += 100
    scaled_by_another(cluster, ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.events_of("ReplicasConflict")) == 1
    cluster.now += 300
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.events_of("ReplicasConflict")) == 2
    cluster.now += 1000
    cluster.api_works = False
    ours.annotations[GROUP + "max-scale"] = "7"  # anything else of it changes
    scaled_by_another(cluster, ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert (
        len(cluster.events_of("ReplicasConflict")) == 3
    )  # since it was last seen, our own write lay between
    cluster.now += 1000
    ours.annotations[GROUP + "max-scale"] = "8"
    scaled_by_another(cluster, ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.events_of("ReplicasConflict")) == 3


def test_an_autoscaler_that_wrote_before_the_class_changed_is_no_conflict() -> None:
    """What was left to it was its own to write; the class says now that it is no more."""
    cluster = Cluster()
    model = cluster.add("n", kind=HPA, min_scale="1", **ONE)
    for time in ("1", "2"):
        scaled_by_another(cluster, model, time)
        cluster.do(cluster.scaler.step(cluster.ns))
    model.annotations[CLASS] = KPA
    for time, conflicts in (("3", 0), ("4", 1)):  # its last word is seen with the change
        scaled_by_another(cluster, model, time)
        cluster.do(cluster.scaler.step(cluster.ns))
        assert len(cluster.events_of("ReplicasConflict")) == conflicts


@pytest.mark.parametrize("seconds", [60, 600])
def test_a_model_that_does_not_start_is_given_up_after_its_progress_deadline(seconds: int) -> None:
    """By `serving.knative.dev/progress-deadline`, and 30 s more."""
    cluster = Cluster()
    model = cluster.add("m", **ONE, stuck="CrashLoopBackOff")
    model.annotations["serving.knative.dev/progress-deadline"] = f"{seconds}s"
    cluster.change(model)
    model.load = 1
    cluster.until(lambda: model.replicas == 1)
    cluster.until(lambda: any(pod.waiting_reason for pod in cluster.of(model)))
    model.load = 0
    passed = cluster.until(lambda: model.replicas == 0, most=2000)
    assert seconds + 20 < passed <= seconds + 30 + 5


def test_while_no_activator_reports_buffered_requests_are_not_forgotten() -> None:
    """A leader without its Lease has sent the activators away; what they hold still waits for a replica."""
    cluster = Cluster()
    model = at_zero(cluster, load_seconds=1000)
    model.load = 1
    cluster.until(lambda: model.replicas == 1)
    cluster.run(4)

    def alone(seconds: int) -> None:
        for _ in range(seconds):
            cluster.now += 1
            cluster.scaler.close_second(cluster.ns)
            cluster.scaler.step(cluster.ns)

    cluster.scaler.pause()
    cluster.scaler.activator_gone("act")
    alone(20 * WINDOW)
    assert cluster.view(model).recommended == 1
    cluster.scaler.resume(cluster.ns)
    assert cluster.view(model).is_young  # they come back within a while
    alone(2 * WINDOW)
    assert cluster.view(model).recommended == 0


def test_a_route_that_was_proven_before_the_lease_was_lost_is_proven_anew() -> None:
    """The last replica does not go by activators that have been sent away since."""
    cluster = Cluster()
    model = cluster.add("m", replicas=1, **ONE)
    cluster.run(4)
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE, most=200)
    proven = RouteStatus(proven_ns=cluster.ns - GRACE * SECOND, quiet=True)
    cluster.scaler.set_route(model.key, proven)
    cluster.scaler.resume(cluster.ns)
    assert scales(cluster.scaler.step(cluster.ns)) == []
    cluster.scaler.set_route(model.key, proven)
    assert scales(cluster.scaler.step(cluster.ns)) == [0]
