"""What Kubernetes counts: CPU, memory, pods, extended resources."""

from collections.abc import Iterator

import numpy as np

from binder.cache.column import Bools, Ints
from binder.cache.view import NodeView
from binder.pod.demand import Demand, Shape
from binder.pod.resources import PODS
from binder.rules.rule import UNBOUNDED, Context, Cure, NewNode, ShapeQuery, ShapeRule, Some


class _AmountRule(ShapeRule):
    cures = frozenset({Cure.POD_ENDS})
    new_node = NewNode.LARGER

    def _amounts(self, shape: Shape) -> Iterator[tuple[str, int]]:
        """(resource, how much is asked) of those that the rule looks at."""
        raise NotImplementedError

    def fails(self, query: ShapeQuery) -> Bools | None:
        found: Bools | None = None
        for name, asked in self._amounts(query.shape):
            short = query.table.left(name)[query.rows] < asked
            found = short if found is None else found | short
        return found

    def replicas_per_node(self, context: Context, demand: Demand) -> Ints | int:
        most = np.full(len(context.table), UNBOUNDED, np.int64)
        for name, asked in self._amounts(demand.shape):
            most = np.minimum(most, context.table.allocatable(name) // asked)
        return np.maximum(most, 0)


class ResourceInsufficient(_AmountRule):
    """Less is left of the node's allocatable than the pod requests."""

    name = "ResourceInsufficient"

    def _amounts(self, shape: Shape) -> Iterator[tuple[str, int]]:
        return ((name, asked) for name, asked in shape.amounts if asked > 0 and name != PODS)

    def nearest(self, context: Context, demand: Demand, rows: Some) -> int | None:
        """By the largest part of a request that is missing."""
        missing = [
            np.maximum(0, asked - context.table.left(name)[rows]) / asked
            for name, asked in demand.shape.amounts
            if asked > 0
        ]
        return int(rows[np.max([*missing, np.zeros(len(rows))], axis=0).argmin()])

    def why(self, demand: Demand, view: NodeView) -> str:
        for name, asked in demand.shape.amounts:
            if name != PODS and asked > max(0, view.left_of(name)):
                return f"{name}: {asked} asked, {max(0, view.left_of(name))} left"
        return ""


class TooManyPods(_AmountRule):
    """The node has as many pods as it takes."""

    name = "TooManyPods"

    def _amounts(self, shape: Shape) -> Iterator[tuple[str, int]]:
        return ((name, asked) for name, asked in shape.amounts if asked > 0 and name == PODS)

    def why(self, demand: Demand, view: NodeView) -> str:
        return f"{view.used.get(PODS, 0)} pods are on the node"
