"""The scaler's heart in a cluster in a nutshell: what comes of a decision, and when."""

from collections.abc import Callable
from itertools import pairwise
from math import copysign
from random import Random
from typing import Any

import msgspec
import pytest

from berth.contract.scaling import ModelKey, Report, Scaled, SchedulableAnswer
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
from tests.fakes.scaled_cluster import BEGAN, SECOND, Cluster, FakeModel, FakePod
from tests.fakes.values import replace

WINDOW, GRACE = 60, 30
ONE = {"target": "1", "target_utilization_percentage": "100"}


def loaded(cluster: Cluster, load: float, **options: Any) -> FakeModel:
    """A model with so many steady requests, a while later."""
    model = cluster.add("m", replicas=1, **ONE, **options)
    model.load = load
    cluster.run(20)
    return model


def asleep(cluster: Cluster, name: str = "m", **options: Any) -> FakeModel:
    model = cluster.add(name, **ONE, **options)
    cluster.run(4)
    return model


def report(about: FakeModel, **fields: Any) -> Report:
    usual = Report(
        version=1,
        model=about.key,
        held=1,
        average_held=0.0,
        arrived=1.0,
        forwarded=0.0,
        held_bytes=10,
        oldest_seconds=0.0,
        wake=True,
        rest_port=20000,
        grpc_port=20001,
    )
    return replace(usual, **fields)


def scales(actions: list[Any]) -> list[int]:
    return [action.replicas for action in actions if isinstance(action, WriteScale)]


