"""Which nodes' facts the binder believes: those of a living agent that could write its report."""

from datetime import UTC, datetime, timedelta
from typing import Any

from berth.contract.ids import NodeName
from berth.contract.keys import Keys
from berth.kube.informer import Change, ChangeKind
from berth.kube.times import micro_time
from binder.cluster import Cluster

N1 = NodeName("n1")


class Heard:
    """A cluster that hears heartbeats at `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cluster = Cluster(Keys(), clock=lambda: self.now)

    def beat(self, *, kind: ChangeKind = ChangeKind.SET, name: str = "berth-agent-n1", **marks: str) -> bool:
        renewed = datetime.now(UTC) + timedelta(seconds=self.now)  # each one is another one
        spec = {"renewTime": micro_time(renewed), "leaseDurationSeconds": 40}
        lease: dict[str, Any] = {"metadata": {"name": name, "annotations": marks}, "spec": spec}
        return self.cluster.on_lease(Change(kind, lease))

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


def test_heartbeats_and_the_election_are_apart() -> None:
    """Whoever may write a heartbeat must not be able to take the binders' lead."""
    (leases,) = [s.path for s in Heard().cluster.sources("berth-system") if s.name == "leases"]
    assert leases == "/apis/coordination.k8s.io/v1/namespaces/berth-system-nodes/leases"
