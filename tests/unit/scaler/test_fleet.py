"""What is made of Deployments and pods as the API server shows them."""

from typing import Any

import pytest

from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey
from scaler.activation.slices import DoorPorts
from scaler.core.deployments import Proxy, keep_deployment, read_proxy
from scaler.core.fleet import Counts, Fleet, PodState, keep_pod
from scaler.core.plan import Kind
from scaler.decision.defaults import BERTH, HPA, KPA, read_defaults

GROUP = "autoscaling.knative.dev/"
OWN = "seldon.io/trtis-"
KEY = ModelKey("a", "m")


def fleet() -> Fleet:
    return Fleet(read_defaults(BERTH))


def deployment(
    own: dict[str, str] | None = None,
    template: dict[str, str] | None = None,
    *,
    uid: str = "d",
    kind: str | None = KPA,
    spec: dict[str, Any] | None = None,
    replicas: int = 1,
) -> dict[str, Any]:
    annotations = {**({} if kind is None else {GROUP + "class": kind}), **(own or {})}
    return {
        "metadata": {"namespace": "a", "name": "m", "uid": uid, "annotations": annotations, "generation": 3},
        "spec": {
            "replicas": replicas,
            "template": {
                "metadata": {"labels": {"app": "m"}, "annotations": template or {}},
                "spec": spec or {},
            },
        },
        "status": {"replicas": replicas},
    }


def pod(
    uid: str = "u",
    *,
    owner: str | None = "m-5f",
    node: str = "n",
    phase: str = "Running",
    conditions: dict[str, tuple[str, str]] | None = None,
    deleting: bool = False,
    waiting: str | None = None,
    priority: int | None = None,
) -> dict[str, Any]:
    owners = [] if owner is None else [{"kind": "ReplicaSet", "name": owner, "controller": True}]
    return {
        "metadata": {
            "namespace": "a",
            "name": uid,
            "uid": uid,
            "labels": {"pod-template-hash": "5f", "app": "m"},
            "ownerReferences": owners,
            **({"deletionTimestamp": "now"} if deleting else {}),
        },
        "spec": {"nodeName": node, "priority": priority, "containers": [{"name": "large"}]},
        "status": {
            "phase": phase,
            "podIP": "10.0.0.1" if node else None,
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": f"{reason} it is"}
                for kind, (status, reason) in (conditions or {}).items()
            ],
            "initContainerStatuses": [
                {"state": {"waiting": {"reason": waiting}} if waiting else {}, "image": "x"}
            ],
        },
    }


READY = {"Ready": ("True", "")}


def test_only_what_asks_is_scaled() -> None:
    told = fleet()
    told.observe_deployment(deployment(kind=None))
    assert not told.deployments
    told.observe_deployment(deployment())
    assert set(told.deployments) == {KEY}
    told.observe_deployment(deployment(kind=None))
    assert not told.deployments


@pytest.mark.parametrize(("kind", "is_kind"), [(KPA, Kind.KPA), (HPA, Kind.HPA), ("external", Kind.EXTERNAL)])
def test_classes(kind: str, is_kind: Kind) -> None:
    told = fleet()
    told.observe_deployment(deployment(kind=kind))
    assert (told.deployments[KEY].kind, told.deployments[KEY].class_name) == (is_kind, kind)


def test_the_template_counts_before_the_deployment() -> None:
    told = fleet()
    own = {
        GROUP + "max-scale": "3",
        GROUP + "minScale": "1",
        OWN + "hold-requests": "5",
        OWN + "hold-bytes": "1Ki",
    }
    template = {GROUP + "maxScale": "7", OWN + "hold-requests": "6", OWN + "hold-timeout": "90"}
    told.observe_deployment(deployment(own, template))
    found = told.deployments[KEY]
    assert (found.spec.bounds.max_scale, found.spec.bounds.min_scale) == (7, 1)
    limits = found.options.limits
    assert (limits.requests, limits.bytes, limits.seconds) == (6, 1024, 90.0)