@pytest.mark.parametrize("breaks", ["decide", "record", "configure", "limit"])
def test_a_model_that_nobody_has_thought_of_does_not_end_the_scaling_of_the_others(
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
        odd.annotations["autoscaling.knative.dev/max-scale"] = str(cluster.now)
        cluster.change(odd)
        cluster.second()
    assert good.replicas == 3


# As many copies as are wanted, and as fit.


def test_five_in_flight_at_a_target_of_one_are_five_copies() -> None:
    cluster = Cluster(places=8)
    model = loaded(cluster, 5)
    assert len(cluster.ready(model)) == model.replicas == 5
    assert not cluster.told("CapacityLimited")


def test_where_three_fit_they_are_three_and_none_is_pending() -> None:
    cluster = Cluster(places=3)
    model = loaded(cluster, 5)
    assert len(cluster.ready(model)) == model.replicas == len(cluster.of(model)) == 3
    view = cluster.view(model)
    assert (view.desired, view.capacity_limited, view.message) == (5, 2, "1 GPUMemoryInsufficient")
    assert len(cluster.told("CapacityLimited")) == 1
    assert Scaled.from_text(model.scaled or "").capacity_limited == 2


def test_nothing_is_shown_as_no_less_than_nothing() -> None:
    """What is left of a window of sums and differences may round to -0.0."""
    cluster, chance = Cluster(), Random(0)
    model = cluster.add("a")
    for second in range(200):
        model.load, model.rate = int(second < 5), chance.random() * 3 if second < 100 else 0.0
        cluster.second()
        shown = cluster.view(model).requests_per_second
        assert all(copysign(1.0, value) == 1.0 for value in (shown.stable, shown.panic) if value is not None)


def test_what_is_forwarded_before_a_copy_has_counted_it_is_shown_as_none() -> None:
    cluster = Cluster()
    model = asleep(cluster)
    cluster.do(cluster.scaler.report("act", report(model), cluster.ns))
    cluster.do(cluster.scaler.report("act", report(model, held=0, arrived=0.0, forwarded=9.0), cluster.ns))
    cluster.second()
    _, requests = cluster.scaler._autoscalers[model.key]._decider.averages(cluster.ns)
    assert requests is not None
    assert requests.stable < 0
    shown = cluster.view(model).requests_per_second
    assert (shown.stable, shown.panic) == (0.0, 0.0)


def test_what_becomes_free_is_used_at_the_next_decision() -> None:
    cluster = Cluster(places=3)
    model = loaded(cluster, 5)
    cluster.places = 5
    assert cluster.until(lambda: model.replicas == 5) <= 2


def test_a_clip_gives_up_no_copy_that_has_a_place() -> None:
    cluster = Cluster(places=5)
    model = loaded(cluster, 5)
    cluster.places = 2
    cluster.run(20)
    assert len(cluster.ready(model)) == 5


def test_a_copy_that_has_lost_its_place_is_not_asked_for_again() -> None:
    cluster = Cluster(places=5)
    model = loaded(cluster, 5)
    cluster.places = 3
    for pod in cluster.ready(model)[:2]:  # a node dies
        cluster._end(pod)
    cluster.run(8)
    assert model.replicas == 3
    assert not any(pod.refused for pod in cluster.living(model))


def test_a_minimum_is_clipped_too() -> None:
    cluster = Cluster(places=2)
    model = cluster.add("m", min_scale="4")
    cluster.run(4)
    assert model.replicas == 2
    assert cluster.view(model).capacity_limited == 2


def test_some_may_wait_for_a_node_that_is_still_to_come() -> None:
    cluster = Cluster(places=3)
    model = cluster.add("m", min_scale="9")
    model.annotations["seldon.io/trtis-overflow-pods"] = "2"
    cluster.change(model)
    cluster.run(20)
    assert model.replicas == 5
    assert sum(pod.refused for pod in cluster.living(model)) == 2


# --- a node that is still to come, and scheduling gates -----------------------------------------------------------------


def without_nodes(**options: Any) -> tuple[Cluster, FakeModel]:
    """A model at zero whose pool has no node yet."""
    cluster = Cluster(places=0)
    model = asleep(cluster, **options)
    model.annotations["seldon.io/trtis-overflow-pods"] = "2"
    cluster.change(model)
    return cluster, model


def test_a_model_at_zero_asks_an_empty_pool_for_a_node() -> None:
    """ecosystem A2: it was called hopeless, its pod went after a second, and no node autoscaler ever saw one."""
    cluster, model = without_nodes()
    model.load = 1
    cluster.run(300)
    assert model.replicas == 1
    (pod,) = cluster.living(model)
    assert pod.refused
    assert model.written == [1]
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert not asked.hopeless
    assert "1 of its pods wait for a node" in asked.waits_for
    assert "wait for a node" in cluster.view(model).message
    assert len(cluster.told("WaitingForNode")) == 1
    cluster.places = 1
    cluster.until(lambda: bool(cluster.ready(model)), most=30)
    assert cluster.view(model).message == ""


@pytest.mark.parametrize("deadline", [60, 600])
def test_a_pod_that_waits_for_a_node_outlives_those_who_wait_for_it(deadline: int) -> None:
    """ecosystem A2: a node takes longer than a client waits. Its progress deadline after the last of them, and no later."""
    cluster, model = without_nodes()
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


def test_a_pod_that_no_node_would_help_waits_for_none() -> None:
    """ecosystem A2: the condition that node autoscalers act on is `Unschedulable` alone; whatever else the binder says
    is a refusal all the same."""
    cluster, model = without_nodes(refused_for="ModelTooLarge")
    model.load = 1
    cluster.run(20)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless
    assert model.replicas == 0


def test_without_pods_that_may_wait_an_empty_pool_is_hopeless_at_once() -> None:
    cluster = Cluster(places=0)
    model = asleep(cluster)
    model.load = 1
    cluster.run(4)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless
    assert model.replicas == 0


def test_a_model_behind_a_quota_shows_one_pod_more_than_is_let_through() -> None:
    """elastic 3.2: gated pods are neither on their way nor unmade, and a quota sees the demand by one of them."""
    cluster = Cluster(places=9)
    model = cluster.add("m", min_scale="5", quota=2)
    cluster.until(lambda: model.replicas == 3, most=60)
    cluster.run(200)
    assert model.replicas == 3
    assert len(cluster.ready(model)) == 2
    view = cluster.view(model)
    assert (view.desired, view.capacity_limited, view.pods.gated, view.pods.pending) == (5, 2, 1, 1)
    assert "scheduling gates block 1 of its pods, as a quota does: kueue.x-k8s.io/admission" in view.message
    assert Scaled.from_text(model.scaled or "").gated == 1
    assert 1 <= len(cluster.told("SchedulingGated")) <= 2
    model.quota = 4
    cluster.until(lambda: len(cluster.ready(model)) == 4, most=60)
    cluster.run(60)
    assert model.replicas == 5
    model.quota = None
    cluster.until(lambda: len(cluster.ready(model)) == 5, most=60)
    cluster.run(4)
    assert (cluster.view(model).message, cluster.view(model).pods.gated) == ("", 0)


def test_a_model_at_zero_behind_a_quota_waits_and_its_clients_are_told_what_for() -> None:
    """elastic 3.2: it is buffered, not refused; whoever waits in vain learns that a gate holds it back."""
    cluster = Cluster(places=9)
    model = asleep(cluster, quota=0)
    model.load = 1
    cluster.run(400)
    assert model.replicas == 1
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert not asked.hopeless
    assert "scheduling gates block 1 of its pods" in asked.waits_for
    assert model.written == [1]
    model.quota = 1
    cluster.until(lambda: bool(cluster.ready(model)), most=30)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.waits_for == ""


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


def test_a_gated_pod_that_nobody_waits_for_any_more_goes() -> None:
    """elastic 3.2."""
    cluster = Cluster(places=9)
    model = asleep(cluster, quota=0)
    model.load = 1
    cluster.run(100)
    model.load = 0
    cluster.until(lambda: model.replicas == 0, most=WINDOW + 10)


def test_a_copy_that_was_gated_for_long_is_not_given_up_while_it_loads() -> None:
    """elastic 3.2: the time behind a gate is not time in which it fails to come up."""
    cluster = Cluster(places=9)
    model = asleep(cluster, quota=0, load_seconds=90)
    model.load = 1
    cluster.run(1000)
    model.quota = 1
    cluster.until(lambda: any(pod.node for pod in cluster.of(model)))
    model.load = 0
    cluster.until(lambda: bool(cluster.ready(model)), most=100)


def test_no_place_is_kept_for_a_pod_that_a_gate_holds_back() -> None:
    """elastic 3.2: a place that is kept for one is taken from others for nothing."""
    cluster = Cluster(places=4)
    behind = cluster.add("a", min_scale="4", quota=1, priority=9)
    cluster.until(lambda: behind.replicas == 2, most=60)
    other = cluster.add("b", min_scale="3")
    cluster.until(lambda: len(cluster.ready(other)) == 3, most=60)
    assert len(cluster.ready(behind)) == 1


def test_priority_is_served_first_then_who_lacks_most() -> None:
    cluster = Cluster(places=6)
    low, high = cluster.add("a", min_scale="6"), cluster.add("b", min_scale="4", priority=5)
    cluster.run(6)
    assert (high.replicas, low.replicas) == (4, 2)


def test_equals_share() -> None:
    cluster = Cluster(places=6)
    models = [cluster.add(name, min_scale="6") for name in ("a", "b", "c")]
    cluster.run(6)
    assert [model.replicas for model in models] == [2, 2, 2]


def test_what_has_been_promised_to_one_is_not_given_to_another() -> None:
    """A copy that was asked for has its place, though its pod is not there yet."""
    cluster = Cluster(places=1)
    first = asleep(cluster)
    cluster.do(cluster.scaler.report("act", report(first), cluster.ns))
    assert first.replicas == 1
    second = cluster.add("z", min_scale="1", priority=9)
    cluster.do(cluster.scaler.step(cluster.ns))
    assert second.replicas == 0
    cluster.run(6)
    assert (first.replicas, second.replicas) == (1, 0)


def test_a_copy_that_the_binder_has_refused_is_owed_nothing() -> None:
    cluster = Cluster(places=1)
    first = asleep(cluster)
    cluster.do(cluster.scaler.report("act", report(first), cluster.ns))
    cluster._follow(first)
    cluster.taken_by_others = 1
    cluster._bind()
    assert [pod.refused for pod in cluster.living(first)] == [True]
    cluster.taken_by_others = 0
    second = cluster.add("z", min_scale="1", priority=9)
    cluster.do(cluster.scaler.step(cluster.ns))
    assert second.replicas == 1


def test_copies_that_are_there_are_told_with_the_question() -> None:
    cluster = Cluster()
    model = cluster.add("m", min_scale="3", load_seconds=5)
    cluster.run(8)
    model.load_seconds = 100
    model.annotations["autoscaling.knative.dev/min-scale"] = "5"
    cluster.change(model)
    cluster.run(4)
    model.annotations["autoscaling.knative.dev/min-scale"] = "6"
    cluster.change(model)
    cluster.scaler.step(cluster.ns)
    question = cluster.scaler.question(cluster.ns)
    assert question is not None
    (asked,) = question.models
    assert (asked.desired, asked.running, asked.starting) == (6, 3, 2)


def test_the_last_word_of_a_silent_binder_is_that_of_its_last_answer() -> None:
    """What it had room for long before that is nobody's any more."""
    cluster = Cluster(places=4)
    model = cluster.add("m", min_scale="9")
    cluster.run(6)
    model.annotations["autoscaling.knative.dev/min-scale"] = "1"
    cluster.change(model)
    cluster.run(20)
    assert model.replicas == 1
    cluster.add("other", min_scale="3")
    cluster.run(6)
    cluster.binder_answers = False
    model.annotations["autoscaling.knative.dev/min-scale"] = "4"
    cluster.change(model)
    cluster.run(20)
    assert model.replicas == 1


@pytest.mark.parametrize("replicas", [0, 2])
def test_without_an_answer_nothing_more_is_asked_for(replicas: int) -> None:
    cluster = Cluster()
    cluster.binder_answers = False
    model = cluster.add("m", replicas=replicas, min_scale="7")
    cluster.run(290)
    assert model.replicas == replicas


def test_a_binder_that_is_away_for_long_is_tried_with_one_copy_at_a_time() -> None:
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


def test_a_binder_that_has_not_been_asked_is_not_silent() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.run(1000)
    model.load = 4
    cluster.run(20)
    assert model.replicas == 4


def test_for_copies_that_have_a_place_nobody_is_asked() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=100)
    model.load = 1
    cluster.run(6)
    assert cluster.view(model).capacity_limited == 0
    cluster.binder_answers = False
    cluster.run(400)
    assert cluster.scaler.binder_silent_ns == 0


