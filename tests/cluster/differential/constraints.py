"""The kinds of constraints that a pending pod can have. Each adds one to a pod's manifest."""

from collections.abc import Callable

from tests.cluster.differential.draw import (
    EFFECTS,
    GENERATION,
    MARK,
    NAMESPACE_LABELS,
    NODE_LABELS,
    POD_LABELS,
    PRODUCT,
    RACK,
    TAINT_KEYS,
    TOPOLOGY_KEYS,
    ZONE,
    Draw,
    Words,
    expression,
    label_selector,
    labels,
    resources,
)
from tests.cluster.differential.objects import Json, Objects, name_of, namespace_of
from tests.cluster.differential.worlds import FPGA, host_ports, init_containers, required

WAITING_CLAIM, UNUSABLE_CLAIM = "waiting claim", "unusable claim"

Constraint = Callable[[Draw, Json, Objects], None]

_AMOUNTS = {
    "cpu": ("0", "100m", "250500u", "0.5", "900m", "1500m"),
    "memory": ("64Mi", "200M", "400Mi", "1000500m", "1Gi"),
    "ephemeral-storage": ("500Mi", "1G", "5Gi"),
    FPGA: ("0", "1", "2"),
}
_NODE_OPERATORS = ("In", "In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
# The selectors of namespaces that do not match a namespace without labels. With the others kube-scheduler
# 1.36 takes a pod's own terms to mean every namespace (see test_differential, the known defect).
_SAFE_OPERATORS = ("In", "Exists")
_POLICIES = ("Honor", "Ignore")
_SERIES = "example.com/series"


def node_selector(draw: Draw, pod: Json, world: Objects) -> None:
    """Mostly labels that some node has together."""
    free = [node for node in world.nodes if not node["spec"]["taints"]]
    having: dict[str, str] = draw.choice(free)["metadata"]["labels"]
    keys = draw.some([key for key in sorted(having) if key in (ZONE, RACK, PRODUCT, GENERATION, MARK)], 1, 2)
    chosen = {key: having[key] for key in keys}
    pod["spec"]["nodeSelector"] = {**chosen, **({"example.com/nowhere": "yes"} if draw.chance(0.05) else {})}


def node_affinity(draw: Draw, pod: Json, world: Objects) -> None:
    """One to three terms, any of which will do; an empty one matches nothing."""
    terms: list[Json] = [
        {
            "matchExpressions": [
                expression(draw, NODE_LABELS, _NODE_OPERATORS) for _ in range(draw.randint(1, 2))
            ]
        }
        for _ in range(draw.randint(1, 3))
    ]
    if draw.chance(0.15):
        terms[0] = {}
    _add_node_terms(pod, terms)


def match_fields(draw: Draw, pod: Json, world: Objects) -> None:
    """Nodes by their name, alone or with labels; now and then two names at once, which no node has."""
    names = [*(name_of(node) for node in world.nodes), "absent"]
    terms = []
    for _ in range(draw.randint(1, 3)):
        fields = [
            {"key": "metadata.name", "operator": draw.choice(("In", "In", "NotIn")), "values": [name]}
            for name in draw.some(names, 1, 1 if draw.chance(0.8) else 2)
        ]
        term: Json = {"matchFields": fields}
        if draw.chance(0.3):
            term["matchExpressions"] = [expression(draw, NODE_LABELS, _NODE_OPERATORS)]
        terms.append(term)
    _add_node_terms(pod, terms)


def _add_node_terms(pod: Json, terms: list[Json]) -> None:
    affinity = (
        pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", required({"nodeSelectorTerms": []}))
    )
    affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] += terms


def tolerations(draw: Draw, pod: Json, world: Objects) -> None:
    """Lt and Gt are behind a gate that is off in 1.36 (TaintTolerationComparisonOperators)."""
    pod["spec"]["tolerations"] = [_toleration(draw) for _ in range(draw.randint(1, 3))]


def _toleration(draw: Draw) -> Json:
    effect = {"effect": draw.choice(EFFECTS)} if draw.chance(0.5) else {}
    if draw.chance(0.2):
        return {"operator": "Exists", **effect}
    key = draw.choice((*TAINT_KEYS, *TAINT_KEYS, "node.kubernetes.io/unschedulable"))
    if draw.chance(0.4):
        return {"key": key, "operator": "Exists", **effect}
    operator = draw.choice(({}, {"operator": "Equal"}))
    return {"key": key, "value": draw.choice(("", "a", "b")), **operator, **effect}


