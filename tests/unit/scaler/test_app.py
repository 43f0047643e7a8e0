"""What the scaler's process reads, is called, and does with what is decided."""

import asyncio
import functools
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import scaler.control_loop as live_module
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey, Scaled, SchedulableAnswer, SchedulableModel, SchedulableRequest
from berth.kube import paths
from berth.kube.election import Election, ElectionTimes
from berth.kube.errors import KubeUnreachable
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from berth.runtime.errors import ConfigError
from scaler import app
from scaler.activation.attend import Attached, Figures, NotLeading
from scaler.app import Replica, address_of, identity, is_predecessor, main, recording
from scaler.config import LEASE, ScalerOptions
from scaler.config_map import ConfigMap
from scaler.control_loop import Clock, ControlLoop
from scaler.core.actions import Action, ColdStarted, Event, NoRecord, RouteChanged, WriteScale, WriteStatus
from scaler.core.models_view import Averages, ColdStartView, ModelView
from scaler.decision.bounds import Activity
from scaler.metrics import ScalerMetrics
from scaler.writer import DeploymentWrite
from tests.fakes.api_server import LEASES, ApiServer
from tests.fakes.attendance import FakeAttendance
from tests.fakes.eventually import until

CLASS = {"autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev"}
A = ModelKey("team", "a")


# --- configuration ------------------------------------------------------------------------------------------------


async def test_certificates_are_looked_at_before_the_api_server_is_asked(tmp_path: Path) -> None:
    options = ScalerOptions(
        kubeconfig=str(tmp_path / "none"),
        keda_listen=Endpoint("127.0.0.1", 0),
        keda_client_ca=tmp_path / "ca",
    )
    with pytest.raises(ConfigError, match="--keda-client-ca needs --tls-cert"):
        await main(options, asyncio.Event())


def test_a_record_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with recording(None, {}) as record:
        assert isinstance(record, NoRecord)
    with (
        pytest.raises(ConfigError, match=r"--record: .*No such file"),
        recording(tmp_path / "no" / "file", {}),
    ):
        pass


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        ("10.0.0.7:9093", "10.0.0.7:9093"),
        ("[fd00::7]:9093", "[fd00::7]:9093"),
        ("0.0.0.0:9093", ""),
        ("[::]:9093", ""),
    ],
)
def test_a_replica_is_called_by_where_its_activators_reach_it(listen: str, found: str) -> None:
    name = identity(Endpoint.parse(listen))
    assert address_of(name) == found
    assert identity(Endpoint.parse(listen)) != name  # each life is another's


def test_a_predecessor_is_known_by_the_pod_that_both_live_in() -> None:
    """autoscaling D3. Without a pod's uid two processes of one machine may live side by side."""
    here, uid = Endpoint.parse("10.0.0.7:9093"), "5f1e-aa"
    before, now = identity(here, uid), identity(here, uid)
    assert is_predecessor(before, now, uid)
    assert not is_predecessor(now, now, uid)
    assert not is_predecessor(identity(here, "5f1e-ab"), now, uid)
    assert not is_predecessor(identity(here), identity(here), "")
    assert not is_predecessor("", now, uid)
    assert before.partition("@")[0].rsplit("-", 2)[0] == socket.gethostname()  # as `berth scale` reads it


# --- time ----------------------------------------------------------------------------------------------------------


def test_time_starts_at_the_walls_and_never_jumps() -> None:
    walls, ticks = iter([1_000, 5_000_000]), iter([10, 11, 15])
    clock = Clock(lambda: next(walls), lambda: next(ticks))
    assert [clock(), clock()] == [1_001, 1_005]


# --- what is done ----------------------------------------------------------------------------------------------------


class Core:
    """Wants what a test says."""

    def __init__(self) -> None:
        self.wants: list[Action] = []
        self.asks: list[SchedulableRequest] = []
        self.heard_of: list[Any] = []
        self.steps = self.seconds = 0

    def models(self) -> list[ModelKey]:
        return [A]

    def heard(self, *told: Any) -> bool:
        self.heard_of.append(told)
        return True

    def close_second(self, now_ns: int) -> None:
        self.seconds += 1

    def step(self, now_ns: int) -> list[Action]:
        self.steps += 1
        return self.wants

    def question(self, now_ns: int) -> SchedulableRequest | None:
        return self.asks.pop(0) if self.asks else None

    def answered(self, question: SchedulableRequest, answer: Any, now_ns: int) -> list[Action]:
        return [WriteScale(model=question.models[0].model, uid="u", replicas=9)]

    def view(self, model: ModelKey) -> ModelView:
        return ModelView(
            model=model, class_name="kpa", spec=None, ready=2, desired=5, capacity_limited=3, buffered=7, in_panic=True,
            activity=Activity.ACTIVE, concurrency=Averages(1.5, None),
        )  # fmt: skip


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def record(self, about: Any, *what: str) -> None:
        self.told.append((str(about), *what))


class Binder:
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.asked: list[SchedulableRequest] = []
        self.known = 0
        self.answers = asyncio.Event()

    async def ask(self, question: SchedulableRequest) -> SchedulableAnswer | None:
        if question.models:
            self.asked.append(question)
        else:
            self.known += 1
        await self.answers.wait()
        return None


class Here:
    def __init__(self) -> None:
        self.core, self.events, self.binder = Core(), Events(), Binder()
        self.writes: list[Any] = []
        self.switched: list[RouteChanged] = []
        self.registry = CollectorRegistry()
        self.metrics = ScalerMetrics(self.registry)
        core: Any = self.core
        writer: Any = self
        events: Any = self.events
        self.live = ControlLoop(core, writer, self.binder, events, self.metrics, lambda: 5)
        self.live.switched = self.switched.append

    def put(self, write: Any) -> None:
        self.writes.append(write)


def question() -> SchedulableRequest:
    one = SchedulableModel(
        name=str(A), desired=1, running=0, starting=0, priority=0, template={}, template_hash="h"
    )
    return SchedulableRequest(models=(one,))


async def test_each_action_goes_where_it_is_done() -> None:
    here = Here()
    scaled = Scaled(desired=3)
    wake = ColdStartView(at_ns=0, phases=(("decide", 0.1), ("schedule", 0.2)))
    here.live.act(
        [
            WriteScale(model=A, uid="u", replicas=3, costs={"p": 1}),
            WriteStatus(model=A, uid="u", scaled=scaled),
            Event(model=A, uid="u", type="Warning", reason="CapacityLimited", message="no room"),
            RouteChanged(model=A),
            ColdStarted(model=A, cold_start=wake),
        ]
    )
    assert here.writes == [
        DeploymentWrite(model=A, uid="u", replicas=3, costs={"p": 1}),
        DeploymentWrite(model=A, uid="u", scaled=scaled),
    ]
    assert here.events.told == [("Deployment team/a", "Warning", "CapacityLimited", "no room")]
    assert here.switched == [RouteChanged(model=A)]
    text = generate_latest(here.registry).decode()
    assert 'berth_scaler_cold_start_seconds_sum{phase="schedule"} 0.2' in text
    assert 'berth_scaler_cold_start_seconds_count{phase="all"} 1.0' in text


async def test_a_binder_that_is_slow_holds_up_no_decision() -> None:
    here = Here()
    here.core.asks = [question(), question()]
    here.live.act([])
    task = asyncio.create_task(here.live.run())
    async with asyncio.timeout(10):
        while not (here.binder.asked and here.core.steps >= 2):
            await asyncio.sleep(0.01)
    assert len(here.binder.asked) == 1  # one question at a time
    assert here.core.seconds > here.core.steps
    here.binder.answers.set()
    async with asyncio.timeout(10):
        while len(here.binder.asked) < 2:
            await asyncio.sleep(0.01)
    assert here.writes[0] == DeploymentWrite(model=A, uid="u", replicas=9)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_binder_knows_who_asks_before_a_request_waits_for_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_module, "_KNOWN_SECONDS", 0.0)
    here = Here()
    task = asyncio.create_task(here.live.run())
    async with asyncio.timeout(10):
        while not here.binder.known:
            await asyncio.sleep(0.01)
        here.core.asks = [question()]
        here.live.act([])
        while not here.binder.asked:  # though nothing has been answered
            await asyncio.sleep(0.01)
        assert here.binder.known == 1
        here.binder.answers.set()
        while here.binder.known < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_tell_of_each_model_and_nothing_of_what_is_unknown() -> None:
    here = Here()
    attendance = FakeAttendance(
        [Attached("berth-system/act-1", 12.5, 3), Attached("a/own", 1.0, 0)],
        Figures(reports=9, left_aside=2, slowed=1),
    )
    here.metrics.follow(
        here.core, writes_waiting=lambda: 4, binder_silent_seconds=lambda: 1.5, attendance=attendance
    )
    text = generate_latest(here.registry).decode()
    assert "berth_scaler_activators 2.0" in text
    assert 'berth_scaler_activator_attached_seconds{activator="berth-system/act-1"} 12.5' in text
    assert 'berth_scaler_activator_buffered_requests{activator="berth-system/act-1"} 3.0' in text
    for name, count in {"reports": 9, "rejected_reports": 2, "throttled_reports": 1}.items():
        assert f"berth_scaler_{name}_total {count}.0" in text
    labels = '{deployment="a",namespace="team"}'
    for name, value in {"desired": 5, "ready": 2, "capacity_limited": 3}.items():
        assert f"berth_scaler_{name}_replicas{labels} {value}.0" in text
    assert f"berth_scaler_buffered_requests{labels} 7.0" in text
    assert f"berth_scaler_in_panic{labels} 1.0" in text
    assert f"berth_scaler_concurrency{labels} 1.5" in text
    assert f"berth_scaler_requests{labels}" not in text
    assert "berth_scaler_writes_waiting 4.0" in text
    assert 'berth_scaler_writes_total{result="refused",what="slice"} 0.0' in text


