"""A random cluster: nodes that differ in all that filters look at, and pods that hold parts of them."""

from typing import Any

from tests.cluster.differential.draw import (
    EFFECTS,
    GENERATION,
    GENERATIONS,
    HOSTNAME,
    MARK,
    NAMESPACE_LABELS,
    POD_LABELS,
    PRODUCT,
    RACK,
    RACKS,
    REGION,
    SET_OPERATORS,
    TAINT_KEYS,
    TOPOLOGY_KEYS,
    ZONE,
    ZONES,
    Draw,
    Words,
    label_selector,
    labels,
    resources,
)
from tests.cluster.differential.objects import Json, Objects, name_of, namespace_of
from tests.cluster.differential.storage import storage
from tests.fakes.objects import GIB, KEYS, gpu, report

FPGA = "example.com/fpga"
# The API server rounds 250500u of cpu up to 251m but keeps a fraction of a byte; kube-scheduler rounds that
# up in the pod's sum.
BOUND_AMOUNTS = {
    "cpu": ("50m", "100m", "0.2", "500m", "250500u"),
    "memory": ("32Mi", "64Mi", "100M", "256Mi", "1000500m"),
    "ephemeral-storage": ("100Mi", "1Gi"),
    FPGA: ("1", "2"),
}
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
# Every pod tolerates this one for a while (admission plugin DefaultTolerationSeconds).
_NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}
_ENDING = "2026-01-01T00:00:00Z"


def world(draw: Draw, seed: int) -> Objects:
    """Names begin with the seed, so that nothing of another world is mistaken for this one's."""
    namespaces = [_namespace(draw, seed, number) for number in range(3)]
    names = [name_of(namespace) for namespace in namespaces]
    nodes = [_node(draw, f"w{seed}n{number:02}") for number in range(draw.randint(12, 24))]
    classes, volumes, claims = storage(draw, seed, names, nodes)
    favourites = draw.some([name_of(node) for node in nodes], 6, 12)
    places = [*favourites, *favourites, *(name_of(node) for node in nodes), f"w{seed}gone"]
    pods = [
        _bound(draw, f"b{number:02}", namespace=draw.choice(names), node=draw.choice(places))
        for number in range(draw.randint(20, 60))
    ]
    _hold(draw, pods, claims)
    _separate(pods)
    return Objects(nodes, namespaces, classes, volumes, claims, pods)


def _namespace(draw: Draw, seed: int, number: int) -> Json:
    words = labels(draw, NAMESPACE_LABELS, 0.6)
    return {"metadata": {"name": f"w{seed}-{'abc'[number]}", "labels": {"world": str(seed), **words}}}


def _node(draw: Draw, name: str) -> Json:
    spec: Json = {"taints": _taints(draw)}
    if draw.chance(0.12):
        spec["unschedulable"] = True
        if draw.chance(0.5):  # the node lifecycle controller adds it a moment later
            spec["taints"].append(_UNSCHEDULABLE)
    return {
        "metadata": {
            "name": name,
            "labels": _node_labels(draw, name),
            "annotations": {KEYS.report: report(gpu(f"GPU-{name}", total=4096 * GIB)).encode()},
        },
        "spec": spec,
        "status": {"allocatable": _allocatable(draw)},
    }


def _node_labels(draw: Draw, name: str) -> dict[str, str]:
    """The hostname is mostly not the node's name; a few nodes have none or one that another has, too."""
    hostname = draw.weighted({name: 6, f"host-{name}": 10, "shared": 2, "": 1})
    optional = {
        ZONE: (draw.choice(ZONES), 0.85),
        REGION: (draw.choice(("west", "east")), 0.5),
        RACK: (draw.choice(RACKS), 0.7),
        PRODUCT: (draw.choice(("T4", "A10", "L40")), 0.8),
        GENERATION: (draw.choice(GENERATIONS), 0.8),
        MARK: (draw.choice(("", "on")), 0.5),
    }
    chosen = {key: value for key, (value, probability) in optional.items() if draw.chance(probability)}
    return {**({HOSTNAME: hostname} if hostname else {}), **chosen}


def _taints(draw: Draw) -> list[Json]:
    if draw.chance(0.65):
        return []
    if draw.chance(0.1):
        return [_NOT_READY]
    pairs = draw.some([(key, effect) for key in TAINT_KEYS for effect in EFFECTS], 1, 2)
    return [{"key": key, "value": draw.choice(("", "a", "b")), "effect": effect} for key, effect in pairs]


def _allocatable(draw: Draw) -> dict[str, str]:
    if draw.chance(0.03):
        return {}  # a node that has only just registered: it takes no pod
    allocatable = {
        "cpu": draw.choice(("1", "1500m", "2", "4")),
        "memory": draw.choice(("512Mi", "1Gi", "2Gi", "2000M", "8Gi")),
        "ephemeral-storage": draw.choice(("2Gi", "10Gi", "20G")),
        "pods": draw.choice(("3", "5", "8", "12", "110")),
    }
    if draw.chance(0.1):
        del allocatable["ephemeral-storage"]
    return {**allocatable, **({FPGA: draw.choice(("0", "1", "2", "4"))} if draw.chance(0.5) else {})}


