"""What one more node of each kind would offer: which nodes are of one kind, and how many kinds are remembered."""

from berth.kube.informer import ChangeKind
from binder.cache.node_kinds import MOST_KINDS, MOST_POOLS
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, node
from tests.fakes.zones import HOST

ZONE = "topology.kubernetes.io/zone"


def sizes(bench: Bench) -> list[int]:
    """Of the GPUs of each kind's fresh node, in GiB."""
    table = bench.scheduler.cluster.kinds.table
    reports = [table.view(row).facts.report for row in table.row_of.values()]
    return [(one.gpus[0].total_bytes or 0) // GIB for one in reports if one is not None]


def test_nodes_that_differ_in_their_names_only_are_one_kind() -> None:
    bench = Bench()
    for number in range(30):
        bench.node(f"n{number}", 16, labels={ZONE: "a", "node-name": f"n{number}"})
    table = bench.scheduler.cluster.kinds.table
    (fresh,) = map(table.view, table.row_of.values())
    assert set(fresh.facts.labels) == {HOST, ZONE}
    assert fresh.facts.labels[HOST] == fresh.facts.name


def test_what_is_remembered_is_bounded_and_odd_labels_displace_no_other_pool() -> None:
    bench = Bench()
    bench.node("big", 40)
    bench.tell("nodes", node("big"), ChangeKind.GONE)
    for number in range(200):
        bench.node("odd", 16, labels={"instance": f"i-{number}"})
    assert sorted(sizes(bench)) == [16] * MOST_KINDS + [40]
    for number in range(200):
        bench.node("odd", 1 + number)
    assert len(sizes(bench)) == MOST_POOLS
    table = bench.scheduler.cluster.kinds.table
    assert table.live.sum() == len(table.row_of)
