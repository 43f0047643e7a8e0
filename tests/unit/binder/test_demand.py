"""What a pod takes of a node and asks of it, read from its JSON as kube-scheduler reads it."""

import copy
from typing import Any

import pytest

from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.pod import has_ended
from berth.contract.quantity import MOST
from binder.cache.reservations import bound_reservation
from binder.engine.cluster import slim
from binder.pod.conditions import reported_message
from binder.pod.demand import Demand, host_ports, parse_demand, pod_claims, product_key
from binder.pod.resources import pod_amounts
from binder.pod.selectors import parse_selector
from binder.pod.topology_terms import required_anti_affinity
from tests.fakes.objects import GIB, KEYS, pod

Json = dict[str, Any]
ALWAYS = {"restartPolicy": "Always"}


def box(name: str = "c", cpu: str | None = None, **more: Any) -> Json:
    requests = {} if cpu is None else {"cpu": cpu}
    return {"name": name, "resources": {"requests": requests}, **more}


def has(name: str = "c", *, cpu: str | None = None, given: str | None = None) -> Json:
    """What a kubelet says of a container: what it has, and what it was given."""
    return {
        "name": name,
        **({} if cpu is None else {"resources": {"requests": {"cpu": cpu}}}),
        **({} if given is None else {"allocatedResources": {"cpu": given}}),
    }


def pending(reason: str, type: str = "PodResizePending") -> list[Json]:
    return [{"type": "Ready", "status": "False"}, {"type": type, "reason": reason}]


LIMITS = {"name": "c", "resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}}
# What of CPU (milli-cores) and others a pod takes: spec, status, amounts without `pods`.
AMOUNTS: dict[str, tuple[Json, Json, Json]] = {
    "nothing": ({"containers": [box()]}, {}, {}),
    "the sum of its containers": ({"containers": [box(cpu="1"), box("d", "250m")]}, {}, {"cpu": 1250}),
    "limits where no request is": ({"containers": [LIMITS]}, {}, {"cpu": 1000, "memory": GIB}),
    "GPU memory is counted elsewhere": (
        {"containers": [{"name": "c", "resources": {"limits": {KEYS.gpu_mem: "1Gi", "x.io/y": "3"}}}]},
        {},
        {"x.io/y": 3},
    ),
    "the largest init container": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "2"), box("j", "3")]},
        {},
        {"cpu": 3000},
    ),
    "init containers that are smaller": (
        {"containers": [box(cpu="3")], "initContainers": [box("i", "2")]},
        {},
        {"cpu": 3000},
    ),
    "a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "500m", **ALWAYS)]},
        {},
        {"cpu": 1500},
    ),
    "an init container after a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "500m", **ALWAYS), box("i", "3")]},
        {},
        {"cpu": 3500},
    ),
    "an init container before a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "3"), box("s", "500m", **ALWAYS)]},
        {},
        {"cpu": 3000},
    ),
    "overhead on top of the peak": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "3")], "overhead": {"cpu": "100m"}},
        {},
        {"cpu": 3100},
    ),
    "requests of the pod as a whole": (
        {
            "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "9", "memory": "1Gi", "x.io/y": "1"}}}
            ],
            "resources": {"requests": {"cpu": "4", "hugepages-2Mi": "2Mi", "x.io/y": "7"}},
            "overhead": {"cpu": "1"},
        },
        {},
        {"cpu": 5000, "memory": GIB, "hugepages-2Mi": 2 * 2**20, "x.io/y": 1},
    ),
    "more than any machine has": (
        {"containers": [box(cpu="1e400"), box("d", "1e400")]},
        {},
        {"cpu": MOST},
    ),
    "resized up, not yet done": (
        {"containers": [box(cpu="4")]},
        {"containerStatuses": [has(cpu="1", given="2")]},
        {"cpu": 4000},
    ),
    "resized down, it was given more": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has(cpu="2", given="3")]},
        {"cpu": 3000},
    ),
    "resized down, it has more": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has("other"), has(cpu="3", given="2")]},
        {"cpu": 3000},
    ),
    "a resize that is infeasible": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1", given="2")], "conditions": pending("Infeasible")},
        {"cpu": 2000},
    ),
    "a resize that has to wait": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1", given="2")], "conditions": pending("Deferred")},
        {"cpu": 9000},
    ),
    "something else that is infeasible": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1")], "conditions": pending("Infeasible", "Other")},
        {"cpu": 9000},
    ),
    "a resized sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "1", **ALWAYS)]},
        {"initContainerStatuses": [has("s", cpu="2")]},
        {"cpu": 3000},
    ),
    "an init container is not resized": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "2")]},
        {"initContainerStatuses": [has("i", cpu="5")]},
        {"cpu": 2000},
    ),
    "a kubelet that says nothing of resources": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has(given="5")]},
        {"cpu": 1000},
    ),
    "a resized pod as a whole": (
        {"containers": [box()], "resources": {"requests": {"cpu": "1"}}},
        {"resources": {"requests": {"cpu": "3"}}, "allocatedResources": {"cpu": "2"}},
        {"cpu": 3000},
    ),
    "a resized pod as a whole that was given more": (
        {"containers": [box()], "resources": {"requests": {"cpu": "1"}}},
        {"resources": {"requests": {}}, "allocatedResources": {"cpu": "2"}},
        {"cpu": 2000},
    ),
}


