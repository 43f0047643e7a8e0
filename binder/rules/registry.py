"""All rules, the first the one that is a node's reason where it fails several; and what follows from them.

A row's code is the number of the first rule that it fails, 0 where it fails none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from binder.cache.column import Bools, Ints
from binder.cache.table import Floats
from binder.pod.demand import Demand
from binder.rules.code import CodeNotAllowed, CodeOfAnotherNamespace, ModelsOfOtherNamespaces
from binder.rules.gpu import (
    GPUCountInsufficient,
    GPUFactsUnknown,
    GPUMemoryInsufficient,
    GPUProductMismatch,
    GPUUnhealthy,
    NoGPU,
)
from binder.rules.host_ports import HostPortTaken
from binder.rules.load_failures import ExcludedAfterLoadFailure
from binder.rules.model_id import ModelAlreadyOnNode
from binder.rules.node_selection import NodeAffinityMismatch, NodeSelectorMismatch
from binder.rules.pod_affinity import ExistingPodAntiAffinity, PodAffinityMismatch, PodAntiAffinity
from binder.rules.quarantine import ModelQuarantined
from binder.rules.report import (
    MissingCapabilities,
    NoNodeReport,
    StaleNodeFacts,
    TritonNotReady,
    UnreadableNodeReport,
    WrongServer,
)
from binder.rules.resources import ResourceInsufficient, TooManyPods
from binder.rules.rule import (
    Context,
    Cure,
    NeighbourRule,
    NewNode,
    PairRule,
    PodRule,
    Reason,
    Rule,
    ShapeQuery,
    ShapeRule,
)
from binder.rules.spread import TopologySpread
from binder.rules.taints import NodeUnschedulable, TaintNotTolerated
from binder.rules.unsupported import UnsupportedConstraint
from binder.rules.volumes import (
    VolumeClaimNotBound,
    VolumeClaimNotFound,
    VolumeInUse,
    VolumeNodeAffinityConflict,
)

Codes = NDArray[np.int8]

FITS = 0
_T = TypeVar("_T", Ints, Floats)


class Registry:
    """Rules in the order of their priority. Everything that is known by kind is derived from them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules: Sequence[Rule] = tuple(rules)
        self.codes = {rule.name: code for code, rule in enumerate(self.rules, start=1)}
        numbered = [(self.codes[rule.name], rule) for rule in self.rules]
        self._of_pods = [rule for rule in self.rules if isinstance(rule, PodRule)]
        shapes = [(code, rule) for code, rule in numbered if isinstance(rule, ShapeRule)]
        self._moving = [(code, rule) for code, rule in shapes if rule.moves]
        self._changing = [(code, rule) for code, rule in shapes if not rule.moves]
        self._pairs = [(code, rule) for code, rule in numbered if isinstance(rule, PairRule)]
        # What most rules do not say is not asked of them.
        self._shape_preferring = [rule for _, rule in shapes if _says(rule, "preference", ShapeRule)]
        self._preferring = [rule for _, rule in self._pairs if _says(rule, "preference", PairRule)]
        self._favouring = [rule for _, rule in self._pairs if _says(rule, "favours", PairRule)]
        self.cured_by = {cure: self.where(partial(_is_cured_by, cure)) for cure in Cure}
        self.by_new_node = {new: self.where(partial(_asks_for, new)) for new in NewNode}
        self.clashing = self.where(lambda rule: _says(rule, "clashes", Rule))
        self.neighbours = [rule for rule in self.rules if isinstance(rule, NeighbourRule)]

    def rule(self, code: int) -> Rule:
        return self.rules[code - 1]

    def named(self, name: str) -> Rule:
        return self.rule(self.codes[name])

    def names(self, codes: Codes) -> set[str]:
        """Of all rules that some of these rows fail."""
        return {self.rule(code).name for code in np.unique(codes).tolist() if code != FITS}

    def counts(self, codes: Codes) -> Counter[str]:
        """How many of these rows each rule refuses."""
        found = np.bincount(codes, minlength=FITS + 1).tolist()
        return Counter({self.rule(code).name: n for code, n in enumerate(found) if n and code != FITS})

    def where(self, holds: Callable[[Rule], bool]) -> Bools:
        """For each code whether this holds of its rule: an index for rows' codes."""
        return np.array([False, *map(holds, self.rules)])

    def refuses(self, context: Context, demand: Demand) -> Reason | None:
        """What no node can help."""
        for rule in self._of_pods:
            if detail := rule.refuses(context, demand):
                return Reason(rule.name, detail)
        return None

    def moving(self, query: ShapeQuery) -> Codes:
        """By what only people change: labels, taints, cordon; and what the node serves."""
        return first_failing(len(query), ((code, rule.fails(query)) for code, rule in self._moving))

    def shape(self, query: ShapeQuery, moving: Codes | None = None) -> Codes:
        """For each row the first rule that any pod of the shape fails. `moving`: as far as that is known."""
        moving = self.moving(query) if moving is None else moving
        changing = ((code, rule.fails(query)) for code, rule in self._changing)
        return first_failing(len(moving), changing, moving)

    def fresh(self, context: Context, demand: Demand, query: ShapeQuery) -> Codes:
        """Of nodes that do not exist yet, as far as that depends on the two alone."""
        fails = (
            (code, None if (found := rule.fails(context, demand)) is None else found[query.rows])
            for code, rule in self._pairs
            if rule.of_fresh_nodes
        )
        return first_failing(len(query), fails, self.shape(query))

    def pairs(
        self, context: Context, demand: Demand, among: Bools | None = None
    ) -> Iterator[tuple[int, Bools]]:
        """What depends on who the pod is and on the time: codes, and which of all rows fail. `among`: of which codes."""
        for code, rule in self._pairs:
            if (among is None or among[code]) and (fails := rule.fails(context, demand)) is not None:
                yield code, fails

    def shape_preference(self, query: ShapeQuery) -> Ints | None:
        found = [rule.preference(query) for rule in self._shape_preferring]
        return sum_of(one for one in found if one is not None)

    def preference(self, context: Context, demand: Demand) -> Floats | None:
        """What the pod would rather have around it."""
        found = [rule.preference(context, demand) for rule in self._preferring]
        return sum_of(one for one in found if one is not None)

    def favoured(self, context: Context, demand: Demand) -> Iterator[Bools]:
        for rule in self._favouring:
            if (better := rule.favours(context, demand)) is not None:
                yield better


