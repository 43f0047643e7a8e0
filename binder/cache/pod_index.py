"""The pods that have a node, found by their labels: what affinity, anti-affinity and spread count.

What has been counted once is kept, and followed as pods come and go: a decision costs the nodes, not the pods that
are there. What no label finds is looked for among groups of pods that look alike, those of a Deployment for example.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from berth.contract.ids import NodeName, PodUid
from binder.pod.bounds import MOST_MET_TERMS, MOST_MET_TESTS
from binder.pod.selectors import Labels, Selector
from binder.pod.topology_terms import ANY_POD_HERE, Term

_K = TypeVar("_K")
_V = TypeVar("_V")
# On a standby the changes are not read.
_TOLD_ONE_BY_ONE = 1000
# Counts that are kept, the last used ones; each pod that comes or goes meets those that could count it.
_MOST_COUNTS = 256
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
PodChange = tuple[Neighbour | None, Neighbour | None]


# Terms that list more are filed as if they spoke of all namespaces.
_FEW_NAMESPACES = 16
# (namespace, None: any; label and value, None: any)
_Scope = tuple[str | None, tuple[str, str] | None]
# The namespace of the pods that have a term, and the term.
_Kept = tuple[str, Term]
# Where the pods with each term are. Kept with the terms: to look one up costs as much as to ask whom it speaks of.
_Nodes = dict[Term, dict[NodeName, int]]
# Whose pods are counted: namespaces (None: all of them), selector, and whether those on their way out count, too.
_Counted = tuple[frozenset[str] | None, Selector, bool]


class _Counts:
    """How many pods are on each node, for each of some questions."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Counted, dict[NodeName, int]] = OrderedDict()
        # By one label of which a pod must have one of the values listed; None where every pod may be meant.
        self._filed: dict[tuple[str, str] | None, set[_Counted]] = {}

    def find(self, asked: _Counted) -> dict[NodeName, int] | None:
        found = self._known.get(asked)
        if found is not None:
            self._known.move_to_end(asked)
        return found

    def keep(self, asked: _Counted, counts: dict[NodeName, int]) -> None:
        self._known[asked] = counts
        for mark in self._marks(asked):
            self._filed.setdefault(mark, set()).add(asked)
        if len(self._known) > _MOST_COUNTS:
            oldest, _ = self._known.popitem(last=False)
            for mark in self._marks(oldest):
                _discard(self._filed, mark, oldest)

    def add(self, pod: Neighbour, number: int) -> None:
        """The pod has come (1) or gone (-1)."""
        if not self._known:
            return
        for mark in (None, *pod.labels.items()):
            for asked in self._filed.get(mark, ()):
                namespaces, selector, also_deleting = asked
                if (
                    (also_deleting or not pod.deleting)
                    and (namespaces is None or pod.namespace in namespaces)
                    and selector.matches(pod.labels)
                ):
                    _add(self._known[asked], pod.node, number)

    @staticmethod
    def _marks(asked: _Counted) -> Iterable[tuple[str, str] | None]:
        """Of one key alone, so that no pod is met twice."""
        lists = asked[1].lists
        if not lists:
            return (None,)
        fewest = min(lists, key=lambda one: len(one.values))
        return [(fewest.key, value) for value in fewest.values]


class _Group:
    """Pods of one namespace with the same labels: how many are on each node, and how many of them stay; and how many
    there are, hidden ones too."""

    __slots__ = ("labels", "nodes", "pods", "staying")

    def __init__(self, labels: Labels) -> None:
        self.labels, self.pods = labels, 0
        self.nodes: dict[NodeName, int] = {}
        self.staying: dict[NodeName, int] = {}

    def add(self, pod: Neighbour, number: int) -> None:
        _add(self.nodes, pod.node, number)
        if not pod.deleting:
            _add(self.staying, pod.node, number)