@pytest.mark.parametrize("case", AMOUNTS)
@pytest.mark.parametrize("kept", [lambda one: one, slim], ids=["whole", "as kept"])
def test_what_a_pod_takes_of_a_node(case: str, kept: Any) -> None:
    spec, status, amounts = AMOUNTS[case]
    assert pod_amounts(kept({"metadata": {}, "spec": spec, "status": status}), KEYS) == amounts | {"pods": 1}


WRONG: dict[str, tuple[Json, str]] = {
    "container": ({"containers": [box(cpu="-1")]}, "container 'c': cpu: '-1' is negative"),
    "nameless": ({"containers": [{"resources": {"limits": {"cpu": "x"}}}]}, "container '?': cpu: 'x' is not"),
    "init container": ({"initContainers": [box("i", "x")]}, "container 'i': cpu: 'x' is not a quantity"),
    "overhead": ({"overhead": {"cpu": "x"}}, "overhead: cpu: 'x' is not a quantity"),
    "pod": ({"resources": {"requests": {"cpu": "x"}}}, "pod: cpu: 'x' is not a quantity"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_quantity_that_cannot_be_read_is_named(case: str) -> None:
    spec, message = WRONG[case]
    with pytest.raises(InvalidPod, match=f"^{message.replace('?', '[?]')}"):
        pod_amounts({"metadata": {}, "spec": spec}, KEYS)


TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "x"}}}
CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)


def everything() -> Json:
    """A pod that uses every field that the binder reads, and many that it does not."""
    made = pod(
        on="n1",
        choice=CHOICE,
        created="2026-01-02T03:04:05Z",
        priority=7,
        preemptionPolicy="Never",
        nodeSelector={"zone": "a"},
        tolerations=[{"operator": "Exists"}],
        affinity={
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]},
        },
        topologySpreadConstraints=[{"topologyKey": "zone", "maxSkew": 2}],
        schedulingGates=[{"name": "g"}],
        overhead={"cpu": "100m"},
        resources={"requests": {"memory": "1Gi"}},
        resourceClaims=[{"name": "r"}],
        volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
        initContainers=[{**box("s", "1", **ALWAYS), "ports": [{"hostPort": 81}], "env": [{"name": "E"}]}],
        serviceAccountName="x",
    )
    made["spec"]["containers"][0] |= {"ports": [{"hostPort": 80, "protocol": "UDP"}], "args": ["a"]}
    made["metadata"] |= {
        "labels": {"app": "x"},
        "ownerReferences": [{"uid": "helper"}, {"uid": "rs", "controller": True}],
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "resourceVersion": "5",
        "managedFields": [{"fieldsV1": {}}],
    }
    made["status"] = {
        "phase": "Failed",
        "nominatedNodeName": "n2",
        "conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no room"}],
        "containerStatuses": [{"name": "proxy", "resources": {"requests": {"cpu": "2"}}, "imageID": "i"}],
        "initContainerStatuses": [{"name": "s", "allocatedResources": {"cpu": "3"}, "resources": {}}],
        "resources": {"requests": {"memory": "2Gi"}},
        "podIP": "10.0.0.1",
    }
    return made


