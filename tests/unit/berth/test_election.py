"""Leader election over a Lease."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from berth.kube.client import WRITE_SECONDS
from berth.kube.election import Election, LeadershipLost, Predecessor
from berth.kube.errors import KubeUnreachable, response_error
from tests.fakes import leaping

START = datetime(2026, 1, 1, tzinfo=UTC)


PATH = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases/berth-binder"


class Store:
    """The API server's one Lease. `before_write` runs between a candidate's reading and its writing."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken: Exception | None = None
        self.hangs = False
        self.before_write: Callable[[], None] | None = None
        self.seconds = 0.01  # that an answer takes
        self.after_write: Callable[[], None] = lambda: None  # may break what has been carried out
        self.asked: list[str] = []

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    def seen(self) -> dict[str, Any]:
        """As it stands."""
        assert self.lease is not None
        meta = {**self.lease["metadata"], "resourceVersion": str(self.version)}
        return {**self.lease, "metadata": meta, "spec": dict(self.spec)}

    def hold(self, holder: str, **spec: Any) -> None:
        self._store({"metadata": {"name": "berth-binder"}, "spec": {"holderIdentity": holder, **spec}})

    async def get(self, path: str) -> dict[str, Any]:
        assert path == PATH
        self.asked.append("get")
        await self._answer()
        if self.lease is None:
            raise response_error(404, "NotFound", path)
        return self.seen()

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == PATH.rpartition("/")[0]
        await self._write()
        if self.lease is not None:
            raise response_error(409, "AlreadyExists", path)
        self._store(body)
        return self.seen()

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == PATH
        self.asked.append("replace")
        await self._write()
        # Its uid is a precondition, too: one that was deleted is another's.
        if self.lease is None or body["metadata"]["resourceVersion"] != str(self.version):
            raise response_error(409, "Conflict", path)
        self._store(body)
        answer = self.seen()
        self.after_write()
        return answer

    def _store(self, lease: dict[str, Any]) -> None:
        self.lease, self.version = lease, self.version + 1

    async def _write(self) -> None:
        await self._answer()
        if self.before_write is not None:
            self.before_write()

    async def _answer(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.hangs:
            await asyncio.Event().wait()
        if self.broken is not None:
            raise self.broken


def candidate(api: Store, identity: str, **options: Any) -> Election:
    return Election(
        api,  # type: ignore[arg-type]
        namespace="berth-system",
        name="berth-binder",
        identity=identity,
        clock=leaping.now,
        now=lambda: START + timedelta(seconds=leaping.now()),
        **options,
    )


async def seconds(work: Awaitable[object]) -> float:
    begun = leaping.now()
    await work
    return leaping.now() - begun


def test_the_first_makes_the_lease_and_keeps_it() -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        assert not leader.is_certain()
        assert await seconds(leader.acquire()) < 1
        assert leader.is_certain()
        assert api.lease is not None
        assert (api.lease["kind"], api.lease["metadata"]) == ("Lease", {"name": "berth-binder"})
        assert api.lease["apiVersion"] == "coordination.k8s.io/v1"
        first = dict(api.spec)
        assert (first["holderIdentity"], first["leaseTransitions"]) == ("one", 0)
        assert first["acquireTime"] == first["renewTime"]
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(300)
        assert leader.is_certain()
        assert not holding.done()
        assert api.spec["renewTime"] > first["renewTime"]
        assert api.spec["acquireTime"] == first["acquireTime"]
        assert (api.spec["leaseTransitions"], api.spec["holderIdentity"]) == (0, "one")
        # A few writes a minute for each Lease, and several within its time.
        assert 300 / first["leaseDurationSeconds"] * 2 < api.version < 300
        holding.cancel()

    leaping.run(story())


@pytest.mark.parametrize("fault", ["broken", "hangs", "stolen"])
def test_a_leader_that_cannot_renew_ends_before_another_begins(fault: str) -> None:
    async def story() -> None:
        api = Store()
        one, two = candidate(api, "one"), candidate(api, "two")
        await one.acquire()
        last = leaping.now()
        following = asyncio.create_task(two.acquire())
        if fault == "stolen":
            api.hold("three", leaseDurationSeconds=15, renewTime="later")
        else:
            setattr(api, fault, True if fault == "hangs" else KubeUnreachable("away"))
        with pytest.raises(LeadershipLost, match="berth-binder: not renewed in time"):
            await one.hold()
        assert 10 < leaping.now() - last < 15 - 2
        assert not one.is_certain()
        following.cancel()

    leaping.run(story())


def test_a_a_failure_that_passes_in_time_costs_no_leadership(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        api.broken = KubeUnreachable("away")
        await asyncio.sleep(8)
        assert leader.is_certain()
        api.broken = None
        await asyncio.sleep(8)
        assert leader.is_certain()
        assert not holding.done()
        holding.cancel()

    leaping.run(story())
    assert {record.getMessage() for record in caplog.records} >= {"lease not written"}


def test_a_leader_that_has_slept_is_not_certain_before_it_has_renewed() -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        await asyncio.sleep(11.5)
        assert leader.is_certain()
        await asyncio.sleep(1)
        assert not leader.is_certain()

    leaping.run(story())


def test_a_dead_leader_is_followed_after_its_lease_and_not_before() -> None:
    async def story() -> None:
        api = Store()
        api.hold("one", leaseDurationSeconds=15, renewTime="then", leaseTransitions=4)
        assert 15 <= await seconds(candidate(api, "two").acquire()) < 20
        assert (api.spec["holderIdentity"], api.spec["leaseTransitions"]) == ("two", 5)
        assert api.spec["acquireTime"] == api.spec["renewTime"]

    leaping.run(story())


def test_a_leader_that_dies_is_followed_within_half_a_minute() -> None:
    async def story() -> None:
        api = Store()
        await candidate(api, "one").acquire()
        assert 10 < await seconds(candidate(api, "two").acquire()) < 30

    leaping.run(story())


def test_every_renewal_counts_from_when_it_is_seen() -> None:
    async def story() -> None:
        api = Store()
        follower = asyncio.create_task(candidate(api, "two").acquire())
        api.hold("one", leaseDurationSeconds=15, renewTime="0")
        for renewal in range(1, 6):
            await asyncio.sleep(10)
            api.hold("one", leaseDurationSeconds=15, renewTime=str(renewal))
        assert not follower.done()
        assert 14 < await seconds(follower) < 20

    leaping.run(story())


def test_another_holder_with_the_same_time_is_another_lease() -> None:
    async def story() -> None:
        api = Store()
        follower = asyncio.create_task(candidate(api, "three").acquire())
        api.hold("one", leaseDurationSeconds=15, renewTime="x")
        await asyncio.sleep(10)
        api.hold("two", leaseDurationSeconds=15, renewTime="x")
        assert await seconds(follower) > 14

    leaping.run(story())


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        {"holderIdentity": ""},
        {"holderIdentity": None, "leaseTransitions": None},
        {"holderIdentity": "x"},
    ],
)
def test_a_lease_that_nobody_holds_or_for_no_time_is_free(spec: dict[str, Any] | None) -> None:
    async def story() -> None:
        api = Store()
        api.lease = {"metadata": {"name": "berth-binder"}, "spec": spec or {}}
        api.version = 1
        assert await seconds(candidate(api, "one").acquire()) < 1
        assert (api.spec["holderIdentity"], api.spec["leaseTransitions"]) == ("one", 1)

    leaping.run(story())


