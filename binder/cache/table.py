"""All nodes side by side: one row a node, one array a fact, so that a rule tests all of them at once.

The arrays are a copy of what `state` knows; `put` and `drop` keep a row in step. Three clocks say
since when a row is as it is: `changed` for anything, `moved` for what only people change (labels,
taints, cordon, capabilities, which GPUs there are), which most decisions need not look at again, and
`eased` for what may let a pod in that did not fit.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import NodeName
from binder.cache.column import Bools, Column, Ints, grown
from binder.cache.gpu_columns import GpuColumns, GpuModels
from binder.cache.used_columns import LabelColumns, ResourceColumns
from binder.cache.view import NamespacedId, NodeView, eases, moves

Floats = NDArray[np.float64]
_FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """One fact of each node that a rule looks at, kept as a column from its first use. `of` reads
    it; `moves`: it is the Node object's alone, and changes only when the node moves."""

    of: Callable[[NodeView], Hashable]
    moves: bool = True


NAME = Fact(lambda view: view.facts.name)


class RowClocks:
    """`now` grows with every change; of each row, when it changed, moved and eased last."""

    def __init__(self, capacity: int) -> None:
        self.now = 0
        self.changed: Ints = np.zeros(capacity, np.int64)
        self.moved: Ints = np.zeros(capacity, np.int64)
        self.eased: Ints = np.zeros(capacity, np.int64)

    def tick(self, row: int, *, changed: bool = True, moved: bool = False, eased: bool = False) -> None:
        self.now += 1
        if changed:
            self.changed[row] = self.now
        if moved:
            self.moved[row] = self.now
        if eased:
            self.eased[row] = self.now

    def lengthen(self, capacity: int) -> None:
        self.changed, self.moved, self.eased = (
            grown(clock, (capacity,), 0) for clock in (self.changed, self.moved, self.eased)
        )


