"""Pods in the domains of a node label, over all nodes at once: what rules between pods count with."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from berth.contract.ids import NodeName
from binder.cache.cluster_facts import ClusterEvent
from binder.cache.column import Bools, Ints
from binder.cache.pod_index import Neighbour
from binder.cache.table import Floats, NodeTable
from binder.pod.demand import Demand
from binder.pod.topology_terms import Term
from binder.rules.rule import Context, NeighbourRule


class DomainRule(NeighbourRule):
    """One that pods elsewhere may lift, by coming or going."""

    def lifted_by(
        self, context: Context, demand: Demand, before: Neighbour | None, after: Neighbour | None
    ) -> bool:
        """Whether what has happened to one pod may lift the rule. None while it is not there."""
        raise NotImplementedError

    def woken_by(self, context: Context, demand: Demand, event: ClusterEvent) -> bool:
        if event.moved or event.pods is None or _is_renamed(demand, event):
            return True
        return any(self.lifted_by(context, demand, before, after) for before, after in event.pods)


def _is_renamed(demand: Demand, event: ClusterEvent) -> bool:
    """A namespace has other labels: the pod's own one, or one that its terms may choose by them."""
    near = demand.neighbours
    chosen = any(t.namespace_selector is not None for t in (*near.affinity, *near.anti_affinity))
    return bool(event.namespaces) and (chosen or demand.model.ref.namespace in event.namespaces)


def speaks_of(context: Context, terms: Iterable[Term], pod: Neighbour | None) -> bool:
    """Whether one of the terms means this pod."""
    return pod is not None and any(
        term.matches(pod.namespace, context.facts.labels_of(pod.namespace), pod.labels) for term in terms
    )


def means_itself(context: Context, demand: Demand, term: Term) -> bool:
    namespace = demand.model.ref.namespace
    return term.matches(namespace, context.facts.labels_of(namespace), demand.labels)


def on_nodes(context: Context, term: Term) -> Mapping[NodeName, int]:
    """Where the pods are that a term speaks of; nowhere that matters, where no node is in any of its domains."""
    if not context.table.has_label(term.topology_key):
        return {}
    return context.pods.on_nodes(term, context.facts.namespaces)


def together_with(table: NodeTable, apart: Iterable[tuple[str, Mapping[NodeName, int]]]) -> Bools:
    """Nodes that are in one domain, of the label named, with one of these nodes. One look for each label, however
    many terms there are."""
    by_key: dict[str, set[NodeName]] = {}
    for key, nodes in apart:
        by_key.setdefault(key, set()).update(nodes)
    found = np.zeros(len(table), np.bool_)
    for key, nodes_of_key in by_key.items():
        if nodes_of_key:
            found |= shared_domain(table, key, dict.fromkeys(nodes_of_key, 1)) > 0
    return found


def shared_domain(table: NodeTable, key: str, nodes: Mapping[NodeName, int]) -> Ints:
    """For each node how many of these pods' nodes share its domain; 0 outside every domain."""
    if not nodes or not table.has_label(key):
        return np.zeros(len(table), np.int64)
    return by_domain(table, key, counts_by_node(table, nodes)).astype(np.int64)


def by_domain(table: NodeTable, key: str, on: Ints) -> Floats:
    """The sum of its domain's figures for each node; 0 outside every domain."""
    column = table.label(key)
    codes = column.codes[: len(table)]
    sums = np.bincount(codes, weights=on, minlength=len(column.values))
    sums[0] = 0
    found: Floats = sums[codes]
    return found


def counts_by_node(table: NodeTable, nodes: Mapping[NodeName, int]) -> Ints:
    on = np.zeros(len(table), np.int64)
    row_of = table.row_of
    known = [(row, count) for node, count in nodes.items() if (row := row_of.get(node)) is not None]
    if known:
        rows, counts = zip(*known, strict=True)
        on[list(rows)] = counts
    return on


def is_labelled(table: NodeTable, key: str) -> Bools:
    mask: Bools = table.label(key).codes[: len(table)] != 0
    return mask


def terms_against(context: Context, demand: Demand) -> Iterator[tuple[Term, Mapping[NodeName, int]]]:
    """Anti-affinity of other pods that could mean this one, and where those pods are."""
    return context.pods.terms_against(demand.model.ref.namespace, demand.labels)