def test_what_a_mirror_keeps_is_enough() -> None:
    whole, kept = fleet(), fleet()
    item = deployment({OWN + "clients": "b, c"}, spec={"containers": [{"args": ["proxy"]}]})
    whole.observe_deployment(item)
    kept.observe_deployment(keep_deployment(item))
    assert whole.deployments == kept.deployments
    assert whole.deployments[KEY].options.clients == {"a", "b", "c"}
    for one in (
        pod(conditions=READY),
        pod(node="", phase="Pending"),
        pod(waiting="ErrImagePull", phase="Pending"),
    ):
        whole.observe_pod(one, 5)
        kept.observe_pod(keep_pod(one), 5)
        assert list(whole.pods(KEY)) == list(kept.pods(KEY))
    assert "containers" not in keep_pod(pod())["spec"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (GROUP + "target", "none"),
        (GROUP + "metric", "cpu"),
        (GROUP + "target-burst-capacity", "211"),
        (GROUP + "target-burst-capacity", "-1"),
        (GROUP + "scale-to-zero-pod-retention-period", "until"),
        (OWN + "overflow-pods", "-1"),
        (OWN + "hold-timeout", "601"),
        (OWN + "hold-timeout", "nan"),
        (OWN + "hold-timeout", "0s"),
        (OWN + "hold-requests", "many"),
        (OWN + "hold-bytes", "-5"),
    ],
)
def test_what_does_not_go_is_named_once_and_the_last_good_reading_stays(name: str, text: str) -> None:
    told = fleet()
    told.observe_deployment(deployment({GROUP + "max-scale": "3"}))
    bad = deployment(
        {GROUP + "max-scale": "4", name: text}, spec={"containers": [{"args": ["proxy", "--model=x"]}]}
    )
    for replicas in (1, 2, 3):
        told.observe_deployment({**bad, "spec": {**bad["spec"], "replicas": replicas}})
    (complaint,) = told.complaints()
    assert name in complaint.text
    assert told.refused(KEY) == complaint.text
    assert told.complaints() == []
    kept = told.deployments[KEY]
    assert (kept.spec.bounds.max_scale, kept.replicas) == (3, 3)
    assert kept.template == bad["spec"]["template"]
    told.observe_deployment(deployment({GROUP + "max-scale": "5"}))
    assert (told.deployments[KEY].spec.bounds.max_scale, told.refused(KEY)) == (5, "")


def test_without_a_good_reading_nothing_is_scaled() -> None:
    told = fleet()
    told.observe_deployment(deployment({GROUP + "target": "none"}))
    assert not told.deployments
    assert len(told.complaints()) == 1


def test_a_successor_has_no_good_reading_of_another() -> None:
    told = fleet()
    told.observe_deployment(deployment())
    told.observe_deployment(deployment({GROUP + "target": "none"}, uid="another"))
    assert not told.deployments
    told.observe_deployment(deployment(uid="another"))
    told.deployment_gone(deployment(uid="d"))
    assert set(told.deployments) == {KEY}
    told.deployment_gone(deployment(uid="another"))
    assert not told.deployments


def test_until_needed_is_for_ever() -> None:
    told = fleet()
    told.observe_deployment(deployment({GROUP + "scaleToZeroPodRetentionPeriod": "until-needed"}))
    found = told.deployments[KEY]
    assert found.options.until_needed
    assert found.spec.bounds.retention_ns > 10**18
    assert not any("etention" in name for name in found.annotations), "Knative could not read it"


@pytest.mark.parametrize(
    ("container", "proxy"),
    [
        ({"args": ["proxy"]}, Proxy()),
        ({"command": ["berth", "proxy"], "args": ["--model", "x"]}, Proxy(model="x")),
        ({"args": ["proxy", "--container-concurrency=4"]}, Proxy(container_concurrency=4)),
        ({"args": ["proxy", "--container-concurrency", "4"]}, Proxy(container_concurrency=4)),
        (
            {"args": ["proxy"], "env": [{"name": "BERTH_PROXY_CONTAINER_CONCURRENCY", "value": "3"}]},
            Proxy(container_concurrency=3),
        ),
        (
            {"args": ["proxy", "--http-listen=[$(POD_IP)]:8080", "--grpc-listen", "0.0.0.0:8081", "--tls-cert=/x"]},
            Proxy(tls=True, door=DoorPorts(8080, 8081, {})),
        ),
        (
            {"args": ["proxy", "--http-listen=what"], "ports": [{"name": "http", "containerPort": 9000}, {"containerPort": 1}]},
            Proxy(door=DoorPorts(9000, 9001, {"http": 9000})),
        ),
        ({"args": ["serve", "--container-concurrency=4"]}, Proxy()),
        ({"name": "bare"}, Proxy()),
    ],
)  # fmt: skip
def test_the_proxys_own_arguments(container: dict[str, Any], proxy: Proxy) -> None:
    assert read_proxy({"spec": {"containers": [{"args": ["sidecar"]}, container]}}) == proxy


def test_the_limit_of_a_copy_bounds_its_target() -> None:
    told = fleet()
    spec = {"containers": [{"args": ["proxy", "--model=public", "--container-concurrency=2"]}]}
    told.observe_deployment(deployment({GROUP + "target": "50"}, spec=spec))
    found = told.deployments[KEY]
    assert (found.spec.total, found.slots, found.public_name) == (2.0, 2, "public")
    told.observe_deployment(deployment({GROUP + "target": "50"}))
    assert (told.deployments[KEY].slots, told.deployments[KEY].public_name) == (70, "m")