def requests(draw: Draw, pod: Json, world: Objects) -> None:
    for number in range(draw.randint(1, 2)):
        container = {"name": f"r{number}", "image": "any", "resources": resources(draw, _AMOUNTS, 0.4)}
        pod["spec"]["containers"].append(container)


def init_requests(draw: Draw, pod: Json, world: Objects) -> None:
    pod["spec"]["initContainers"] = init_containers(draw, _AMOUNTS)


def pod_level_requests(draw: Draw, pod: Json, world: Objects) -> None:
    """They replace the sum over the containers, and may not be less than it, so they come out large."""
    amounts: Words = {"cpu": ("7", "8"), "memory": ("4Gi", "8Gi")}
    if "initContainers" not in pod["spec"] and len(pod["spec"]["containers"]) == 1:
        amounts = {"cpu": ("100m", "900m", "1500m"), "memory": ("100Mi", "700Mi", "1500Mi")}
    wanted = labels(draw, amounts, 0.7)
    pod["spec"]["resources"] = {draw.choice(("requests", "limits")): wanted}


def ports(draw: Draw, pod: Json, world: Objects) -> None:
    pod["spec"]["containers"][0]["ports"] = host_ports(draw)
    if draw.chance(0.15):
        pod["spec"]["hostNetwork"] = True


def pod_affinity(draw: Draw, pod: Json, world: Objects) -> None:
    """Mostly to a pod that there is: all terms together must match a single one."""
    liked = draw.choice(world.pods)
    terms = [
        _term_to(draw, liked) if draw.chance(0.6) else _term(draw, world)
        for _ in range(draw.choice((1, 1, 2)))
    ]
    _add_pod_terms(pod, "podAffinity", terms)


def pod_anti_affinity(draw: Draw, pod: Json, world: Objects) -> None:
    _add_pod_terms(pod, "podAntiAffinity", [_term(draw, world) for _ in range(draw.randint(1, 2))])


def self_affinity(draw: Draw, pod: Json, world: Objects) -> None:
    """The first pod of a series that wants to be together: it may go where the topology keys are.

    Unless a term looks elsewhere: then the pod does not match its own terms, and fits nowhere.
    """
    series = {_SERIES: name_of(pod)}
    pod["metadata"]["labels"] |= series
    terms: list[Json] = [
        {"topologyKey": key, "labelSelector": {"matchLabels": series}}
        for key in draw.some(TOPOLOGY_KEYS, 1, 2)
    ]
    if draw.chance(0.2):
        terms[-1]["namespaces"] = [name_of(draw.choice(world.namespaces))]
    if draw.chance(0.1):
        terms[-1]["namespaceSelector"] = {}
    _add_pod_terms(pod, "podAffinity", terms)


def _add_pod_terms(pod: Json, kind: str, terms: list[Json]) -> None:
    block = pod["spec"].setdefault("affinity", {}).setdefault(kind, required([]))
    block["requiredDuringSchedulingIgnoredDuringExecution"] += terms


def _term(draw: Draw, world: Objects) -> Json:
    term: Json = {"topologyKey": draw.choice(TOPOLOGY_KEYS)}
    if not draw.chance(0.04):  # without a selector it matches no pod
        term["labelSelector"] = label_selector(draw, POD_LABELS)
        _add_label_keys(draw, term)
    if draw.chance(0.3):
        term["namespaces"] = [name_of(namespace) for namespace in draw.some(world.namespaces, 1, 2)]
    if draw.chance(0.4):
        term["namespaceSelector"] = label_selector(draw, NAMESPACE_LABELS, _SAFE_OPERATORS)
    return term


def _term_to(draw: Draw, liked: Json) -> Json:
    """A term that this pod matches, but for what label keys may add."""
    own: dict[str, str] = liked["metadata"]["labels"]
    term: Json = {
        "topologyKey": draw.choice(TOPOLOGY_KEYS),
        "labelSelector": {"matchLabels": dict(draw.some([*own.items()], 0, 2))},
        "namespaces": [namespace_of(liked)],
    }
    _add_label_keys(draw, term)
    return term


