"""One model from step to step: what is requested of it, when, and what is reported."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from berth.contract.scaling import Scaled
from scaler.core.reconcile import RouteStatus
from scaler.decision.bounds import Activity
from scaler.decision.defaults import HPA
from tests.fakes.scaled_cluster import GROUP, ONE, SECOND, Cluster, FakeModel, FakePod

WINDOW, GRACE = 60, 30
FULL = "1 GPUMemoryInsufficient"


class Life:
    """Of a model of one request a replica, at most `places` replicas fit."""

    def __init__(self) -> None:
        self.cluster = Cluster()

    @property
    def model(self) -> FakeModel:
        return next(iter(self.cluster.models.values()))

    @property
    def pods(self) -> list[FakePod]:
        return self.cluster.living(self.model)

    def route(self) -> Any:
        asked = self.cluster.scaler.asked(self.model.key, self.cluster.ns)
        assert asked is not None
        return asked


Step = Callable[[Life], None]
# What a life is asked for, besides the fields of the model's view.
FACTS: dict[str, Callable[[Life], Any]] = {
    "replicas": lambda life: life.model.replicas,
    "ready": lambda life: len(life.cluster.ready(life.model)),
    "pods": lambda life: len(life.cluster.of(life.model)),
    "unschedulable": lambda life: sum(pod.refused for pod in life.pods),
    "written": lambda life: life.model.written,
    "gated": lambda life: life.cluster.view(life.model).pods.gated,
    "pending": lambda life: life.cluster.view(life.model).pods.pending,
    "is_routed_away": lambda life: life.route().needs_proxy,
    "unavailable": lambda life: life.route().unavailable,
    "waits_for": lambda life: life.route().waiting_for,
    "phases": lambda life: [dict(one.phases) for one in life.cluster.view(life.model).cold_starts],
    "status": lambda life: Scaled.from_text(life.model.scaled or ""),
    "binder_silent": lambda life: life.cluster.scaler.binder_silent_ns > 0,
}


def fact(life: Life, name: str) -> Any:
    return FACTS[name](life) if name in FACTS else getattr(life.cluster.view(life.model), name)


def model(*, at_zero: bool = False, name: str = "m", **options: Any) -> Step:
    """`at_zero`: it is at zero, and the scaler has looked at it."""

    def step(life: Life) -> None:
        given = dict(options)
        load, overflow = given.pop("load", 0.0), given.pop("overflow", None)
        added = life.cluster.add(name, **ONE, **given)
        added.load = load
        if overflow is not None:
            added.annotations["seldon.io/trtis-overflow-pods"] = overflow
            life.cluster.change(added)
        if at_zero:
            life.cluster.run(4)

    return step


def loaded(requests: float, **options: Any) -> list[Step]:
    """A model with so many steady requests, a while later."""
    return [model(replicas=1, load=requests, **options), run(20)]


def places(number: int) -> Step:
    return lambda life: setattr(life.cluster, "places", number)


def world(**values: Any) -> Step:
    """Of the cluster."""
    return lambda life: [setattr(life.cluster, name, value) for name, value in values.items()] and None


def run(seconds: int) -> Step:
    return lambda life: life.cluster.run(seconds)


def load(requests: float, **values: Any) -> Step:
    return change(load=requests, **values)


def change(**values: Any) -> Step:
    """Fields of the model, or autoscaling's annotations; None: it has none."""

    def step(life: Life) -> None:
        for name, value in values.items():
            key = GROUP + name.replace("_", "-")
            if name in {one.name for one in fields(FakeModel)}:
                setattr(life.model, name, value)
            elif value is None:
                del life.model.annotations[key]
            else:
                life.model.annotations[key] = value
        life.cluster.change(life.model)

    return step


def expect(**facts: Any) -> Step:
    """A function is asked whether it is so, a text in a list is one that is contained."""

    def step(life: Life) -> None:
        for name, value in facts.items():
            found = fact(life, name)
            if callable(value):
                assert value(found), (name, found)
            elif isinstance(value, list) and isinstance(found, str):
                assert all(part in found for part in value), (name, found)
            else:
                assert found == value, name

    return step