@pytest.mark.parametrize(
    ("item", "state"),
    [
        (pod(conditions=READY), PodState.READY),
        (pod(), PodState.STARTING),
        (pod(phase="Pending", conditions=READY), PodState.STARTING),
        (pod(node="", phase="Pending"), PodState.PENDING),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "SchedulingGated")}), PodState.PENDING),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "Unschedulable")}), PodState.UNSCHEDULABLE),
        (pod(conditions=READY, deleting=True), PodState.LEAVING),
    ],
)  # fmt: skip
def test_states_of_pods(item: dict[str, Any], state: PodState) -> None:
    told = fleet()
    told.observe_pod(item, 0)
    assert [found.state for found in told.pods(KEY)] == [state]


@pytest.mark.parametrize("item", [pod(owner=None), pod(owner="m-77"), pod(owner="-5f"), pod(phase="Failed"), pod(phase="Succeeded")])  # fmt: skip
def test_no_copies(item: dict[str, Any]) -> None:
    told = fleet()
    told.observe_pod(pod(), 0)
    told.observe_pod(item, 0)
    assert list(told.pods(KEY)) == []


def test_counts_and_what_makes_no_progress() -> None:
    told = fleet()
    loaded = Keys().loaded_condition
    told.observe_pod(pod("u1", conditions=READY), 0)
    told.observe_pod(pod("u2", phase="Pending", waiting="ImagePullBackOff"), 0)
    told.observe_pod(pod("u3", phase="Pending", waiting="PodInitializing"), 0)
    told.observe_pod(pod("u4", phase="Pending", conditions={loaded: ("False", "Broken")}), 0)
    told.observe_pod(pod("u5", node="", phase="Pending"), 0)
    told.observe_pod(pod("u6", deleting=True), 0)
    counts = told.counts(KEY)
    assert counts == Counts(ready=1, starting=3, pending=1, unschedulable=0, leaving=1, stuck=2)
    assert (counts.bound, counts.on_their_way) == (4, 2)
    assert {one.name: one.hopeless for one in told.pods(KEY)}["u4"] == "Broken it is"
    told.pod_gone(pod("u1"))
    told.pod_gone(pod("u1"))
    assert told.counts(KEY).ready == 0


def test_when_a_copy_was_first_seen_to_be_so() -> None:
    told = fleet()
    told.observe_pod(pod(node="", phase="Pending"), 1)
    told.observe_pod(pod(), 2)
    told.observe_pod(pod(conditions=READY), 3)
    told.observe_pod(pod(), 4)
    (found,) = told.pods(KEY)
    assert (found.bound_ns, found.ready_ns) == (2, 3)


def test_endpoints_are_copies_with_an_address() -> None:
    told = fleet()
    told.observe_pod(pod("u1", conditions=READY), 0)
    assert told.endpoints(KEY) == ()
    told.observe_deployment(deployment())
    told.observe_pod(pod("u2"), 0)
    told.observe_pod(pod("u3", node="", phase="Pending"), 0)
    told.observe_pod(pod("u4", conditions=READY, deleting=True), 0)
    assert [(one.name, one.rest_port, one.ready) for one in told.endpoints(KEY)] == [
        ("u1", 9000, True),
        ("u2", 9000, False),
    ]


def test_priorities() -> None:
    told = fleet()
    told.observe_deployment(deployment(spec={"priorityClassName": "high"}))
    assert told.priority(KEY) == 0
    told.observe_pod(pod(priority=3), 0)
    assert told.priority(KEY) == 3
    told.observe_priority_class({"metadata": {"name": "high"}, "value": 7})
    told.observe_priority_class({"metadata": {"name": "usual"}, "value": 1, "globalDefault": True})
    assert told.priority(KEY) == 7
    assert told.priority(ModelKey("a", "other")) == 1
    told.priority_class_gone({"metadata": {"name": "high"}})
    assert told.priority(KEY) == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"since": "x"}', '{"activity": 5}'])
def test_what_stands_in_our_annotation_may_be_anything(text: str) -> None:
    told = fleet()
    told.observe_deployment(deployment({OWN + "scaled": text}))
    assert told.deployments[KEY].told is None


@pytest.mark.parametrize(
    "clients", [",".join(f"n{number}" for number in range(65)), "a b", "B", "x" * 64, "a,*x", "é"]
)
def test_clients_that_are_no_namespaces_or_too_many_are_refused(clients: str) -> None:
    """What one writes is told to every activator, with what all others write."""
    told = fleet()
    told.observe_deployment(deployment({OWN + "clients": clients}))
    assert KEY not in told.deployments
    (complaint,) = told.complaints()
    assert complaint.text.startswith(OWN + "clients: ")
    assert len(complaint.text) < 300


def test_a_name_that_no_model_has_is_refused() -> None:
    told = fleet()
    args = ["proxy", "--model=" + "m" * 256]
    told.observe_deployment(deployment({}, spec={"containers": [{"args": args}]}))
    (complaint,) = told.complaints()
    assert complaint.text == "the model's name has 256 characters; 255 at most are served"
