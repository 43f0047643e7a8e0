"""Affinity and anti-affinity between pods.

Semantics of kube-scheduler 1.36: plugins/interpodaffinity/filtering.go.
"""

from collections.abc import Mapping

import numpy as np

from berth.contract.ids import NodeName
from binder.cache.column import Bools, Ints
from binder.cache.pod_index import Neighbour
from binder.cache.table import Floats
from binder.pod.demand import Demand
from binder.pod.topology_terms import Term
from binder.rules.domains import (
    DomainRule,
    by_domain,
    counts_by_node,
    is_labelled,
    means_itself,
    on_nodes,
    shared_domain,
    speaks_of,
    terms_against,
    together_with,
)
from binder.rules.rule import UNBOUNDED, Context, Cure


class PodAffinityMismatch(DomainRule):
    """Company that the pod requires is not in the node's domain."""

    name = "PodAffinityMismatch"
    cures = frozenset({Cure.NEIGHBOURS})

    def concerns(self, context: Context, demand: Demand) -> bool:
        return bool(demand.neighbours.affinity)

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        """Pods that match all terms at once count; while there are none the first of a group that wants
        to be together may go anywhere where all the labels are."""
        terms, table = demand.neighbours.affinity, context.table
        if not terms:
            return None
        pods = _all_at_once(context, terms)
        found = np.ones(len(table), np.bool_)
        labelled = found.copy()
        anywhere = False
        for key in dict.fromkeys(term.topology_key for term in terms):
            counts = shared_domain(table, key, pods)
            anywhere |= bool(counts.any())
            found &= counts > 0
            labelled &= is_labelled(table, key)
        if anywhere or not all(means_itself(context, demand, term) for term in terms):
            return ~found
        return ~labelled

    def preference(self, context: Context, demand: Demand) -> Floats | None:
        """Of preferred affinity and anti-affinity together."""
        table = context.table
        weights: dict[str, Ints] = {}
        for weight, term in demand.neighbours.preferred:
            on = weight * counts_by_node(table, on_nodes(context, term))
            weights[term.topology_key] = weights.get(term.topology_key, 0) + on
        return (
            sum((by_domain(table, key, on) for key, on in weights.items()), np.zeros(len(table)))
            if weights
            else None
        )

    def lifted_by(
        self, context: Context, demand: Demand, before: Neighbour | None, after: Neighbour | None
    ) -> bool:
        """Company helps when it comes, or when the last of it goes from one who is company to itself."""
        terms = demand.neighbours.affinity
        return speaks_of(context, terms, before) or speaks_of(context, terms, after)


class PodAntiAffinity(DomainRule):
    """A pod that this one must keep away from is in the node's domain."""

    name = "PodAntiAffinity"
    cures = frozenset({Cure.NEIGHBOURS, Cure.POD_ENDS})

    def concerns(self, context: Context, demand: Demand) -> bool:
        return bool(demand.neighbours.anti_affinity)

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        terms = demand.neighbours.anti_affinity
        if not terms:
            return None
        apart = ((term.topology_key, on_nodes(context, term)) for term in terms)
        return together_with(context.table, apart)

    def lifted_by(
        self, context: Context, demand: Demand, before: Neighbour | None, after: Neighbour | None
    ) -> bool:
        return speaks_of(context, demand.neighbours.anti_affinity, before)

    def most_replicas(self, context: Context, demand: Demand, per_node: Ints) -> int:
        """One a domain, where replicas keep away from each other."""
        most = UNBOUNDED
        for term in demand.neighbours.anti_affinity:
            if means_itself(context, demand, term):
                domains = context.table.label(term.topology_key).codes[: len(per_node)]
                inside = domains[(per_node > 0) & (domains > 0)]
                most = min(most, len(np.unique(inside)) + int(per_node[domains == 0].sum()))
        return most


class ExistingPodAntiAffinity(DomainRule):
    """A pod in the node's domain excludes pods like this one there."""

    name = "ExistingPodAntiAffinity"
    cures = frozenset({Cure.NEIGHBOURS, Cure.POD_ENDS})

    def concerns(self, context: Context, demand: Demand) -> bool:
        return any(True for _ in terms_against(context, demand))

    def fails(self, context: Context, demand: Demand) -> Bools | None:
        table = context.table
        found = [
            (term.topology_key, nodes)
            for term, nodes in terms_against(context, demand)
            if table.has_label(term.topology_key) and means_itself(context, demand, term)
        ]
        return together_with(table, found) if found else None

    def lifted_by(
        self, context: Context, demand: Demand, before: Neighbour | None, after: Neighbour | None
    ) -> bool:
        return before is not None and any(means_itself(context, demand, term) for term in before.keeps_away)


def _all_at_once(context: Context, terms: tuple[Term, ...]) -> Mapping[NodeName, int]:
    """On which nodes pods are of which all terms speak."""
    # Whatever the domains: of whom they speak.
    different = [*{(t.selector, t.namespaces, t.namespace_selector): t for t in terms}.values()]
    if len(different) == 1:
        return context.pods.on_nodes(different[0], context.facts.namespaces)
    return context.pods.all_at_once(different, context.facts.namespaces)