def test_a_binder_that_nobody_asks_any_more_is_not_silent() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    cluster.binder_answers, model.load = False, 4
    cluster.run(20)
    assert cluster.scaler.binder_silent_ns > 0
    model.load = 2
    cluster.run(300)
    assert cluster.scaler.binder_silent_ns == 0


def test_what_was_promised_and_not_written_is_anybodys_after_a_while() -> None:
    cluster = Cluster(places=5)
    model = loaded(cluster, 2)
    cluster.api_works = False
    model.load = 5
    cluster.until(lambda: cluster.view(model).requested == 5, most=20)
    cluster.taken_by_others = 3
    cluster.run(6)
    assert cluster.view(model).requested == 5, "it may be on its way"
    cluster.run(14)
    cluster.api_works = True
    cluster.run(10)
    assert max(model.written) == model.replicas == 2


def test_who_is_owed_copies_that_do_not_come_is_waited_for_ten_seconds() -> None:
    cluster = Cluster(places=3)
    model = cluster.add("m", min_scale="3", most_pods=0)
    cluster.run(4)
    assert model.replicas == 3
    other = cluster.add("other", min_scale="3", priority=9)
    cluster.run(4)
    assert other.replicas == 0
    cluster.run(8)
    assert other.replicas == 3


# Replicas that are asked for and never made.


def hindered(cluster: Cluster, **options: Any) -> FakeModel:
    """It may have two pods, wants as many as there are places, and more than others."""
    model = cluster.add("m", min_scale="6", priority=5, most_pods=2, load_seconds=1, **options)
    cluster.run(10)
    assert (model.replicas, len(cluster.living(model))) == (6, 2)
    return model


def test_what_a_quota_forbids_keeps_no_place_from_others() -> None:
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


def test_who_may_have_no_more_pods_asks_again_now_and_then_and_not_for_long() -> None:
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


def test_once_a_pod_is_made_after_all_the_others_are_asked_for() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    cluster.run(30)
    model.most_pods, model.annotations["autoscaling.knative.dev/min-scale"] = 9, "8"
    cluster.change(model)
    cluster.run(4)
    assert (model.replicas, cluster.view(model).message) == (6, "1 GPUMemoryInsufficient")
    cluster.places = 8
    cluster.run(4)
    assert model.replicas == 8


def test_what_could_not_be_written_is_not_what_is_not_made() -> None:
    cluster = Cluster(places=6)
    model = cluster.add("m", min_scale="6", load_seconds=1)
    cluster.api_works = False
    cluster.run(60)
    cluster.api_works = True
    cluster.run(8)
    assert (model.replicas, len(cluster.ready(model)), cluster.view(model).message) == (6, 6, "")


def test_pods_that_are_made_slowly_are_waited_for() -> None:
    cluster = Cluster(places=6)
    model = hindered(cluster)
    other = cluster.add("other", min_scale="1", load_seconds=1)
    for _ in range(4):
        cluster.run(15)
        model.most_pods += 1
    assert (other.replicas, model.most_pods) == (0, 6)


# From zero.


def test_the_first_request_is_decided_at_once() -> None:
    cluster = Cluster()
    model = asleep(cluster)
    assert model.replicas == 0
    cluster.do(cluster.scaler.report("act", report(model), cluster.ns))
    assert model.replicas == 1
    assert cluster.told("ScaledFromZero")


def test_a_second_request_decides_nothing_before_its_time() -> None:
    cluster = Cluster()
    model = asleep(cluster)
    cluster.do(cluster.scaler.report("act", report(model), cluster.ns))
    before = cluster.scaler.view(model.key)
    cluster.do(cluster.scaler.report("act", report(model, held=9, average_held=9.0, arrived=8.0), cluster.ns))
    after = cluster.scaler.view(model.key)
    assert before is not None
    assert after is not None
    assert before.decisions == after.decisions
    cluster.run(2)
    assert model.replicas > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"average_held": float("nan")},
        {"arrived": -1.0},
        {"forwarded": float("inf")},
        {"served_ago": float("nan")},
        {"model": ModelKey("x", "y")},
    ],
)
def test_what_cannot_be_wakes_nobody(fields: dict[str, Any]) -> None:
    cluster = Cluster()
    model = asleep(cluster)
    assert cluster.scaler.report("act", report(model, **fields), cluster.ns) == []
    assert model.replicas == 0


def test_a_model_that_cannot_come_is_not_being_woken() -> None:
    cluster = Cluster()
    model = asleep(cluster, fails="it is broken")
    model.load = 1
    cluster.run(10)
    model.load = 0
    cluster.run(2 * WINDOW)
    seen = len(cluster.view(model).cold_starts)
    assert cluster.scaler.report("act", report(model), cluster.ns) == []
    assert len(cluster.view(model).cold_starts) == seen


def test_what_an_activator_holds_that_says_no_more_is_waited_for() -> None:
    """Until its stream ends: it may be slow, and its clients wait all the same."""
    cluster = Cluster()
    model = asleep(cluster, load_seconds=1000)
    cluster.do(cluster.scaler.report("act", report(model, average_held=1.0), cluster.ns))
    cluster.run(4 * WINDOW)
    assert (model.replicas, cluster.view(model).recommended) == (1, 1)
    cluster.scaler.activator_gone("act")
    cluster.until(lambda: cluster.view(model).recommended == 0, most=2 * WINDOW)


def test_requests_that_are_held_are_among_those_that_wait() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=1000)
    assert cluster.view(model).waiting.stable == 0.0
    model.load = 5
    cluster.run(30)
    assert cluster.view(model).waiting.panic == 5.0