def test_what_is_left_out_of_the_mirror_changes_nothing() -> None:
    whole = everything()
    kept = slim(copy.deepcopy(whole))
    assert parse_demand(kept, KEYS) == parse_demand(whole, KEYS)
    assert parse_demand(kept, KEYS).nominated == parse_demand(whole, KEYS).nominated == "n2"
    assert bound_reservation(kept, NodeName("n1"), KEYS) == bound_reservation(whole, NodeName("n1"), KEYS)
    assert required_anti_affinity(kept) == required_anti_affinity(whole) != ()
    assert reported_message(kept) == reported_message(whole) == "no room"
    assert has_ended(kept)
    assert kept["metadata"]["resourceVersion"] == "5"


def test_what_no_decision_depends_on_is_not_kept() -> None:
    kept = str(slim(everything()))
    for waste in ("managedFields", "serviceAccountName", "env", "args", "image", "podIP"):
        assert waste not in kept
    usual = pod(requests={"cpu": "1"})
    usual["status"]["containerStatuses"] = [
        {"name": "proxy", "resources": {"requests": {"cpu": "1"}}, "allocatedResources": {"cpu": "1"}},
        {"name": "unheard of"},
    ]
    assert "containerStatuses" not in slim(usual)["status"]
    assert slim({"metadata": {"name": "bare"}}) == {"metadata": {"name": "bare"}, "spec": {}, "status": {}}


def test_who_a_pod_is_to_others() -> None:
    demand = parse_demand(everything(), KEYS)
    assert (demand.owner, demand.priority, demand.preempts, demand.gated) == ("rs", 7, False, True)
    assert (demand.claims, demand.owned_claims) == (("c",), frozenset())
    assert demand.host_ports == {("0.0.0.0", "UDP", 80), ("0.0.0.0", "TCP", 81)}
    assert demand.unsupported == "spec.resourceClaims"
    plain = parse_demand(pod(), KEYS)
    assert (plain.owner, plain.priority, plain.preempts, plain.gated) == (None, 0, True, False)
    assert (plain.created, plain.unsupported, plain.nominated) == ("2026-01-01T00:00:00Z", None, None)


PORTS: dict[str, tuple[Json, set[Any]]] = {
    "of a container": (
        {"containers": [{"ports": [{"hostPort": 80, "hostIP": "10.0.0.1", "protocol": "SCTP"}]}]},
        {("10.0.0.1", "SCTP", 80)},
    ),
    "on all addresses": ({"containers": [{"ports": [{"hostPort": 80}]}]}, {("0.0.0.0", "TCP", 80)}),
    "of a sidecar": ({"initContainers": [{"ports": [{"hostPort": 80}], **ALWAYS}]}, {("0.0.0.0", "TCP", 80)}),
    "of an init container, which ends": ({"initContainers": [{"ports": [{"hostPort": 80}]}]}, set()),
    "none on the host": ({"containers": [{"ports": [{"containerPort": 80}, {"hostPort": 0}]}, {}]}, set()),
}


@pytest.mark.parametrize("case", PORTS)
def test_host_ports(case: str) -> None:
    spec, ports = PORTS[case]
    assert host_ports({"spec": spec}) == ports


def claim(name: str, volume: str = "v") -> Json:
    return {"name": volume, "persistentVolumeClaim": {"claimName": name}}


def test_claims_of_a_pod() -> None:
    volumes = [
        claim("a"),
        {"name": "e", "ephemeral": {}},
        {"name": "s", "secret": {}},
        claim("b"),
        claim("a"),
    ]
    assert pod_claims(pod("p1", volumes=volumes)) == (("a", "b", "p1-e"), frozenset({"p1-e"}))
    assert pod_claims(pod()) == ((), frozenset())


@pytest.mark.parametrize(
    ("volume", "unsupported"),
    [
        *(
            ({kind: {}}, None)
            for kind in (
                "configMap",
                "csi",
                "downwardAPI",
                "emptyDir",
                "hostPath",
                "image",
                "nfs",
                "projected",
            )
        ),
        ({"secret": {}}, None),
        ({"ephemeral": {}}, None),
        ({"persistentVolumeClaim": {"claimName": "c"}}, None),
        ({"awsElasticBlockStore": {}}, "volume 'v' (awsElasticBlockStore)"),
        ({"iscsi": {}}, "volume 'v' (iscsi)"),
    ],
)
def test_volumes_that_tie_a_pod_to_a_node(volume: Json, unsupported: str | None) -> None:
    volumes = [{"name": "free", "secret": {}}, {"name": "v", **volume}]
    assert parse_demand(pod(volumes=volumes), KEYS).unsupported == unsupported


