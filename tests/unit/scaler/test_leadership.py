"""Which replica leads, and what another one may rely on."""

import asyncio
import functools
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS
from berth.kube.election import Election, ElectionTimes
from berth.kube.errors import KubeUnreachable
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from scaler import app, leadership
from scaler.activation.control_server import NotLeading
from scaler.app import Replica, main
from scaler.config import LEASE, ScalerOptions
from scaler.config_map import ConfigMap
from scaler.core.actions import NoRecord
from scaler.leadership import address_of, identity, is_predecessor
from tests.fakes.api_server import LEASES, ApiServer
from tests.fakes.eventually import until

CLASS = {"autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev"}
A = ModelKey("team", "a")


class Cut(ApiServer):
    """`away`: no write of a Lease has an answer."""

    away = False

    async def replace(self, path: str, body: Any) -> Any:
        if self.away and path.startswith(LEASES):
            raise KubeUnreachable("away")
        return await super().replace(path, body)


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


def test_without_a_certain_lease_nothing_may_be_written() -> None:
    client: Any = None
    here = leadership.Leadership(client, ScalerOptions())
    assert here.may_write()  # no Lease is needed by a replica that elects none
    asked: list[float] = []
    election: Any = SimpleNamespace(is_certain=lambda *, for_seconds: asked.append(for_seconds))
    here._election = election
    assert not here.may_write()
    assert asked == [WRITE_SECONDS]


def test_a_predecessor_is_known_by_the_pod_that_both_live_in() -> None:
    here, uid = Endpoint.parse("10.0.0.7:9093"), "5f1e-aa"
    before, now = identity(here, uid), identity(here, uid)
    assert is_predecessor(before, now, uid)
    assert not is_predecessor(now, now, uid)
    assert not is_predecessor(identity(here, "5f1e-ab"), now, uid)
    assert not is_predecessor(identity(here), identity(here), "")
    assert not is_predecessor("", now, uid)
    assert before.partition("@")[0].rsplit("-", 2)[0] == socket.gethostname()  # as `berth scale` reads it


@pytest.mark.parametrize(
    ("holder", "named"), [("other@10.0.0.2:9093", "10.0.0.2:9093"), ("this@10.0.0.1:9093", ""), ("", "")]
)
def test_nobody_is_sent_to_one_that_has_just_ended_to_lead(holder: str, named: str) -> None:
    nothing: Any = None
    replica = Replica(ScalerOptions(), ConfigMap({}), nothing, nothing, NoRecord())
    replica._leadership._own = "10.0.0.1:9093"
    replica._leadership._on_lease(Change(ChangeKind.SET, {"spec": {"holderIdentity": holder}}))
    with pytest.raises(NotLeading) as refused:
        replica._leader._routes.require_leading()
    assert refused.value.leader == named


async def test_a_standby_lists_anew_what_a_leader_may_have_written_before_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scaler")
    listed = [paths.SERVICES, paths.ENDPOINT_SLICES, paths.DEPLOYMENTS, paths.PODS]
    api, stop, quick = ApiServer(), asyncio.Event(), ElectionTimes(15, 10.0, 0.01)
    api.collections |= {path: {} for path in (*listed, paths.PRIORITY_CLASSES)}
    monkeypatch.setattr(app, "open_client", api.open)
    monkeypatch.setattr(leadership, "Election", functools.partial(Election, times=quick))

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
    options = ScalerOptions(admin_listen=free, control_listen=free, config=tmp_path)
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
            assert replicas[0]._leadership._own == address_of(holder) != ""
            stop.set()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_leader_without_the_api_server_decides_on_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It crashed after 12 s, with its windows. Nobody can have led meanwhile. Once another has, it is a
    standby that begins anew, in the same process."""
    caplog.set_level("INFO", "scaler")
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

    monkeypatch.setattr(leadership, "Election", election)
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
    running = asyncio.create_task(main(ScalerOptions(admin_listen=free, control_listen=free), stop))
    try:
        await until(lambda: bool(replicas) and leads(replicas[0]))
        (one,) = replicas
        assert since == [one._leadership._since]  # not from when it had read everything
        autoscaler = one._leader._loop._core._autoscalers[A]
        wrote: list[Any] = []
        monkeypatch.setattr(one._leader._writer, "put", wrote.append)
        api.away = True
        await until(lambda: said("leadership lost") > 0)
        await until(lambda: not leads(one))
        assert one._leader._loop._core._is_paused  # nobody reports what is held
        assert one._leader._writer._discards == 1  # what waited to be written is decided anew
        with pytest.raises(NotLeading):
            one._leader._routes.require_leading()
        wrote.clear()
        steps: list[int] = []
        step = one._leader._loop._core.step
        monkeypatch.setattr(one._leader._loop._core, "step", lambda now: steps.append(now) or step(now))
        await until(lambda: len(steps) >= 2)  # it decides on
        assert wrote == []
        api.away = False
        await until(lambda: said("leading again") > 0)
        await until(lambda: leads(one))
        one._leader._routes.require_leading()
        assert one._leader._loop._core._autoscalers[A] is autoscaler  # with its windows
        assert not one._leader._loop._core._is_paused
        await until(lambda: wrote != [])  # the newest, now
        held = api.collections[LEASES][LEASE]
        holder = held["spec"]["holderIdentity"]
        assert address_of(holder) == one._leadership._own
        # Another takes it.
        api.put(LEASES, {**held, "spec": {**held["spec"], "holderIdentity": "another", "renewTime": "x"}})
        await until(lambda: said("another scaler leads") == 1)
        await until(lambda: len(replicas) == 2)
        assert not running.done()
        held = api.collections[LEASES][LEASE]
        api.put(LEASES, {**held, "spec": {**held["spec"], "holderIdentity": ""}})
        await until(lambda: leads(replicas[1]))
        assert replicas[1]._leader._loop._core._autoscalers[A] is not autoscaler
        assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]
        stop.set()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