def _add_label_keys(draw: Draw, term: Json) -> None:
    """Keys that the selector does not name, as validation wants it; the API server merges them into it."""
    free = [key for key in POD_LABELS if key not in _named(term["labelSelector"])]
    if free and draw.chance(0.2):
        term[draw.choice(("matchLabelKeys", "mismatchLabelKeys"))] = [draw.choice(free)]


def _named(selector: Json) -> set[str]:
    """The label keys that a selector speaks of."""
    return {*selector.get("matchLabels", ()), *(e["key"] for e in selector.get("matchExpressions", ()))}


def spread(draw: Draw, pod: Json, world: Objects) -> None:
    """Up to three keys; ScheduleAnyway says nothing about feasibility."""
    constraints = [_spread(draw, key) for key in draw.some(TOPOLOGY_KEYS, 1, draw.choice((1, 2, 3)))]
    pod["spec"]["topologySpreadConstraints"] = constraints


def _spread(draw: Draw, key: str) -> Json:
    constraint: Json = {
        "topologyKey": key,
        "maxSkew": draw.choice((1, 1, 2, 3)),
        "whenUnsatisfiable": "DoNotSchedule" if draw.chance(0.93) else "ScheduleAnyway",
    }
    if not draw.chance(0.06):
        constraint["labelSelector"] = label_selector(draw, POD_LABELS)
        free = [word for word in POD_LABELS if word not in _named(constraint["labelSelector"])]
        if free and draw.chance(0.25):
            constraint["matchLabelKeys"] = draw.some(free, 1, 2)
    if draw.chance(0.25) and constraint["whenUnsatisfiable"] == "DoNotSchedule":
        constraint["minDomains"] = draw.randint(1, 5)
    for policy in ("nodeAffinityPolicy", "nodeTaintsPolicy"):
        if draw.chance(0.4):
            constraint[policy] = draw.choice(_POLICIES)
    return constraint


def bound_claim(draw: Draw, pod: Json, world: Objects) -> None:
    bound = [claim for claim in world.claims if name_of(claim).startswith("bound-")]
    _use(draw, pod, draw.choice(bound))


def waiting_claim(draw: Draw, pod: Json, world: Objects) -> None:
    """Claims whose volume is chosen or made for the node of their first consumer."""
    waiting = [claim for claim in world.claims if name_of(claim).split("-")[0] in _WAITING]
    chosen = draw.choice(waiting)
    _use(draw, pod, chosen)
    if name_of(chosen) == "static-0" and draw.chance(0.6):
        _add_volume(pod, {"name": "second", "persistentVolumeClaim": {"claimName": "static-1"}})


def unusable_claim(draw: Draw, pod: Json, world: Objects) -> None:
    """Claims that fit nowhere: half bound, lost, ending, without a volume, or not there at all."""
    if draw.chance(0.2):
        template = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}
        _add_volume(pod, {"name": "own", "ephemeral": {"volumeClaimTemplate": template}})
        return
    known = ("bound", *_WAITING)
    _use(draw, pod, draw.choice([c for c in world.claims if name_of(c).split("-")[0] not in known]))


_WAITING = ("anywhere", "zonal", "selected", "static")


def _use(draw: Draw, pod: Json, claim: Json) -> None:
    """A claim is found in the pod's own namespace only."""
    if not draw.chance(0.03):
        pod["metadata"]["namespace"] = namespace_of(claim)
    _add_volume(pod, {"name": "data", "persistentVolumeClaim": {"claimName": name_of(claim)}})


def _add_volume(pod: Json, volume: Json) -> None:
    volumes = pod["spec"].setdefault("volumes", [])
    volumes.append({**volume, "name": f"{volume['name']}-{len(volumes)}"})


# With how often each is taken. In the order in which they are added: the pod's level looks at its containers.
CONSTRAINTS: dict[str, tuple[Constraint, int]] = {
    "node selector": (node_selector, 4),
    "node affinity": (node_affinity, 7),
    "match fields": (match_fields, 4),
    "tolerations": (tolerations, 6),
    "requests": (requests, 6),
    "init requests": (init_requests, 4),
    "pod level requests": (pod_level_requests, 3),
    "host ports": (ports, 4),
    "pod affinity": (pod_affinity, 6),
    "pod anti-affinity": (pod_anti_affinity, 6),
    "self affinity": (self_affinity, 3),
    "spread": (spread, 9),
    "bound claim": (bound_claim, 5),
    UNUSABLE_CLAIM: (unusable_claim, 1),
    WAITING_CLAIM: (waiting_claim, 2),
}
