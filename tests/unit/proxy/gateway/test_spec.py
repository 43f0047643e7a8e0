"""What processes exchange, and the total of several."""

from dataclasses import replace

import msgspec

from proxy.gateway.spec import ReplicaStats, Spec, Status, aggregate
from proxy.request.load import LoadReport
from proxy.request.traffic import Figures
from tests.fakes.agent_control import replica_of


def test_one_total_of_all_processes() -> None:
    def status(uid: str, count: int) -> Status:
        figures = Figures(running=count)
        figures.rest.answered("200", 0.1)
        return Status(
            stats={uid: ReplicaStats(figures, LoadReport(count, 1.0, 5.0 * count, 7.0, 10 + count, count))}
        )

    total = aggregate([status("a", 1), status("a", 2), status("b", 9)], "a")
    assert total is not None
    assert (total.figures.running, total.figures.rest.codes) == (3, {"200": 2})
    assert total.load == LoadReport(
        3, 2.0, 10.0, 7.0, second=11, last_arrival=2
    )  # a second that both have closed
    assert aggregate([status("a", 1)], "c") is None
    said = replace(
        status("a", 3),
        idle=frozenset("i"),
        drain_requests=frozenset("w"),
        leaving=frozenset("l"),
        rejected={"late": 1},
        connections=2,
    )
    assert msgspec.json.decode(msgspec.json.encode(said), type=Status) == said
    spec = Spec(
        replicas=(replica_of("a"),),
        ejected={"a": "why"},
        draining=frozenset("a"),
        drained=frozenset("b"),
        leaving=frozenset("l"),
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec
