"""Affinity, anti-affinity and spread between pods, over all nodes at once.

Semantics of kube-scheduler 1.36: plugins/interpodaffinity/filtering.go and
plugins/podtopologyspread/filtering.go.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from berth.contract.ids import NodeName
from binder.cache.table import Bools, Floats, Ints, NodeTable
from binder.pod.demand import Demand
from binder.pod.selectors import Labels, Selector
from binder.pod.topology_terms import Spread, Term
from binder.rules.reasons import Kind

# How much one pod too many in a domain weighs for a constraint that is only wished for: as much as a
# preferred term of middling weight.
_SPREAD_WEIGHT = 50
_ZONE = "topology.kubernetes.io/zone"


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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The pods that have a node, and their namespaces' labels."""

    pods: Pods
    namespaces: Mapping[str, Labels]

    def labels_of(self, namespace: str) -> Labels:
        return self.namespaces.get(namespace, {})


@dataclass(frozen=True, slots=True)
class NodePolicy:
    """Which nodes a spread constraint counts: those that the pod's own rules let it on."""

    affinity: Callable[[], Bools]
    taints: Callable[[], Bools]

    def counted(self, spread: Spread, rows: int) -> Bools:
        mask = np.ones(rows, np.bool_)
        if spread.honours_affinity:
            mask &= self.affinity()
        if spread.honours_taints:
            mask &= self.taints()
        return mask


def misfits(
    table: NodeTable, around: Surroundings, demand: Demand, policy: NodePolicy
) -> Iterator[tuple[Kind, Bools]]:
    """For each rule that this pod is under, the nodes that it forbids."""
    near = demand.neighbours
    if near.affinity:
        yield Kind.POD_AFFINITY, ~_has_company(table, around, demand)
    if near.anti_affinity:
        apart = ((term.topology_key, _on_nodes(table, around, term)) for term in near.anti_affinity)
        yield Kind.POD_ANTI_AFFINITY, _beside(table, apart)
    if (kept := _kept_away(table, around, demand)) is not None:
        yield Kind.KEPT_AWAY, kept
    hard = [spread for spread in near.spread if spread.required]
    if hard:
        all_keys = np.logical_and.reduce([_has(table, spread.topology_key) for spread in hard])
        for spread in hard:
            counted = all_keys & policy.counted(spread, len(table))
            yield Kind.SPREAD, _too_many(table, around, demand, spread, counted)


def wishes(table: NodeTable, around: Surroundings, demand: Demand) -> Floats | None:
    """What the pod would rather have beside it, as one figure a node; None where it does not care."""
    near = demand.neighbours
    soft = [spread for spread in near.spread if not spread.required]
    if not near.preferred and not soft:
        return None
    figure = np.zeros(len(table))
    weights: dict[str, Ints] = {}
    for weight, term in near.preferred:
        on = weight * _counts_by_node(table, _on_nodes(table, around, term))
        weights[term.topology_key] = weights.get(term.topology_key, 0) + on
    for key, on in weights.items():
        figure += _by_domain(table, key, on)
    for spread in soft:
        pods = around.pods.staying(demand.model.ref.namespace, spread.selector)
        counts = _where(table, spread.topology_key, pods)
        figure -= _SPREAD_WEIGHT * counts / spread.max_skew
        # A node outside every domain is the last choice.
        figure[~_has(table, spread.topology_key)] -= 1e6
    return figure


def crowded(table: NodeTable, around: Surroundings, demand: Demand, *, among: Bools) -> Floats | None:
    """How many replicas of the pod's controller share a zone and a node with it already, as one figure a node, infinite but
    among those nodes; None where there are none, or where the pod says itself how it is to be spread.

    The weights are those of kube-scheduler's system default constraints (podtopologyspread/scoring.go): one replica
    counts ln(domains + 2), so that nodes are evened out before a zone with few of them gets as many as others.
    """
    there = around.pods.owned(demand.model.ref.namespace, demand.owner)
    if not there or demand.neighbours.spread:
        return None
    known = [(row, count) for node, count in there.items() if (row := table.row_of.get(node)) is not None]
    on = np.zeros(len(table))
    for row, count in known:
        on[row] = count
    zones = table.label(_ZONE).codes[: len(table)]  # nodes without a zone are in one together
    by_zone = np.bincount(zones, weights=on)
    figure: Floats = by_zone[zones] * np.log(len(np.unique(zones[among])) + 2) + on * np.log(among.sum() + 2)
    figure[~among] = np.inf
    return figure