def first_failing(rows: int, fails: Iterable[tuple[int, Bools | None]], codes: Codes | None = None) -> Codes:
    """The codes with these rules added: the earliest stands."""
    # One less each, in 8 bits without a sign: FITS is the largest then, and the earliest rule the least.
    worst = np.full(rows, 255, np.uint8) if codes is None else codes.view(np.uint8) - np.uint8(1)
    for code, refuses in fails:
        if refuses is not None:
            np.minimum(worst, np.uint8(code - 1), out=worst, where=refuses)
    return (worst + np.uint8(1)).view(np.int8)


def _is_cured_by(cure: Cure, rule: Rule) -> bool:
    return cure in rule.cures


def _asks_for(new: NewNode, rule: Rule) -> bool:
    return rule.new_node is new


def _says(rule: Rule, method: str, base: type[Rule]) -> bool:
    return getattr(type(rule), method) is not getattr(base, method)


def sum_of(figures: Iterable[_T]) -> _T | None:
    total: _T | None = None
    for figure in figures:
        total = figure if total is None else total + figure
    return total


RULES = Registry(
    (
        UnsupportedConstraint(),
        ModelQuarantined(),
        VolumeClaimNotFound(),
        VolumeClaimNotBound(),
        VolumeInUse(),
        NodeUnschedulable(),
        TaintNotTolerated(),
        NodeSelectorMismatch(),
        NodeAffinityMismatch(),
        NoNodeReport(),
        UnreadableNodeReport(),
        TritonNotReady(),
        WrongServer(),
        MissingCapabilities(),
        CodeNotAllowed(),
        StaleNodeFacts(),
        ExcludedAfterLoadFailure(),
        VolumeNodeAffinityConflict(),
        ModelAlreadyOnNode(),
        CodeOfAnotherNamespace(),
        ModelsOfOtherNamespaces(),
        HostPortTaken(),
        ResourceInsufficient(),
        TooManyPods(),
        NoGPU(),
        GPUProductMismatch(),
        GPUCountInsufficient(),
        GPUUnhealthy(),
        GPUFactsUnknown(),
        GPUMemoryInsufficient(),
        PodAffinityMismatch(),
        PodAntiAffinity(),
        ExistingPodAntiAffinity(),
        TopologySpread(),
    )
)