def test_a_leader_that_comes_back_under_its_name_leads_on() -> None:
    async def story() -> None:
        api = Store()
        api.hold("one", leaseDurationSeconds=15, renewTime="x", acquireTime="before", leaseTransitions=2)
        assert await seconds(candidate(api, "one").acquire()) < 1
        assert (api.spec["acquireTime"], api.spec["leaseTransitions"]) == ("before", 2)

    leaping.run(story())


@pytest.mark.parametrize("there", [False, True])
def test_who_writes_second_does_not_lead(there: bool) -> None:
    async def story() -> None:
        api = Store()
        if there:
            api.hold("")
        api.before_write = lambda: api.hold("faster", leaseDurationSeconds=15, renewTime="x")
        election = candidate(api, "one")
        waiting = asyncio.create_task(election.acquire())
        await asyncio.sleep(1)
        assert api.spec["holderIdentity"] == "faster"
        assert not waiting.done()
        assert not election.is_certain()
        waiting.cancel()

    leaping.run(story())


@pytest.mark.parametrize("there", [False, True])
def test_of_several_that_race_one_leads_and_the_next_when_it_lets_go(there: bool) -> None:
    async def story() -> None:
        api = Store()
        if there:
            api.hold("")
        elections = [candidate(api, name) for name in ("one", "two", "three")]
        racing = {asyncio.create_task(one.acquire()): one for one in elections}
        done, waiting = await asyncio.wait(racing, timeout=5)
        assert len(done) == 1
        assert [one.is_certain() for one in elections].count(True) == 1
        for task in done:
            await racing[task].release()
        done, waiting = await asyncio.wait(waiting, timeout=5)  # at once, not after the Lease
        assert len(done) == 1
        assert api.spec["leaseTransitions"] == (2 if there else 1)
        for task in waiting:
            task.cancel()

    leaping.run(story())


def test_a_candidate_waits_out_an_api_server_that_is_away() -> None:
    async def story() -> None:
        api = Store()
        api.broken = KubeUnreachable("away")
        election = candidate(api, "one")
        waiting = asyncio.create_task(election.acquire())
        await asyncio.sleep(60)
        assert not waiting.done()
        assert not election.is_certain()
        api.broken = None
        assert await seconds(waiting) < 5

    leaping.run(story())


def test_a_time_counts_from_before_the_writing() -> None:
    """The Lease may have been renewed the moment that it was asked for; the answer came later."""

    async def story() -> None:
        api = Store()
        election = candidate(api, "one")
        api.hold("")
        api.seconds = 1.5
        begun = leaping.now()
        await election.acquire()
        asked = begun + 1.5
        await asyncio.sleep(asked + 11.9 - leaping.now())
        assert election.is_certain()
        await asyncio.sleep(0.2)
        assert not election.is_certain()

    leaping.run(story())


def test_a_renewal_is_one_request() -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        api.asked.clear()
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(60)
        assert set(api.asked) == {"replace"}
        assert 20 < len(api.asked) <= 30
        holding.cancel()

    leaping.run(story())


@pytest.mark.parametrize("change", ["by hand", "deleted", "answer lost"])
def test_a_leader_reads_its_lease_when_it_is_another_than_it_wrote(change: str) -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        api.asked.clear()
        acquired = api.spec["acquireTime"]
        if change == "by hand":
            api.hold(**{"holder": "one", **{k: v for k, v in api.spec.items() if k != "holderIdentity"}})
        elif change == "deleted":
            api.lease = None
        else:
            api.after_write = lose_the_answer(api)
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(60)
        assert leader.is_certain()
        assert not holding.done()
        assert api.asked.count("get") == 1
        assert api.spec["leaseTransitions"] == 0
        assert (api.spec["acquireTime"] == acquired) == (change != "deleted")
        holding.cancel()

    leaping.run(story())


def lose_the_answer(api: Store) -> Callable[[], None]:
    def lose() -> None:
        api.after_write = lambda: None
        raise KubeUnreachable("reset")

    return lose


