"""The binder as a process: when it places pods, what a standby does, what is asked before the first decision, and
how it ends."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.keys import agent_lease_namespace
from berth.kube import paths
from berth.kube.election import Election, ElectionTimes, LeadershipLost
from berth.kube.errors import KubeUnreachable
from berth.kube.times import micro_time
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.options import parse_options
from binder import app
from binder.config import BinderOptions
from binder.engine.score import STRATEGIES, make_strategy
from tests.fakes.api_server import LEASES, ApiServer
from tests.fakes.eventually import until
from tests.fakes.objects import GIB, gpu, node, pod, report

QUICK = ElectionTimes(lease_seconds=15, renew_deadline_seconds=10.0, retry_seconds=0.01)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """One node with 16 GiB and a living agent."""
    made = ApiServer()
    monkeypatch.setattr(app, "open_client", made.open)
    monkeypatch.setattr(app, "Election", functools.partial(Election, times=QUICK))
    made.put(paths.NODES, node(says=report(gpu())))
    spec = {"renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 40}
    made.put(
        paths.leases(agent_lease_namespace("berth-system")),
        {"metadata": {"name": "berth-agent-n1"}, "spec": spec},
    )
    return made


def options_of(*argv: str) -> BinderOptions:
    arguments = ["--admin-listen", "127.0.0.1:0", *argv]
    return parse_options(BinderOptions, process="binder", summary="", argv=arguments, environ={})


@asynccontextmanager
async def binder(*argv: str) -> AsyncIterator["asyncio.Task[None]"]:
    """One that runs; it is stopped, and ends in good order."""
    stop = asyncio.Event()
    task = asyncio.create_task(app.main(options_of(*argv), stop))
    try:
        async with asyncio.timeout(20):
            yield task
            stop.set()
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def lease(api: ApiServer) -> str:
    return str(api.collections[LEASES].get("berth-binder", {}).get("spec", {}).get("holderIdentity", "none"))


def held_by(api: ApiServer, holder: str) -> None:
    spec = {"holderIdentity": holder, "renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 15}
    api.put(LEASES, {"metadata": {"name": "berth-binder"}, "spec": spec})


async def test_a_leader_places_pods_and_lets_go_of_the_lease_at_its_end(api: ApiServer) -> None:
    api.put(paths.PODS, pod("p1"))
    api.put(paths.PODS, pod("theirs", schedulerName="kube"))
    async with binder():
        await until(lambda: api.bindings)
        api.put(paths.PODS, pod("p2"))
        await until(lambda: len(api.bindings) == 2)
        assert lease(api) not in ("", "none")
    assert api.bindings == [("p1", "n1"), ("p2", "n1")]
    assert lease(api) == ""
    said = {(event["involvedObject"]["name"], event["reason"]) for event in api.events}
    assert said == {("p1", "Scheduled"), ("p2", "Scheduled")}  # written before the end
    assert {event["source"]["component"] for event in api.events} == {"trtis-scheduler"}


async def test_another_scheduler_name_is_another_binder(api: ApiServer) -> None:
    api.put(paths.PODS, pod("p1"))
    api.put(paths.PODS, pod("mine", schedulerName="mine"))
    async with binder("--scheduler-name", "mine"):
        await until(lambda: api.bindings)
        assert api.bindings == [("mine", "n1")]


async def test_without_an_election_there_is_no_lease(api: ApiServer) -> None:
    api.put(paths.PODS, pod("p1"))
    async with binder("--no-leader-elect"):
        await until(lambda: api.bindings)
        assert lease(api) == "none"


async def test_a_standby_writes_nothing_and_catches_up_before_its_first_decision(api: ApiServer) -> None:
    """The last leader has bound a pod that no watch shows."""
    held_by(api, "another")
    waits = api.put(paths.PODS, pod("waits", mem="10Gi"))
    async with binder():
        await until(lambda: api.lists.count(paths.PODS) and api.lists.count(paths.BUDGETS))
        await asyncio.sleep(0.05)
        assert api.bindings == api.events == []
        api.silent = True
        choice = GpuChoice(GpuUuid("GPU-a"), 0, 10 * GIB)
        api.put(paths.PODS, pod("unseen", mem="10Gi", on="n1", choice=choice, phase="Running"))
        before = len(api.lists)
        held_by(api, "")
        await until(lambda: api.events)
        assert api.bindings == []
        message = api.events[0]["message"]
        assert (api.events[0]["involvedObject"]["name"], message[:40]) == (
            waits["metadata"]["name"],
            "0/1 nodes: 1 GPUMemoryInsufficient (4 Gi",
        )
        assert api.lists[before:][:2] == [paths.PODS, paths.NODES]


async def test_it_catches_up_however_often_that_takes(api: ApiServer) -> None:
    held_by(api, "another")
    api.put(paths.PODS, pod("p1"))
    async with binder():
        await until(lambda: api.lists.count(paths.BUDGETS))
        await asyncio.sleep(0.05)
        api.hidden = {paths.PODS}
        held_by(api, "")
        await until(lambda: lease(api) not in ("", "another"))
        await asyncio.sleep(0.05)
        assert api.bindings == []
    assert lease(api) == ""  # it was stopped while it caught up


async def test_a_list_that_fails_is_requested_again(api: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    held_by(api, "another")
    api.put(paths.PODS, pod("p1"))
    async with binder():
        await until(lambda: api.lists.count(paths.BUDGETS))
        await asyncio.sleep(0.05)
        get, failed = api.get, list[str]()

        async def fails_once(path: str, **params: str) -> Any:
            if path == paths.PODS and len(failed) < 2:
                failed.append(path)
                raise KubeUnreachable("away")
            return await get(path, **params)

        api.get = fails_once  # type: ignore[method-assign]
        held_by(api, "")
        await until(lambda: api.bindings)
        assert len(failed) == 2


async def test_a_leader_that_is_deposed_ends(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    times = ElectionTimes(lease_seconds=15, renew_deadline_seconds=0.2, retry_seconds=0.01)
    monkeypatch.setattr(app, "Election", functools.partial(Election, times=times))
    with pytest.RaisesGroup(pytest.RaisesExc(LeadershipLost), flatten_subgroups=True):
        async with binder() as task:
            await until(lambda: lease(api) != "none")
            held_by(api, "another")
            await task
    assert lease(api) == "another"


@pytest.mark.parametrize("binds", [True, False])
async def test_a_lease_with_bindings_in_doubt_is_left_to_run_out(
    binds: bool, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.put(paths.PODS, pod("p1"))
    api.binds = binds
    async with binder():
        await until(lambda: api.bindings)
        await asyncio.sleep(0.02)
    assert (lease(api) == "") is binds


@pytest.mark.parametrize("path", [paths.PODS, paths.BUDGETS])
async def test_it_can_be_stopped_before_it_has_seen_everything(path: str, api: ApiServer) -> None:
    api.hidden = {path}
    api.put(paths.PODS, pod("p1"))
    async with binder():
        await asyncio.sleep(0.05)
        assert (api.bindings, lease(api)) == ([], "none")


async def test_it_can_be_stopped_while_another_leads(api: ApiServer) -> None:
    held_by(api, "another")
    async with binder():
        await asyncio.sleep(0.05)
    assert lease(api) == "another"


async def test_an_api_server_that_is_away_is_named(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("berth.kube.client.PATIENCE_SECONDS", 0.0)
    api.fails = [KubeUnreachable("refused")]
    with pytest.raises(CannotStart, match="listing nodes"):
        await app.main(options_of(), asyncio.Event())


async def test_who_is_told_to_end_while_the_api_server_is_away_ends(api: ApiServer) -> None:
    """In good order and at once, whether it waits for an answer or to ask again."""
    for away in ({"hidden": {paths.NODES}}, {"fails": [KubeUnreachable("refused")] * 99}):
        vars(api).update(away)
        async with binder():
            await asyncio.sleep(0.3)
        api.hidden = set()
    assert lease(api) == "none"


async def fetch(port: int, path: str, body: Any = None) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            "GET" if body is None else "POST",
            f"http://127.0.0.1:{port}{path}",
            data=None if body is None else json.dumps(body),
            allow_redirects=False,
        ) as answer,
    ):
        return answer.status, await answer.text(), answer.headers.get("Location", "")


async def fetch_ok(port: int, path: str, body: Any = None) -> str:
    """Once it is there."""
    while True:
        with suppress(aiohttp.ClientConnectionError):
            status, text, _ = await fetch(port, path, body)
            if status == 200:
                return text
        await asyncio.sleep(0.01)


async def test_a_standby_is_ready_once_it_has_seen_everything(api: ApiServer, unused_tcp_port: int) -> None:
    held_by(api, "another")
    api.hidden = {paths.BUDGETS}
    async with binder("--admin-listen", f"127.0.0.1:{unused_tcp_port}"):
        await until(lambda: paths.PODS in api.lists)
        await asyncio.sleep(0.05)
        status, text, _ = await fetch(unused_tcp_port, "/readyz")
        assert (status, text.strip()) == (503, "not mirrored yet: poddisruptionbudgets")
    api.hidden = set()
    async with binder("--admin-listen", f"127.0.0.1:{unused_tcp_port}"):
        await fetch_ok(unused_tcp_port, "/readyz")
        assert "berth_binder_leader 0.0" in await fetch_ok(unused_tcp_port, "/metrics")


async def test_a_standby_s_extender_sends_its_callers_to_the_leader(
    api: ApiServer, unused_tcp_port_factory: Callable[[], int]
) -> None:
    held_by(api, "berth-binder-0-1-ab@http://10.0.0.7:8481/")
    port = unused_tcp_port_factory()
    own = ("--extender-listen", f"127.0.0.1:{port}", "--extender-url", f"http://127.0.0.1:{port}")
    args = {"Pod": pod(schedulerName="kube"), "NodeNames": ["n1"]}
    async with binder(*own):
        await until(lambda: paths.BUDGETS in api.lists)
        await asyncio.sleep(0.05)
        status, _, location = await fetch(port, "/filter", args)
        assert (status, location) == (307, "http://10.0.0.7:8481/filter")
        held_by(api, "berth-binder-0-1-ab")  # one without an extender
        await asyncio.sleep(0.05)
        assert (await fetch(port, "/filter", args))[0] == 503
        held_by(api, "")
        await until(lambda: lease(api).endswith(f"@http://127.0.0.1:{port}"))
        assert json.loads(await fetch_ok(port, "/filter", args))["NodeNames"] == ["n1"]
    with pytest.raises(aiohttp.ClientConnectionError):
        await fetch(port, "/filter", args)


async def test_a_standby_sends_the_scaler_to_the_leader_whether_or_not_that_is_an_extender(
    api: ApiServer, unused_tcp_port_factory: Callable[[], int]
) -> None:
    held_by(api, "berth-binder-0-1-ab,http://10.0.0.7:8482/@http://10.0.0.7:8481")
    port, other = unused_tcp_port_factory(), unused_tcp_port_factory()
    own = ("--schedulable-listen", f"127.0.0.1:{port}", "--schedulable-url", f"http://127.0.0.1:{port}")
    both = (*own, "--extender-listen", f"127.0.0.1:{other}", "--extender-url", f"http://127.0.0.1:{other}")
    args = {"Pod": pod(schedulerName="kube"), "NodeNames": ["n1"]}
    async with binder(*both):
        await until(lambda: paths.BUDGETS in api.lists)
        await asyncio.sleep(0.05)
        status, _, location = await fetch(port, "/schedulable", {})
        assert (status, location) == (307, "http://10.0.0.7:8482/schedulable")
        status, _, location = await fetch(other, "/filter", args)
        assert (status, location) == (307, "http://10.0.0.7:8481/filter")
        held_by(api, "berth-binder-0-1-ab@http://10.0.0.7:8481")  # of an earlier version
        await asyncio.sleep(0.05)
        assert (await fetch(port, "/schedulable", {}))[0] == 503
        held_by(api, "")
        await until(lambda: lease(api).endswith(f",http://127.0.0.1:{port}@http://127.0.0.1:{other}"))
        while (status := (await fetch(port, "/schedulable", {}))[0]) in (307, 503):  # it catches up first
            await asyncio.sleep(0.005)
        assert status == 401
    with pytest.raises(aiohttp.ClientConnectionError):
        await fetch(port, "/schedulable", {})


@pytest.mark.parametrize(
    ("written", "url"),
    [
        # deploy/extender writes brackets for either family; Go refuses to follow a caller to an IPv4 host in them.
        ("http://[10.0.0.7]:8481", "http://10.0.0.7:8481"),
        ("http://[fd00::7]:8481/", "http://[fd00::7]:8481"),
        ("http://binder.example:8481", "http://binder.example:8481"),
    ],
)
def test_an_extender_s_url_is_one_that_kube_scheduler_can_follow(written: str, url: str) -> None:
    assert options_of("--extender-url", written).extender_url == url


@pytest.mark.parametrize(
    "written", ["10.0.0.7:8481", "http://10.0.0.7", "http://fd00::7:8481", "http://h:1/x"]
)
def test_an_extender_s_url_that_is_none_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="--extender-url"):
        options_of("--extender-url", written)


async def test_each_life_of_a_replica_is_another_candidate(api: ApiServer) -> None:
    found = set()
    for _ in range(2):
        async with binder():
            await until(lambda: lease(api) not in ("", "none"))
            found.add(lease(api))
    assert len(found) == 2
    assert not any("@" in identity for identity in found)


def test_every_strategy_that_may_be_requested_is_there() -> None:
    for name in STRATEGIES:
        assert options_of("--strategy", name).strategy == name
        assert make_strategy(name, None) is not None  # type: ignore[arg-type]
    assert options_of().strategy == STRATEGIES[0] == "least-fragmentation"


def test_a_strategy_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="fullest"):
        make_strategy("fullest", None)  # type: ignore[arg-type]
