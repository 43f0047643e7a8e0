"""Which nodes' facts the binder believes: those of a living agent that could write its report."""

from datetime import UTC, datetime, timedelta
from typing import Any

from berth.contract.ids import NodeName
from berth.contract.keys import Keys
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from binder.engine.cluster import Cluster

N1 = NodeName("n1")


class Beats:
    """A cluster that hears heartbeats at `now`, in seconds, of agents whose clocks are ahead by `skew`."""

    def __init__(self) -> None:
        self.now, self.skew = 0.0, 0.0
        self.cluster = Cluster(Keys(), clock=lambda: self.now)

    def beat(
        self,
        *,
        kind: ChangeKind = ChangeKind.SET,
        name: str = "berth-agent-n1",
        source: str = "leases",
        **marks: str,
    ) -> bool:
        renewed = datetime.now(UTC) + timedelta(seconds=self.now + self.skew)  # each one is another one
        spec = {"renewTime": micro_time(renewed), "leaseDurationSeconds": 40}
        lease: dict[str, Any] = {"metadata": {"name": name, "annotations": marks}, "spec": spec}
        (hear,) = [one.hear for one in self.cluster.sources("berth-system") if one.name == source]
        return hear(Change(kind, lease))

    def earlier(self, **more: Any) -> bool:
        """Of an agent of an earlier version."""
        return self.beat(source="earlier leases", **more)

    def is_fresh(self) -> bool:
        return self.cluster.is_fresh(N1)


def test_a_heartbeat_vouches_for_a_node_until_it_ends() -> None:
    beats = Beats()
    assert not beats.is_fresh()
    assert beats.beat()  # which is news for those who wait
    assert beats.is_fresh()
    beats.now = 10.0
    assert not beats.beat()
    beats.now = 49.0
    assert beats.is_fresh()
    beats.now = 51.0
    assert not beats.is_fresh()


def test_a_heartbeat_whose_agent_cannot_write_its_report_vouches_for_nothing() -> None:
    beats, behind = Beats(), {Keys().report_behind: "403 Forbidden"}
    beats.beat()
    beats.now = 10.0
    assert not beats.beat(**behind)
    assert not beats.is_fresh()
    beats.now = 20.0
    assert not beats.beat(**behind)
    beats.now = 30.0
    assert beats.beat(**{"example.com/other": "x"})
    assert beats.is_fresh()


def test_a_lease_that_is_gone_or_another_ones_vouches_for_nothing() -> None:
    beats = Beats()
    beats.beat(name="berth-binder")
    beats.beat(name="berth-agent-n2")
    assert not beats.is_fresh()
    beats.beat()
    beats.beat(kind=ChangeKind.GONE)
    assert not beats.is_fresh()


BEHIND = {Keys().report_behind: "403 Forbidden"}


def test_the_agents_of_an_earlier_version_are_heard() -> None:
    beats = Beats()
    assert beats.earlier()
    beats.now = 39.0
    assert beats.is_fresh()
    assert not beats.earlier()
    beats.now = 78.0
    assert beats.is_fresh()
    beats.earlier(**BEHIND)
    assert not beats.is_fresh()
    beats.earlier()
    assert beats.is_fresh()
    beats.earlier(kind=ChangeKind.GONE)
    assert not beats.is_fresh()


def test_what_an_updated_agent_has_left_behind_runs_out_and_makes_no_node_stale() -> None:
    beats = Beats()
    beats.earlier()
    beats.now = 5.0
    assert not beats.beat()  # no news: it was fresh already
    for beats.now in (15.0, 25.0, 35.0, 45.0):
        beats.beat()
        assert beats.is_fresh()
    beats.earlier(kind=ChangeKind.GONE)
    assert beats.is_fresh()
    beats.now = 86.0
    assert not beats.is_fresh()


def test_an_agent_that_is_set_back_is_heard_at_once() -> None:
    beats = Beats()
    beats.beat()
    beats.now = 39.0
    beats.earlier()
    beats.now = 60.0
    assert beats.is_fresh()
    beats.beat(kind=ChangeKind.GONE)
    assert beats.is_fresh()


def test_an_older_lease_does_not_vouch_for_a_report_that_the_living_agent_calls_behind() -> None:
    beats = Beats()
    beats.earlier()
    beats.now = 5.0
    beats.beat(**BEHIND)
    assert not beats.is_fresh()
    beats.now = 30.0
    beats.earlier()
    assert not beats.is_fresh()
    beats.now = 50.0  # nobody renews the newer one any more: the agent was set back
    assert beats.earlier()
    assert beats.is_fresh()


def test_a_clock_that_differs_does_not_prolong_being_behind() -> None:
    """Only the first Lease of an agent is judged by the time that it names."""
    beats = Beats()
    beats.skew = -3600.0
    beats.beat()
    beats.now = 10.0
    beats.beat()
    assert beats.is_fresh()
    beats.now = 20.0
    beats.beat(**BEHIND)
    assert not beats.is_fresh()
    beats.now = 30.0
    beats.beat()
    assert beats.is_fresh()


def test_heartbeats_and_the_election_are_apart() -> None:
    """Whoever may write a heartbeat must not be able to take the binders' lead."""
    (leases,) = [s.path for s in Beats().cluster.sources("berth-system") if s.name == "leases"]
    assert leases == "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases"
