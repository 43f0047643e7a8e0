"""Storage classes, volumes and claims of a world: bound ones for the most part, and the ways not to be."""

from dataclasses import dataclass, field

from tests.cluster.differential.draw import (
    GENERATION,
    HOSTNAME,
    NODE_LABELS,
    RACK,
    ZONE,
    ZONES,
    Draw,
    expression,
)
from tests.cluster.differential.objects import Json, name_of

_BOUND = "pv.kubernetes.io/bind-completed"
_SELECTED = "volume.kubernetes.io/selected-node"
_OLD_ZONE = "failure-domain.beta.kubernetes.io/zone"
_FINALIZER = "example.com/hold"
_ENDING = "2026-01-01T00:00:00Z"
_PROVISIONER = "example.com/csi"


@dataclass(slots=True)
class _Store:
    """What has been made so far; `static` volumes wait for a claim."""

    draw: Draw
    seed: int
    namespaces: list[str]
    nodes: list[Json]
    volumes: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)

    def name(self, kind: str) -> str:
        return f"w{self.seed}-{kind}"


def storage(
    draw: Draw, seed: int, namespaces: list[str], nodes: list[Json]
) -> tuple[list[Json], list[Json], list[Json]]:
    """Storage classes, volumes and claims."""
    store = _Store(draw, seed, namespaces, nodes)
    for number in range(8):
        _bound(store, f"bound-{number}")
    _broken(store)
    _waiting(store)
    return _classes(store), store.volumes, store.claims


def _classes(store: _Store) -> list[Json]:
    topologies = [
        {"matchLabelExpressions": [{"key": ZONE, "values": store.draw.some(ZONES, 1, 2)}]},
        {
            "matchLabelExpressions": [
                {"key": RACK, "values": ["r1", "r2"]},
                {"key": ZONE, "values": [store.draw.choice(ZONES)]},
            ]
        },
    ]
    return [
        _class(store.name("immediate"), mode="Immediate"),
        _class(store.name("static"), provisioner="kubernetes.io/no-provisioner"),
        _class(store.name("anywhere")),
        _class(store.name("zonal"), allowedTopologies=topologies),
    ]


def _class(
    name: str, *, mode: str = "WaitForFirstConsumer", provisioner: str = _PROVISIONER, **more: object
) -> Json:
    return {
        "metadata": {"name": name},
        "provisioner": provisioner,
        "volumeBindingMode": mode,
        **more,
    }


def _bound(store: _Store, name: str) -> None:
    """A claim and its volume, which is tied to nodes by affinity, by its labels, or not at all."""
    draw = store.draw
    mode = draw.weighted({"ReadWriteOnce": 6, "ReadWriteMany": 2, "ReadWriteOncePod": 2})
    claim = _claim(store, name, storage_class="", volume=store.name(name), mode=mode)
    claim["metadata"]["annotations"] = {_BOUND: "yes"}
    claim["status"] = {"phase": "Bound"}
    volume = _volume(store, name, storage_class="", mode=mode)
    volume["spec"]["claimRef"] = {"namespace": claim["metadata"]["namespace"], "name": name}
    volume["status"] = {"phase": "Bound"}
    if draw.chance(0.7):
        volume["spec"]["nodeAffinity"] = {"required": {"nodeSelectorTerms": _terms(store)}}
    if draw.chance(0.35):
        volume["metadata"]["labels"] = _place(draw)


def _place(draw: Draw) -> dict[str, str]:
    """The labels of cloud volumes, with several zones in one value; VolumeZone compares them with nodes'."""
    key = draw.choice((ZONE, _OLD_ZONE))
    return {key: "__".join(draw.some(ZONES, 1, 2))}


