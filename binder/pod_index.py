"""The pods that have a node, found by their labels: what affinity, anti-affinity and spread count."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from berth.contract.ids import NodeName, PodUid
from binder.labels import Labels, Selector
from binder.neighbours import Term

_K = TypeVar("_K")
_V = TypeVar("_V")
# On a standby nobody asks for the changes.
_TOLD_ONE_BY_ONE = 1000
# (namespace, label, value)
_Mark = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One pod as others see it. `keeps_away`: its own required anti-affinity; `owner`: the uid of its controller."""

    namespace: str
    labels: Labels
    node: NodeName
    deleting: bool = False
    keeps_away: tuple[Term, ...] = ()
    owner: str | None = None


# A pod as it was and as it is; None while it is not there.
Turn = tuple[Neighbour | None, Neighbour | None]


class PodIndex:
    """Looks at few pods: those that share the rarest label that a selector asks for."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, Neighbour] = {}
        self._marked: dict[_Mark, set[PodUid]] = {}
        self._in_namespace: dict[str, set[PodUid]] = {}
        # Where the replicas of one controller are, but for those that are on their way out.
        self._owned: dict[tuple[str, str], dict[NodeName, int]] = {}
        # Where pods with one and the same anti-affinity term are; and the terms by one label that
        # they ask for, so that a pod meets only those that could speak of it.
        self._apart: dict[Term, dict[NodeName, int]] = {}
        self._terms: dict[tuple[str, str] | None, set[Term]] = {}
        self._filed: dict[Term, list[tuple[str, str] | None]] = {}
        # How pods that have changed were before; None once there are too many to be told one by one.
        self._before: dict[PodUid, Neighbour | None] | None = {}

    def take_changed(self) -> "list[Turn] | None":
        """Pods that have come, gone or changed since the last call; None if they are too many to tell."""
        before, self._before = self._before, {}
        if before is None:
            return None
        return [(old, new) for uid, old in before.items() if old != (new := self._pods.get(uid))]

    def _note(self, uid: PodUid) -> None:
        if self._before is not None:
            self._before.setdefault(uid, self._pods.get(uid))
            if len(self._before) > _TOLD_ONE_BY_ONE:
                self._before = None

    def put(self, uid: PodUid, pod: Neighbour) -> None:
        self.drop(uid)
        self._note(uid)
        self._pods[uid] = pod
        self._in_namespace.setdefault(pod.namespace, set()).add(uid)
        for mark in _marks(pod):
            self._marked.setdefault(mark, set()).add(uid)
        self._count_owned(pod, 1)
        for term in pod.keeps_away:
            self._add_term(term, pod.node)

    def drop(self, uid: PodUid) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        self._note(uid)
        del self._pods[uid]
        _discard(self._in_namespace, pod.namespace, uid)
        for mark in _marks(pod):
            _discard(self._marked, mark, uid)
        self._count_owned(pod, -1)
        for term in pod.keeps_away:
            self._drop_term(term, pod.node)

    def get(self, uid: PodUid) -> Neighbour | None:
        return self._pods.get(uid)

    def matching(self, term: Term, namespaces: Mapping[str, Labels]) -> Iterator[Neighbour]:
        """The pods that a term speaks of. `namespaces`: the labels of each."""
        if term.selector is None:
            return iter(())
        return self._in(self._namespaces_of(term, namespaces), term.selector)

    def in_namespace(self, namespace: str, selector: Selector | None) -> Iterator[Neighbour]:
        """The pods of one namespace that a selector matches."""
        return iter(()) if selector is None else self._in((namespace,), selector)

    def owned(self, namespace: str, owner: str | None) -> Mapping[NodeName, int]:
        """How many replicas of a controller are on each node; without those that are on their way out."""
        return {} if owner is None else self._owned.get((namespace, owner), {})

    def terms_against(self, labels: Labels) -> Iterator[tuple[Term, Mapping[NodeName, int]]]:
        """Terms that could speak of a pod with these labels, and the nodes of the pods that have them."""
        seen: set[Term] = set()
        for mark in (None, *labels.items()):
            for term in self._terms.get(mark, ()):
                if term not in seen:
                    seen.add(term)
                    yield term, self._apart[term]

    def _count_owned(self, pod: Neighbour, by: int) -> None:
        if pod.owner is None or pod.deleting:
            return
        key = (pod.namespace, pod.owner)
        nodes = self._owned.setdefault(key, {})
        nodes[pod.node] = nodes.get(pod.node, 0) + by
        if not nodes[pod.node]:
            del nodes[pod.node]
        if not nodes:
            del self._owned[key]

    def _namespaces_of(self, term: Term, namespaces: Mapping[str, Labels]) -> frozenset[str]:
        among = term.namespace_selector
        if among is None:
            return term.namespaces
        if not among.requirements:
            return frozenset(self._in_namespace)
        return term.namespaces | {name for name, labels in namespaces.items() if among.matches(labels)}

    def _in(self, namespaces: "frozenset[str] | tuple[str, ...]", selector: Selector) -> Iterator[Neighbour]:
        for namespace in namespaces:
            for uid in self._candidates(namespace, selector):
                pod = self._pods[uid]
                if selector.matches(pod.labels):
                    yield pod

    def _candidates(self, namespace: str, selector: Selector) -> Iterator[PodUid]:
        """Every pod that has one of the rarest labels that the selector asks for, some others perhaps."""
        nobody: set[PodUid] = set()
        lookups = [
            [self._marked.get((namespace, one.key, value), nobody) for value in one.values]
            for one in selector.lists
        ]
        everybody = [self._in_namespace.get(namespace, nobody)]
        rarest: list[set[PodUid]] = min(lookups, key=_size, default=everybody)
        return chain.from_iterable(rarest)

    def _add_term(self, term: Term, node: NodeName) -> None:
        nodes = self._apart.get(term)
        if nodes is None:
            nodes = self._apart[term] = {}
            self._filed[term] = self._rarest_marks(term)
            for mark in self._filed[term]:
                self._terms.setdefault(mark, set()).add(term)
        nodes[node] = nodes.get(node, 0) + 1

    def _drop_term(self, term: Term, node: NodeName) -> None:
        nodes = self._apart[term]
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._apart[term]
            for mark in self._filed.pop(term):
                _discard(self._terms, mark, term)

    def _rarest_marks(self, term: Term) -> "list[tuple[str, str] | None]":
        """The labels of which a pod must have one, those under which the fewest terms are filed; None when
        that cannot be told."""
        nothing: set[Term] = set()
        lists = () if term.selector is None else term.selector.lists
        marks: list[list[tuple[str, str] | None]] = [[(one.key, v) for v in one.values] for one in lists]
        return min(marks, key=lambda some: _size(self._terms.get(m, nothing) for m in some), default=[None])


def _marks(pod: Neighbour) -> Iterator[_Mark]:
    return ((pod.namespace, key, value) for key, value in pod.labels.items())


def _size(sets: Iterable[set[_V]]) -> int:
    return sum(map(len, sets))


def _discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]
