import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from berth.kube.client import load_configuration
from berth.kube.election import Election, ElectionTimes, LeadershipLost
from berth.kube.errors import Conflict, KubeUnreachable, NotFound, response_error
from berth.kube.informer import ChangeKind, Mirror
from berth.kube.lease import Freshness
from berth.kube.times import micro_time
from berth.runtime.errors import ConfigError
from berth.triton.keys import TritonKeys
from localcluster.credentials import write_kubeconfig

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def item(uid: str, version: str, name: str = "p") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": name, "resourceVersion": version}}


def told(changes: list[Any]) -> list[tuple[str, str]]:
    return [(change.kind.value, change.object["metadata"]["uid"]) for change in changes]


def test_a_relist_tells_the_difference_deletions_first() -> None:
    mirror = Mirror()
    assert told(mirror.replace([item("a", "1"), item("b", "1")])) == [("set", "a"), ("set", "b")]
    # b was deleted and made anew under the same name while nobody watched
    assert told(mirror.replace([item("a", "1"), item("c", "2")])) == [("gone", "b"), ("set", "c")]
    assert set(mirror.objects) == {"a", "c"}


def test_a_watch_event_that_repeats_what_is_known_is_no_change() -> None:
    mirror = Mirror()
    mirror.replace([item("a", "1")])
    assert mirror.apply("ADDED", item("a", "1")) == []
    assert [change.kind for change in mirror.apply("MODIFIED", item("a", "2"))] == [ChangeKind.SET]
    assert told(mirror.apply("DELETED", item("a", "3"))) == [("gone", "a")]
    assert mirror.objects == {}


def lease(renewed: datetime, *, duration: int = 40, name: str = "berth-agent-n") -> dict[str, Any]:
    spec = {"renewTime": micro_time(renewed), "leaseDurationSeconds": duration}
    return {"metadata": {"name": name}, "spec": spec}


def test_a_lease_seen_for_the_first_time_is_judged_by_its_own_time() -> None:
    fresh = Freshness()
    fresh.observe(lease(NOW - timedelta(seconds=30)), monotonic=100.0, wall=NOW)
    assert fresh.is_fresh("berth-agent-n", monotonic=109.9)
    assert not fresh.is_fresh("berth-agent-n", monotonic=110.0)


def test_a_renewal_counts_whatever_the_clock_of_its_writer_says() -> None:
    fresh = Freshness()
    skewed = NOW - timedelta(days=1)
    fresh.observe(lease(skewed), monotonic=0.0, wall=NOW)
    assert not fresh.is_fresh("berth-agent-n", monotonic=0.0)
    fresh.observe(lease(skewed + timedelta(seconds=10)), monotonic=10.0, wall=NOW)
    assert fresh.is_fresh("berth-agent-n", monotonic=49.9)
    fresh.observe(lease(skewed + timedelta(seconds=10)), monotonic=45.0, wall=NOW)  # no renewal
    assert not fresh.is_fresh("berth-agent-n", monotonic=50.0)


def test_a_writer_ahead_in_time_gains_nothing() -> None:
    fresh = Freshness()
    fresh.observe(lease(NOW + timedelta(days=1)), monotonic=0.0, wall=NOW)
    assert fresh.seconds_left("berth-agent-n", monotonic=0.0) == 40


@pytest.mark.parametrize("spec", [{}, {"renewTime": None}, {"renewTime": "soon", "leaseDurationSeconds": 40}])
def test_a_lease_that_says_nothing_is_not_fresh(spec: dict[str, Any]) -> None:
    fresh = Freshness()
    fresh.observe({"metadata": {"name": "x"}, "spec": spec}, monotonic=0.0, wall=NOW)
    assert not fresh.is_fresh("x", monotonic=0.0)
    assert not fresh.is_fresh("never-seen", monotonic=0.0)


