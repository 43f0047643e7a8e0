"""What a scheduling rule is: one object that says which nodes refuse a pod, why, and what ends that.

The order of the rules (`registry`) is their priority: of all rules that a node fails the first one is its reason.
A rule sees many nodes at once. What it may be cached by is its class: `PodRule` looks at the pod alone, `ShapeRule` at a
node and what pods of one shape ask, `PairRule` at anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import NodeName
from binder.cache.cluster_facts import ClusterEvent, ClusterFacts
from binder.cache.column import Bools, Ints, Rows
from binder.cache.reservations import Reservation
from binder.cache.table import Floats, NodeTable
from binder.cache.view import NodeView
from binder.pod.demand import Demand, Shape
from binder.pod.selectors import Labels, Selector
from binder.pod.topology_terms import Term

Some = NDArray[np.intp]
UNBOUNDED = 2**20


class Cure(Enum):
    """What ends a refusal."""

    OWNER = auto()  # the pod's owner changes the pod, or its controller makes another one
    NODE = auto()  # the node itself must change: what it gives back helps no pod
    REPORT = auto()  # the node's agent tells something else
    POD_ENDS = auto()  # a pod on the node ends, also by eviction
    NEIGHBOURS = auto()  # pods come or go, there or elsewhere
    CLUSTER = auto()  # objects that are neither nodes nor pods
    TIME = auto()


class NewNode(Enum):
    """Which new node would not refuse so, where all kinds of nodes that are known do."""

    NONE = auto()
    LARGER = auto()
    OTHER_POOL = auto()


@dataclass(frozen=True, slots=True)
class Reason:
    """One refusal: a rule's name and the detail. `short_bytes`: how much GPU memory is missing on the node's best GPU."""

    rule: str
    detail: str = ""
    short_bytes: int | None = None


class Pods(Protocol):
    """Pods that have a node, as `PodIndex` finds them."""

    def on_nodes(self, term: Term, namespaces: Mapping[str, Labels]) -> Mapping[NodeName, int]: ...

    def all_at_once(
        self, terms: Sequence[Term], namespaces: Mapping[str, Labels]
    ) -> Mapping[NodeName, int]: ...

    def owned(self, namespace: str, owner: str | None) -> Mapping[NodeName, int]: ...

    def staying(self, namespace: str, selector: Selector | None) -> Mapping[NodeName, int]: ...

    def terms_against(
        self, namespace: str, labels: Labels
    ) -> Iterator[tuple[Term, Mapping[NodeName, int]]]: ...


class Claims(Protocol):
    """Which volume claims pods that have a node mount."""

    def __call__(self, namespace: str, claim: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may look at: the nodes, the pods on them, and the cluster beside."""

    table: NodeTable
    facts: ClusterFacts
    pods: Pods
    is_claimed: Claims

    def mask(self, rows: Sequence[int]) -> Bools | None:
        """These rows of all; None where there are none."""
        if not len(rows):
            return None
        mask = np.zeros(len(self.table), np.bool_)
        mask[rows] = True
        return mask


@dataclass(slots=True)
class ShapeQuery:
    """Some rows for pods of one shape. `shared`: what rules have found that others need, too."""

    table: NodeTable
    shape: Shape
    rows: Rows
    shared: object = None

    def __len__(self) -> int:
        return len(self.table.live[self.rows])


class Rule:
    """What every rule says."""

    name: ClassVar[str]
    cures: ClassVar[frozenset[Cure]]
    new_node: ClassVar[NewNode] = NewNode.NONE
    # What one node says likely holds for all, or says what to change.
    tells_for_all: ClassVar[bool] = False
    # It speaks of the node's GPUs, each of which has a reason of its own.
    is_of_gpus: ClassVar[bool] = False

    def why(self, demand: Demand, view: NodeView) -> str:
        """The detail, for one node that refuses."""
        return ""

    def reason(self, context: Context, demand: Demand, row: int) -> Reason:
        """Why this node refuses, with what would be right."""
        return Reason(self.name, self.why(demand, context.table.view(row)))

    def nearest(self, context: Context, demand: Demand, rows: Some) -> int | None:
        """Of these rows, which refuse, the one whose detail stands for all."""
        return int(rows[0]) if self.tells_for_all else None

    def remedy(self, context: Context, demand: Demand) -> str:
        """What is wrong with the pod that the end of no other pod cures; "" where nothing is."""
        return ""

    def woken_by(self, context: Context, demand: Demand, event: ClusterEvent) -> bool:
        """Whether what else has changed than the nodes that refuse so may help a pod."""
        return False

    def clashes(self, demand: Demand, reservation: Reservation) -> bool:
        """Whether the pod cannot be where this one is, whatever room there is."""
        return False

    def never_fits(self, context: Context, demand: Demand) -> Bools | None:
        """Nodes that refuse for good, even if all else were gone; None where there are none."""
        return None

    def replicas_per_node(self, context: Context, demand: Demand) -> Ints | int:
        """At most so many replicas on each node, if all else were gone."""
        return UNBOUNDED

    def most_replicas(self, context: Context, demand: Demand, per_node: Ints) -> int:
        """At most so many of the replicas that nodes could hold each on its own, together."""
        return UNBOUNDED


class PodRule(Rule):
    """Refuses a pod on every node."""

    def refuses(self, context: Context, demand: Demand) -> str:
        """The detail; "" where it does not refuse."""
        raise NotImplementedError


class ShapeRule(Rule):
    """Refuses pods of one shape by the node's own figures: cached for each shape, and renewed where nodes change.
    `moves`: only where they move (`NodeTable`)."""

    moves: ClassVar[bool] = False
    # A node that refuses so refuses for good.
    lasts: ClassVar[bool] = False

    def never_fits(self, context: Context, demand: Demand) -> Bools | None:
        if not self.lasts:
            return None
        return self.fails(ShapeQuery(context.table, demand.shape, context.table.all_rows))

    def fails(self, query: ShapeQuery) -> Bools | None:
        """Which of the rows refuse; None where none does."""
        raise NotImplementedError

    def preference(self, query: ShapeQuery) -> Ints | None:
        """What the pod's owner prefers in the same matter, as one figure a row; None where he does not care."""
        return None


class PairRule(Rule):
    """Refuses by whatever it likes: the pod itself, other pods, the time. Never cached."""

    # It would refuse a node that does not exist yet, too.
    of_fresh_nodes: ClassVar[bool] = False

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        """Which of all rows refuse; None where none does."""
        raise NotImplementedError

    def preference(self, context: Context, demand: Demand) -> Floats | None:
        """What the pod's owner prefers in the same matter, as one figure a row; None where he does not care."""
        return None

    def favours(self, context: Context, demand: Demand) -> Bools | None:
        """Nodes that are better than all others for the sake of those who come later; None where none is."""
        return None


class NeighbourRule(PairRule):
    """A rule between pods, which can keep a pod from a fresh node, too."""

    def concerns(self, context: Context, demand: Demand) -> bool:
        """Whether the pod is under it at all."""
        raise NotImplementedError
