"""From zero and to zero with the real core, switch and activators' registry; the API server is a dictionary."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.activation import ACTIVATOR_PORTS, Assignment, Report, RouteMode
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey, ReplicaLoad, Scaled, Schedulable, SchedulableAnswer
from berth.kube.informer import Change, ChangeKind
from scaler.activation.activators import Activator
from scaler.activation.control_server import NotLeading
from scaler.activation.ports import PortPair
from scaler.activation.route import NO_PORTS, NO_SERVICE, Apply, SliceAction
from scaler.activation.routes import RouteReconciler
from scaler.core.actions import Action, RouteChanged, WriteScale, WriteStatus
from scaler.core.cache import Cache
from scaler.core.scaler import Scaler
from scaler.decision.defaults import BERTH, read_defaults
from scaler.go import SECOND_NS
from scaler.route_controller import RouteController

MODEL = ModelKey("a", "m")
T0 = 1_700_000_000 * SECOND_NS
HASH = "5f"
Json = dict[str, Any]


def deployment(replicas: int, scaled: Scaled | None, **annotations: str) -> Json:
    keys = {
        "class": "kpa.autoscaling.knative.dev",
        "target": "1",
        "window": "6s",
        "target-utilization-percentage": "100",
    }
    keys |= annotations
    template = {
        "metadata": {
            "labels": {"app": "m"},
            "annotations": {f"autoscaling.knative.dev/{key}": value for key, value in keys.items()},
        },
        "spec": {"containers": [{"name": "proxy", "args": ["proxy", "--model=m"], "ports": []}]},
    }
    own = {} if scaled is None else {"seldon.io/trtis-scaled": scaled.to_text()}
    return {
        "metadata": {"name": "m", "namespace": "a", "uid": "dep", "resourceVersion": "1", "annotations": own},
        "spec": {"replicas": replicas, "template": template},
    }


def replica(name: str, *, ready: bool) -> Json:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    owner = {"kind": "ReplicaSet", "name": f"m-{HASH}", "controller": True}
    return {
        "metadata": {
            "name": name,
            "namespace": "a",
            "uid": f"uid-{name}",
            "labels": {"app": "m", "pod-template-hash": HASH},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running", "podIP": "10.0.0.9", "conditions": [condition]},
    }


SERVICE = {
    "metadata": {"name": "m", "namespace": "a", "uid": "svc"},
    "spec": {"clusterIP": "10.96.0.1", "selector": {"app": "m"}, "ports": [{"name": "http", "port": 9000}]},
}


class Stream:
    """One activator, which opens what it is told at once if it is to."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.assigned: dict[ModelKey, Assignment] = {}
        self.calls: list[tuple[str, str]] = []
        self.opens = True

    def assign(self, model: ModelKey, assignments: Mapping[PodUid, Assignment]) -> None:
        assignment = assignments.get(PodUid("act"))
        if assignment is None:
            self.assigned.pop(model, None)
        else:
            self.assigned[model] = assignment

    def set_client(self, pod: Mapping[str, Any]) -> None:
        self.calls.append(("set", pod["metadata"]["name"]))

    def delete_client(self, pod: Mapping[str, Any]) -> None:
        self.calls.append(("delete", pod["metadata"]["name"]))

    def end(self) -> None:
        self.calls.append(("end", ""))

    def report(
        self, *, buffered: int = 0, arrived: float = 0, forwarded: float = 0, cold_start: bool = False
    ) -> None:
        world, told = self.world, self.assigned.get(MODEL)
        if told is None:
            return
        ports = PortPair(told.rest_port, told.grpc_port) if self.opens else PortPair(0, 0)
        if world.reconciler.activators.set_open(world.activator, MODEL, ports):
            world.route.ports_changed(MODEL)
        world.activator.has_reported = True
        report = Report(
            version=1,
            model=MODEL,
            buffered=buffered,
            average_buffered=float(buffered),
            arrived=arrived,
            forwarded=forwarded,
            buffered_bytes=0,
            oldest_seconds=0.0,
            cold_start=cold_start,
            rest_port=ports.rest,
            grpc_port=ports.grpc,
        )
        if buffered or arrived:
            world.route.reported(world.activator, report)


