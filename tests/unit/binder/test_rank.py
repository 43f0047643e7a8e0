"""How many shapes' rankings are kept, and which go."""

import pytest

from berth.contract.ids import NodeName
from binder.cache.table import NodeTable
from binder.engine import rank as ranking
from binder.engine.cluster import Cluster
from binder.engine.rank import Ranking, Rankings
from binder.engine.score import LeastFragmentation
from binder.pod.demand import Shape, parse_demand
from binder.rules.registry import RULES, Registry
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report


@pytest.fixture(name="table")
def _table() -> NodeTable:
    cluster = Cluster(KEYS, clock=lambda: 0.0)
    for name in ("a", "b"):
        cluster.state.set_node(node(name, says=report(gpu(f"{name}-0", total=80 * GIB))))
    cluster.decider.refresh()
    assert set(cluster.decider.table.row_of) == {NodeName("a"), NodeName("b")}
    return cluster.decider.table


def shapes(count: int) -> list[Shape]:
    return [parse_demand(pod(f"p{n}", mem=f"{n + 1}Mi"), KEYS).shape for n in range(count)]


def keep(monkeypatch: pytest.MonkeyPatch, *, rows: int, few: int, least: int) -> None:
    for name, number in (("_KEPT_ROWS", rows), ("_FEW_ROWS", few), ("_LEAST_KEPT", least)):
        monkeypatch.setattr(ranking, name, number)


@pytest.mark.parametrize(
    ("rows", "few", "least", "most"), [(20, 1, 4, 10), (20, 1, 12, 12), (20, 5, 2, 4), (4, 1, 2, 2)]
)
def test_as_many_are_kept_as_there_is_memory_for(
    table: NodeTable, monkeypatch: pytest.MonkeyPatch, rows: int, few: int, least: int, most: int
) -> None:
    keep(monkeypatch, rows=rows, few=few, least=least)
    rankings = Rankings(LeastFragmentation(), RULES)
    for shape in shapes(40):
        assert rankings.of(shape, table).shape == shape
    assert len(rankings._known) == most


def test_more_nodes_leave_room_for_fewer(table: NodeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    rankings, many = Rankings(LeastFragmentation(), RULES), shapes(40)
    for shape in many[:30]:
        rankings.of(shape, table)
    keep(monkeypatch, rows=20, few=1, least=4)
    rankings.of(many[39], table)
    assert len(rankings._known) == 10
    assert (many[39], False) in rankings._known


def test_one_shape_more_than_are_kept_does_not_cost_all_of_them(
    table: NodeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question goes through all models, again and again."""
    keep(monkeypatch, rows=100, few=1, least=4)
    rankings, many, made = Rankings(LeastFragmentation(), RULES), shapes(55), 0

    class Counted(Ranking):
        def __init__(self, shape: Shape, rules: Registry, *, awaited: bool = False) -> None:
            nonlocal made
            made += 1
            super().__init__(shape, rules, awaited=awaited)

    monkeypatch.setattr(ranking, "Ranking", Counted)
    for _ in range(10):
        for shape in many:
            rankings.of(shape, table)
    assert made < 55 + 9 * 20
