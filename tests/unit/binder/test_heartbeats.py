"""Which nodes' facts the binder believes: those of a living agent that could write its report."""

from datetime import UTC, datetime, timedelta
from typing import Any

from berth.contract.ids import NodeName
from berth.contract.keys import Keys
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from binder.engine.cluster import Cluster

N1 = NodeName("n1")


class Heard:
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
    heard = Heard()
    assert not heard.is_fresh()
    assert heard.beat()  # which is news for those who wait
    assert heard.is_fresh()
    heard.now = 10.0
    assert not heard.beat()
    heard.now = 49.0
    assert heard.is_fresh()
    heard.now = 51.0
    assert not heard.is_fresh()


def test_a_heartbeat_whose_agent_cannot_write_its_report_vouches_for_nothing() -> None:
    heard, behind = Heard(), {Keys().report_behind: "403 Forbidden"}
    heard.beat()
    heard.now = 10.0
    assert not heard.beat(**behind)
    assert not heard.is_fresh()
    heard.now = 20.0
    assert not heard.beat(**behind)
    heard.now = 30.0
    assert heard.beat(**{"example.com/other": "x"})
    assert heard.is_fresh()


def test_a_lease_that_is_gone_or_another_ones_vouches_for_nothing() -> None:
    heard = Heard()
    heard.beat(name="berth-binder")
    heard.beat(name="berth-agent-n2")
    assert not heard.is_fresh()
    heard.beat()
    heard.beat(kind=ChangeKind.GONE)
    assert not heard.is_fresh()


BEHIND = {Keys().report_behind: "403 Forbidden"}


def test_the_agents_of_an_earlier_version_are_heard() -> None:
    heard = Heard()
    assert heard.earlier()
    heard.now = 39.0
    assert heard.is_fresh()
    assert not heard.earlier()
    heard.now = 78.0
    assert heard.is_fresh()
    heard.earlier(**BEHIND)
    assert not heard.is_fresh()
    heard.earlier()
    assert heard.is_fresh()
    heard.earlier(kind=ChangeKind.GONE)
    assert not heard.is_fresh()


def test_what_an_updated_agent_has_left_behind_runs_out_and_makes_no_node_stale() -> None:
    heard = Heard()
    heard.earlier()
    heard.now = 5.0
    assert not heard.beat()  # no news: it was fresh already
    for heard.now in (15.0, 25.0, 35.0, 45.0):
        heard.beat()
        assert heard.is_fresh()
    heard.earlier(kind=ChangeKind.GONE)
    assert heard.is_fresh()
    heard.now = 86.0
    assert not heard.is_fresh()


def test_an_agent_that_is_set_back_is_heard_at_once() -> None:
    heard = Heard()
    heard.beat()
    heard.now = 39.0
    heard.earlier()
    heard.now = 60.0
    assert heard.is_fresh()
    heard.beat(kind=ChangeKind.GONE)
    assert heard.is_fresh()


def test_an_older_lease_does_not_vouch_for_a_report_that_the_living_agent_calls_behind() -> None:
    heard = Heard()
    heard.earlier()
    heard.now = 5.0
    heard.beat(**BEHIND)
    assert not heard.is_fresh()
    heard.now = 30.0
    heard.earlier()
    assert not heard.is_fresh()
    heard.now = 50.0  # nobody renews the newer one any more: the agent was set back
    assert heard.earlier()
    assert heard.is_fresh()


def test_a_clock_that_differs_does_not_prolong_being_behind() -> None:
    """Only the first Lease of an agent is judged by the time that it names."""
    heard = Heard()
    heard.skew = -3600.0
    heard.beat()
    heard.now = 10.0
    heard.beat()
    assert heard.is_fresh()
    heard.now = 20.0
    heard.beat(**BEHIND)
    assert not heard.is_fresh()
    heard.now = 30.0
    heard.beat()
    assert heard.is_fresh()


def test_heartbeats_and_the_election_are_apart() -> None:
    """Whoever may write a heartbeat must not be able to take the binders' lead."""
    (leases,) = [s.path for s in Heard().cluster.sources("berth-system") if s.name == "leases"]
    assert leases == "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases"