class NodeTable:
    """Rows are given out in order of arrival and used again."""

    def __init__(self, *, like: "NodeTable | None" = None) -> None:
        """`like`: GPU models have its numbers, so that what is known of them there counts here, too."""
        self.row_of: dict[NodeName, int] = {}
        self._spare: list[int] = []
        self._views: list[NodeView | None] = []
        capacity = self._capacity = _FIRST_CAPACITY
        self._clocks = RowClocks(capacity)
        self._live: Bools = np.zeros(capacity, np.bool_)
        self._deadline: Floats = np.full(capacity, -np.inf)
        self._deadlines: dict[NodeName, float] = {}
        self._gpus: GpuColumns = GpuColumns(capacity, GpuModels() if like is None else like._gpus.models)
        self._resources, self._labels = ResourceColumns(capacity), LabelColumns(capacity)
        self._facts: dict[Fact, Column] = {}
        self._model_rows: dict[Hashable, set[int]] = {}
        self._port_rows: dict[tuple[str, int], set[int]] = {}

    def __len__(self) -> int:
        """How many rows are given out, spare ones among them."""
        return len(self._views)

    @property
    def clock(self) -> int:
        """Grows with every change."""
        return self._clocks.now

    @property
    def all_rows(self) -> slice:
        return slice(0, len(self._views))

    @property
    def live(self) -> Bools:
        """Which rows are nodes."""
        return self._live[: len(self._views)]

    @property
    def deadline(self) -> Floats:
        """Until when the agent's heartbeat counts, monotonic seconds."""
        return self._deadline[: len(self._views)]

    @property
    def free(self) -> Ints:
        """(rows, GPUs): free bytes; below 0 where a GPU takes nothing."""
        return self._gpus.free[: len(self._views)]

    @property
    def condition(self) -> NDArray[np.int8]:
        """(rows, GPUs): USABLE, or why not."""
        return self._gpus.condition[: len(self._views)]

    @property
    def gpu_model(self) -> NDArray[np.int32]:
        """(rows, GPUs): which of `models` the GPU is."""
        return self._gpus.model[: len(self._views)]

    @property
    def models(self) -> list[tuple[str, int]]:
        """(product, bytes) of each GPU model."""
        return self._gpus.models.known

    @property
    def loads(self) -> NDArray[np.int32]:
        """(rows, GPUs): models that are to be loaded there or are being loaded."""
        return self._gpus.loads[: len(self._views)]

    def left(self, resource: str) -> Ints:
        """What is left of a resource on every node."""
        return self._resources.left(resource, self._views)[: len(self._views)]

    def allocatable(self, resource: str) -> Ints:
        return self._resources.allocatable(resource, self._views)[: len(self._views)]

    def has_label(self, key: str) -> bool:
        """Some node has it. Where none has, no node is in any of its domains."""
        return key in self._labels

    def label(self, key: str) -> Column:
        """One label of every node."""
        return self._labels.column(key, self._views)

    def fact(self, fact: Fact) -> Column:
        """One fact of every node."""
        column = self._facts.get(fact)
        if column is None:
            column = self._facts[fact] = Column(self._capacity)
            column.fill([None if view is None else fact.of(view) for view in self._views])
        return column

    def view(self, row: int) -> NodeView:
        view = self._views[row]
        assert view is not None
        return view

    def rows_with_model(self, model: NamespacedId) -> list[int]:
        """Nodes that hold a model of this id."""
        return sorted(self._model_rows.get(model, ()))

    def rows_with_port(self, protocol: str, port: int) -> list[int]:
        return sorted(self._port_rows.get((protocol, port), ()))

    def changed_since(self, clock: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._clocks.changed[: len(self)] > clock)

    def moved_since(self, clock: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._clocks.moved[: len(self)] > clock)

    def eased_since(self, clock: int) -> NDArray[np.intp]:
        """Nodes where something became free or better."""
        return np.flatnonzero((self._clocks.eased[: len(self)] > clock) & self.live)

    def moved_after(self, rows: NDArray[np.intp], clock: int) -> Bools:
        """Which of these rows have moved since."""
        return self._clocks.moved[rows] > clock

    def ease(self, name: NodeName) -> None:
        """Something that is not in the node's view has become better."""
        if (row := self.row_of.get(name)) is not None:
            self._clocks.tick(row, changed=False, eased=True)

    def put(self, view: NodeView, *, hypothetical: bool = False) -> None:
        """Take a node as it is now, or as it is supposed to be for a question."""
        row = self._row(view.facts.name)
        before = self._views[row]
        known = None if before is None else before.facts
        has_moved = known is None or (known is not view.facts and moves(known, view.facts))
        self._clocks.tick(row, moved=has_moved, eased=not hypothetical and eases(before, view))
        if has_moved:
            self._labels.move(row, known, view.facts)
        for fact, column in self._facts.items():
            if has_moved or not fact.moves:
                column.set(row, fact.of(view))
        self._index(row, before, view)
        self._views[row] = view
        if known is not view.facts:
            self._resources.measure(row, known, view.facts)
            self._gpus.measure(row, view)
        self._resources.weigh(row, view)
        self._gpus.weigh(row, before if known is view.facts else None, view)

    def drop(self, name: NodeName) -> None:
        """The node is gone."""
        row = self.row_of.pop(name, None)
        if row is None:
            return
        self._clocks.tick(row, moved=True)
        before = self._views[row]
        self._index(row, before, None)
        if before is not None:
            self._resources.measure(row, before.facts, None)
        self._labels.move(row, None if before is None else before.facts, None)
        self._views[row] = None
        self._live[row] = False
        for column in self._facts.values():
            column.set(row, None)
        self._gpus.forget(row)
        self._deadline[row] = -np.inf
        self._spare.append(row)

    def unlike(self, other: "NodeTable", rows: Iterable[int]) -> list[int]:
        """Which of another table's rows are not here as they are there."""
        return [row for row in rows if row >= len(self) or self._views[row] is not other._views[row]]

    def mirror(self, other: "NodeTable", rows: Iterable[int]) -> None:
        """Take some of another table's rows as they are there, under the same numbers: equal figures are decided
        by the row. A mirror takes every row from that table."""
        for row in rows:
            before, view = self._views[row] if row < len(self) else None, other._views[row]
            if before is not None and (view is None or view.facts.name != before.facts.name):
                self.drop(before.facts.name)
            if view is not None and view is not before:
                if self.row_of.get(view.facts.name, row) != row:
                    self.drop(view.facts.name)
                self._seat(view.facts.name, row)
                self.put(view, hypothetical=True)
        self._spare.clear()

    def mirror_heartbeats(self, other: "NodeTable") -> None:
        """Of the rows that are mirrored."""
        rows = min(len(self), len(other))
        self._deadline[:rows] = other._deadline[:rows]

    def beat(self, name: NodeName, deadline: float) -> None:
        """The node's heartbeat counts until then. It may arrive before the node is known."""
        if deadline == -np.inf:
            self._deadlines.pop(name, None)
        else:
            self._deadlines[name] = deadline
        if (row := self.row_of.get(name)) is not None:
            self._deadline[row] = deadline

    def deadline_of(self, name: NodeName) -> float:
        """-inf without a heartbeat."""
        return self._deadlines.get(name, -np.inf)

    def _index(self, row: int, before: NodeView | None, after: NodeView | None) -> None:
        for rows, old, new in (
            (self._model_rows, _model_keys(before), _model_keys(after)),
            (self._port_rows, _ports(before), _ports(after)),
        ):
            _reindex(rows, row, old, new)

    def _row(self, name: NodeName) -> int:
        row = self.row_of.get(name)
        if row is not None:
            return row
        row = self._spare.pop() if self._spare else len(self._views)
        self._seat(name, row)
        return row

    def _seat(self, name: NodeName, row: int) -> None:
        while row >= len(self._views):
            self._views.append(None)
        while row >= self._capacity:
            self._lengthen()
        self.row_of[name] = row
        self._live[row] = True
        self._deadline[row] = self._deadlines.get(name, -np.inf)

    def _lengthen(self) -> None:
        capacity = self._capacity = 2 * self._capacity
        self._live = grown(self._live, (capacity,), False)
        self._deadline = grown(self._deadline, (capacity,), -np.inf)
        for columns in (self._clocks, self._gpus, self._resources, self._labels):
            columns.lengthen(capacity)
        for column in self._facts.values():
            column.widen(capacity)


def _model_keys(view: NodeView | None) -> frozenset[Hashable]:
    return frozenset() if view is None else frozenset(view.model_ids)


def _ports(view: NodeView | None) -> frozenset[tuple[str, int]]:
    return frozenset() if view is None else frozenset((p, n) for _, p, n in view.host_ports)


def _reindex(rows: dict[Any, set[int]], row: int, old: frozenset[Any], new: frozenset[Any]) -> None:
    if old == new:
        return
    for key in old - new:
        rows[key].discard(row)
        if not rows[key]:
            del rows[key]
    for key in new - old:
        rows.setdefault(key, set()).add(row)