def test_how_long_a_wake_took_by_phases() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=5)
    model.load = 1
    cluster.run(10)
    (wake,) = cluster.view(model).cold_starts
    assert dict(wake.phases) == {"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.0}


@pytest.mark.parametrize(
    ("served_ago", "found"),
    [
        (0.0, {"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.5}),
        (0.25, {"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.25}),
        (1.0, {"decide": 0.0, "schedule": 1.0, "load": 4.5, "serve": 0.0}),  # before it was seen to be ready
        (1e6, {"decide": 0.0, "schedule": 0.0, "load": 0.0, "serve": 0.0}),
    ],
)
def test_a_wake_ends_when_a_copy_has_served_and_not_when_that_is_told(
    served_ago: float, found: dict[str, float]
) -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=5)
    began_ns = cluster.ns
    cluster.scaler.report("act", report(model, held=1, wake=True), began_ns)
    cold_starts = cluster.scaler._autoscalers[model.key]._cold_starts
    cold_starts.requested(began_ns)
    cold_starts._reach(2, began_ns + SECOND)
    cold_starts._reach(3, began_ns + 6 * SECOND)
    told = report(model, held=0, forwarded=1.0, served_ago=served_ago)
    cluster.scaler.report("act", told, began_ns + 13 * SECOND // 2)
    (wake,) = cluster.view(model).cold_starts
    assert dict(wake.phases) == found


def test_what_was_woken_in_vain_goes_again() -> None:
    """Its clients have gone before it was ready, and it has served nobody."""
    cluster = Cluster()
    model = asleep(cluster, load_seconds=100)
    model.load = 1
    cluster.run(3)
    model.load = 0
    cluster.run(100)
    assert len(cluster.ready(model)) == 1
    cluster.until(lambda: model.replicas == 0, most=2 * WINDOW + GRACE)
    model.load_seconds, model.load = 1, 1
    cluster.run(10)
    assert [dict(wake.phases).get("serve") for wake in cluster.view(model).cold_starts] == [None, 0.0]


# To zero.


def test_to_zero_after_a_window_without_requests_and_the_grace_period() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    away = cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    assert WINDOW <= away <= WINDOW + 4
    assert GRACE <= cluster.until(lambda: model.replicas == 0) <= GRACE + 4
    assert cluster.told("ScaledToZero") == ["it was idle for its stable window"]


def test_not_to_zero_before_requests_can_come_to_an_activator() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    cluster._lead = lambda: None  # type: ignore[method-assign]
    cluster.run(10 * GRACE)
    assert model.replicas == 1
    cluster.scaler.set_route(model.key, RouteStatus(proven_ns=cluster.ns))
    cluster.run(GRACE - 2)
    assert model.replicas == 1
    cluster.run(4)
    assert model.replicas == 0


def test_copies_that_are_left_in_peace_go_earlier() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    cluster._lead = lambda: None  # type: ignore[method-assign]
    cluster.scaler.set_route(model.key, RouteStatus(proven_ns=cluster.ns - 5 * SECOND, quiet=True))
    assert cluster.until(lambda: model.replicas == 0) <= 2


def test_a_proof_of_another_time_is_none() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    cluster._lead = lambda: None  # type: ignore[method-assign]
    cluster.scaler.set_route(model.key, RouteStatus(proven_ns=cluster.ns - 1000 * SECOND, quiet=True))
    model.load = 0
    cluster.run(WINDOW + 2 * GRACE)
    assert model.replicas == 1


def test_a_request_in_the_grace_period_keeps_it() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    cluster.run(GRACE - 6)
    model.load = 1
    cluster.run(GRACE)
    assert (model.replicas, cluster.view(model).activity) == (1, Activity.ACTIVE)


@pytest.mark.parametrize("lacking", ["Service", "activator"])
def test_who_could_not_be_woken_keeps_one_copy(lacking: str) -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    model.has_service = lacking != "Service"
    cluster.activators = int(lacking != "activator")
    model.load = 0
    cluster.run(10 * WINDOW)
    assert model.replicas == 1
    assert lacking in cluster.told("ScaleToZeroBlocked")[0]
    assert len(cluster.told("ScaleToZeroBlocked")) <= 2
    model.has_service, cluster.activators = True, 1
    cluster.until(lambda: model.replicas == 0, most=3 * WINDOW)


def test_who_is_kept_is_shown_as_kept_and_why() -> None:
    """Not as one that is wanted now and is not the next moment, each window anew."""
    cluster = Cluster()
    model = loaded(cluster, 1, has_service=False)
    model.load = 0
    cluster.until(lambda: cluster.told("ScaleToZeroBlocked"))
    shown = set()
    for _ in range(5 * WINDOW):
        cluster.second()
        view = cluster.view(model)
        shown.add((view.desired, view.requested, view.activity, view.message))
    assert shown == {(1, 1, Activity.INACTIVE, "no Service leads to its copies")}


def test_who_is_kept_and_asked_is_active_again() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1, has_service=False)
    model.load = 0
    cluster.until(lambda: cluster.told("ScaleToZeroBlocked"))
    model.load = 2
    cluster.until(lambda: model.replicas == 2)
    view = cluster.view(model)
    assert (view.activity, view.message) == (Activity.ACTIVE, "")


def test_a_minimum_is_no_copy_that_is_kept() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1, has_service=False)
    model.load = 0
    cluster.until(lambda: cluster.told("ScaleToZeroBlocked"))
    model.annotations["autoscaling.knative.dev/min-scale"] = "1"
    cluster.change(model)
    cluster.run(4)
    view = cluster.view(model)
    assert (view.desired, view.activity, view.message) == (1, Activity.ACTIVE, "")


def test_while_a_copy_is_wanted_nothing_is_said_of_why_the_last_one_would_stay() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=100, has_service=False)
    model.load = 1
    cluster.run(20)
    assert (model.replicas, cluster.view(model).recommended) == (1, 1)
    assert cluster.told("ScaleToZeroBlocked") == []


def test_the_time_of_an_activation_is_not_that_of_the_one_before() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=1, stuck="CrashLoopBackOff")
    model.load = 1
    cluster.run(4)
    model.load = 0
    (pod,) = cluster.living(model)
    for is_ready in (False, True, False):
        pod.ready, pod.waiting_reason = is_ready, "" if is_ready else "CrashLoopBackOff"
        cluster._show(pod)
        cluster.run(4 if is_ready else 400)
        assert model.replicas == 1
    cluster.until(lambda: model.replicas == 0, most=240)


def test_who_sleeps_is_not_woken_for_want_of_an_activator() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: model.replicas == 0)
    model.written.clear()
    cluster.activators = 0
    cluster.run(2 * WINDOW)
    assert (model.written, cluster.view(model).recommended) == ([], 0)


def test_a_last_copy_with_a_request_stays() -> None:
    """An open stream without messages is no load, and yet somebody's."""
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    stream = 1

    def quiet(_: FakeModel, ready: list[FakePod]) -> None:
        for pod in ready:
            pod.busy, pod.rate = 0, 0.0

    cluster.spread = quiet
    usual = cluster._load
    cluster._load = lambda pod: _with(usual(pod), stream)  # type: ignore[method-assign]
    cluster.run(WINDOW + 4 * GRACE)
    assert model.replicas == 1
    stream = 0
    cluster.run(4)
    assert model.replicas == 0


def _with(load: Any, in_triton: int) -> Any:

    return msgspec.structs.replace(load, in_triton=in_triton)


def test_a_copy_that_says_nothing_may_be_busy() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    record, cluster.scaler.record_loads = cluster.scaler.record_loads, lambda *_: False  # type: ignore[method-assign]
    cluster.run(3 * GRACE)
    assert model.replicas == 1
    cluster.scaler.record_loads = record  # type: ignore[method-assign]
    cluster.run(4)
    assert model.replicas == 0


def test_a_retention_begins_when_nobody_asks_any_more() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1, scale_to_zero_pod_retention_period="90s")
    cluster.run(200)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    assert 90 <= cluster.until(lambda: model.replicas == 0) <= 94


# Fewer.


def test_the_copies_whose_end_costs_least_go() -> None:
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


def test_nothing_is_said_of_costs_when_no_copy_goes() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    model.load = 4
    cluster.run(20)
    assert len(cluster.ready(model)) == 4
    assert not any(action.costs for action in cluster.actions if isinstance(action, WriteScale))


def test_of_costs_only_what_is_new_is_written() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4)
    first, *others = cluster.ready(model)
    first.cost = "1"
    cluster._show(first)
    model.annotations["autoscaling.knative.dev/max-scale"] = "3"
    cluster.change(model)
    cluster.run(2)
    (write,) = [one for one in cluster.actions if isinstance(one, WriteScale) and one.replicas == 3]
    assert write.costs == {pod.name: 1 for pod in others}