def _bound(draw: Draw, name: str, *, namespace: str, node: str) -> Json:
    containers: list[Json] = [
        {"name": f"c{number}", "image": "any", "resources": resources(draw, BOUND_AMOUNTS, 0.4)}
        for number in range(draw.choice((1, 1, 2)))
    ]
    spec: Json = {"nodeName": node, "containers": containers}
    if draw.chance(0.2):
        spec["initContainers"] = init_containers(draw, BOUND_AMOUNTS)
    if draw.chance(0.1):
        spec["resources"] = {"requests": {"cpu": "2", "memory": "1Gi"}}
    if draw.chance(0.25):
        containers[0]["ports"] = host_ports(draw)
    if draw.chance(0.12):
        spec["affinity"] = {"podAntiAffinity": required([_hatred(draw)])}
    metadata = {"name": name, "namespace": namespace, "labels": labels(draw, POD_LABELS, 0.7)}
    pod = {"metadata": metadata, "spec": spec}
    _age(draw, pod)
    return pod


def _age(draw: Draw, pod: Json) -> None:
    """Some have ended, which frees all they held; some are ending, which frees nothing but spread."""
    if draw.chance(0.08):
        pod["status"] = {"phase": draw.choice(("Succeeded", "Failed"))}
    elif draw.chance(0.25):
        pod["status"] = _running(draw, pod)
    if draw.chance(0.08):
        pod["metadata"]["deletionTimestamp"] = _ENDING


def _running(draw: Draw, pod: Json) -> Json:
    """A kubelet's word on what the containers have, which a resize makes differ from the spec.

    kube-scheduler counts the greatest of spec, allocated and actual, and leaves the spec out where the
    resize is infeasible (k8s.io/component-helpers/resource/helpers.go, determineEffectiveRequests).
    """
    spec = pod["spec"]
    status: Json = {
        "phase": "Running",
        "containerStatuses": [_container_status(draw, container) for container in spec["containers"]],
        "initContainerStatuses": [
            _container_status(draw, container) for container in spec.get("initContainers", ())
        ],
    }
    if draw.chance(0.4):
        reason = draw.choice(("Infeasible", "Deferred"))
        status["conditions"] = [{"type": "PodResizePending", "status": "True", "reason": reason}]
    if "resources" in spec and draw.chance(0.7):
        actual = {"cpu": draw.choice(("1", "2", "3")), "memory": draw.choice(("512Mi", "2Gi"))}
        status |= {"resources": {"requests": actual}, "allocatedResources": actual}
    return status


def _container_status(draw: Draw, container: Json) -> Json:
    status: Json = {
        "name": container["name"],
        "image": "any",
        "imageID": "any",
        "ready": True,
        "restartCount": 0,
    }
    if draw.chance(0.7):
        amounts = {name: amounts for name, amounts in BOUND_AMOUNTS.items() if name in ("cpu", "memory")}
        status["resources"] = {"requests": labels(draw, amounts, 0.8)}
        status["allocatedResources"] = labels(draw, amounts, 0.8)
    return status


def _hatred(draw: Draw) -> Json:
    """A term of a bound pod's anti-affinity, which pods that arrive must respect."""
    term: Json = {
        "topologyKey": draw.choice(TOPOLOGY_KEYS[:3]),
        "labelSelector": label_selector(draw, POD_LABELS),
    }
    if draw.chance(0.5):
        term["namespaceSelector"] = label_selector(draw, NAMESPACE_LABELS, SET_OPERATORS)
    return term


def _hold(draw: Draw, pods: list[Json], claims: list[Json]) -> None:
    """Some pods use a claim; what that means depends on its access mode."""
    for claim in claims:
        users = [pod for pod in pods if namespace_of(pod) == namespace_of(claim)]
        if users and draw.chance(0.3):
            source = {"claimName": name_of(claim)}
            user = draw.choice(users)["spec"]
            user["volumes"] = [{"name": "data", "persistentVolumeClaim": source}]


def _separate(pods: list[Json]) -> None:
    """No two pods of a node with the same host port, as no scheduler would have put them.

    kube-scheduler keeps a node's ports as a set, so that the end of one such pod would free the other's
    (NodeInfo.updateUsedPorts in pkg/scheduler/framework/types.go).
    """
    taken: set[tuple[str, str, int]] = set()
    for pod in pods:
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
        wanted = {
            (pod["spec"]["nodeName"], port.get("protocol", "TCP"), port["hostPort"])
            for container in containers
            for port in container.get("ports", ())
        }
        if wanted & taken:
            for container in containers:
                container.pop("ports", None)
        else:
            taken |= wanted


def required(terms: Any) -> Json:
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def init_containers(draw: Draw, amounts: Words) -> list[Json]:
    """In a random order, plain ones and sidecars: a plain one counts with the sidecars before it."""
    return [
        {
            "name": f"i{number}",
            "image": "any",
            "resources": resources(draw, amounts, 0.6),
            **({"restartPolicy": "Always"} if draw.chance(0.5) else {}),
            **({"ports": host_ports(draw)} if draw.chance(0.15) else {}),
        }
        for number in range(draw.randint(1, 3))
    ]


def host_ports(draw: Draw) -> list[Json]:
    """To kube-scheduler only 0.0.0.0 and no address at all mean every address; `::` is one like others."""
    ports = []
    for number in draw.some((53, 8080, 9090), 1, 2):
        port: Json = {"containerPort": number, "hostPort": number}
        if draw.chance(0.4):
            port["protocol"] = draw.choice(("TCP", "UDP", "SCTP"))
        if draw.chance(0.5):
            port["hostIP"] = draw.choice(("0.0.0.0", "127.0.0.1", "10.0.0.1", "::"))
        ports.append(port)
    return ports