def until(at_least: int = 0, at_most: int = 600, **facts: Any) -> Step:
    """So many seconds."""

    def step(life: Life) -> None:
        passed = life.cluster.until(
            lambda: all(fact(life, name) == value for name, value in facts.items()), most=at_most + 1
        )
        assert at_least <= passed <= at_most

    return step


def reported(reason: str, *parts: str, times: int | None = None) -> Step:
    """An event, of which the first has these parts; `times`: so often."""

    def step(life: Life) -> None:
        found = life.cluster.events_of(reason)
        assert times is None or len(found) == times, found
        assert all(part in found[0] for part in parts)

    return step


def restart(life: Life) -> None:
    life.cluster.restart()


def forget_writes(life: Life) -> None:
    life.model.written.clear()


def deaf(life: Life) -> None:
    """No gateway's report arrives."""
    life.cluster.scaler.record_loads = lambda *_: False  # type: ignore[method-assign]


def hears_again(life: Life) -> None:
    del life.cluster.scaler.record_loads


def first_request(life: Life) -> None:
    life.cluster.report(life.model)


def activator_gone(life: Life) -> None:
    life.cluster.scaler.activator_gone("act")


def no_route_is_reported(life: Life) -> None:
    life.cluster._lead = lambda: None  # type: ignore[method-assign]


def route(*, proven_for: int, quiet: bool = False) -> Step:
    def step(life: Life) -> None:
        status = RouteStatus(proven_ns=life.cluster.ns - proven_for * SECOND, quiet=quiet)
        life.cluster.scaler.set_route(life.model.key, status)

    return step


def pod(**values: Any) -> Step:
    """Of its first pod."""

    def step(life: Life) -> None:
        one = life.pods[0]
        for name, value in values.items():
            setattr(one, name, value)
        life.cluster._show(one)

    return step


def lose(number: int) -> Step:
    """A node dies."""
    return lambda life: [life.cluster._end(one) for one in life.cluster.ready(life.model)[:number]] and None


def each_replica(*busy: tuple[int, float]) -> Step:
    """Requests in it, and how many come a second."""

    def spread(_: FakeModel, ready: list[FakePod]) -> None:
        for place, one in enumerate(ready):
            one.busy, one.rate = busy[min(place, len(busy) - 1)]

    return lambda life: setattr(life.cluster, "spread", spread)


def silent_stream(number: int) -> Step:
    """Requests that are in Triton and of which nothing else is reported."""

    def step(life: Life) -> None:
        life.cluster.spread = lambda _, ready: (
            [setattr(one, "busy", 0) or setattr(one, "rate", 0.0) for one in ready] and None
        )
        life.cluster._load = lambda one: msgspec.structs.replace(  # type: ignore[method-assign]
            Cluster._load(life.cluster, one), in_triton=number
        )

    return step


GATES = "scheduling gates block 1 of its pods"
ACTIVE, INACTIVE = Activity.ACTIVE, Activity.INACTIVE
IDLE = [*loaded(1), load(0), until(WINDOW, WINDOW + 4, activity=INACTIVE)]
BROKEN = "the model's files are not a model"