def test_copies_that_are_busy_are_no_reason_for_more_than_somebody_has_left() -> None:
    """Who sets fewer by hand has said which number may not be passed on the way down."""
    cluster = Cluster()
    model = loaded(cluster, 4, concurrency=0)

    def long(model: FakeModel, ready: list[FakePod]) -> None:
        for pod in ready:
            pod.busy, pod.rate = 1, 0.0

    cluster.spread = long
    cluster.run(2)
    model.replicas = 2
    model.annotations["autoscaling.knative.dev/max-scale"] = "1"
    cluster.change(model)
    model.written.clear()
    cluster.do(cluster.scaler.step(cluster.ns))
    assert max(model.written, default=0) <= 2


def test_copies_with_long_requests_are_not_ended() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4, concurrency=0)

    def long(model: FakeModel, ready: list[FakePod]) -> None:
        for place, pod in enumerate(ready):
            pod.busy, pod.rate = (1, 0.0) if place < 3 else (0, 0.0)

    cluster.spread = long
    # One of three at once would do, by its annotations.
    model.annotations["autoscaling.knative.dev/target"] = "10"
    cluster.change(model)
    cluster.run(3 * WINDOW)
    assert model.replicas == 3
    assert cluster.view(model).recommended == 1


def test_while_nothing_is_known_nothing_changes() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4)
    cluster.scaler.record_loads = lambda *_: False  # type: ignore[method-assign]
    model.written.clear()
    cluster.run(5 * WINDOW)
    assert model.replicas == 4
    assert set(model.written) <= {4}


# Classes.


def test_an_hpa_has_all_copies_but_the_first_and_the_last() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind=HPA, **ONE)
    model.load = 5
    cluster.run(20)
    assert model.written == [1]
    assert (cluster.view(model).recommended, cluster.view(model).desired) == (5, 5)
    model.replicas = 4  # the HPA's
    cluster.change(model)
    cluster.run(20)
    assert model.written == [1]
    model.load, model.replicas = 0, 1
    cluster.change(model)
    cluster.until(lambda: model.replicas == 0)
    assert model.written == [1, 0]


def test_an_hpas_minimum_is_what_it_begins_with() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind=HPA, min_scale="3", **ONE)
    cluster.run(4)
    assert model.written == [3]


def test_of_another_class_nothing_is_written_and_its_requests_are_held() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind="external", **ONE)
    model.load = 5
    cluster.run(20)
    assert model.written == []
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.away
    assert (cluster.view(model).buffered, cluster.view(model).recommended) == (5, 5)
    model.replicas = 2  # KEDA's
    cluster.change(model)
    cluster.run(20)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert not asked.away
    model.load = 0
    cluster.run(5 * WINDOW)
    assert model.written == []


def test_annotations_that_do_not_go_put_nobody_out_of_reach_when_the_scaler_is_another() -> None:
    cluster = Cluster()
    model = asleep(cluster, max_scale="3")
    model.annotations["autoscaling.knative.dev/max-scale"] = "abc"
    cluster.change(model)
    cluster.run(20)
    for _ in range(2):  # what is written by the first is what the second writes
        cluster.restart()
        cluster.run(20)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.away
    model.load = 9
    cluster.run(20)
    assert model.replicas == 3
    model.annotations["autoscaling.knative.dev/max-scale"] = "5"
    cluster.change(model)
    cluster.run(20)
    assert model.replicas == 5
    assert Scaled.from_text(model.scaled or "").last_valid == {}


def test_what_another_autoscaler_does_is_not_told_as_ours() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind="external", replicas=1, **ONE)
    for model.replicas in (1, 0, 2, 0):
        cluster.change(model)
        cluster.run(20)
        assert cluster.view(model).requested == model.replicas
    assert (cluster.told("ScaledFromZero"), cluster.told("ScaledToZero")) == ([], [])


def test_one_that_is_woken_by_hand_is_not_told_as_ours() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=10)
    model.replicas = 1
    cluster.change(model)
    cluster.run(4)
    assert cluster.told("ScaledFromZero") == []


def test_what_is_set_by_hand_is_overwritten() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    model.replicas = 7
    cluster.change(model)
    cluster.run(2)
    assert model.replicas == 3


def test_without_the_class_its_copies_stay_as_they_are() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    del model.annotations["autoscaling.knative.dev/class"]
    cluster.change(model)
    cluster.actions.clear()
    model.load = 0
    cluster.run(3 * WINDOW)
    assert model.replicas == 3
    assert cluster.actions == [RouteChanged(model=model.key)]
    assert cluster.scaler.asked(model.key, cluster.ns) is None
    assert cluster.scaler.view(model.key) is None


def test_a_deployment_that_ends_is_forgotten_and_a_successor_is_another() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    cluster.remove(model)
    cluster.do(cluster.scaler.report("act", report(model), cluster.ns))
    cluster.run(2)
    assert cluster.scaler.asked(model.key, cluster.ns) is None
    successor = cluster.add("m", **ONE)
    cluster.run(2)
    assert cluster.view(successor).recommended is None


def test_a_successor_that_nobody_has_seen_in_between_is_another_as_well() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    model.uid, model.scaled = "another", None
    cluster.change(model)
    cluster.do(cluster.scaler.report("act", report(model, held=0), cluster.ns))
    assert cluster.view(model).since_ns == cluster.ns
    assert cluster.view(model).decisions == ()


# Options.


def test_bounds_of_the_annotations() -> None:
    cluster = Cluster()
    model = loaded(cluster, 9, max_scale="4", min_scale="2")
    assert model.replicas == 4
    model.load = 0
    cluster.run(4 * WINDOW)
    assert model.replicas == 2


def test_an_initial_scale_counts_once() -> None:
    cluster = Cluster()
    model = cluster.add("m", initial_scale="3", **ONE)
    cluster.until(lambda: len(cluster.ready(model)) == 3)
    cluster.until(lambda: model.replicas == 0, most=3 * WINDOW)
    cluster.restart()
    model.written.clear()
    model.load = 1
    cluster.run(20)
    assert model.written == [1]


def test_an_initial_scale_is_waited_for_until_so_many_are_ready() -> None:
    cluster = Cluster(places=2)
    model = cluster.add("m", initial_scale="3", **ONE)
    cluster.run(3 * WINDOW)
    assert (model.replicas, cluster.view(model).desired) == (2, 3)
    cluster.places = 3
    cluster.until(lambda: len(cluster.ready(model)) == 3, most=10)
    cluster.until(lambda: model.replicas == 0, most=3 * WINDOW)


def test_what_does_not_go_is_said_once_and_the_last_good_set_stays() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    model.annotations["autoscaling.knative.dev/target"] = "some"
    cluster.change(model)
    cluster.run(10)
    model.load = 5
    cluster.run(20)
    (said,) = cluster.told("InvalidAnnotation")
    assert "autoscaling.knative.dev/target" in said
    assert model.replicas == 5
    assert cluster.view(model).invalid == said


def test_other_annotations_count_from_the_next_decision_on() -> None:
    cluster = Cluster()
    model = loaded(cluster, 6)
    model.annotations["autoscaling.knative.dev/max-scale"] = "2"
    cluster.change(model)
    cluster.run(2)
    assert model.replicas == 2


# Replicas that never come.


def test_a_copy_that_loads_for_long_is_waited_for() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=3000)
    model.load = 1
    cluster.run(10)
    model.load = 0  # though nobody waits any more
    cluster.run(2000)
    assert model.replicas == 1


