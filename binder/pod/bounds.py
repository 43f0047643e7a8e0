"""How many of each thing one pod may write that the binder has to look at. Pure.

An API server takes what fits into a megabyte: thousands of terms, keys, values. A decision's work grows with them, and
it holds up everybody's. A pod that waits and goes beyond is refused, before anything is made of it; of a pod that has
a node already (bound by any scheduler) so many terms are honoured, and for the rest its node is kept free (`neighbours`).
So it is with many pods of one namespace, each within the bounds (`pod_index`).

The figures are several times what people write, and little enough that a pod which uses one of them to the full
costs a few plain decisions.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from berth.contract.errors import InvalidPod

JsonObject = Mapping[str, Any]

MOST_TERMS: Final = 64  # of affinity and anti-affinity between pods, whatever kind; of node affinity
MOST_WIDE: Final = 4  # of the terms between pods those that speak of other namespaces, too
MOST_TESTS: Final = 128  # keys that selectors ask about, in all terms together
MOST_VALUES: Final = 2048  # values and namespaces that are listed, in all terms together
MOST_SPREADS: Final = 16
MOST_NODE_LABELS: Final = 64
MOST_TOLERATIONS: Final = 128
MOST_CONTAINERS: Final = 64
MOST_RESOURCES: Final = 256  # entries in requests and limits, of all containers
MOST_PORTS: Final = 128
MOST_VOLUMES: Final = 256
MOST_LABELS: Final = 128
# Of the anti-affinity terms of all pods of one namespace those that one decision looks at, and their tests.
MOST_MET_TERMS, MOST_MET_TESTS = 256, 2048

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_RESOURCE_LISTS = ("requests", "limits")


def require_bounded(pod: JsonObject) -> None:
    """Raises InvalidPod, which names the first thing of which there are too many."""
    for what, count, most in _counts(pod):
        if count > most:
            raise InvalidPod(f"{what}: {count}; the binder takes {most} at most")


def within(terms: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """The first of a pod's terms, as many as the bounds allow."""
    tests = values = wide = 0
    for number, term in enumerate(terms):
        tests, values = tests + _tests_of(term), values + _values_of(term)
        wide += _is_wide(term)
        if number >= MOST_TERMS or tests > MOST_TESTS or values > MOST_VALUES or wide > MOST_WIDE:
            return
        yield term


def _counts(pod: JsonObject) -> Iterator[tuple[str, int, int]]:
    """What there is, how many of it, and how many there may be."""
    spec, labels = pod["spec"], pod["metadata"].get("labels") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    yield "metadata.labels", len(labels), MOST_LABELS
    yield "spec.nodeSelector keys", len(spec.get("nodeSelector") or {}), MOST_NODE_LABELS
    yield "spec.tolerations", len(spec.get("tolerations") or ()), MOST_TOLERATIONS
    yield "spec.volumes", len(spec.get("volumes") or ()), MOST_VOLUMES
    yield "containers and initContainers", len(containers), MOST_CONTAINERS
    yield "ports of all containers", sum(len(one.get("ports") or ()) for one in containers), MOST_PORTS
    yield "requested resources", sum(map(len, _resource_lists(spec, containers))), MOST_RESOURCES
    yield from _counts_of_affinity(spec.get("affinity") or {})
    spreads = spec.get("topologySpreadConstraints") or ()
    yield "spec.topologySpreadConstraints", len(spreads), MOST_SPREADS
    yield from _sizes("spec.topologySpreadConstraints", spreads)


def _counts_of_affinity(affinity: JsonObject) -> Iterator[tuple[str, int, int]]:
    node = affinity.get("nodeAffinity") or {}
    terms = [
        *((node.get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()),
        *(one.get("preference") or {} for one in node.get(_PREFERRED) or ()),
    ]
    yield "terms of spec.affinity.nodeAffinity", len(terms), MOST_TERMS
    yield from _sizes("spec.affinity.nodeAffinity", terms)
    kinds = [affinity.get(kind) or {} for kind in ("podAffinity", "podAntiAffinity")]
    among = [
        *chain.from_iterable(kind.get(_REQUIRED) or () for kind in kinds),
        *(one.get("podAffinityTerm") or {} for kind in kinds for one in kind.get(_PREFERRED) or ()),
    ]
    yield "terms of spec.affinity.podAffinity and podAntiAffinity", len(among), MOST_TERMS
    yield "of them terms with namespaces or a namespaceSelector", sum(map(_is_wide, among)), MOST_WIDE
    yield from _sizes("spec.affinity.podAffinity and podAntiAffinity", among)


def _sizes(where: str, terms: Iterable[JsonObject]) -> Iterator[tuple[str, int, int]]:
    yield f"keys asked about in {where}", sum(map(_tests_of, terms)), MOST_TESTS
    yield f"values and namespaces listed in {where}", sum(map(_values_of, terms)), MOST_VALUES


def _tests_of(term: JsonObject) -> int:
    """Of a term of any kind: node selector term, term between pods, spread constraint."""
    keys = (len(term.get(name) or ()) for name in ("matchLabelKeys", "mismatchLabelKeys", "matchFields"))
    selectors = (
        len(one.get("matchLabels") or ()) + len(one.get("matchExpressions") or ()) for one in _selectors(term)
    )
    return sum(keys) + sum(selectors)


def _values_of(term: JsonObject) -> int:
    tests = chain(
        term.get("matchFields") or (), *(one.get("matchExpressions") or () for one in _selectors(term))
    )
    return len(term.get("namespaces") or ()) + sum(len(test.get("values") or ()) for test in tests)


def _is_wide(term: JsonObject) -> bool:
    return bool(term.get("namespaces")) or term.get("namespaceSelector") is not None


def _selectors(term: JsonObject) -> tuple[JsonObject, ...]:
    """A node selector term is one itself."""
    return (term, term.get("labelSelector") or {}, term.get("namespaceSelector") or {})


def _resource_lists(spec: JsonObject, containers: Iterable[JsonObject]) -> Iterator[JsonObject]:
    yield spec.get("overhead") or {}
    for one in (spec, *containers):
        resources = one.get("resources") or {}
        yield from (resources.get(name) or {} for name in _RESOURCE_LISTS)