class OneLease:
    """An API server that holds a single Lease and can be made to fail or hang."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken: Exception | None = None
        self.hangs = False

    async def get(self, path: str) -> dict[str, Any]:
        await self._pass()
        if self.lease is None:
            raise response_error(404, "NotFound", path)
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.lease)}

    async def create(self, path: str, body: dict[str, Any]) -> None:
        await self._pass()
        if self.lease is not None:
            raise response_error(409, "AlreadyExists", path)
        self.lease, self.version = body["spec"], self.version + 1

    async def replace(self, path: str, body: dict[str, Any]) -> None:
        await self._pass()
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise response_error(409, "Conflict", path)
        self.lease, self.version = body["spec"], self.version + 1

    async def _pass(self) -> None:
        await asyncio.sleep(0)
        if self.hangs:
            await asyncio.Event().wait()
        if self.broken:
            raise self.broken


TIMES = ElectionTimes(lease_seconds=1, renew_deadline_seconds=0.3, retry_seconds=0.05)


def candidate(api: OneLease, identity: str) -> Election:
    return Election(api, namespace="n", name="l", identity=identity, times=TIMES)  # type: ignore[arg-type]


async def test_one_of_two_leads_and_the_other_follows_when_it_lets_go() -> None:
    api = OneLease()
    one, two = candidate(api, "one"), candidate(api, "two")
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await one.release()
    async with asyncio.timeout(1):  # at once, not after the lease
        await waiting
    assert api.lease is not None
    assert (api.lease["holderIdentity"], api.lease["leaseTransitions"]) == ("two", 1)


async def test_a_dead_leader_is_followed_after_its_lease_and_not_before() -> None:
    api = OneLease()
    await candidate(api, "one").acquire()
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(3):
        await candidate(api, "two").acquire()
    assert asyncio.get_running_loop().time() - started >= TIMES.lease_seconds


@pytest.mark.parametrize("fault", ["broken", "hangs", "stolen"])
async def test_a_leader_that_cannot_renew_stops_before_its_lease_ends(fault: str) -> None:
    api = OneLease()
    leader = candidate(api, "one")
    await leader.acquire()
    if fault == "broken":
        api.broken = KubeUnreachable("away")
    elif fault == "hangs":
        api.hangs = True
    else:
        assert api.lease is not None
        api.lease["holderIdentity"] = "two"
    async with asyncio.timeout(TIMES.lease_seconds):
        with pytest.raises(LeadershipLost):
            await leader.hold()


async def test_two_that_race_for_a_free_lease_do_not_both_lead() -> None:
    api = OneLease()
    tasks = [asyncio.create_task(candidate(api, name).acquire()) for name in ("one", "two", "three")]
    done, pending = await asyncio.wait(tasks, timeout=0.3)
    assert len(done) == 1
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def test_statuses_become_the_errors_that_somebody_handles() -> None:
    assert isinstance(response_error(404, "NotFound", "x"), NotFound)
    assert isinstance(response_error(409, "Conflict", "x"), Conflict)
    assert str(response_error(500, "", "boom")) == "500: boom"


def test_keys_never_show_and_come_back_from_their_files(tmp_path: Any) -> None:
    keys = TritonKeys.generate()
    assert keys.admin not in repr(keys)
    keys.write(tmp_path)
    assert TritonKeys.read(tmp_path) == keys
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o440}
    assert (
        f"--http-restricted-api=model-repository,shared-memory,logging,trace:berth-admin-key={keys.admin}"
        in (keys.server_flags())
    )


@pytest.mark.parametrize("names", ["config", "config:other"])
async def test_a_kubeconfig_that_is_not_there_is_said_to_be_missing(tmp_path: Path, names: str) -> None:
    path = ":".join(str(tmp_path / name) for name in names.split(":"))
    with pytest.raises(ConfigError, match=f"^--kubeconfig: {path}: no such file$"):
        await load_configuration(path)


async def test_of_several_kubeconfigs_one_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ca").touch()
    write_kubeconfig(
        tmp_path / "config", server="https://127.0.0.1:1", certificate=tmp_path / "ca", token="t"
    )
    configuration = await load_configuration(f"{tmp_path}/none:~/config")
    assert configuration.host == "https://127.0.0.1:1"