@pytest.mark.parametrize(("ours", "least", "most"), [(True, WRITE_SECONDS, 13.0), (False, 30.0, 33.0)])
def test_a_lease_of_ones_predecessor_is_taken_once_its_writes_are_over(
    ours: bool, least: float, most: float
) -> None:
    """autoscaling D3: a leader that died hard delayed every cold start by its Lease, though it was back after a second.
    What it wrote last may still be carried out for so long; a Lease that it renewed last as well."""

    async def story() -> None:
        api = Store()
        api.hold("dead", leaseDurationSeconds=30, renewTime="1")
        back = candidate(
            api, "back", predecessor=Predecessor(lambda holder: ours and holder == "dead", leaping.now())
        )
        assert least <= await seconds(back.acquire()) <= most
        assert api.spec["holderIdentity"] == "back"

    leaping.run(story())


def test_a_predecessors_writes_are_over_so_long_after_it_has_ended_however_late_its_lease_is_read() -> None:
    """autoscaling D3: its last renewal is one of them, and may come late."""

    async def story() -> None:
        api = Store()
        api.hold("dead", leaseDurationSeconds=15, renewTime="1")
        ended_at = leaping.now()
        await asyncio.sleep(6)
        begun = leaping.now()
        back = asyncio.create_task(
            candidate(api, "b", predecessor=Predecessor(lambda one: one == "dead", ended_at)).acquire()
        )
        await asyncio.sleep(1)
        api.hold("dead", leaseDurationSeconds=15, renewTime="2")
        await back
        assert 4.0 <= leaping.now() - begun <= 7.0

    leaping.run(story())


def test_a_predecessors_lease_that_ends_sooner_is_not_waited_for_longer() -> None:
    async def story() -> None:
        api = Store()
        api.hold("dead", leaseDurationSeconds=4, renewTime="1")
        assert (
            await seconds(
                candidate(api, "b", predecessor=Predecessor(lambda one: True, leaping.now())).acquire()
            )
            < WRITE_SECONDS
        )

    leaping.run(story())


async def lost(api: Store, leader: Election) -> None:
    """Leads, and is told that it does not any more."""
    await leader.acquire()
    api.broken = KubeUnreachable("away")
    with pytest.raises(LeadershipLost):
        await leader.hold()


@pytest.mark.parametrize("heard", [True, False])
def test_a_leader_that_nobody_has_followed_leads_again(heard: bool) -> None:
    """autoscaling D4: also where its own last write was carried out and never answered."""

    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await lost(api, leader)
        if not heard:
            api.hold("one", leaseDurationSeconds=15, renewTime="late", leaseTransitions=0)
        regaining = asyncio.create_task(leader.regain())
        await asyncio.sleep(1000)
        assert not regaining.done()
        assert not leader.is_certain()
        api.broken = None
        assert await regaining
        assert leader.is_certain(for_seconds=WRITE_SECONDS)
        assert (api.spec["holderIdentity"], api.spec["leaseTransitions"]) == ("one", 0)

    leaping.run(story())


@pytest.mark.parametrize("holder", ["two", "", None])
def test_a_leader_that_another_has_followed_learns_of_it(holder: str | None) -> None:
    """autoscaling D4: also where that one has let go since, or the Lease was deleted: what it knows is of another time."""

    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await lost(api, leader)
        api.broken = None
        if holder is None:
            api.lease = None
        else:
            api.hold(holder, leaseDurationSeconds=15, renewTime="x")
        assert not await leader.regain()
        assert not leader.is_certain()
        assert (api.lease or {}).get("spec", {}).get("holderIdentity") == holder

    leaping.run(story())


def test_that_a_lease_is_not_written_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """autoscaling D4: one line, however long the API server is away."""

    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        for _ in range(2):
            api.broken = None
            await lost(api, leader)
            with suppress(TimeoutError):
                async with asyncio.timeout(100):
                    await leader.regain()

    leaping.run(story())
    assert [one.message for one in caplog.records].count("lease not written") == 2


def test_a_leader_whose_lease_another_has_taken_does_not_write_over_it() -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        api.hold("two", leaseDurationSeconds=3600, renewTime="x")
        with pytest.raises(LeadershipLost):
            await leader.hold()
        assert api.spec["holderIdentity"] == "two"

    leaping.run(story())


