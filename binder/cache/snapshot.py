"""The cluster as it would be: a mirror of the scheduler's table, on which replicas can be supposed to be placed and pods to
be gone.

A decider over it decides by a decision's own rules. The mirror is its own: whatever is supposed, the scheduler's
table, its queue and waiting pods do not see it, so that a question may be left and taken up again. Between
`follow` and `revert` the mirror stands still; only what pods say of each other (affinity, spread) and
volumes are looked up as they are by then.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName, PodUid
from binder.cache.live_nodes import LiveNodes
from binder.cache.pod_index import Neighbour, PodIndex
from binder.cache.state import with_replica
from binder.cache.table import NodeTable
from binder.cache.view import NodeView
from binder.pod.demand import Demand
from binder.pod.selectors import Labels, Selector
from binder.pod.topology_terms import Term

_NEVER = -1


class ClusterSnapshot:
    """`live`: the nodes that are mirrored."""

    def __init__(self, live: LiveNodes) -> None:
        self._live, self._state, self._followed = live, live.state, _NEVER
        self.table, self.pods = NodeTable(like=live.table), _Pods(live.state.pods)
        # As mirrored, of the nodes that something is supposed of.
        self._found: dict[NodeName, NodeView] = {}
        self._replicas: dict[NodeName, list[tuple[Demand, GpuChoice]]] = {}
        self._hidden: frozenset[PodUid] = frozenset()
        self._claims: set[tuple[str, str]] = set()

    def follow(self, *, most: int) -> bool:
        """Mirror `most` of the nodes that have changed. True once the mirror is in step."""
        self._live.refresh()
        theirs = self._live.table
        rows = self.table.unlike(theirs, theirs.changed_since(self._followed).tolist())
        self.table.mirror(theirs, rows[:most])
        if len(rows) > most:
            return False
        self._followed = theirs.clock
        self.table.mirror_heartbeats(theirs)
        return True

    def revert(self) -> None:
        """Nothing is supposed any more."""
        found, self._found = self._found, {}
        self._replicas.clear()
        self._claims.clear()
        self._hidden = frozenset()
        self.pods.clear()
        for view in found.values():
            self.table.put(view, hypothetical=True)

    def add(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        """The pod has this place."""
        ref = demand.model.ref
        self._keep(node)
        self._replicas.setdefault(node, []).append((demand, gpu))
        self.table.put(with_replica(self._view(node), demand, gpu), hypothetical=True)
        self._claims.update((ref.namespace, claim) for claim in demand.claims)
        apart = demand.neighbours.anti_affinity
        self.pods.add(Neighbour(ref.namespace, demand.labels, node, keeps_away=apart, owner=demand.owner))

    def remove(self, uids: Collection[PodUid]) -> None:
        """These pods are gone, and their models."""
        self._hide(self._hidden.union(uids))

    @contextmanager
    def without(self, uids: Collection[PodUid]) -> Iterator[None]:
        before = self._hidden
        self._hide(before.union(uids))
        try:
            yield
        finally:
            self._hide(before)

    def refresh(self, *, most: int | None = None) -> None:
        """It stands still: see `follow`."""

    def is_claimed(self, namespace: str, claim: str) -> bool:
        return (namespace, claim) in self._claims or self._live.is_claimed(namespace, claim)

    def _hide(self, hidden: frozenset[PodUid]) -> None:
        """Nodes of those who are hidden now and were not, or the other way round, change."""
        if hidden == self._hidden:
            return
        changed, self._hidden = self._hidden ^ hidden, hidden
        reservations = [
            reservation for uid in changed if (reservation := self._state.reservation_of(uid)) is not None
        ]
        for node in {reservation.node for reservation in reservations} & self.table.row_of.keys():
            self._keep(node)
            self.table.put(self._simulated(node), hypothetical=True)
        self.pods.hide(pod for uid in hidden if (pod := self._state.pods.get(uid)) is not None)

    def _simulated(self, node: NodeName) -> NodeView:
        """The node as it is supposed to be."""
        here = {
            uid
            for uid in self._hidden
            if (h := self._state.reservation_of(uid)) is not None and h.node == node
        }
        view = self._state.view_without(node, here) if here else self._found[node]
        for demand, gpu in self._replicas.get(node, ()):
            view = with_replica(view, demand, gpu)
        return view

    def _keep(self, node: NodeName) -> None:
        if node not in self._found:
            self._found[node] = self._view(node)

    def _view(self, node: NodeName) -> NodeView:
        return self.table.view(self.table.row_of[node])


class _Pods:
    """Pods that have a node and replicas that are supposed to have one, but for those who are supposed to be gone."""

    def __init__(self, there: PodIndex) -> None:
        self._there, self._replicas = there, PodIndex()
        self._gone: dict[int, Neighbour] = {}
        self._added = 0

    def add(self, pod: Neighbour) -> None:
        self._added += 1
        self._replicas.put(PodUid(str(self._added)), pod)

    def hide(self, pods: Iterable[Neighbour]) -> None:
        """Told apart by identity: two pods may look alike."""
        self._gone = {id(pod): pod for pod in pods}

    def clear(self) -> None:
        self._replicas, self._added = PodIndex(), 0
        self._gone.clear()

    def matching(self, term: Term, namespaces: Mapping[str, Labels]) -> Iterator[Neighbour]:
        there = self._there.matching(term, namespaces)
        return chain(self._left(there), self._replicas.matching(term, namespaces))

    def on_nodes(self, term: Term, namespaces: Mapping[str, Labels]) -> Mapping[NodeName, int]:
        if self._gone:
            return Counter(pod.node for pod in self.matching(term, namespaces))
        return _sum(self._there.on_nodes(term, namespaces), self._replicas.on_nodes(term, namespaces))

    def all_at_once(self, terms: Sequence[Term], namespaces: Mapping[str, Labels]) -> Mapping[NodeName, int]:
        if not self._gone:
            there = self._there.all_at_once(terms, namespaces)
            return _sum(there, self._replicas.all_at_once(terms, namespaces))
        first, *others = terms
        return Counter(
            pod.node
            for pod in self.matching(first, namespaces)
            if all(t.matches(pod.namespace, namespaces.get(pod.namespace, {}), pod.labels) for t in others)
        )

    def staying(self, namespace: str, selector: Selector | None) -> Mapping[NodeName, int]:
        if self._gone:
            return Counter(pod.node for pod in self.in_namespace(namespace, selector) if not pod.deleting)
        return _sum(self._there.staying(namespace, selector), self._replicas.staying(namespace, selector))

    def in_namespace(self, namespace: str, selector: Selector | None) -> Iterator[Neighbour]:
        there = self._there.in_namespace(namespace, selector)
        return chain(self._left(there), self._replicas.in_namespace(namespace, selector))

    def owned(self, namespace: str, owner: str | None) -> Mapping[NodeName, int]:
        there, replicas = self._there.owned(namespace, owner), self._replicas.owned(namespace, owner)
        if not replicas and not self._gone:
            return there
        counts = Counter(there)
        counts.update(replicas)
        gone = (pod for pod in self._gone.values() if (pod.namespace, pod.owner) == (namespace, owner))
        counts.subtract(pod.node for pod in gone if not pod.deleting)
        return +counts

    def terms_against(self, namespace: str, labels: Labels) -> Iterator[tuple[Term, Mapping[NodeName, int]]]:
        for term, nodes in self._there.terms_against(namespace, labels):
            gone = Counter(pod.node for pod in self._gone.values() if term in pod.keeps_away)
            yield term, {node: n for node, n in nodes.items() if n > gone[node]} if gone else nodes
        yield from self._replicas.terms_against(namespace, labels)

    def _left(self, pods: Iterator[Neighbour]) -> Iterator[Neighbour]:
        return (pod for pod in pods if id(pod) not in self._gone) if self._gone else pods


def _sum(one: Mapping[NodeName, int], other: Mapping[NodeName, int]) -> Mapping[NodeName, int]:
    if not other:
        return one
    both = dict(one)
    for node, number in other.items():
        both[node] = both.get(node, 0) + number
    return both