def _terms(store: _Store) -> list[Json]:
    draw, terms = store.draw, []
    for _ in range(draw.randint(1, 3)):
        hostnames = [
            node["metadata"]["labels"].get(HOSTNAME, "none") for node in draw.some(store.nodes, 1, 6)
        ]
        fixed = draw.choice(
            (
                {"key": HOSTNAME, "operator": "In", "values": hostnames},
                {"key": ZONE, "operator": "In", "values": draw.some(ZONES, 1, 2)},
                expression(draw, NODE_LABELS, ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")),
                {"key": GENERATION, "operator": "Gt", "values": ["5"]},
            )
        )
        terms.append({"matchExpressions": [fixed]})
    return terms


def _broken(store: _Store) -> None:
    """Claims that no pod can use."""
    _claim(store, "immediate", storage_class=store.name("immediate"))
    half_bound = _claim(store, "half-bound", storage_class="", volume=store.name("half-bound"))
    half_bound["status"] = {"phase": "Pending"}
    lost = _claim(store, "lost", storage_class="", volume=store.name("nowhere"))
    lost["metadata"]["annotations"] = {_BOUND: "yes"}
    lost["status"] = {"phase": "Lost"}
    volumeless = _claim(store, "volumeless", storage_class="", volume=store.name("nowhere"))
    volumeless["metadata"]["annotations"] = {_BOUND: "yes"}
    volumeless["status"] = {"phase": "Bound"}
    _bound(store, "ending")
    store.claims[-1]["metadata"] |= {"finalizers": [_FINALIZER], "deletionTimestamp": _ENDING}


def _waiting(store: _Store) -> None:
    """Claims whose volume is chosen or made when a pod has its node."""
    draw = store.draw
    _claim(store, "anywhere", storage_class=store.name("anywhere"))
    _claim(store, "zonal", storage_class=store.name("zonal"))
    selected = _claim(store, "selected", storage_class=store.name("zonal"))
    selected["metadata"]["annotations"] = {_SELECTED: name_of(draw.choice(store.nodes))}
    # Sizes differ throughout: among equals kube-scheduler takes the one its map happens to give first.
    for number, size in enumerate(draw.sample(range(1, 30), 5)):
        _static_volume(store, number, size)
    for number, size in enumerate((2, 7)):
        _static_claim(store, number, size)


def _static_volume(store: _Store, number: int, size: int) -> None:
    draw = store.draw
    mode = draw.weighted({"ReadWriteOnce": 5, "ReadWriteMany": 1})
    volume = _volume(
        store, f"static-{number}", storage_class=store.name("static"), size=f"{size}Gi", mode=mode
    )
    volume["spec"]["nodeAffinity"] = {"required": {"nodeSelectorTerms": _terms(store)}}
    volume["status"] = {"phase": draw.weighted({"Available": 8, "Released": 1})}
    volume["metadata"]["labels"] = {"speed": draw.choice(("fast", "slow"))}
    if draw.chance(0.15):
        volume["spec"]["volumeMode"] = "Block"


def _static_claim(store: _Store, number: int, size: int) -> None:
    draw = store.draw
    claim = _claim(store, f"static-{number}", storage_class=store.name("static"), size=f"{size}Gi")
    # Both in one namespace, so that one pod can ask for both.
    claim["metadata"]["namespace"] = store.namespaces[0]
    if draw.chance(0.3):
        claim["spec"]["selector"] = {"matchLabels": {"speed": "fast"}}
    if draw.chance(0.2):
        reserved = draw.choice([v for v in store.volumes if "speed" in v["metadata"].get("labels", {})])
        reserved["spec"]["claimRef"] = {"namespace": store.namespaces[0], "name": name_of(claim)}


def _claim(
    store: _Store,
    name: str,
    *,
    storage_class: str,
    volume: str = "",
    size: str = "1Gi",
    mode: str = "ReadWriteOnce",
) -> Json:
    claim: Json = {
        "metadata": {"name": name, "namespace": store.draw.choice(store.namespaces)},
        "spec": {
            "accessModes": [mode],
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage_class,
            **({"volumeName": volume} if volume else {}),
        },
    }
    store.claims.append(claim)
    return claim


def _volume(
    store: _Store,
    name: str,
    *,
    storage_class: str,
    size: str = "1Gi",
    mode: str = "ReadWriteOnce",
) -> Json:
    volume: Json = {
        "metadata": {"name": store.name(name)},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": [mode],
            "hostPath": {"path": "/data"},
            "storageClassName": storage_class,
        },
    }
    store.volumes.append(volume)
    return volume