class PodIndex:
    """Looks at few pods: those that share the rarest label that a selector requires."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, Neighbour] = {}
        # Those that are taken out of account for a question. For each pod what is counted down then: its group, and
        # where pods with each of its terms are.
        self._hidden: set[PodUid] = set()
        self._counted_in: dict[PodUid, tuple[_Group, tuple[dict[NodeName, int], ...]]] = {}
        self._marked: dict[_Mark, set[PodUid]] = {}
        self._in_namespace: dict[str, set[PodUid]] = {}
        # Where the replicas of one controller are, but for those that are on their way out.
        self._owned: dict[tuple[str, str], dict[NodeName, int]] = {}
        # Where pods of one namespace with one and the same anti-affinity term are; and each namespace's terms by one
        # label that they ask for, so that a pod meets only those that could speak of it.
        self._apart: dict[_Kept, dict[NodeName, int]] = {}
        self._terms: dict[_Scope, dict[str, _Nodes]] = {}
        self._filed: dict[_Kept, list[_Scope]] = {}
        self._counts = _Counts()
        self._groups: dict[str, dict[frozenset[tuple[str, str]], _Group]] = {}
        # How pods that have changed were before; None once there are too many to be listed one by one.
        self._before: dict[PodUid, Neighbour | None] | None = {}

    def take_changed(self) -> "list[PodChange] | None":
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
        terms = tuple(self._add_term((pod.namespace, term), pod.node) for term in pod.keeps_away)
        self._counts.add(pod, 1)
        self._counted_in[uid] = (self._group(pod, 1), terms)

    def hide(self, uids: Iterable[PodUid]) -> list[PodUid]:
        """Count these pods no more, until they are shown again; returns those that are there and were not hidden.

        For a question, of which a search asks hundreds: it costs next to nothing, whatever labels and terms the pods
        have, for what finds a pod is left as it is.
        """
        found = [uid for uid in uids if uid in self._pods and uid not in self._hidden]
        for uid in found:
            self._recount(uid, -1)
        self._hidden.update(found)
        return found

    def show(self, uids: Iterable[PodUid]) -> None:
        """Count them again."""
        found = self._hidden.intersection(uids)
        self._hidden -= found
        for uid in found:
            self._recount(uid, 1)

    def _recount(self, uid: PodUid, number: int) -> None:
        pod, (group, terms) = self._pods[uid], self._counted_in[uid]
        self._count_owned(pod, number)
        for nodes in terms:
            _add(nodes, pod.node, number)
        self._counts.add(pod, number)
        group.add(pod, number)

    def drop(self, uid: PodUid) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        hidden = set(self._hidden)
        self.show(hidden)  # what is empty while they are hidden must not go with this one
        self._drop(uid, pod)
        self.hide(hidden)

    def _drop(self, uid: PodUid, pod: Neighbour) -> None:
        self._note(uid)
        del self._counted_in[uid]
        del self._pods[uid]
        _discard(self._in_namespace, pod.namespace, uid)
        for mark in _marks(pod):
            _discard(self._marked, mark, uid)
        self._count_owned(pod, -1)
        for term in pod.keeps_away:
            self._drop_term((pod.namespace, term), pod.node)
        self._counts.add(pod, -1)
        self._group(pod, -1)

    def get(self, uid: PodUid) -> Neighbour | None:
        return None if uid in self._hidden else self._pods.get(uid)

    def matching(self, term: Term, namespaces: Mapping[str, Labels]) -> Iterator[Neighbour]:
        """The pods that a term speaks of. `namespaces`: the labels of each."""
        if term.selector is None:
            return iter(())
        return self._in(self._namespaces_of(term, namespaces), term.selector)

    def on_nodes(self, term: Term, namespaces: Mapping[str, Labels]) -> Mapping[NodeName, int]:
        """How many of the pods that a term speaks of are on each node. Not to be changed."""
        if term.selector is None:
            return {}
        everywhere = term.namespace_selector is not None and not term.namespace_selector.requirements
        among = None if everywhere else self._namespaces_of(term, namespaces)
        return self._counted((among, term.selector, True))

    def staying(self, namespace: str, selector: Selector | None) -> Mapping[NodeName, int]:
        """How many pods of one namespace that a selector matches are on each node and not on their way out. Not to
        be changed."""
        return {} if selector is None else self._counted((frozenset({namespace}), selector, False))

    def _counted(self, asked: _Counted) -> Mapping[NodeName, int]:
        counts = self._counts.find(asked)
        if counts is None:
            counts = self._count(asked)
            self._counts.keep(asked, counts)
        return counts

    def _count(self, asked: _Counted) -> dict[NodeName, int]:
        among, selector, also_deleting = asked
        counts: dict[NodeName, int] = {}
        for namespace in self._in_namespace if among is None else among:
            found, groups = self._lookup(namespace, selector), self._groups.get(namespace, {})
            if found is not None and _size(found) < len(groups):
                uids = (uid for uid in chain.from_iterable(found) if uid not in self._hidden)
                pods = (self._pods[uid] for uid in uids)
                for pod in pods:
                    if (also_deleting or not pod.deleting) and selector.matches(pod.labels):
                        _add(counts, pod.node, 1)
            else:
                alike = (group for group in groups.values() if selector.matches(group.labels))
                _merge(counts, (group.nodes if also_deleting else group.staying for group in alike))
        return counts

    def all_at_once(self, terms: Sequence[Term], namespaces: Mapping[str, Labels]) -> Mapping[NodeName, int]:
        """How many pods of which all of these terms speak are on each node."""
        counts: dict[NodeName, int] = {}
        if any(term.selector is None for term in terms):
            return counts
        among = [self._namespaces_of(term, namespaces) for term in terms]
        for namespace in frozenset.intersection(*among):
            alike = (
                group.nodes
                for group in self._groups.get(namespace, {}).values()
                if all(term.selector is not None and term.selector.matches(group.labels) for term in terms)
            )
            _merge(counts, alike)
        return counts

    def _group(self, pod: Neighbour, number: int) -> _Group:
        there = self._groups.setdefault(pod.namespace, {})
        key = frozenset(pod.labels.items())
        group = there.get(key)
        if group is None:
            group = there[key] = _Group(pod.labels)
        group.add(pod, number)
        group.pods += number
        if not group.pods:
            del there[key]
            if not there:
                del self._groups[pod.namespace]
        return group

    def in_namespace(self, namespace: str, selector: Selector | None) -> Iterator[Neighbour]:
        """The pods of one namespace that a selector matches."""
        return iter(()) if selector is None else self._in((namespace,), selector)

    def owned(self, namespace: str, owner: str | None) -> Mapping[NodeName, int]:
        """How many replicas of a controller are on each node; without those that are on their way out."""
        return {} if owner is None else self._owned.get((namespace, owner), {})

    def terms_against(self, namespace: str, labels: Labels) -> Iterator[tuple[Term, Mapping[NodeName, int]]]:
        """Terms that could speak of a pod of this namespace with these labels, and the nodes of the pods that have
        them. Where one namespace's are too many to look at, what they say does not count: all of their pods' nodes take
        no such pod, and no other node refuses it for them."""
        for met in self._met(namespace, labels):
            if _are_few(met):
                yield from [(term, nodes) for terms in met for term, nodes in terms.items() if nodes]
            else:
                everywhere = set[NodeName]().union(*[nodes for terms in met for nodes in terms.values()])
                yield ANY_POD_HERE, dict.fromkeys(everywhere, 1)

    def _met(self, namespace: str, labels: Labels) -> "Iterable[list[_Nodes]]":
        """For each namespace whose pods have any."""
        met: dict[str, list[_Nodes]] = {}
        for scope in (None, namespace):
            for mark in (None, *labels.items()):
                if filed := self._terms.get((scope, mark)):
                    for source, terms in filed.items():
                        met.setdefault(source, []).append(terms)
        return met.values()

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
                if uid not in self._hidden and selector.matches(pod.labels):
                    yield pod

    def _candidates(self, namespace: str, selector: Selector) -> Iterator[PodUid]:
        """Every pod that has one of the rarest labels that the selector requires, some others perhaps."""
        rarest = self._lookup(namespace, selector)
        return chain.from_iterable([self._in_namespace.get(namespace, set())] if rarest is None else rarest)

    def _lookup(self, namespace: str, selector: Selector) -> list[set[PodUid]] | None:
        """The pods with the rarest label that the selector requires; None where it requires none."""
        no_pods: set[PodUid] = set()
        lookups = [
            [self._marked.get((namespace, one.key, value), no_pods) for value in one.values]
            for one in selector.lists
        ]
        return min(lookups, key=_size, default=None)

    def _add_term(self, kept: "_Kept", node: NodeName) -> dict[NodeName, int]:
        nodes = self._apart.get(kept)
        if nodes is None:
            nodes = self._apart[kept] = {}
            source, term = kept
            self._filed[kept] = self._rarest_marks(term)
            for mark in self._filed[kept]:
                self._terms.setdefault(mark, {}).setdefault(source, {})[term] = nodes
        nodes[node] = nodes.get(node, 0) + 1
        return nodes

    def _drop_term(self, kept: "_Kept", node: NodeName) -> None:
        nodes = self._apart[kept]
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._apart[kept]
            source, term = kept
            for mark in self._filed.pop(kept):
                del self._terms[mark][source][term]
                if not self._terms[mark][source]:
                    del self._terms[mark][source]
                if not self._terms[mark]:
                    del self._terms[mark]

    def _rarest_marks(self, term: Term) -> "list[_Scope]":
        """The labels, each in the term's namespaces, of which a pod must have one: those of one key, under which the
        fewest terms are filed; None when that is unknown."""
        nothing: dict[str, _Nodes] = {}
        lists = () if term.selector is None else term.selector.lists
        narrow = term.namespace_selector is None and len(term.namespaces) <= _FEW_NAMESPACES
        scopes = term.namespaces if narrow else (None,)
        marks: list[list[_Scope]] = [
            [(scope, (one.key, value)) for scope in scopes for value in one.values] for one in lists
        ]
        anybody: list[_Scope] = [(scope, None) for scope in scopes]
        return min(
            marks,
            key=lambda some: sum(_size(self._terms.get(m, nothing).values()) for m in some),
            default=anybody,
        )


def _marks(pod: Neighbour) -> Iterator[_Mark]:
    return ((pod.namespace, key, value) for key, value in pod.labels.items())


def _add(counts: dict[NodeName, int], node: NodeName, number: int) -> None:
    now = counts.get(node, 0) + number
    if now:
        counts[node] = now
    else:
        del counts[node]


def _merge(counts: dict[NodeName, int], more: Iterable[Mapping[NodeName, int]]) -> None:
    for one in more:
        for node, number in one.items():
            counts[node] = counts.get(node, 0) + number


def _are_few(met: list[_Nodes]) -> bool:
    return _size(met) <= MOST_MET_TERMS and sum(t.tests for terms in met for t in terms) <= MOST_MET_TESTS


def _size(sets: Iterable[Sized]) -> int:
    return sum(map(len, sets))


def _discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]