class World:
    """A second at a time. `slow`: what is written is seen only with the next second."""

    activator: Activator

    def __init__(self, *, replicas: int = 1, scaled: Scaled | None = None, **annotations: str) -> None:
        self.now, self.annotations = T0, annotations
        self.replicas, self.scaled, self.pods = replicas, scaled, dict[str, Json]()
        self.slice: Json | None = None
        self.written: list[str] = []
        self.api_answers = True
        self.requests, self.last_arrival = 0.0, 0
        # By which the node's clock is ahead.
        self.off_seconds = 0
        if replicas:
            self.pods["p"] = replica("p", ready=True)
        self.anew()

    def anew(self, *, deputy_seconds: int = 0, attaches: bool = True) -> None:
        """Another scaler, which knows what stands in the API server. It was there for so long before it led."""
        self.cache = Cache(read_defaults(BERTH))
        self.core = Scaler(self.cache, self.now)
        self.reconciler = RouteReconciler(began_ns=self.now)
        self.stream, self.reported = Stream(self), list[ModelKey]()
        self.route = RouteController(
            self.cache,
            self.core,
            self.reconciler,
            self.stream,
            put=self.put,
            act=self.act,
            on_report=self.reported.append,
            clock_ns=lambda: self.now,
        )
        self.show()
        self.route.on_service(Change(ChangeKind.SET, SERVICE))
        if self.slice is not None:
            self.route.on_slice(Change(ChangeKind.SET, self.slice))
        for pod in self.pods.values():
            self.cache.observe_pod(pod, self.now)
        self.controllers_slice()
        self.now += deputy_seconds * SECOND_NS
        self.act(self.core.step(self.now))
        self.route.begin(self.now)
        if attaches:
            self.connect()

    def connect(self) -> None:
        self.activator = self.reconciler.activators.connect(PodUid("act"), "act", "10.0.1.1", None)
        self.route.connected(self.activator)

    def show(self) -> None:
        self.cache.observe_deployment(deployment(self.replicas, self.scaled, **self.annotations))
        self.route.touch(MODEL)

    def put(self, action: SliceAction) -> None:
        if not self.api_answers:
            return
        self.written.append(type(action).__name__)
        if isinstance(action, Apply):
            body = action.slice.to_json()
            body["metadata"] |= {"uid": "ours"}
            self.slice = body
            self.route.on_slice(Change(ChangeKind.SET, body))
        elif self.slice is not None:
            gone, self.slice = self.slice, None
            self.route.on_slice(Change(ChangeKind.GONE, gone))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case WriteScale() if self.api_answers:
                    self.replicas = action.replicas
                    self.written.append(f"replicas={action.replicas}")
                    self.show()
                case WriteStatus() if self.api_answers:
                    self.scaled = action.scaled
                case RouteChanged():
                    self.route.switched(action)
        question = self.core.question(self.now)
        if question is not None:
            room = {one.model: Schedulable(name=one.name, now=9) for one in question.models}
            self.act(self.core.answered(question, SchedulableAnswer(generation=1, models=room), self.now))

    def pod(self, name: str, *, ready: bool) -> None:
        self.pods[name] = replica(name, ready=ready)
        self.cache.observe_pod(self.pods[name], self.now)
        self.controllers_slice()
        self.route.touch(MODEL)

    def no_pod(self, name: str) -> None:
        self.cache.pod_gone(self.pods.pop(name))
        self.controllers_slice()
        self.route.touch(MODEL)

    def controllers_slice(self) -> None:
        ready = [one for one in self.pods.values() if one["status"]["conditions"][0]["status"] == "True"]
        body = {
            "metadata": {
                "name": "m-x",
                "namespace": "a",
                "uid": "theirs",
                "labels": {"kubernetes.io/service-name": "m"},
            },
            "endpoints": [{"addresses": ["10.0.0.9"], "conditions": {"ready": True}} for _ in ready],
        }
        self.route.on_slice(Change(ChangeKind.SET, body))

    async def second(self, **report: Any) -> None:
        self.now += SECOND_NS
        at = self.now // SECOND_NS
        for name in self.pods:
            if self.requests:
                self.last_arrival = at
            load = ReplicaLoad(
                namespace="a",
                pod_name=name,
                pod_uid=f"uid-{name}",
                second=at,
                average_concurrent_requests=self.requests,
                request_count=self.requests,
                last_arrival=self.last_arrival and self.last_arrival + self.off_seconds,
                timestamp=at + self.off_seconds,
                process_uptime=100.0,
            )
            self.core.record_loads([load], {load.pod_uid}, self.now)
        self.stream.report(**report)
        self.core.close_second(self.now)
        if at % 2 == 0:
            self.act(self.core.step(self.now))
        for _ in range(3):  # whatever the turns bring about is looked at in the next
            await self.route.turn()
            self.stream.report()

    async def seconds(self, number: int) -> None:
        for _ in range(number):
            await self.second()

    async def until(self, done: Any, *, most: int = 120, **report: Any) -> int:
        for n in range(most):
            if done():
                return n
            await self.second(**report)
        raise AssertionError(f"not within {most} s: {self.written} {self.stream.assigned}")

    async def at_zero(self) -> None:
        await self.until(lambda: self.replicas == 0)
        self.no_pod("p")
        await self.second()

    def state(self) -> str:
        """As the activator has been told; "" for nothing."""
        told = self.stream.assigned.get(MODEL)
        return "" if told is None else told.mode.value