def test_a_copy_without_progress_and_without_clients_goes_after_the_deadline() -> None:
    cluster = Cluster()
    model = asleep(cluster, stuck="ImagePullBackOff")
    model.load = 1
    cluster.run(10)
    model.load = 0
    passed = cluster.until(lambda: model.replicas == 0, most=800)
    assert 600 <= passed <= 640


def test_clients_that_went_with_their_activator_are_waited_for_no_longer() -> None:
    """Nobody has told that they went."""
    cluster = Cluster()
    model = asleep(cluster, stuck="CrashLoopBackOff")
    model.load = 1
    cluster.run(10)
    model.load = model.held = 0
    cluster.scaler.activator_gone("act")
    assert 600 <= cluster.until(lambda: model.replicas == 0, most=800) <= 700


def test_who_loses_its_last_copy_is_held_for_at_once_and_no_longer_than_it_has_none() -> None:
    cluster = Cluster()
    model = loaded(cluster, 1)
    (pod,) = cluster.ready(model)

    def is_away() -> bool:
        asked = cluster.scaler.asked(model.key, cluster.ns)
        assert asked is not None
        return asked.away

    assert not is_away()
    pod.ready = False
    cluster._show(pod)
    assert is_away()
    cluster.scaler.set_route(model.key, RouteStatus(proven_ns=cluster.ns))
    pod.ready = True
    cluster._show(pod)
    assert not is_away()


def test_a_failed_model_is_ended_and_not_woken_for_a_while() -> None:
    cluster = Cluster()
    model = asleep(cluster, fails="the model's files are not a model")
    model.load = 1
    cluster.run(10)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless == "the model's files are not a model"
    assert model.replicas == 0
    assert "not a model" in cluster.told("ScaledToZero")[0]
    model.written.clear()
    cluster.run(580)
    assert model.written == []
    model.fails = ""
    cluster.run(40)
    assert model.replicas == 1


def test_one_copy_that_serves_is_hope_enough() -> None:
    cluster = Cluster()
    model = cluster.add("m", min_scale="2", fails="this node is broken", **ONE)
    cluster.run(10)
    assert model.replicas == 2
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless == "this node is broken"
    first = cluster.living(model)[0]
    first.ready, first.failed = True, ""
    cluster._show(first)
    cluster.run(2)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless == ""


def test_a_copy_that_has_failed_and_leaves_is_no_sign_of_the_next() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=100)
    model.load = 1
    cluster.run(4)
    (pod,) = cluster.living(model)
    pod.failed, pod.leaving_until = "it is broken", cluster.now + 100
    cluster._show(pod)
    cluster.run(10)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless == ""


def test_another_template_is_another_hope() -> None:
    cluster = Cluster()
    model = asleep(cluster, fails="it is broken")
    model.load = 1
    cluster.run(10)
    assert model.replicas == 0
    model.fails, model.concurrency = "", 7
    cluster.change(model)
    cluster.run(4)
    assert model.replicas == 1


def test_what_fits_nowhere_is_said_and_tried_again() -> None:
    cluster = Cluster(places=0)
    model = asleep(cluster)
    model.load = 1
    cluster.run(4)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert asked.hopeless == "1 GPUMemoryInsufficient"
    cluster.places = 1
    cluster.until(lambda: model.replicas == 1, most=70)


# Memory as a cache.


def retained(cluster: Cluster, name: str, **options: Any) -> FakeModel:
    model = cluster.add(
        name, replicas=1, scale_to_zero_pod_retention_period="until-needed", load_seconds=1, **ONE, **options
    )
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
    assert cluster.told("IdleReplicaEvicted") == ["old-5f-4 was idle, and a/new needs its memory"]
    assert cluster.told("ScaledToZero") == ["its memory was needed"]
    cluster.run(5 * WINDOW)
    assert len(cluster.ready(young)) == 1, "more than needed went"


def offered(cluster: Cluster) -> tuple[str, ...]:
    """What the binder is told of idle copies, as somebody has no place."""
    needy = cluster.add("needy", min_scale="1", **ONE)
    cluster._carry_out(cluster.scaler.step(cluster.ns))
    question = cluster.scaler.question(cluster.ns)
    assert question is not None
    assert needy.key in {one.model for one in question.models}
    return question.idle


def idle_for_long(cluster: Cluster, **options: Any) -> FakeModel:
    model = retained(cluster, "kept", **options)
    cluster.run(10)
    model.load = 0
    cluster.run(5 * WINDOW)
    assert len(cluster.ready(model)) == 1
    return model


def test_an_idle_copy_is_offered() -> None:
    cluster = Cluster(places=1)
    model = idle_for_long(cluster)
    assert offered(cluster) == (f"a/{cluster.ready(model)[0].name}",)


def test_a_copy_that_a_request_may_still_come_to_is_not_offered() -> None:
    cluster = Cluster(places=1)
    model = idle_for_long(cluster)
    cluster._lead = lambda: None  # type: ignore[method-assign]
    cluster.scaler.set_route(model.key, RouteStatus())
    assert offered(cluster) == ()


def test_a_copy_that_a_request_waits_for_is_not_offered() -> None:
    """For a slot of it, so that nobody has to be woken."""
    cluster = Cluster(places=1)
    model = idle_for_long(cluster)
    cluster.scaler.report("act", report(model, wake=False), cluster.ns)
    assert offered(cluster) == ()


def test_a_copy_with_an_open_stream_is_not_offered() -> None:
    cluster = Cluster(places=1)
    idle_for_long(cluster)
    usual = cluster._load
    cluster._load = lambda pod: _with(usual(pod), 1)  # type: ignore[method-assign]
    cluster.run(1)
    assert offered(cluster) == ()


def test_of_who_keeps_copies_for_a_time_none_is_offered() -> None:
    cluster = Cluster(places=1)
    model = cluster.add("kept", replicas=1, scale_to_zero_pod_retention_period="1h", load_seconds=1, **ONE)
    model.load = 1
    cluster.run(10)
    model.load = 0
    cluster.run(5 * WINDOW)
    assert len(cluster.ready(model)) == 1
    assert offered(cluster) == ()


@pytest.mark.parametrize("kind", [HPA, "external"])
def test_copies_that_another_autoscaler_counts_are_not_offered(kind: str) -> None:
    cluster = Cluster(places=1)
    idle_for_long(cluster, kind=kind)
    assert offered(cluster) == ()


def two_idle(cluster: Cluster) -> FakeModel:
    """Replicas, as somebody wants a second one; nobody has ever asked that. By the usual rate one would be left."""
    model = idle_for_long(cluster)
    model.replicas = 2
    cluster.change(model)
    cluster.run(6)
    assert len(cluster.ready(model)) == 2
    return model


def test_the_copy_that_was_named_goes_and_no_other_of_its_model() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    first, _ = cluster.ready(model)
    cluster.add("needy", min_scale="1", load_seconds=1, **ONE)
    cluster.run(20)
    assert cluster.ready(model) == [first]