def test_a_product_is_spelled_as_nvml_and_as_node_labels_spell_it() -> None:
    assert product_key(" NVIDIA A100-SXM4-80GB ") == product_key("nvidia-a100-sxm4-80gb")
    assert product_key("A100") != product_key("A10")


def asking(**changes: Any) -> Demand:
    """A pod of a model that has a name: two of them ask the same but for the change."""
    labels, owner = changes.pop("labels", None), changes.pop("owner", "rs")
    namespace, uid = changes.pop("namespace", "team"), changes.pop("uid", "p1")
    marks = {KEYS.model_id: "m", **changes.pop("annotations", {})}
    made = pod(uid, annotations=marks, **changes)
    made["metadata"] |= {"labels": labels, "namespace": namespace}
    made["metadata"]["ownerReferences"] = [{"uid": owner, "controller": True}]
    return parse_demand(made, KEYS)


DIFFERENT: dict[str, Json] = {
    "namespace": {"namespace": "other"},
    "model": {"annotations": {KEYS.model_id: "n"}},
    "name in Triton": {"annotations": {KEYS.model_name: "n"}},
    "owner": {"owner": "other"},
    "memory": {"mem": "2Gi"},
    "labels": {"labels": {"app": "y"}},
    "rules between pods": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]},
    "node selector": {"nodeSelector": {"zone": "a"}},
    "host port": {"containers": [{"name": "proxy", "ports": [{"hostPort": 80}]}]},
    "claims": {"volumes": [claim("a")]},
    "unsupported": {"resourceClaims": [{"name": "r"}]},
    "priority": {"priority": 1},
    "preemption": {"preemptionPolicy": "Never"},
    "gates": {"schedulingGates": [{"name": "g"}]},
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_who_asks_for_something_else_is_not_answered_alike(case: str) -> None:
    assert asking().question == asking(uid="p2", created="2027-01-01T00:00:00Z").question
    assert asking().question != asking(**DIFFERENT[case]).question


SELECTED: list[tuple[Json | None, str]] = [
    (None, ""),
    ({}, "a ab c -"),
    ({"matchLabels": {"x": "a"}}, "a ab"),
    ({"matchLabels": {"x": "a", "y": "b"}}, "ab"),
    ({"matchExpressions": [{"key": "x", "operator": "In", "values": ["a", "c"]}]}, "a ab c"),
    ({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["a"]}]}, "c -"),
    ({"matchExpressions": [{"key": "y", "operator": "Exists"}]}, "ab"),
    ({"matchExpressions": [{"key": "y", "operator": "DoesNotExist"}]}, "a c -"),
    ({"matchExpressions": [{"key": "x", "operator": "Gt", "values": ["0"]}]}, ""),
    ({"matchLabels": {"x": "a"}, "matchExpressions": [{"key": "y", "operator": "DoesNotExist"}]}, "a"),
]


@pytest.mark.parametrize(("selector", "found"), SELECTED)
def test_label_selectors(selector: Json | None, found: str) -> None:
    labelled = {"a": {"x": "a"}, "ab": {"x": "a", "y": "b"}, "c": {"x": "c"}, "-": {}}
    parsed = parse_selector(selector)
    assert " ".join(n for n, labels in labelled.items() if parsed and parsed.matches(labels)) == found


def test_selectors_that_mean_the_same_are_the_same() -> None:
    """They are compared to tell whether something has changed."""
    tests = [{"key": k, "operator": "In", "values": [v, v]} for k, v in (("y", "b"), ("x", "a"))]
    assert parse_selector({"matchExpressions": tests}) == parse_selector(
        {"matchLabels": {"x": "a", "y": "b"}}
    )


@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ({KEYS.model_id: " m "}, ("m", "m")),
        ({KEYS.model_id: "m", KEYS.model_name: "n"}, ("m", "n")),
        ({KEYS.model_id: None, KEYS.model_name: "n"}, (None, "n")),
        ({KEYS.model_id: None}, (None, None)),
    ],
)
def test_a_damaged_pod_keeps_its_names(marks: Json, names: tuple[str | None, str | None]) -> None:
    reservation = bound_reservation(pod("p1", on="n1", choice="{", annotations=marks), NodeName("n1"), KEYS)
    assert (reservation.model_id, reservation.model_name) == names
    assert (reservation.gpus, reservation.bytes) == ((), GIB)
