"""Columns of what tenants name as they like: labels and resources. Made when a pod names one, the last used are kept."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from binder.cache.column import Column, Ints, grown
from binder.cache.gpu_columns import within_64_bits
from binder.cache.view import NodeFacts, NodeView
from binder.pod.resources import PODS

# Of each kind: each column costs at every report. Only what some node has gets a column, so this is for nodes with very
# many labels.
_MOST_COLUMNS = 1024
_T = TypeVar("_T")
Views = Sequence[NodeView | None]


class LabelColumns:
    """One column for each label that pods have asked about."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._columns: OrderedDict[str, Column] = OrderedDict()
        # On how many nodes each label is; one that is on none needs no column.
        self._keys: Counter[str] = Counter()
        self._none = Column(capacity)

    def __contains__(self, key: str) -> bool:
        """Some node has it."""
        return key in self._keys

    def column(self, key: str, views: Views) -> Column:
        if key not in self._keys:
            return self._none
        return _recent(self._columns, key, lambda: self._filled(key, views))

    def move(self, row: int, before: NodeFacts | None, after: NodeFacts | None) -> None:
        """The node has come, has other labels, or is gone."""
        labels = {} if after is None else after.labels
        _recount(self._keys, () if before is None else before.labels, labels)
        for key, column in self._columns.items():
            column.set(row, labels.get(key))

    def lengthen(self, capacity: int) -> None:
        self._capacity = capacity
        for column in (*self._columns.values(), self._none):
            column.widen(capacity)

    def _filled(self, key: str, views: Views) -> Column:
        column = Column(self._capacity)
        column.fill([None if view is None else view.facts.labels.get(key) for view in views])
        return column


class ResourceColumns:
    """What nodes have of each resource that pods have asked about, and what is left of it: less than MOST, so that a
    pod that requires it fits nowhere."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._left: OrderedDict[str, Ints] = OrderedDict()
        self._allocatable: OrderedDict[str, Ints] = OrderedDict()
        # On how many nodes each resource is; of one that is on none nothing is left.
        self._offers: Counter[str] = Counter()
        self._nothing = np.zeros(capacity, np.int64)

    def left(self, resource: str, views: Views) -> Ints:
        if resource not in self._offers and resource != PODS:
            return self._nothing
        return self._figures(self._left, resource, views, lambda view: view.left_of(resource))

    def allocatable(self, resource: str, views: Views) -> Ints:
        if resource not in self._offers:
            return self._nothing
        return self._figures(
            self._allocatable, resource, views, lambda view: view.facts.allocatable.get(resource, 0)
        )

    def measure(self, row: int, before: NodeFacts | None, after: NodeFacts | None) -> None:
        """What the node has, whatever its pods take of it."""
        has = {} if after is None else after.allocatable
        _recount(self._offers, () if before is None else before.allocatable, has)
        if after is not None:
            for resource, amounts in self._allocatable.items():
                amounts[row] = within_64_bits(has.get(resource, 0))

    def weigh(self, row: int, view: NodeView) -> None:
        for resource, left in self._left.items():
            left[row] = within_64_bits(view.left_of(resource))

    def lengthen(self, capacity: int) -> None:
        self._capacity = capacity
        for amounts in (self._left, self._allocatable):
            for resource in amounts:
                amounts[resource] = grown(amounts[resource], (capacity,), 0)
        self._nothing = grown(self._nothing, (capacity,), 0)

    def _figures(
        self,
        known: "OrderedDict[str, Ints]",
        resource: str,
        views: Views,
        figure: Callable[[NodeView], int],
    ) -> Ints:
        return _recent(known, resource, lambda: self._filled(views, figure))

    def _filled(self, views: Views, figure: Callable[[NodeView], int]) -> Ints:
        amounts: Ints = np.zeros(self._capacity, np.int64)
        for row, view in enumerate(views):
            if view is not None:
                amounts[row] = within_64_bits(figure(view))
        return amounts


def _recount(counts: Counter[str], before: Iterable[str], after: Iterable[str]) -> None:
    if before is after:
        return
    counts.update(iter(after))
    for name in before:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def _recent(known: "OrderedDict[str, _T]", key: str, make: Callable[[], _T]) -> _T:
    """One of those that are known, made where it is not; the one that was not used for longest goes."""
    found = known.get(key)
    if found is None:
        found = known[key] = make()
        if len(known) > _MOST_COLUMNS:
            known.popitem(last=False)
    known.move_to_end(key)
    return found