def test_two_copies_of_one_model_go_for_two_others() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    for name in ("needy", "other"):
        cluster.add(name, min_scale="1", **ONE)
    cluster._carry_out(cluster.scaler.step(cluster.ns))
    question = cluster.scaler.question(cluster.ns)
    assert question is not None
    answer = cluster.answer(question)
    for asked, name in zip(question.models, question.idle, strict=True):
        answer.models[asked.model] = replace(answer.models[asked.model], if_idle_go=(name,))
    actions = cluster.scaler.answered(question, answer, cluster.ns)
    assert scales([one for one in actions if one.model == model.key])[-1] == 0


def test_who_has_made_room_is_not_given_more_than_somebody_has_left() -> None:
    cluster = Cluster(places=2, config={"max-scale-down-rate": "10"})
    model = two_idle(cluster)
    cluster.add("needy", min_scale="1", load_seconds=1, **ONE)
    cluster.until(lambda: model.replicas == 1)
    model.replicas = 0
    cluster.change(model)
    model.written.clear()
    cluster.run(20)
    assert max(model.written, default=0) == 0


def test_nobody_goes_for_a_copy_of_who_is_let_make_none() -> None:
    """Else a tenant without a pod could empty all caches."""
    cluster = Cluster(places=3)
    kept = [retained(cluster, name) for name in ("a", "b")]
    cluster.run(10)
    for model in kept:
        model.load = 0
    cluster.run(5 * WINDOW)
    needy = cluster.add("needy", min_scale="9", most_pods=0)
    for cluster.taken_by_others in (0, 1):  # the place that it has not used goes to somebody else
        cluster.run(4 * WINDOW)
        assert (needy.replicas, [len(cluster.ready(model)) for model in kept]) == (1, [1, 1])
    cluster.taken_by_others, needy.most_pods = 0, 9
    cluster.run(20)
    assert [len(cluster.ready(model)) for model in kept] == [0, 0]


def test_a_retained_copy_serves_at_once() -> None:
    cluster = Cluster(places=1)
    model = retained(cluster, "m")
    cluster.run(10)
    model.load = 0
    cluster.run(5 * WINDOW)
    assert cluster.view(model).activity is Activity.INACTIVE
    model.load = 1
    cluster.run(4)
    asked = cluster.scaler.asked(model.key, cluster.ns)
    assert asked is not None
    assert not asked.away
    assert set(model.written) <= {1}


def test_an_idle_copy_that_has_lost_its_place_is_not_asked_for_again() -> None:
    cluster = Cluster(places=1)
    model = retained(cluster, "m")
    cluster.run(10)
    model.load = 0
    cluster.run(5 * WINDOW)
    cluster._end(cluster.ready(model)[0])
    cluster.places = 0
    cluster.run(10)
    assert (model.replicas, cluster.living(model)) == (0, [])


def test_nobody_goes_for_a_lower_priority() -> None:
    cluster = Cluster(places=1)
    kept = retained(cluster, "kept", priority=5)
    cluster.run(10)
    kept.load = 0
    cluster.run(5 * WINDOW)
    new = cluster.add("new", **ONE)
    new.load = 1
    cluster.run(30)
    assert (kept.replicas, new.replicas) == (1, 0)


# Other annotations.


def test_what_waits_is_averaged_over_the_window_of_now() -> None:
    cluster = Cluster()
    model = asleep(cluster, load_seconds=1000)
    model.load = 5
    cluster.run(30)
    model.load = 0
    model.annotations["autoscaling.knative.dev/window"] = "6s"
    cluster.change(model)
    cluster.run(8)
    assert cluster.view(model).waiting.stable == 0.0


@pytest.mark.parametrize(
    ("name", "value", "is_new"),
    [
        ("scale-down-delay", "10m", True),
        ("metric-aggregation-algorithm", "weighted-exponential", True),
        ("target", "2", False),
    ],
)
def test_what_a_decider_takes_at_its_beginning_makes_a_new_one(name: str, value: str, is_new: bool) -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    model.annotations[f"autoscaling.knative.dev/{name}"] = value
    cluster.change(model)
    cluster.scaler.step(cluster.ns)
    assert (cluster.view(model).concurrency.stable is None) == is_new


# Over a restart.


def test_a_restart_ends_no_copy_for_a_window() -> None:
    cluster = Cluster()
    model = loaded(cluster, 4)
    cluster.restart()
    model.load = 1
    cluster.run(WINDOW - 4)
    assert model.replicas == 4
    cluster.run(10)
    assert model.replicas < 4


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
    model.annotations["autoscaling.knative.dev/metric-aggregation-algorithm"] = "weighted-exponential"
    cluster.change(model)