LIVES: dict[str, list[Step]] = {
    # As many replicas as are desired, and as can be scheduled.
    "five in flight at a target of one are five replicas": [
        places(8), *loaded(5), expect(ready=5, replicas=5), reported("CapacityLimited", times=0)],
    "where three fit they are three and none is pending": [
        places(3), *loaded(5), expect(ready=3, replicas=3, pods=3, desired=5, capacity_limited=2, message=FULL),
        reported("CapacityLimited", "desired 5 replicas, requested 3", FULL, times=1),
        expect(status=lambda status: (status.desired, status.capacity_limited) == (5, 2))],
    "capacity that becomes free is used at the next decision": [
        places(3), *loaded(5), places(5), until(0, 2, replicas=5)],
    "a capacity limit gives up no replica that has a node": [
        places(5), *loaded(5), places(2), run(20), expect(ready=5)],
    "a replica that has lost its node is not requested again": [
        places(5), *loaded(5), places(3), lose(2), run(8), expect(replicas=3, unschedulable=0)],
    "a minimum is limited too": [
        places(2), model(min_scale="4"), run(4), expect(replicas=2, capacity_limited=2)],
    "some may wait for a node that is still to be added": [
        places(3), model(min_scale="9", overflow="2"), run(20), expect(replicas=5, unschedulable=2)],
    # A node that is still to be added, and scheduling gates.
    "a model at zero asks an empty pool for a node": [
        places(0), model(at_zero=True, overflow="2"), load(1), run(300),
        expect(replicas=1, unschedulable=1, written=[1], unavailable="", waits_for=["1 of its pods wait for a node", FULL],
               message=["wait for a node"]),
        reported("WaitingForNode", times=1), places(1), until(0, 30, ready=1), expect(message="")],
    "a pod that no node would help waits for none": [
        places(0), model(at_zero=True, overflow="2", refused_for="ModelTooLarge"), load(1), run(20),
        expect(unavailable=FULL, replicas=0)],
    "without pods that may wait an empty pool makes the model unavailable at once": [
        places(0), model(at_zero=True), load(1), run(4), expect(unavailable=FULL, replicas=0)],
    "a model behind a quota shows one pod more than is let through": [
        places(9), model(min_scale="5", quota=2), until(0, 60, replicas=3), run(200),
        expect(replicas=3, ready=2, desired=5, capacity_limited=2, gated=1, pending=1,
               message=[f"{GATES}, as a quota does: kueue.x-k8s.io/admission"], status=lambda status: status.gated == 1),
        reported("SchedulingGated", times=1), change(quota=4), until(0, 60, ready=4), run(60), expect(replicas=5),
        change(quota=None), until(0, 60, ready=5), run(4), expect(message="", gated=0)],
    "a model at zero behind a quota waits, and its clients are told what for": [
        places(9), model(at_zero=True, quota=0), load(1), run(400),
        expect(replicas=1, written=[1], unavailable="", waits_for=[GATES]),
        change(quota=1), until(0, 30, ready=1), expect(waits_for="")],
    "a replica that failed for good is seen while another is gated": [
        places(9), model(min_scale="2", quota=1, fails=BROKEN), run(20),
        expect(gated=1, unavailable=BROKEN, waits_for=["kueue.x-k8s.io/admission"])],
    "a gated pod for which no request waits any more goes": [
        places(9), model(at_zero=True, quota=0), load(1), run(100), load(0), until(0, WINDOW + 10, replicas=0)],
    "a replica that was gated for long is not given up while it loads": [
        places(9), model(at_zero=True, quota=0, load_seconds=90), load(1), run(1000), change(quota=1),
        until(gated=0, pending=0), load(0), until(0, 100, ready=1)],
    # The binder.
    "the last answer of a silent binder counts": [
        places(4), model(min_scale="9"), run(6), change(min_scale="1"), run(20), expect(replicas=1),
        model(name="other", min_scale="3"), run(6), world(binder_answers=False), change(min_scale="4"), run(20),
        expect(replicas=1)],
    "without an answer no replica is requested at zero": [
        world(binder_answers=False), model(min_scale="7"), run(290), expect(replicas=0)],
    "without an answer no more replicas are requested": [
        world(binder_answers=False), model(replicas=2, min_scale="7"), run(290), expect(replicas=2)],
    "a binder that has not been asked is not silent": [*loaded(2), run(1000), load(4), run(20), expect(replicas=4)],
    "for replicas that have a node the binder is not asked": [
        model(at_zero=True, load_seconds=100), load(1), run(6), expect(capacity_limited=0), world(binder_answers=False),
        run(400), expect(binder_silent=False)],
    "a binder that is asked no more is not silent": [
        *loaded(2), world(binder_answers=False), load(4), run(20), expect(binder_silent=True), load(2), run(300),
        expect(binder_silent=False)],
    "what was promised and not written is given to others after a while": [
        places(5), *loaded(2), world(api_works=False), load(5), until(0, 20, requested=5), world(taken_by_others=3), run(6),
        expect(requested=5), run(14), world(api_works=True), run(10), expect(replicas=2, written=lambda all: max(all) == 2)],
    "what could not be written is not what is not created": [
        places(6), model(min_scale="6", load_seconds=1), world(api_works=False), run(60), world(api_works=True), run(8),
        expect(replicas=6, ready=6, message="")],
    # From zero.
    "the first request is decided at once": [
        model(at_zero=True), expect(replicas=0), first_request, expect(replicas=1),
        reported("ScaledFromZero", "requested 1 of 1 desired replicas", times=1)],
    "a request that an activator buffers and reports no more is waited for until its stream ends": [
        model(asleep=True, load_seconds=1000),
        lambda life: life.cluster.report(life.model, average_buffered=1.0),
        run(4 * WINDOW), expect(replicas=1, recommended=1), activator_gone, until(0, 2 * WINDOW, recommended=0)],
    "buffered requests are among those that wait": [
        model(at_zero=True, load_seconds=1000), expect(waiting=lambda waiting: waiting.stable == 0.0), load(5), run(30),
        expect(waiting=lambda waiting: waiting.panic == 5.0)],
    "requests that wait are averaged over the window of now": [
        model(at_zero=True, load_seconds=1000), load(5), run(30), load(0, window="6s"), run(8),
        expect(waiting=lambda waiting: waiting.stable == 0.0)],
    "a cold start has its phases": [
        model(at_zero=True, load_seconds=5), load(1), run(10),
        expect(phases=[{"decide": 0.0, "schedule": 1.0, "load": 5.0, "serve": 0.0}])],
    "what was started in vain goes again": [
        model(at_zero=True, load_seconds=100), load(1), run(3), load(0), run(100), expect(ready=1),
        until(0, 2 * WINDOW + GRACE, replicas=0), load(1, load_seconds=1), run(10),
        expect(phases=lambda all: [one.get("serve") for one in all] == [None, 0.0])],
    # To zero.
    "to zero after a window without requests and the grace period": [
        *IDLE, until(GRACE, GRACE + 4, replicas=0), reported("ScaledToZero", "it was idle for its stable window", times=1)],
    "not to zero before requests get to an activator": [
        *IDLE, no_route_is_reported, run(10 * GRACE), expect(replicas=1), route(proven_for=0), run(GRACE - 2),
        expect(replicas=1), run(4), expect(replicas=0)],
    "replicas that get no request go earlier": [
        *IDLE, no_route_is_reported, route(proven_for=5, quiet=True), until(0, 2, replicas=0)],
    "a proof of another time is none": [
        *loaded(1), no_route_is_reported, route(proven_for=1000, quiet=True), load(0), run(WINDOW + 2 * GRACE),
        expect(replicas=1)],
    "a request in the grace period keeps it": [
        *IDLE, run(GRACE - 6), load(1), run(GRACE), expect(replicas=1, activity=ACTIVE)],
    "without a Service the last replica is kept": [
        *loaded(3), load(0, has_service=False), run(10 * WINDOW), expect(replicas=1),
        reported("ScaleToZeroBlocked", "no Service leads to its replicas", times=2), change(has_service=True),
        until(0, 3 * WINDOW, replicas=0)],
    "without an activator the last replica is kept": [
        *loaded(3), load(0), world(activators=0), run(10 * WINDOW), expect(replicas=1),
        reported("ScaleToZeroBlocked", "activator", times=2), world(activators=1), until(0, 3 * WINDOW, replicas=0)],
    "a kept replica that gets requests is active again": [
        *loaded(1, has_service=False), load(0), until(activity=INACTIVE), load(2), until(replicas=2),
        expect(activity=ACTIVE, message="")],
    "a minimum keeps no replica in the way of zero": [
        *loaded(1, has_service=False), load(0), until(activity=INACTIVE), change(min_scale="1"), run(4),
        expect(desired=1, activity=ACTIVE, message="")],
    "while a replica is recommended nothing is reported of why the last one would be kept": [
        model(at_zero=True, load_seconds=100, has_service=False), load(1), run(20), expect(replicas=1, recommended=1),
        reported("ScaleToZeroBlocked", times=0)],
    "a model at zero is not started for want of an activator": [
        *IDLE, until(replicas=0), forget_writes, world(activators=0), run(2 * WINDOW), expect(written=[], recommended=0)],
    "a last replica with an open stream stays": [
        *loaded(1), load(0), silent_stream(1), run(WINDOW + 4 * GRACE), expect(replicas=1), silent_stream(0), run(4),
        expect(replicas=0)],
    "a replica whose load is unknown may be busy": [
        *IDLE, deaf, run(3 * GRACE), expect(replicas=1), hears_again, run(4), expect(replicas=0)],
    "a retention period begins when the model is idle": [
        *loaded(1, scale_to_zero_pod_retention_period="90s"), run(200), load(0), until(activity=INACTIVE),
        until(90, 94, replicas=0)],
    # Fewer.
    "replicas with long requests are not removed": [
        *loaded(4, concurrency=0), each_replica((1, 0.0), (1, 0.0), (1, 0.0), (0, 0.0)), change(target="10"),
        run(3 * WINDOW), expect(replicas=3, recommended=1)],
    "busy replicas are no reason for more than were left by hand": [
        *loaded(4, concurrency=0), each_replica((1, 0.0)), run(2), change(replicas=2, max_scale="1"), forget_writes,
        lambda life: life.cluster.do(life.cluster.scaler.step(life.cluster.ns)), expect(written=lambda all: max(all, default=0) <= 2)],
    "while nothing is known nothing changes": [
        *loaded(4), deaf, forget_writes, run(5 * WINDOW), expect(replicas=4, written=lambda all: {*all} <= {4})],
    # Classes.
    "an HPA decides between the first replica and the last": [
        model(kind=HPA, load=5), run(20), expect(written=[1], recommended=5, desired=5), change(replicas=4), run(20),
        expect(written=[1]), change(load=0, replicas=1), until(replicas=0), expect(written=[1, 0])],
    "an HPA's minimum is what it begins with": [model(kind=HPA, min_scale="3"), run(4), expect(written=[3])],
    "of another class nothing is written, and its requests are buffered": [
        model(kind="external", load=5), run(20), expect(written=[], is_routed_away=True, buffered=5, recommended=5),
        change(replicas=2), run(20), expect(is_routed_away=False), load(0), run(5 * WINDOW), expect(written=[])],
    "what another autoscaler writes is not reported as ours": [
        model(kind="external", replicas=1),
        *[step for number in (1, 0, 2, 0) for step in (change(replicas=number), run(20), expect(requested=number))],
        reported("ScaledFromZero", times=0), reported("ScaledToZero", times=0)],
    "a model that is started by hand is not reported as ours": [
        model(at_zero=True, load_seconds=10), change(replicas=1), run(4), reported("ScaledFromZero", times=0)],
    "what is set by hand is overwritten": [*loaded(3), change(replicas=7), run(2), expect(replicas=3)],
    # Options.
    "bounds of the annotations": [
        *loaded(9, max_scale="4", min_scale="2"), expect(replicas=4), load(0), run(4 * WINDOW), expect(replicas=2)],
    "an initial scale counts once": [
        model(initial_scale="3"), until(ready=3), until(0, 3 * WINDOW, replicas=0), restart, forget_writes, load(1), run(20),
        expect(written=[1])],
    "an initial scale is waited for until so many are ready": [
        places(2), model(initial_scale="3"), run(3 * WINDOW), expect(replicas=2, desired=3), places(3), until(0, 10, ready=3),
        until(0, 3 * WINDOW, replicas=0)],
    "invalid annotations are reported once, and the last valid ones stay in effect": [
        *loaded(3), change(target="some"), run(10), load(5), run(20), reported("InvalidAnnotation", GROUP + "target", times=1),
        expect(replicas=5, invalid=[GROUP + "target"])],
    "invalid annotations stay without effect when another scaler leads": [
        model(at_zero=True, max_scale="3"), change(max_scale="abc"), run(20), restart, run(20), restart, run(20),
        expect(is_routed_away=True), load(9), run(20), expect(replicas=3), change(max_scale="5"), run(20),
        expect(replicas=5, status=lambda status: status.last_valid == {})],
    "other annotations count from the next decision on": [*loaded(6), change(max_scale="2"), run(2), expect(replicas=2)],
    # Replicas that never come.
    "a replica that loads for long is waited for, though no request waits any more": [
        model(at_zero=True, load_seconds=3000), load(1), run(10), load(0), run(2000), expect(replicas=1)],
    "a replica without progress and without clients goes after the deadline": [
        model(at_zero=True, stuck="ImagePullBackOff"), load(1), run(10), load(0), until(600, 640, replicas=0)],
    "clients that went with their activator are waited for no longer": [
        model(at_zero=True, stuck="CrashLoopBackOff"), load(1), run(10), change(load=0, buffered=0), activator_gone,
        until(600, 700, replicas=0)],
    "the time of an activation is not that of the one before": [
        model(at_zero=True, load_seconds=1, stuck="CrashLoopBackOff"), load(1), run(4), load(0),
        pod(waiting_reason="CrashLoopBackOff"), run(400), expect(replicas=1), pod(ready=True, waiting_reason=""), run(4),
        pod(ready=False, waiting_reason="CrashLoopBackOff"), run(400), expect(replicas=1), until(0, 240, replicas=0)],
    "a model that loses its last replica is buffered for at once, and only while it has none": [
        *loaded(1), expect(is_routed_away=False), pod(ready=False), expect(is_routed_away=True), route(proven_for=0),
        pod(ready=True), expect(is_routed_away=False)],
    "a failed model is ended and not started for a while": [
        model(at_zero=True, fails=BROKEN), load(1), run(10), expect(unavailable=BROKEN, replicas=0),
        reported("ScaledToZero", f"its replicas cannot serve: {BROKEN}"), forget_writes, run(580), expect(written=[]),
        change(fails=""), run(40), expect(replicas=1)],
    "a model that cannot serve begins no cold start": [
        model(at_zero=True, fails="it is broken"), load(1), run(10), load(0), run(2 * WINDOW), expect(phases=lambda all: len(all) == 1),
        first_request, expect(phases=lambda all: len(all) == 1, replicas=0)],
    "a model with one replica that serves is available": [
        model(min_scale="2", fails="this node is broken"), run(10), expect(replicas=2, unavailable="this node is broken"),
        pod(ready=True, failed=""), run(2), expect(unavailable="")],
    "a replica that has failed and is being deleted says nothing of the next": [
        model(at_zero=True, load_seconds=100), load(1), run(4), pod(failed="it is broken", leaving_until=2**40), run(10),
        expect(unavailable="")],
    "another template may serve": [
        model(at_zero=True, fails="it is broken"), load(1), run(10), expect(replicas=0), change(fails="", concurrency=7),
        run(4), expect(replicas=1)],
    "what fits on no node is unavailable, and tried again": [
        places(0), model(at_zero=True), load(1), run(4), expect(unavailable=FULL), places(1), until(0, 70, replicas=1)],
    # Another scaler, and clocks.
    "a restart removes no replica for a window": [
        *loaded(4), restart, load(1), run(WINDOW - 4), expect(replicas=4), run(10), expect(replicas=lambda number: number < 4)],
    "a restart on the way to zero goes on": [*IDLE, restart, until(0, GRACE + 4, replicas=0)],
    "another decider on the way to zero goes on": [
        *IDLE, change(metric_aggregation_algorithm="weighted-exponential"), until(0, GRACE + 4, replicas=0)],
    "a model at zero stays there over a restart": [model(at_zero=True), restart, run(20 * WINDOW), expect(written=[])],
    "before anything is known nothing is taken back": [
        places(3), *loaded(3), places(2), lose(1), lambda life: life.cluster._follow(life.model),
        lambda life: life.cluster._bind(), restart, deaf, forget_writes, run(20), expect(written=[])],
    "a clock that goes back goes on from where it was": [
        *loaded(3), lambda life: setattr(life.cluster, "now", life.cluster.now - 3600), run(100), expect(replicas=3),
        lambda life: setattr(life.cluster, "now", life.cluster.now + 3600), run(20), expect(replicas=3)],
    "a clock that leaps removes no replica": [
        *loaded(3), lambda life: setattr(life.cluster, "now", life.cluster.now + 36000), run(20), expect(replicas=3)],
    "an unknown annotation is reported on the Deployment": [
        model(targt="3"), run(20), reported("UnknownAnnotation", "did you mean", times=1)],
}  # fmt: skip


@pytest.mark.parametrize("name", LIVES)
def test_life(name: str) -> None:
    life = Life()
    for step in LIVES[name]:
        step(life)