async def asleep() -> World:
    world = World()
    await world.at_zero()
    return world


async def test_a_model_that_nobody_asks_goes_to_zero_behind_an_activator() -> None:
    world = World()
    await world.second()
    assert not world.state()
    world.requests = 1.0
    await world.seconds(10)
    assert (world.replicas, world.written) == (1, [])
    world.requests = 0.0
    await world.until(lambda: world.replicas == 0)
    # The slice came first, and the last replica has had no request for a while by then.
    assert world.written == ["Apply", "replicas=0"]
    assert world.state() == "proxy"
    assert world.now // SECOND_NS - world.last_arrival >= 5


@pytest.mark.parametrize("off_seconds", [0, 60, -60, 86_400, -86_400])
async def test_whoever_still_sends_a_replica_requests_is_seen_by_a_clock_that_is_off(
    off_seconds: int,
) -> None:
    """The slice stands, and a kube-proxy has not heard of it: its requests are short, and come now and then."""
    world = World()
    world.off_seconds, world.requests = off_seconds, 1.0
    await world.seconds(10)
    world.requests = 0.0
    await world.until(lambda: "Apply" in world.written)
    for _ in range(12):
        world.last_arrival = world.now // SECOND_NS
        await world.second()
    assert world.replicas == 1
    assert 3 <= await world.until(lambda: world.replicas == 0) <= 10


async def test_without_an_activator_that_listens_the_last_replica_stays() -> None:
    world = World()
    world.stream.opens = False
    await world.seconds(100)
    assert (world.replicas, world.written) == (1, [])
    assert world.state() == "proxy"
    world.stream.opens = True
    await world.until(lambda: world.replicas == 0)


async def test_the_first_request_wakes_it_and_clients_are_led_back_to_the_copy() -> None:
    world = await asleep()
    world.written.clear()
    # Within the step in which it is told: nobody waits for a tick.
    world.stream.report(buffered=1, arrived=1, cold_start=True)
    assert world.written == ["replicas=1"]
    world.pod("q", ready=False)
    await world.second(buffered=1)
    assert [one.ready for one in world.stream.assigned[MODEL].endpoints] == [False]
    assert world.state() == "proxy"
    world.pod("q", ready=True)
    await world.second(forwarded=1)
    assert [one.ready for one in world.stream.assigned[MODEL].endpoints] == [True]
    await world.second()
    assert world.written == ["replicas=1", "Delete"]
    world.requests = 1.0
    await world.until(lambda: world.state() == "serve", most=3)
    assert await world.until(lambda: not world.state()) >= 59
    assert (world.replicas, world.slice) == (1, None)


async def test_whoever_asks_between_the_switch_and_the_end_keeps_the_replica() -> None:
    world = World()
    await world.until(lambda: world.slice is not None)
    world.requests = 1.0
    await world.seconds(6)
    assert (world.replicas, world.slice) == (1, None)
    assert world.state() == "serve"


