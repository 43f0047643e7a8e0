"""Objects with the largest number of each thing that the API server takes of a tenant.

An object is as large as etcd takes it (`--max-request-bytes`, 1.5 MiB), annotations together 256 KiB
(apimachinery, `TotalAnnotationSizeLimitB`); what is in a pod is bounded by nothing else but for its names' lengths.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

Json = dict[str, Any]

OBJECT_BYTES: Final = 1_450_000
ANNOTATION_BYTES: Final = 256 * 1024 - 1024
_ZONE: Final = "topology.kubernetes.io/zone"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def many(make: Callable[[int], Any], size: int = OBJECT_BYTES) -> list[Any]:
    """As many as are so long in JSON, each counted as one whose number has five digits."""
    return [make(n) for n in range(size // (len(json.dumps(make(99_999), separators=(",", ":"))) + 1))]


def entries(prefix: str = "k", value: str = "", size: int = OBJECT_BYTES) -> dict[str, str]:
    return dict(many(lambda n: (f"{prefix}{n}", value), size))


def _expression(n: int) -> Json:
    return {"key": f"k{n}", "operator": "DoesNotExist"}


def _term(n: int) -> Json:
    """As short as a term can be: an empty selector takes every pod."""
    return {"topologyKey": f"k{n}", "labelSelector": {}}


def _zone_term(n: int) -> Json:
    return {"topologyKey": _ZONE, "labelSelector": {"matchLabels": {"k": str(n)}}}


def _weighted_term(n: int) -> Json:
    return {"weight": 1, "podAffinityTerm": _term(n)}


def _spread(n: int, action: str) -> Json:
    return {"maxSkew": 1, "topologyKey": f"k{n}", "whenUnsatisfiable": action, "labelSelector": {}}


def _node(kind: str, terms: Any) -> Json:
    return {"affinity": {"nodeAffinity": {kind: terms}}}


def _anti(*terms: Json) -> Json:
    return {"affinity": {"podAntiAffinity": {_REQUIRED: list(terms)}}}


def _anti_in_zone(**more: Any) -> Json:
    return _anti({"topologyKey": _ZONE, "labelSelector": {}, **more})


# Of a pod's metadata, or its template's.
METADATA: Final[Mapping[str, Callable[[], Json]]] = {
    "labels": lambda: {"labels": entries()},
    "annotations": lambda: {"annotations": entries(size=ANNOTATION_BYTES)},
    "one annotation": lambda: {"annotations": {"a": "x" * ANNOTATION_BYTES}},
    "finalizers": lambda: {"finalizers": many(lambda n: f"a/{n}")},
    "owners": lambda: {
        "ownerReferences": many(
            lambda n: {"apiVersion": "v1", "kind": "Node", "name": f"n{n}", "uid": f"{n}"}
        )
    },
}
# Of its spec. `containers` come after its own one.
SPEC: Final[Mapping[str, Callable[[], Json]]] = {
    "node terms": lambda: _node(
        _REQUIRED, {"nodeSelectorTerms": many(lambda n: {"matchExpressions": [_expression(n)]})}
    ),
    "node expressions": lambda: _node(
        _REQUIRED, {"nodeSelectorTerms": [{"matchExpressions": many(_expression)}]}
    ),
    "node values": lambda: _node(
        _REQUIRED,
        {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "k", "operator": "NotIn", "values": many(str)}]}
            ]
        },
    ),
    "preferred node terms": lambda: _node(
        _PREFERRED, many(lambda n: {"weight": 1, "preference": {"matchExpressions": [_expression(n)]}})
    ),
    "pod terms": lambda: {"affinity": {"podAffinity": {_REQUIRED: many(_term)}}},
    "pod terms of one key": lambda: {"affinity": {"podAffinity": {_REQUIRED: many(_zone_term)}}},
    "preferred pod terms": lambda: {"affinity": {"podAffinity": {_PREFERRED: many(_weighted_term)}}},
    "anti terms": lambda: _anti(*many(_term)),
    "anti terms of one key": lambda: _anti(*many(_zone_term)),
    "preferred anti terms": lambda: {"affinity": {"podAntiAffinity": {_PREFERRED: many(_weighted_term)}}},
    "anti expressions": lambda: _anti_in_zone(labelSelector={"matchExpressions": many(_expression)}),
    "anti namespaces": lambda: _anti_in_zone(namespaces=many(lambda n: f"n{n}")),
    "anti namespace expressions": lambda: _anti_in_zone(
        namespaceSelector={"matchExpressions": many(_expression)}
    ),
    "anti label keys": lambda: _anti_in_zone(matchLabelKeys=many(lambda n: f"k{n}")),
    "spread constraints": lambda: {"topologySpreadConstraints": many(lambda n: _spread(n, "DoNotSchedule"))},
    "soft spread constraints": lambda: {
        "topologySpreadConstraints": many(lambda n: _spread(n, "ScheduleAnyway"))
    },
    "node selector": lambda: {"nodeSelector": entries()},
    "tolerations": lambda: {"tolerations": many(lambda n: {"key": f"k{n}", "operator": "Exists"})},
    "scheduling gates": lambda: {"schedulingGates": many(lambda n: {"name": f"g{n}"})},
    "readiness gates": lambda: {"readinessGates": many(lambda n: {"conditionType": f"g{n}"})},
    "volumes": lambda: {"volumes": many(lambda n: {"name": f"v{n}", "emptyDir": {}})},
    "claims": lambda: {
        "volumes": many(lambda n: {"name": f"v{n}", "persistentVolumeClaim": {"claimName": f"c{n}"}})
    },
    "resource claims": lambda: {
        "resourceClaims": many(lambda n: {"name": f"r{n}", "resourceClaimName": "c"})
    },
    "containers": lambda: {"containers": many(lambda n: {"name": f"c{n}", "image": "i"})},
    "containers with memory": lambda: {
        "containers": many(lambda n: {"name": f"c{n}", "resources": {"limits": {"memory": "1"}}})
    },
    "init containers": lambda: {"initContainers": many(lambda n: {"name": f"c{n}", "image": "i"})},
    "sidecars": lambda: {"initContainers": many(lambda n: {"name": f"c{n}", "restartPolicy": "Always"})},
}
# Of its own container.
CONTAINER: Final[Mapping[str, Callable[[], Json]]] = {
    "resources": lambda: {"resources": {"limits": entries("a/r", "1")}},
    "arguments": lambda: {"args": ["proxy", *many(lambda n: f"--a{n}")]},
    "arguments that refer": lambda: {"args": ["proxy", "$(X)" * (OBJECT_BYTES // 4)]},
    "variables": lambda: {"args": ["proxy"], "env": many(lambda n: {"name": f"V{n}"})},
    "variables that refer": lambda: {
        "args": ["proxy"],
        "env": many(lambda n: {"name": f"V{n}", "value": f"$(V{n - 1})$(V{n - 1})xx"}),
    },
    "ports": lambda: {"ports": many(lambda n: {"name": f"p{n}", "containerPort": n % 65535 + 1})},
    "host ports": lambda: {"ports": many(lambda n: {"containerPort": 1, "hostPort": n % 65535 + 1})},
}
THINGS: Final = (*METADATA, *SPEC, *CONTAINER)


def with_most(thing: str, plain: Json) -> Json:
    """The plain pod, which has a container, with as many as it may have of one of `THINGS`."""
    meta, spec = plain["metadata"], plain["spec"]
    if thing in METADATA:
        more = METADATA[thing]()
        both = {
            key: {**(meta.get(key) or {}), **value} for key, value in more.items() if isinstance(value, dict)
        }
        return {**plain, "metadata": {**meta, **more, **both}}
    own = dict(spec["containers"][0])
    if thing in CONTAINER:
        own |= CONTAINER[thing]()
        return {**plain, "spec": {**spec, "containers": [own, *spec["containers"][1:]]}}
    more = SPEC[thing]()
    return {**plain, "spec": {**spec, **more, "containers": [own, *more.get("containers", ())]}}