@pytest.mark.parametrize("slow_from_the_start", [False, True])
def test_an_api_server_that_takes_five_seconds_costs_no_leadership_and_keeps_no_write_from_it(
    *, slow_from_the_start: bool
) -> None:
    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        if slow_from_the_start:
            api.hold("")
            api.seconds = 5.0
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(10)
        api.seconds = 5.0
        await asyncio.sleep(20)  # by now the API server has answered to the longer Lease
        for _ in range(600):
            await asyncio.sleep(1)
            assert leader.is_certain(for_seconds=WRITE_SECONDS)
        assert not holding.done()
        begun = len(api.asked)
        await asyncio.sleep(60)
        assert len(api.asked) - begun <= 13  # one at a time
        holding.cancel()

    leaping.run(story())


def test_a_longer_lease_counts_once_it_is_written() -> None:
    """The one whose answer showed that the API server is slow was written for the usual time."""

    async def story() -> None:
        api = Store()
        leader = candidate(api, "one")
        await leader.acquire()
        holding = asyncio.create_task(leader.hold())
        api.seconds, api.after_write = 5.0, lambda: setattr(api, "broken", KubeUnreachable("away"))
        asked = leaping.now() + 2
        await asyncio.sleep(13.5)
        assert api.spec["leaseDurationSeconds"] == 15
        assert leader.is_certain()
        await asyncio.sleep(asked + 12.1 - leaping.now())
        assert not leader.is_certain()
        with pytest.raises(LeadershipLost):
            await holding

    leaping.run(story())


@pytest.mark.parametrize("seed", range(6))
def test_two_never_lead_at_once_whatever_the_api_server_does(seed: int) -> None:
    """It is slow by turns, loses requests and answers, or takes none; each candidate that loses begins a new life."""
    chance = random.Random(seed)

    async def story() -> None:
        api, led = Store(), set[str]()
        alive: dict[str, Election] = {}

        async def live(name: str) -> None:
            for life in count():
                one = alive[name] = candidate(api, f"{name}{life}")
                await one.acquire()
                led.add(f"{name}{life}")
                with suppress(LeadershipLost):
                    await one.hold()
                await asyncio.sleep(chance.uniform(0, 30))

        def weather() -> None:
            api.seconds = chance.choice([0.01, 0.5, 2.5, 5.0, 7.0])
            api.broken = KubeUnreachable("reset") if chance.random() < 0.2 else None
            loses = chance.random() < 0.2
            api.after_write = lose_the_answer(api) if loses else lambda: None

        lives = [asyncio.create_task(live(name)) for name in ("one", "two", "three")]
        for turn in range(3000):
            if turn % 20 == 0:
                weather()
            await asyncio.sleep(chance.uniform(0, 1))
            certain = [one for one in alive.values() if one.is_certain()]
            assert len(certain) <= 1
            assert all(api.spec["holderIdentity"] == one._identity for one in certain)
        assert len(led) > 3, "nobody has ever followed anybody"
        for task in lives:
            task.cancel()

    leaping.run(story())


def test_a_candidate_that_has_never_led_is_not_certain_however_early_it_is() -> None:
    election = Election(
        Store(),  # type: ignore[arg-type]
        namespace="berth-system",
        name="berth-binder",
        identity="one",
        clock=lambda: 1.0,
    )
    assert not election.is_certain()


def test_a_lease_is_let_go_by_its_holder_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        api = Store()
        one = candidate(api, "one")
        await one.acquire()
        await candidate(api, "two").release()
        assert api.spec["holderIdentity"] == "one"
        await one.release()
        assert (api.spec["holderIdentity"], api.spec["leaseDurationSeconds"]) == ("", 1)
        assert await seconds(candidate(api, "two").acquire()) < 1
        api.broken = KubeUnreachable("away")
        await one.release()

    leaping.run(story())
    assert [record.getMessage() for record in caplog.records] == ["leading", "leading", "lease not released"]