@pytest.mark.parametrize("at", ["told", "written", "proven", "zero", "waking", "ready", "serve"])
async def test_a_scaler_that_is_killed_at_any_step_is_followed_by_one_that_goes_on(at: str) -> None:
    world = World()
    down = {
        "told": lambda: world.state() == "proxy",
        "written": lambda: world.slice is not None,
        "proven": lambda: world.slice is not None and "replicas=0" not in world.written,
        "zero": lambda: world.replicas == 0,
    }
    if at in down:
        await world.until(down[at])
        world.anew()
        await world.until(lambda: world.replicas == 0)
        assert world.slice is not None
        return
    await world.until(lambda: world.replicas == 0)
    world.no_pod("p")
    await world.second()
    world.stream.report(buffered=1, arrived=1, cold_start=True)
    world.pod("q", ready=False)
    await world.second(buffered=1)
    if at == "waking":
        world.anew()
    world.pod("q", ready=True)
    world.requests = 1.0
    if at == "ready":
        world.anew()
    await world.until(lambda: world.slice is None, buffered=1)
    if at == "serve":
        await world.until(lambda: world.state() == "serve")
        world.anew()
    await world.seconds(20)
    assert (world.replicas, world.slice) == (1, None)


async def test_the_next_scaler_keeps_the_ports_of_the_slices_that_stand() -> None:
    """They need not be those that it would choose."""
    world = await asleep()
    assert world.slice is not None
    world.slice["ports"] = [{"name": "http", "port": 20042, "protocol": "TCP"}]
    world.anew()
    assert (world.stream.assigned[MODEL].rest_port, world.stream.assigned[MODEL].grpc_port) == (20042, 20043)


async def test_an_api_server_that_is_away_costs_time_alone() -> None:
    world = World()
    world.api_answers = False
    await world.seconds(60)
    assert (world.replicas, world.slice) == (1, None)
    world.api_answers = True
    await world.until(lambda: world.replicas == 0)
    assert world.written[-2:] == ["Apply", "replicas=0"]


async def test_an_activator_that_dies_takes_nobody_along() -> None:
    """At zero, and it was the only one: its address leaves the slice; another one's takes its place."""
    world = await asleep()
    world.reconciler.activators.disconnect(world.activator, world.now, gone=True)
    world.route.disconnected(world.activator)
    await world.second()
    assert world.slice is not None
    assert world.slice["endpoints"] == []
    world.connect()
    await world.second()
    await world.second()
    assert len(world.slice["endpoints"]) == 1


async def test_a_model_that_is_not_scaled_any_more_leaves_nothing_behind() -> None:
    world = await asleep()
    plain = deployment(0, None)
    plain["spec"]["template"]["metadata"]["annotations"] = {}
    world.cache.observe_deployment(plain)
    await world.seconds(7)
    assert (world.slice, world.state()) == (None, "")


async def test_nobody_attaches_before_all_is_known() -> None:
    world = World()
    fresh = RouteController(
        world.cache,
        world.core,
        world.reconciler,
        world.stream,
        put=world.put,
        act=world.act,
        leader=lambda: "10.0.0.1:9093",
    )
    with pytest.raises(NotLeading) as refusal:
        fresh.require_leading()
    assert refusal.value.leader == "10.0.0.1:9093"
    world.route.require_leading()


async def test_a_model_that_breaks_a_look_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    real, broken = world.core.asked, ModelKey("a", "broken")

    def asked(model: ModelKey, now_ns: int) -> Any:
        if model == broken:
            raise RuntimeError("nobody has thought of this")
        return real(model, now_ns)

    monkeypatch.setattr(world.core, "asked", asked)
    other = deployment(1, None)
    other["metadata"] |= {"name": "broken", "uid": "dep-2"}
    other["spec"]["template"]["metadata"]["labels"] = {"app": "broken"}
    world.cache.observe_deployment(other)
    world.route.touch(broken)
    await world.until(lambda: world.replicas == 0)


def looks_of(world: World) -> list[tuple[Any, ...]]:
    """From now on: each is one at a model."""
    looks, real = list[tuple[Any, ...]](), world.reconciler.reconcile

    def look(*args: Any) -> Any:
        looks.append(args)
        return real(*args)

    world.reconciler.reconcile = look  # type: ignore[assignment, method-assign]
    return looks


async def test_a_thousand_that_sleep_cost_little() -> None:
    """One that is left in peace is looked at every ten seconds."""
    world = await asleep()
    looks = looks_of(world)
    await world.seconds(40)
    assert len(looks) <= 12
    assert replace(world.stream.assigned[MODEL], version=0).mode is RouteMode.PROXY