# --- who leads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "named"), [("other@10.0.0.2:9093", "10.0.0.2:9093"), ("this@10.0.0.1:9093", ""), ("", "")]
)
def test_nobody_is_sent_to_one_that_has_just_ended_to_lead(holder: str, named: str) -> None:
    nothing: Any = None
    replica = Replica(ScalerOptions(), ConfigMap({}), nothing, nothing, NoRecord())
    replica._own = "10.0.0.1:9093"
    replica._on_lease(Change(ChangeKind.SET, {"spec": {"holderIdentity": holder}}))
    with pytest.raises(NotLeading) as refused:
        replica._route.require_leading()
    assert refused.value.leader == named


async def test_a_standby_lists_anew_what_a_leader_may_have_written_before_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scaler.app")
    listed = [paths.SERVICES, paths.ENDPOINT_SLICES, paths.DEPLOYMENTS, paths.PODS]
    api, stop, quick = ApiServer(), asyncio.Event(), ElectionTimes(15, 10.0, 0.01)
    api.collections |= {path: {} for path in (*listed, paths.PRIORITY_CLASSES)}
    monkeypatch.setattr(app, "open_client", api.open)
    monkeypatch.setattr(app, "Election", functools.partial(Election, times=quick))

    def led_by(holder: str) -> None:
        spec = {
            "holderIdentity": holder,
            "renewTime": micro_time(datetime.now(UTC)),
            "leaseDurationSeconds": 15,
        }
        api.put(LEASES, {"metadata": {"name": LEASE}, "spec": spec})

    led_by("another")
    replicas: list[Replica] = []

    class Kept(Replica):
        def __init__(self, *told: Any) -> None:
            super().__init__(*told)
            replicas.append(self)

    monkeypatch.setattr(app, "Replica", Kept)
    free, watched = Endpoint("127.0.0.1", 0), asyncio.Event()

    async def watch(self: object) -> None:
        watched.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(app.ConfigMapWatch, "run", watch)
    options = ScalerOptions(admin_listen=free, attend_listen=free, config=tmp_path)
    running = asyncio.create_task(main(options, stop))
    try:
        async with asyncio.timeout(20):
            await watched.wait()  # its ConfigMap, too, before it leads
            while not {*listed, LEASES} <= {*api.lists}:
                await asyncio.sleep(0.005)
            # What no watch has told yet.
            api.silent = True
            meta = {"namespace": "team", "name": "a", "annotations": CLASS}
            spec = {"replicas": 1, "template": {"metadata": {}, "spec": {"containers": []}}}
            api.put(paths.DEPLOYMENTS, {"metadata": meta, "spec": spec})
            before = len(api.lists)
            led_by("")
            while "scaling models" not in caplog.text:
                await asyncio.sleep(0.005)
            (led,) = [one for one in caplog.records if one.message == "scaling models"]
            assert api.lists[before:][:4] == listed
            assert led.fields["models"] == 1  # type: ignore[attr-defined]
            # The Lease that it leads by is the one by which it would send others to itself.
            holder = api.collections[LEASES][LEASE]["spec"]["holderIdentity"]
            assert replicas[0]._own == address_of(holder) != ""
            stop.set()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Cut(ApiServer):
    """`away`: no write of a Lease has an answer."""

    away = False

    async def replace(self, path: str, body: Any) -> Any:
        if self.away and path.startswith(LEASES):
            raise KubeUnreachable("away")
        return await super().replace(path, body)


