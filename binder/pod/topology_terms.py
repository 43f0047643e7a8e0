"""What a pod asks of the pods around it: affinity, anti-affinity, spread. Values only.

Sources: the API reference of PodAffinityTerm and TopologySpreadConstraint; kube-scheduler's
framework/types.go (AffinityTerm) and podtopologyspread/common.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binder.pod.bounds import within
from binder.pod.selectors import Labels, Requirement, Selector, parse_selector

JsonObject = Mapping[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class Term:
    """Pods of these namespaces that the selector matches, in the domain of one node label.

    `selector` None matches no pod; `namespace_selector` None adds no namespace.
    """

    topology_key: str
    selector: Selector | None
    namespaces: frozenset[str]
    namespace_selector: Selector | None

    def matches(self, namespace: str, namespace_labels: Labels, labels: Labels) -> bool:
        """Whether it speaks of a pod with these labels."""
        is_listed = namespace in self.namespaces
        if self.selector is None or (not is_listed and self.namespace_selector is None):
            return False
        if not self.selector.matches(labels):
            return False
        return is_listed or (
            self.namespace_selector is not None and self.namespace_selector.matches(namespace_labels)
        )

    @property
    def tests(self) -> int:
        """How many there are to `matches` at most."""
        selectors = (self.selector, self.namespace_selector)
        return sum(len(one.requirements) for one in selectors if one is not None)


@dataclass(frozen=True, slots=True)
class Spread:
    """One topology spread constraint, over the pods of the pod's own namespace."""

    topology_key: str
    selector: Selector | None
    max_skew: int
    min_domains: int
    required: bool
    honours_affinity: bool
    honours_taints: bool


@dataclass(frozen=True, slots=True)
class Neighbours:
    """`preferred`: (weight, term), the weight negative for anti-affinity."""

    affinity: tuple[Term, ...] = ()
    anti_affinity: tuple[Term, ...] = ()
    preferred: tuple[tuple[int, Term], ...] = ()
    spread: tuple[Spread, ...] = ()


NONE = Neighbours()
# No pod at all, on the node itself.
ANY_POD_HERE = Term("kubernetes.io/hostname", Selector(()), frozenset(), Selector(()))


def parse_neighbours(pod: JsonObject) -> Neighbours:
    """Read `affinity.podAffinity`, `affinity.podAntiAffinity` and `topologySpreadConstraints`."""
    spec = pod["spec"]
    affinity = spec.get("affinity") or {}
    near, apart = affinity.get("podAffinity") or {}, affinity.get("podAntiAffinity") or {}
    spread = spec.get("topologySpreadConstraints") or ()
    if not near and not apart and not spread:
        return NONE
    return Neighbours(
        affinity=tuple(_term(term, pod) for term in near.get(_REQUIRED) or ()),
        anti_affinity=required_anti_affinity(pod),
        preferred=(
            *((p["weight"], _term(p["podAffinityTerm"], pod)) for p in near.get(_PREFERRED) or ()),
            *((-p["weight"], _term(p["podAffinityTerm"], pod)) for p in apart.get(_PREFERRED) or ()),
        ),
        spread=tuple(_spread(constraint, pod) for constraint in spread),
    )


def required_anti_affinity(pod: JsonObject) -> tuple[Term, ...]:
    """The terms that bind in both directions: a pod that is placed keeps others away, too.

    Of more terms than the bounds allow those at the beginning are honoured as they are. All others together keep
    everybody off the pod's own node, and nothing else: what they say is not looked at.
    """
    apart = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    asked = apart.get(_REQUIRED) or ()
    terms = tuple(_term(term, pod) for term in within(asked))
    return terms if len(terms) == len(asked) else (*terms, ANY_POD_HERE)


def _term(term: JsonObject, pod: JsonObject) -> Term:
    """Without namespaces and namespaceSelector it speaks of the pod's own namespace."""
    meta = pod["metadata"]
    namespaces = frozenset(term.get("namespaces") or ())
    among = parse_selector(term.get("namespaceSelector"))
    if not namespaces and among is None:
        namespaces = frozenset({meta.get("namespace", "")})
    selector = parse_selector(term.get("labelSelector"))
    if selector is not None:
        # The API server has merged these into the selector already; twice is once.
        selector = selector.and_also(
            *_alike(term.get("matchLabelKeys"), "In", meta),
            *_alike(term.get("mismatchLabelKeys"), "NotIn", meta),
        )
    return Term(term["topologyKey"], selector, namespaces, among)


def _spread(constraint: JsonObject, pod: JsonObject) -> Spread:
    selector = parse_selector(constraint.get("labelSelector"))
    if selector is not None:
        selector = selector.and_also(*_alike(constraint.get("matchLabelKeys"), "In", pod["metadata"]))
    return Spread(
        topology_key=constraint["topologyKey"],
        selector=selector,
        max_skew=constraint.get("maxSkew") or 1,
        min_domains=constraint.get("minDomains") or 1,
        required=constraint.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule",
        honours_affinity=constraint.get("nodeAffinityPolicy", "Honor") == "Honor",
        honours_taints=constraint.get("nodeTaintsPolicy", "Ignore") == "Honor",
    )


def _alike(keys: list[str] | None, operator: str, meta: JsonObject) -> tuple[Requirement, ...]:
    """Keys whose value the pod itself gives; those that it lacks are ignored."""
    labels = meta.get("labels") or {}
    return tuple(Requirement(key, operator, frozenset({labels[key]})) for key in keys or () if key in labels)