def _has_company(table: NodeTable, around: Surroundings, demand: Demand) -> Bools:
    """Pods that match all terms at once count; while there are none the first of a group that wants
    to be together may go anywhere where all the labels are."""
    terms = demand.neighbours.affinity
    pods = _all_at_once(around, terms)
    found = np.ones(len(table), np.bool_)
    labelled = found.copy()
    anywhere = False
    for key in dict.fromkeys(term.topology_key for term in terms):
        counts = _where(table, key, pods)
        anywhere |= bool(counts.any())
        found &= counts > 0
        labelled &= _has(table, key)
    if anywhere or not _matches_itself(around, demand):
        return found
    return labelled


def _all_at_once(around: Surroundings, terms: tuple[Term, ...]) -> Mapping[NodeName, int]:
    """On which nodes pods are of which all terms speak."""
    # Whatever the domains: of whom they speak.
    different = [*{(t.selector, t.namespaces, t.namespace_selector): t for t in terms}.values()]
    if len(different) == 1:
        return around.pods.on_nodes(different[0], around.namespaces)
    return around.pods.all_at_once(different, around.namespaces)


def _matches_itself(around: Surroundings, demand: Demand) -> bool:
    namespace = demand.model.ref.namespace
    labels = around.labels_of(namespace)
    return all(term.matches(namespace, labels, demand.labels) for term in demand.neighbours.affinity)


def _kept_away(table: NodeTable, around: Surroundings, demand: Demand) -> Bools | None:
    """Where a pod is that wants nobody like this one in its domain."""
    namespace = demand.model.ref.namespace
    labels = around.labels_of(namespace)
    found = [
        (term.topology_key, nodes)
        for term, nodes in around.pods.terms_against(namespace, demand.labels)
        if table.has_label(term.topology_key) and term.matches(namespace, labels, demand.labels)
    ]
    return _beside(table, found) if found else None


def _too_many(
    table: NodeTable, around: Surroundings, demand: Demand, spread: Spread, counted: Bools
) -> Bools:
    """Nodes where the pod would raise its domain more than max_skew above the emptiest one."""
    column = table.label(spread.topology_key)
    codes = column.codes[: len(table)]
    namespace = demand.model.ref.namespace
    # An empty selector counts nobody who is there, as in countPodsMatchSelector (common.go).
    counted_by = spread.selector if spread.selector and spread.selector.requirements else None
    on = _counts_by_node(table, around.pods.staying(namespace, counted_by))
    by_domain = np.bincount(codes, weights=np.where(counted, on, 0), minlength=len(column.values))
    domains = np.unique(codes[counted])
    itself = int(spread.selector is not None and spread.selector.matches(demand.labels))
    if not len(domains):
        return codes == 0
    least = 0 if len(domains) < spread.min_domains else by_domain[domains].min()
    too_many: Bools = by_domain[codes] + itself - least > spread.max_skew
    return too_many | (codes == 0)


def _on_nodes(table: NodeTable, around: Surroundings, term: Term) -> Mapping[NodeName, int]:
    """Where the pods are that a term speaks of; nowhere that matters, where no node is in any of its domains."""
    if not table.has_label(term.topology_key):
        return {}
    return around.pods.on_nodes(term, around.namespaces)


def _beside(table: NodeTable, apart: Iterable[tuple[str, Mapping[NodeName, int]]]) -> Bools:
    """Nodes that are in one domain, of the label named, with one of these nodes. One look for each label, however
    many terms there are."""
    by_key: dict[str, set[NodeName]] = {}
    for key, nodes in apart:
        by_key.setdefault(key, set()).update(nodes)
    beside = np.zeros(len(table), np.bool_)
    for key, together in by_key.items():
        if together:
            beside |= _where(table, key, dict.fromkeys(together, 1)) > 0
    return beside


def _where(table: NodeTable, key: str, nodes: Mapping[NodeName, int]) -> Ints:
    """For each node how many of these pods' nodes share its domain; 0 outside every domain."""
    if not nodes or not table.has_label(key):
        return np.zeros(len(table), np.int64)
    return _by_domain(table, key, _counts_by_node(table, nodes)).astype(np.int64)


def _by_domain(table: NodeTable, key: str, on: Ints) -> Floats:
    """The sum of its domain's figures for each node; 0 outside every domain."""
    column = table.label(key)
    codes = column.codes[: len(table)]
    by_domain = np.bincount(codes, weights=on, minlength=len(column.values))
    by_domain[0] = 0
    found: Floats = by_domain[codes]
    return found


def _counts_by_node(table: NodeTable, nodes: Mapping[NodeName, int]) -> Ints:
    on = np.zeros(len(table), np.int64)
    row_of = table.row_of
    known = [(row, count) for node, count in nodes.items() if (row := row_of.get(node)) is not None]
    if known:
        rows, counts = zip(*known, strict=True)
        on[list(rows)] = counts
    return on


def _has(table: NodeTable, key: str) -> Bools:
    mask: Bools = table.label(key).codes[: len(table)] != 0
    return mask