async def test_a_leader_without_the_api_server_decides_on_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """autoscaling D4: it crashed after 12 s, with its windows. Nobody can have led meanwhile. Once another has, it is a
    standby that begins anew, in the same process."""
    caplog.set_level("INFO", "scaler.app")
    # Long enough to write in, and lost a moment after it was renewed last.
    times = ElectionTimes(lease_seconds=14, renew_deadline_seconds=3.0, retry_seconds=0.01)
    api, stop = Cut(), asyncio.Event()
    api.collections |= {
        path: {}
        for path in (
            paths.SERVICES,
            paths.ENDPOINT_SLICES,
            paths.DEPLOYMENTS,
            paths.PODS,
            paths.PRIORITY_CLASSES,
        )
    }
    meta = {"namespace": "team", "name": "a", "annotations": CLASS}
    spec = {"replicas": 1, "template": {"metadata": {}, "spec": {"containers": []}}}
    api.put(paths.DEPLOYMENTS, {"metadata": meta, "spec": spec})
    api.put(LEASES, {"metadata": {"name": LEASE}, "spec": {"holderIdentity": ""}})
    monkeypatch.setattr(app, "open_client", api.open)
    since: list[float | None] = []

    def election(*told: Any, **named: Any) -> Election:
        since.append(named["predecessor"].ended_at)
        return Election(*told, **named, times=times)

    monkeypatch.setattr(app, "Election", election)
    replicas: list[Any] = []

    class Kept(Replica):
        def __init__(self, *told: Any) -> None:
            super().__init__(*told)
            replicas.append(self)

    monkeypatch.setattr(app, "Replica", Kept)

    def said(what: str) -> int:
        return sum(what in one.message for one in caplog.records)

    def leads(replica: Any) -> bool:
        return "berth_scaler_leader 1.0" in generate_latest(replica._registry).decode()

    free = Endpoint("127.0.0.1", 0)
    running = asyncio.create_task(main(ScalerOptions(admin_listen=free, attend_listen=free), stop))
    try:
        await until(lambda: bool(replicas) and leads(replicas[0]))
        (one,) = replicas
        assert since == [one._since]  # not from when it had read everything
        autoscaler = one._core._autoscalers[A]
        wrote: list[Any] = []
        monkeypatch.setattr(one._writer, "put", wrote.append)
        api.away = True
        await until(lambda: said("leadership lost") > 0)
        await until(lambda: not leads(one))
        assert one._core._is_paused  # nobody reports what is held
        assert one._writer._discards == 1  # what waited to be written is decided anew
        with pytest.raises(NotLeading):
            one._route.require_leading()
        wrote.clear()
        steps: list[int] = []
        step = one._core.step
        monkeypatch.setattr(one._core, "step", lambda now: steps.append(now) or step(now))
        await until(lambda: len(steps) >= 2)  # it decides on
        assert wrote == []
        api.away = False
        await until(lambda: said("leading again") > 0)
        await until(lambda: leads(one))
        one._route.require_leading()
        assert one._core._autoscalers[A] is autoscaler  # with its windows
        assert not one._core._is_paused
        await until(lambda: wrote != [])  # the newest, now
        held = api.collections[LEASES][LEASE]
        holder = held["spec"]["holderIdentity"]
        assert address_of(holder) == one._own
        # Another takes it.
        api.put(LEASES, {**held, "spec": {**held["spec"], "holderIdentity": "another", "renewTime": "x"}})
        await until(lambda: said("another scaler leads") == 1)
        await until(lambda: len(replicas) == 2)
        assert not running.done()
        held = api.collections[LEASES][LEASE]
        api.put(LEASES, {**held, "spec": {**held["spec"], "holderIdentity": ""}})
        await until(lambda: leads(replicas[1]))
        assert replicas[1]._core._autoscalers[A] is not autoscaler
        assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]
        stop.set()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
