"""Claims of a pod: which are fit to be mounted, and from which nodes."""

from typing import Any

import pytest

from berth.kube.informer import Change, ChangeKind
from binder.pod.demand import parse_demand
from tests.fakes.objects import KEYS
from tests.fakes.zones import (
    EVERYWHERE,
    HOST,
    allowed,
    asks,
    neighbour,
    zoned_cluster,
)

Json = dict[str, Any]


BOUND = {"pv.kubernetes.io/bind-completed": "yes"}
OLD_ZONE, NEW_ZONE = "failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"


def claim(
    name: str = "c", *, volume: str = "v", bound: bool = True, meta: Json | None = None, **spec: Any
) -> Json:
    annotations = BOUND if bound else {}
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "annotations": annotations,
            **(meta or {}),
        },
        "spec": {"volumeName": volume, **spec},
    }


def volume(name: str = "v", *, labels: Json | None = None, **spec: Any) -> Json:
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def only_on(*names: str) -> Json:
    expression = {"key": HOST, "operator": "In", "values": list(names)}
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


MOUNTS = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
EPHEMERAL = [{"name": "e", "ephemeral": {}}]
OWNED = {"ownerReferences": [{"uid": "p", "controller": True}]}
DISOWNED = {"ownerReferences": [{"uid": "p"}, {"uid": "q", "controller": True}]}
LATE = {"metadata": {"name": "late"}, "volumeBindingMode": "WaitForFirstConsumer"}
ZONES: Json = {
    "a1": {"labels": {OLD_ZONE: "a"}},
    "a2": {"labels": {NEW_ZONE: "a"}},
    "b1": {"labels": {NEW_ZONE: "b", OLD_ZONE: "c"}},
    "x": {"labels": {}},
}
# Objects, volumes of the pod, labels of nodes; where it may go, why it may not.
CLAIMS: dict[str, tuple[list[Json], list[Json], Json, str, str]] = {
    "bound": ([claim(), volume()], MOUNTS, {}, EVERYWHERE, ""),
    "not there": ([volume()], MOUNTS, {}, "", "persistentvolumeclaim 'c' does not exist or is being deleted"),
    "of another namespace": (
        [claim(meta={"namespace": "other"}), volume()],
        MOUNTS,
        {},
        "",
        "does not exist",
    ),
    "being deleted": ([claim(meta={"deletionTimestamp": "x"}), volume()], MOUNTS, {}, "", "is being deleted"),
    "not bound": ([claim(volume=""), volume()], MOUNTS, {}, "", "claim 'c' is not bound yet"),
    "binding not completed": ([claim(bound=False), volume()], MOUNTS, {}, "", "claim 'c' is not bound yet"),
    "waits for its consumer": (
        [claim(volume="", storageClassName="late"), LATE],
        MOUNTS,
        {},
        "",
        "claim 'c' (class 'late') waits for its first consumer; place the pod with kube-scheduler",
    ),
    "volume gone": ([claim()], MOUNTS, {}, "", "persistentvolume 'v' of claim 'c' does not exist"),
    "ephemeral": ([claim("p-e", meta=OWNED), volume()], EPHEMERAL, {}, EVERYWHERE, ""),
    "ephemeral of another": ([claim("p-e"), volume()], EPHEMERAL, {}, "", "was not made for this pod"),
    "ephemeral of another controller": (
        [claim("p-e", meta=DISOWNED), volume()],
        EPHEMERAL,
        {},
        "",
        "was not made for this pod",
    ),
    "somebody else's claim that it mounts": ([claim(meta=DISOWNED), volume()], MOUNTS, {}, EVERYWHERE, ""),
    "on some nodes": ([claim(), volume(**only_on("a2", "x"))], MOUNTS, {}, "a2 x", "elsewhere"),
    "two volumes": (
        [claim(), volume(**only_on("a2", "x")), claim("d", volume="w"), volume("w", **only_on("a1", "x"))],
        [*MOUNTS, {"name": "w", "persistentVolumeClaim": {"claimName": "d"}}],
        {},
        "x",
        "elsewhere",
    ),
    "in a zone, old label": (
        [claim(), volume(labels={OLD_ZONE: "a"})],
        MOUNTS,
        ZONES,
        "a1 a2 x",
        "elsewhere",
    ),
    "a node's old label counts": ([claim(), volume(labels={OLD_ZONE: "b"})], MOUNTS, ZONES, "x", "elsewhere"),
    "in a zone, new label": ([claim(), volume(labels={NEW_ZONE: "b"})], MOUNTS, ZONES, "b1 x", "elsewhere"),
    "in several zones": (
        [claim(), volume(labels={OLD_ZONE: "a__c"})],
        MOUNTS,
        ZONES,
        EVERYWHERE,
        "",
    ),
    "in a zone and a region": (
        [claim(), volume(labels={NEW_ZONE: "b", "topology.kubernetes.io/region": "r"})],
        MOUNTS,
        ZONES,
        "x",
        "elsewhere",
    ),
    "other labels are no zones": ([claim(), volume(labels={"zone": "q"})], MOUNTS, {}, EVERYWHERE, ""),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_claims(case: str) -> None:
    objects, volumes, nodes, where, why = CLAIMS[case]
    cluster = zoned_cluster(**nodes)
    for one in objects:
        hear = (
            cluster.on_class
            if "volumeBindingMode" in one
            else cluster.on_claim
            if "namespace" in one["metadata"]
            else cluster.on_volume
        )
        assert hear(Change(ChangeKind.SET, one))
    made = asks(volumes=volumes)
    fits, kinds = allowed(cluster, made)
    assert fits == where
    because = cluster.decider.because(parse_demand(made, KEYS))
    if why in ("", "elsewhere"):
        assert because is None
        assert kinds <= {"VolumeNodeAffinityConflict"}
    else:
        assert because is not None
        assert why in because.detail
        unbound = "bound" in why or "consumer" in why
        assert because.rule is ("VolumeClaimNotBound" if unbound else "VolumeClaimNotFound")


@pytest.mark.parametrize("modes", [["ReadWriteOncePod"], ["ReadWriteOnce"], None])
def test_a_claim_for_one_pod_alone(modes: list[str] | None) -> None:
    cluster, exclusive = zoned_cluster(), modes == ["ReadWriteOncePod"]
    cluster.on_volume(Change(ChangeKind.SET, volume()))
    cluster.on_claim(Change(ChangeKind.SET, claim(accessModes=modes)))
    demand = parse_demand(asks(volumes=MOUNTS), KEYS)
    assert cluster.decider.because(demand) is None
    for other in (neighbour("o", "a1", ns="other", volumes=MOUNTS), neighbour("d", "a1")):
        cluster.on_pod(Change(ChangeKind.SET, other))
    assert cluster.decider.because(demand) is None
    reservation = neighbour("r", "a1", volumes=MOUNTS)
    cluster.on_pod(Change(ChangeKind.SET, reservation))
    because = cluster.decider.because(demand)
    assert (because is not None and because.rule == "VolumeInUse") is exclusive
    cluster.on_pod(Change(ChangeKind.GONE, reservation))
    assert cluster.decider.because(demand) is None