async def test_a_model_with_replicas_is_not_looked_at_again_and_again() -> None:
    world = World()
    world.requests = 1.0
    await world.second()
    looks = looks_of(world)
    await world.seconds(20)
    assert len(looks) <= 1


async def test_a_deputy_that_takes_over_waits_for_those_that_another_had_attached() -> None:
    world = await asleep()
    world.anew(deputy_seconds=60, attaches=False)
    await world.seconds(28)
    assert world.slice is not None
    assert len(world.slice["endpoints"]) == 1
    await world.seconds(6)
    assert world.slice["endpoints"] == []


async def test_an_activator_that_does_not_come_back_is_out_of_the_slices_soon() -> None:
    world = await asleep()
    world.reconciler.activators.disconnect(world.activator, world.now)
    gone: list[str] = []

    def activator_gone(activator: str) -> None:
        gone.append(activator)

    world.core.activator_gone = activator_gone  # type: ignore[method-assign]
    world.route.disconnected(world.activator)
    assert gone == ["act"]
    await world.seconds(9)
    assert world.slice is not None
    assert len(world.slice["endpoints"]) == 1
    seconds = await world.until(lambda: world.slice is None or not world.slice["endpoints"], most=10)
    assert seconds <= 7


async def test_who_leads_no_more_sends_everybody_on() -> None:
    world = World()
    world.route.end()
    assert world.stream.calls == [("end", "")]
    with pytest.raises(NotLeading):
        world.route.require_leading()


async def test_the_streams_get_the_pods_that_may_be_clients() -> None:
    world = World()
    pod = replica("client", ready=True)
    world.route.on_client(Change(ChangeKind.SET, pod))
    world.route.on_client(Change(ChangeKind.GONE, pod))
    assert world.stream.calls == [("set", "client"), ("delete", "client")]


async def test_why_a_model_cannot_sleep_is_known_for_as_long_as_it_is_so() -> None:
    world = World()
    world.route.on_service(Change(ChangeKind.GONE, SERVICE))
    await world.until(lambda: world.route.failures)
    assert world.route.failures == {MODEL: NO_SERVICE}
    assert (world.replicas, world.written) == (1, [])
    world.route.on_service(Change(ChangeKind.SET, SERVICE))
    await world.until(lambda: world.replicas == 0)
    assert world.route.failures == {}


async def test_whom_no_port_was_left_for_scales_to_zero_once_one_is_free() -> None:
    world = World()
    others = [ModelKey("z", str(port)) for port in ACTIVATOR_PORTS[::2]]
    for other in others:
        world.reconciler._ports.adopt(other, int(other.name))
    await world.until(lambda: world.route.failures)
    assert world.route.failures == {MODEL: NO_PORTS}
    for other in others:
        world.reconciler._ports.release(other, world.now)
    await world.until(lambda: world.replicas == 0, most=400)


async def test_each_report_is_passed_to_the_exporters() -> None:
    world = await asleep()
    world.reported.clear()
    world.stream.report(buffered=1, arrived=1, cold_start=True)
    assert world.reported == [MODEL]


async def test_a_leader_that_leads_again_waits_for_its_activators_and_writes_nothing_meanwhile() -> None:
    """Without its Lease it sends them away; for however long, the way of what sleeps stands."""
    world = await asleep()
    before = world.slice
    assert before is not None
    world.written.clear()
    world.route.end()
    world.reconciler.activators.disconnect(world.activator, world.now)
    world.route.disconnected(world.activator)
    world.core.pause()
    for _ in range(120):
        world.now += SECOND_NS
        world.core.close_second(world.now)
        world.core.step(world.now)
        world.route.touch(MODEL)
        await world.route.turn()
    assert world.written == []
    world.core.resume(world.now)
    world.act(world.core.step(world.now))
    world.route.resume(world.now)
    await world.route.turn()
    for _ in range(5):
        world.now += SECOND_NS
        await world.route.turn()
    assert world.written == []  # they are on their way
    world.connect()
    await world.second()
    assert world.slice is not None
    assert world.slice["ports"] == before["ports"]
    assert world.slice["endpoints"] == before["endpoints"]
    assert "Delete" not in world.written
    world.stream.report(buffered=1, arrived=1, cold_start=True)
    assert world.replicas == 1