@pytest.mark.parametrize("begins", [another_leads, another_leads_and_hears_nothing, another_decider])
def test_windows_that_have_just_begun_end_no_last_copy(
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
def test_who_is_asked_no_more_goes_a_window_after_its_windows_began(
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


@pytest.mark.parametrize("begins", [another_leads, another_decider])
def test_who_is_on_its_way_to_zero_goes_on(begins: Callable[[Cluster, FakeModel], None]) -> None:
    """Its window was a whole one."""
    cluster = Cluster()
    model = loaded(cluster, 1)
    model.load = 0
    cluster.until(lambda: cluster.view(model).activity is Activity.INACTIVE)
    begins(cluster, model)
    assert cluster.until(lambda: model.replicas == 0) <= GRACE + 4


def test_nothing_in_windows_that_have_just_begun_is_not_known_to_be_nothing() -> None:
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


def test_nobody_is_known_to_wait_for_nothing_before_the_activators_are_back() -> None:
    cluster = Cluster()
    model = cluster.add("m", kind="keda", **ONE)
    cluster.restart()
    cluster.run(10)
    assert is_active(cluster.view(model)) is None
    cluster.run(2)
    assert is_active(cluster.view(model)) is False


def test_who_sleeps_goes_on_sleeping_over_a_restart() -> None:
    cluster = Cluster()
    model = asleep(cluster)
    cluster.restart()
    cluster.run(20 * WINDOW)
    assert model.written == []


def test_before_anything_is_known_nothing_is_taken_back() -> None:
    cluster = Cluster(places=3)
    model = loaded(cluster, 3)
    cluster.places = 2
    cluster._end(cluster.ready(model)[0])
    cluster._follow(model)
    cluster._bind()
    cluster.restart()
    cluster.scaler.record_loads = lambda *_: False  # type: ignore[method-assign]
    model.written.clear()
    cluster.run(20)
    assert model.written == []


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
def test_what_others_write_there_is_nobodys_harm(text: str) -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=1, scaled=text, **ONE)
    cluster.scaler.step(cluster.ns)
    assert cluster.view(model).since_ns <= cluster.ns
    model.load = 3
    cluster.run(20)
    assert model.replicas == 3


# Writes.


def test_what_was_not_written_is_told_again() -> None:
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
    model.annotations["autoscaling.knative.dev/max-scale"] = "2"
    cluster.change(model)
    cluster.actions.clear()
    cluster.run(4)
    assert scales(cluster.actions) == [2]


def test_the_annotation_is_written_on_change_alone() -> None:
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


def test_the_annotation_is_written_no_oftener_than_a_step_is_made() -> None:
    cluster = Cluster()
    model = loaded(cluster, 2)
    told: list[int] = []
    (pod, _), began = cluster.ready(model), cluster.ns
    for quarter in range(40):
        pod.ready = not pod.ready
        cluster._show(pod)
        now_ns = began + quarter * SECOND // 4
        for action in cluster.scaler.step(now_ns):
            if isinstance(action, WriteStatus):
                told.append(now_ns)
    assert len(told) > 2
    assert min(after - before for before, after in pairwise(told)) >= 1.5 * SECOND


# Clocks.


def test_a_clock_that_goes_back_goes_on_from_where_it_was() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    cluster.now -= 3600
    cluster.run(100)
    assert model.replicas == 3
    cluster.now += 3600
    cluster.run(20)
    assert model.replicas == 3


def test_a_clock_that_leaps_ends_nobody() -> None:
    cluster = Cluster()
    model = loaded(cluster, 3)
    cluster.now += 36000
    cluster.run(20)
    assert model.replicas == 3


def test_nothing_is_scaled_that_did_not_ask() -> None:
    cluster = Cluster()
    model = cluster.add("m", replicas=2)
    model.annotations.clear()
    cluster.change(model)
    model.load = 9
    cluster.run(20)
    assert model.written == []
    assert cluster.scaler.models() == []


def test_a_scaler_without_models_has_nothing_to_ask() -> None:
    cluster = Cluster()
    scaler = Scaler(cluster.cache, BEGAN * SECOND)
    assert scaler.step(cluster.ns) == []
    assert scaler.question(cluster.ns) is None


# What one tenant has is not what all others wait for.


def crowd(cluster: Cluster, count: int, *, padding: int, namespace: str) -> None:
    """Models that want a copy, of templates that are so much larger than they need to be."""
    for number in range(count):
        item = cluster.add(f"m{number}", namespace=namespace, min_scale="1").json()
        item["spec"]["template"]["metadata"]["annotations"] = {"x": "y" * padding}
        cluster.cache.observe_deployment(item)


@pytest.mark.parametrize(("count", "padding"), [(200, 100_000), (120, 0)])
def test_a_tenant_with_more_than_one_question_takes_nobody_out_of_it(
    count: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scaler.core.scaler.MOST_ASKED", 90)
    cluster = Cluster()
    crowd(cluster, count, padding=padding, namespace="hostile")
    other = cluster.add("m", namespace="z", min_scale="1")
    cluster.scaler.step(cluster.ns)
    question = cluster.scaler.question(cluster.ns)
    assert question is not None
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


def test_a_template_that_is_too_large_is_not_asked_for_and_its_user_is_told() -> None:
    cluster = Cluster()
    model = cluster.add("m", min_scale="1")
    item = model.json()
    item["spec"]["template"]["metadata"]["annotations"] = {"x": "y" * 200_000}
    cluster.cache.observe_deployment(item)
    (event,) = [action for action in cluster.scaler.step(cluster.ns) if isinstance(action, Event)]
    assert "the pod template has 200" in event.message
    assert cluster.scaler.question(cluster.ns) is None


# --- what people get wrong --------------------------------------------------------------------------------------------


def test_another_autoscaler_of_the_same_deployment_is_told_of() -> None:
    """autoscaling D8: class kpa beside an HPA was neither detected nor told. What it wrote before Berth scaled is no
    conflict, nor what a class leaves to it."""

    def scaled_by(model: FakeModel, time: str) -> None:
        item = model.json()
        fields = {"f:spec": {"f:replicas": {}}}
        item["metadata"]["managedFields"] = [
            {"manager": "kube-controller-manager", "subresource": "scale", "time": time, "fieldsV1": fields}
        ]
        cluster.cache.observe_deployment(item)

    cluster = Cluster()
    ours, theirs = cluster.add("m", **ONE, min_scale="1"), cluster.add("n", kind=HPA, min_scale="1")
    for model in (ours, theirs):
        scaled_by(model, "1")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert not cluster.told("ReplicasConflict")
    for model in (ours, theirs):
        scaled_by(model, "2")
    cluster.do(cluster.scaler.step(cluster.ns))
    (said,) = cluster.told("ReplicasConflict")
    assert "kube-controller-manager writes replicas as well" in said
    assert [event.model for event in cluster.events if event.reason == "ReplicasConflict"] == [ours.key]
    cluster.now += 100
    scaled_by(ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.told("ReplicasConflict")) == 1
    cluster.now += 300
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.told("ReplicasConflict")) == 2
    cluster.now += 1000
    cluster.api_works = False
    ours.annotations["autoscaling.knative.dev/max-scale"] = "7"  # anything else of it changes
    scaled_by(ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.told("ReplicasConflict")) == 3  # since it was last seen, our own write lay between
    cluster.now += 1000
    ours.annotations["autoscaling.knative.dev/max-scale"] = "8"
    scaled_by(ours, "3")
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.told("ReplicasConflict")) == 3


def test_whoever_scaled_before_a_class_was_taken_back_is_no_conflict() -> None:
    """What was left to it was its own to write; the class says now that it is no more."""
    cluster = Cluster()
    model = cluster.add("n", kind=HPA, min_scale="1", **ONE)
    for time in ("1", "2"):
        item = model.json()
        fields = {"f:spec": {"f:replicas": {}}}
        one = {"manager": "kube-controller-manager", "subresource": "scale", "time": time, "fieldsV1": fields}
        item["metadata"]["managedFields"] = [one]
        cluster.cache.observe_deployment(item)
        cluster.do(cluster.scaler.step(cluster.ns))
    item["metadata"]["annotations"] = {**item["metadata"]["annotations"], CLASS: KPA}
    item["metadata"]["managedFields"] = [{**one, "time": "3"}]  # its last word, seen with the change
    cluster.cache.observe_deployment(item)
    cluster.do(cluster.scaler.step(cluster.ns))
    assert not cluster.told("ReplicasConflict")
    item["metadata"]["managedFields"] = [{**one, "time": "4"}]
    cluster.cache.observe_deployment({**item})
    cluster.do(cluster.scaler.step(cluster.ns))
    assert len(cluster.told("ReplicasConflict")) == 1


def test_an_unknown_annotation_is_told_on_the_deployment() -> None:
    """autoscaling D7."""
    cluster = Cluster()
    model = cluster.add("m", targt="3")
    cluster.run(20)
    assert len(cluster.told("UnknownAnnotation")) == 1
    (event,) = [one for one in cluster.events if one.reason == "UnknownAnnotation"]
    assert (event.model, event.uid, event.type) == (model.key, model.uid, "Warning")


@pytest.mark.parametrize("seconds", [60, 600])
def test_a_model_that_does_not_come_up_is_given_up_after_its_progress_deadline(seconds: int) -> None:
    """autoscaling, undocumented differences: `serving.knative.dev/progress-deadline`, and 30 s more."""
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


def test_pods_behind_gates_are_owed_nothing() -> None:
    """elastic 3.2: what was promised to them a moment ago keeps nobody else from a place."""
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


# --- without the Lease ----------------------------------------------------------------------------------------------------


def test_while_nobody_reports_what_is_held_that_is_not_taken_for_nothing() -> None:
    """autoscaling D4: a leader without its Lease has sent the activators away; what they hold still waits for a copy."""
    cluster = Cluster()
    model = asleep(cluster, load_seconds=1000)
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


def test_a_way_that_was_proven_before_a_leader_lost_its_lease_is_proven_anew() -> None:
    """autoscaling D4: the last copy does not go by activators that have been sent away since."""
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
