"""What is made of Deployments and pods as the API server shows them."""

import tracemalloc
from typing import Any, Final

import pytest

from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled
from scaler.activation.slices import ProxyPorts
from scaler.core.actions import Kind
from scaler.core.cache import Cache, Counts, PodState, keep_pod
from scaler.core.deployments import Proxy, keep_deployment, read_proxy, scaled_by, template_text, text_hash
from scaler.decision.annotations import ANNOTATIONS, unknown
from scaler.decision.defaults import BERTH, HPA, KPA, read_defaults

GROUP = "autoscaling.knative.dev/"
OWN = "seldon.io/trtis-"
KEY = ModelKey("a", "m")


def cache(*deployments: dict[str, Any]) -> Cache:
    """Which has seen these."""
    made = Cache(read_defaults(BERTH))
    for item in deployments:
        made.observe_deployment(item)
    return made


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
    cached = cache(deployment(kind=None))
    assert not cached.deployments
    cached.observe_deployment(deployment())
    assert set(cached.deployments) == {KEY}
    cached.observe_deployment(deployment(kind=None))
    assert not cached.deployments


@pytest.mark.parametrize(("kind", "is_kind"), [(KPA, Kind.KPA), (HPA, Kind.HPA), ("external", Kind.EXTERNAL)])
def test_classes(kind: str, is_kind: Kind) -> None:
    cached = cache(deployment(kind=kind))
    assert (cached.deployments[KEY].kind, cached.deployments[KEY].class_name) == (is_kind, kind)


def test_the_template_counts_before_the_deployment() -> None:
    cached = cache()
    own = {
        GROUP + "max-scale": "3",
        GROUP + "minScale": "1",
        OWN + "hold-requests": "5",
        OWN + "hold-bytes": "1Ki",
    }
    template = {GROUP + "maxScale": "7", OWN + "hold-requests": "6", OWN + "hold-timeout": "90"}
    cached.observe_deployment(deployment(own, template))
    found = cached.deployments[KEY]
    assert (found.spec.bounds.max_scale, found.spec.bounds.min_scale) == (7, 1)
    limits = found.options.limits
    assert (limits.requests, limits.bytes, limits.seconds) == (6, 1024, 90.0)


def gated(item: dict[str, Any], *names: str) -> dict[str, Any]:
    item["spec"]["schedulingGates"] = [{"name": name} for name in names or ("q/admission",)]
    return item


def crashing() -> dict[str, Any]:
    item = pod()
    item["metadata"]["annotations"] = {"controller.kubernetes.io/pod-deletion-cost": "7"}
    item["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    return item


def test_what_a_mirror_keeps_is_enough() -> None:
    whole, kept = cache(), cache()
    item = deployment({OWN + "clients": "b, c"}, spec={"containers": [{"args": ["proxy"]}]})
    whole.observe_deployment(item)
    kept.observe_deployment(keep_deployment(item))
    assert whole.deployments == kept.deployments
    assert whole.deployments[KEY].options.clients == {"a", "b", "c"}
    for one in (
        pod(conditions=READY),
        pod(node="", phase="Pending"),
        pod(waiting="ErrImagePull", phase="Pending"),
        pod(phase="Pending", conditions={Keys().loaded_condition: ("False", "Broken")}, priority=3),
        crashing(),
    ):
        whole.observe_pod(one, 5)
        kept.observe_pod(keep_pod(one), 5)
        assert list(whole.pods(KEY)) == list(kept.pods(KEY))
    assert whole.priority(KEY) == kept.priority(KEY) == 3
    (found,) = kept.pods(KEY)
    assert (found.stuck, found.deletion_cost) == ("CrashLoopBackOff", "7")
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
        (OWN + "hold-requests", "0"),
        (OWN + "hold-requests", "1000001"),
        (OWN + "overflow-pods", "1001"),
        (OWN + "hold-bytes", "-5"),
    ],
)
def test_what_does_not_go_is_named_once_and_the_last_good_reading_stays(name: str, text: str) -> None:
    cached = cache(deployment({GROUP + "max-scale": "3"}))
    bad = deployment(
        {GROUP + "max-scale": "4", name: text}, spec={"containers": [{"args": ["proxy", "--model=x"]}]}
    )
    for replicas in (1, 2, 3):
        cached.observe_deployment({**bad, "spec": {**bad["spec"], "replicas": replicas}})
    (complaint,) = cached.problems()
    assert name in complaint.text
    assert cached.refused(KEY) == complaint.text
    assert cached.problems() == []
    kept = cached.deployments[KEY]
    assert (kept.spec.bounds.max_scale, kept.replicas) == (3, 3)
    assert kept.template == bad["spec"]["template"]
    text = template_text(bad["spec"]["template"])
    assert (kept.template_hash, kept.template_bytes) == (text_hash(text), len(text))
    cached.observe_deployment(deployment({GROUP + "max-scale": "6", name: text_of(bad, name)}))
    assert cached.problems() == [], "it was named, and what else has changed is no news of it"
    cached.observe_deployment(deployment({GROUP + "max-scale": "5"}))
    assert (cached.deployments[KEY].spec.bounds.max_scale, cached.refused(KEY)) == (5, "")


def text_of(item: dict[str, Any], name: str) -> str:
    text: str = item["metadata"]["annotations"][name]
    return text


def test_who_writes_nonsense_again_and_again_is_told_of_the_last() -> None:
    """However often between two steps; of a standby, which tells nobody, it makes nothing grow."""
    cached = cache()
    for number in range(50):
        cached.observe_deployment(deployment({GROUP + "target": f"bad{number}"}))
    (complaint,) = cached.problems()
    assert "bad49" in complaint.text
    cached.observe_deployment(deployment({GROUP + "target": "bad"}))
    cached.deployment_gone(deployment())
    assert cached.problems() == []


def test_the_last_good_annotations_are_found_again_as_the_last_scaler_wrote_them() -> None:
    good = {GROUP + "class": HPA, GROUP + "max-scale": "3", OWN + "hold-requests": "7"}
    bad = {GROUP + "max-scale": "abc", OWN + "scaled": Scaled(last_valid=good).to_text()}
    cached = cache(deployment(bad))
    found = cached.deployments[KEY]
    assert (found.kind, found.spec.bounds.max_scale, found.options.limits.requests) == (Kind.HPA, 3, 7)
    assert (cached.last_valid_of(KEY), len(cached.problems())) == (good, 1)
    cached.observe_deployment(deployment({**bad, GROUP + "max-scale": "4"}))
    assert (cached.deployments[KEY].spec.bounds.max_scale, cached.last_valid_of(KEY)) == (4, {})


@pytest.mark.parametrize(
    "good", [{GROUP + "max-scale": "3"}, {GROUP + "class": KPA, GROUP + "target": "x"}, {}]
)
def test_what_anybody_may_have_written_as_good_is_read_as_any_other(good: dict[str, str]) -> None:
    cached = cache(
        deployment({GROUP + "max-scale": "abc", OWN + "scaled": Scaled(last_valid=good).to_text()})
    )
    assert (cached.deployments, cached.last_valid_of(KEY)) == ({}, {})


def test_of_another_class_requests_at_once_are_counted_where_nothing_else_is_named() -> None:
    cached, args = cache(), {"containers": [{"args": ["proxy", "--model=x", "--container-concurrency=4"]}]}
    for given, metric, total in (({}, "concurrency", 4.0), ({GROUP + "metric": "rps"}, "rps", 200.0)):
        cached.observe_deployment(deployment(given, kind="keda", spec=args))
        spec = cached.deployments[KEY].spec
        assert (spec.metric, spec.total) == (metric, total)


def test_without_a_good_reading_nothing_is_scaled() -> None:
    cached = cache(deployment({GROUP + "target": "none"}))
    assert not cached.deployments
    assert len(cached.problems()) == 1


def test_a_successor_has_no_good_reading_of_another() -> None:
    cached = cache(deployment())
    cached.observe_deployment(deployment({GROUP + "target": "none"}, uid="another"))
    assert not cached.deployments
    cached.observe_deployment(deployment(uid="another"))
    cached.deployment_gone(deployment(uid="d"))
    assert set(cached.deployments) == {KEY}
    cached.deployment_gone(deployment(uid="another"))
    assert not cached.deployments


def test_until_needed_is_for_ever() -> None:
    cached = cache(deployment({GROUP + "scaleToZeroPodRetentionPeriod": "until-needed"}))
    found = cached.deployments[KEY]
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
            {"args": ["proxy", "--model=$(BASE)-$(SIZE)$$(BASE)", "--container-concurrency", "$(CC)"],
             "env": [{"name": "BASE", "value": "bert"}, {"name": "SIZE", "value": "$(BASE)9"}, {"name": "CC", "value": "4"}]},
            Proxy(model="bert-bert9$(BASE)", container_concurrency=4),
        ),
        (
            {"args": ["proxy", "--model=$(ELSEWHERE)", "--http-listen=:$(PORT)"],
             "env": [{"name": "ELSEWHERE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
            Proxy(model="$(ELSEWHERE)"),
        ),
        (
            {"args": ["proxy", "--model=mine", "--container-concurrency=4"],
             "env": [{"name": "BERTH_PROXY_CONTAINER_CONCURRENCY", "value": "3"}, {"name": "BERTH_PROXY_MODEL", "value": "x"}]},
            Proxy(model="mine", container_concurrency=4),
        ),
        ({"args": ["proxy", "--model=x", "y", "--container-concurrency=4", "5"]}, Proxy(model="x", container_concurrency=4)),
        (
            {"args": ["proxy", "--http-listen=[$(POD_IP)]:8080", "--grpc-listen", "0.0.0.0:8081", "--tls-cert=/x"]},
            Proxy(tls=True, ports=ProxyPorts(8080, 8081, {})),
        ),
        ({"args": ["proxy", "--http-listen=:10080", "--grpc-listen=:65535"]}, Proxy(ports=ProxyPorts(10080, 65535, {}))),
        ({"args": ["proxy", "--http-listen=:65536", "--grpc-listen=:0"]}, Proxy()),
        (
            {"args": ["proxy", "--http-listen=what"], "ports": [{"name": "http", "containerPort": 9000}, {"containerPort": 1}]},
            Proxy(ports=ProxyPorts(9000, 9001, {"http": 9000})),
        ),
        ({"args": ["serve", "--container-concurrency=4"]}, Proxy()),
        ({"name": "bare"}, Proxy()),
        # What no message can say, behind a beginning that looks well.
        ({"args": ["proxy", "--http-listen=:0000099999999999", "--grpc-listen=:99999"]}, Proxy()),
        ({"args": ["proxy", "--http-listen=:" + "00000" + 5000 * "9"]}, Proxy()),
    ],
)  # fmt: skip
def test_the_proxys_own_arguments(container: dict[str, Any], proxy: Proxy) -> None:
    assert read_proxy({"spec": {"containers": [{"args": ["sidecar"]}, container]}}) == proxy


BERTHS: Final = {"name": "door", "args": ["proxy", "--model=ours"]}
ISTIOS: Final = {"name": "istio-proxy", "args": ["proxy", "sidecar", "--domain", "a.svc", "--model=theirs"]}
OTHERS: Final = {"name": "proxy", "command": ["oauth"], "args": ["--model=theirs"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [ISTIOS, BERTHS]},
        {"containers": [OTHERS, BERTHS]},
        {"containers": [ISTIOS, {"name": "p", "command": ["/usr/bin/berth"], "args": ["proxy", "--model", "ours"]}]},
        {"containers": [{"name": "p", "command": ["tini", "--", "berth", "proxy", "--model=ours"]}]},
        {"containers": [{"name": "proxy", "command": ["start"], "args": ["--model=ours"]}, ISTIOS]},
        {"containers": [OTHERS], "initContainers": [{**BERTHS, "restartPolicy": "Always"}]},
        {
            "containers": [{"name": "main", "args": ["sleep"]}],
            "initContainers": [
                {**ISTIOS, "restartPolicy": "Always"},
                {"name": "loader", "args": ["loader", "--model=x"]},
                {**BERTHS, "restartPolicy": "Always"},
            ],
        },
        {
            "containers": [{**BERTHS, "args": ["proxy", "--model=theirs"]}, {**BERTHS, "name": "proxy"}],
        },
    ],
    ids=range(8),
)  # fmt: skip
def test_the_proxy_is_found_among_all_that_run_beside_it(spec: dict[str, Any]) -> None:
    """A native sidecar was not found, and Istio's proxy was."""
    assert read_proxy({"spec": spec}).model == "ours"


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [ISTIOS]},
        {"containers": [{"name": "a", "command": ["other"], "args": ["proxy", "--model=theirs"]}]},
        {"containers": [], "initContainers": [BERTHS]},
        {"containers": [{"name": "a", "args": ["serve", "proxy", "--model=theirs"]}]},
    ],
    ids=range(4),
)
def test_what_is_not_berths_proxy_is_not_taken_for_it(spec: dict[str, Any]) -> None:
    assert read_proxy({"spec": spec}) == Proxy()


def test_the_limit_of_a_replica_bounds_its_target() -> None:
    cached = cache()
    spec = {"containers": [{"args": ["proxy", "--model=public", "--container-concurrency=2"]}]}
    cached.observe_deployment(deployment({GROUP + "target": "50"}, spec=spec))
    found = cached.deployments[KEY]
    assert (found.spec.total, found.slots, found.public_name) == (2.0, 2, "public")
    cached.observe_deployment(deployment({GROUP + "target": "50"}))
    assert (cached.deployments[KEY].slots, cached.deployments[KEY].public_name) == (70, "m")


@pytest.mark.parametrize(
    ("item", "state"),
    [
        (pod(conditions=READY), PodState.READY),
        (pod(), PodState.STARTING),
        (pod(phase="Pending", conditions=READY), PodState.STARTING),
        (pod(node="", phase="Pending"), PodState.PENDING),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "SchedulingGated")}), PodState.PENDING),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "Unschedulable")}), PodState.UNSCHEDULABLE),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "ModelTooLarge")}), PodState.UNSCHEDULABLE),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("True", "Unschedulable")}), PodState.PENDING),
        (pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "SchedulerError")}), PodState.UNSCHEDULABLE),
        (gated(pod(node="", phase="Pending", conditions={"PodScheduled": ("False", "SchedulingGated")})), PodState.GATED),
        (gated(pod(node="", phase="Pending")), PodState.GATED),
        (gated(pod(node="", phase="Pending", deleting=True)), PodState.LEAVING),
        (pod(conditions=READY, deleting=True), PodState.LEAVING),
    ],
)  # fmt: skip
def test_states_of_pods(item: dict[str, Any], state: PodState) -> None:
    cached = cache()
    cached.observe_pod(item, 0)
    assert [found.state for found in cached.pods(KEY)] == [state]


@pytest.mark.parametrize("item", [pod(owner=None), pod(owner="m-77"), pod(owner="-5f"), pod(phase="Failed"), pod(phase="Succeeded")])  # fmt: skip
def test_no_replicas(item: dict[str, Any]) -> None:
    cached = cache()
    cached.observe_pod(pod(), 0)
    cached.observe_pod(item, 0)
    assert list(cached.pods(KEY)) == []


def test_counts_and_what_makes_no_progress() -> None:
    cached = cache()
    loaded = Keys().loaded_condition
    cached.observe_pod(pod("u1", conditions=READY), 0)
    cached.observe_pod(pod("u2", phase="Pending", waiting="ImagePullBackOff"), 0)
    cached.observe_pod(pod("u3", phase="Pending", waiting="PodInitializing"), 0)
    cached.observe_pod(pod("u4", phase="Pending", conditions={loaded: ("False", "Broken")}), 0)
    cached.observe_pod(pod("u5", node="", phase="Pending"), 0)
    cached.observe_pod(pod("u6", deleting=True, conditions={loaded: ("False", "Broken")}), 0)
    counts = cached.counts(KEY)
    assert counts == Counts(ready=1, starting=3, pending=1, unschedulable=0, leaving=1, stuck=2)
    assert (counts.bound, counts.on_their_way) == (4, 2)
    assert {one.name: one.failed_load for one in cached.pods(KEY)}["u4"] == "Broken it is"
    cached.pod_gone(pod("u1"))
    cached.pod_gone(pod("u1"))
    assert cached.counts(KEY).ready == 0


def test_a_pods_own_words_are_few_and_on_one_line() -> None:
    cached = cache()
    cached.observe_pod(pod(conditions={Keys().loaded_condition: ("False", "no\n\x1b[2J" + "x" * 10_000)}), 0)
    (found,) = cached.pods(KEY)
    assert len(found.failed_load) <= 512
    assert found.failed_load.isprintable()


def test_when_a_replica_was_first_seen_to_be_so() -> None:
    cached = cache()
    cached.observe_pod(pod(node="", phase="Pending"), 1)
    cached.observe_pod(pod(), 2)
    cached.observe_pod(pod(conditions=READY), 3)
    cached.observe_pod(pod(), 4)
    cached.observe_pod(pod(conditions=READY), 5)
    (found,) = cached.pods(KEY)
    assert (found.bound_ns, found.ready_ns) == (2, 3)


def test_endpoints_are_replicas_with_an_address() -> None:
    cached = cache()
    cached.observe_pod(pod("u1", conditions=READY), 0)
    assert cached.endpoints(KEY) == ()
    cached.observe_deployment(deployment())
    cached.observe_pod(pod("u2"), 0)
    cached.observe_pod(pod("u3", node="", phase="Pending"), 0)
    cached.observe_pod(pod("u4", conditions=READY, deleting=True), 0)
    found = cached.endpoints(KEY)
    assert [(one.name, one.ready, one.nearly_ready) for one in found] == [
        ("u1", True, False),
        ("u2", False, False),
    ]
    assert {(one.rest_port, one.grpc_port, one.slots) for one in found} == {(9000, 9001, 140)}
    cached.observe_pod(pod("u2", conditions={"Initialized": ("True", "")}), 1)  # its loader is done
    assert [(one.name, one.nearly_ready) for one in cached.endpoints(KEY)] == [("u1", False), ("u2", True)]


def test_a_nodes_address_is_no_replicas_address() -> None:
    """An activator would be sent to whatever listens there, at any port that the template names."""
    cached = cache(deployment())
    bare = pod(conditions=READY)
    bare["spec"]["hostNetwork"] = True
    cached.observe_pod(keep_pod(bare), 0)
    assert cached.endpoints(KEY) == ()
    cached.observe_deployment(deployment(spec={"hostNetwork": True}))
    (complaint,) = cached.problems()
    assert "hostNetwork" in complaint.text


def test_priorities() -> None:
    cached = cache(deployment(spec={"priorityClassName": "high"}))
    cached.observe_priority_class({"metadata": {"name": "nobodys"}, "value": 9})
    cached.observe_priority_class({"metadata": {"name": "usual"}, "value": 1, "globalDefault": True})
    assert cached.priority(KEY) == 0, "it names another, of which nothing is known"
    cached.observe_pod(pod(priority=3), 0)
    cached.observe_pod(pod(priority=None), 1)
    assert cached.priority(KEY) == 3
    cached.observe_priority_class({"metadata": {"name": "high"}, "value": 7})
    assert cached.priority(KEY) == 7
    assert cached.priority(ModelKey("a", "other")) == 1
    cached.priority_class_gone({"metadata": {"name": "high"}})
    assert cached.priority(KEY) == 3
    cached.pod_gone(pod(priority=3))
    assert cached.priority(KEY) == 3


def test_of_pods_that_outlive_their_deployment_nothing_is_left() -> None:
    cached = cache(deployment())
    cached.observe_pod(pod(priority=3), 0)
    cached.deployment_gone(deployment())
    cached.observe_pod(pod(priority=3, deleting=True), 0)
    cached.pod_gone(pod(priority=3))
    kept = {name for name, value in vars(cached).items() if isinstance(value, dict) and value}
    assert kept == set()


@pytest.mark.parametrize("kind", [KPA, None])
def test_of_what_is_gone_nothing_is_kept(kind: str | None) -> None:
    """Whichever is seen to go first, and a pod that leaves is seen to do so once more: names come and go for ever."""
    cached = cache()
    for order in ("pods", "deployment", "pods of nobody"):
        if order != "pods of nobody":
            cached.observe_deployment(deployment(kind=kind))
        cached.observe_pod(pod(priority=3, conditions=READY), 0)
        cached.ready(KEY), cached.counts(KEY)
        if order == "pods":
            cached.pod_gone(pod())
            assert cached.priority(KEY) == (0 if kind is None else 3), "its next one will have the same"
        if order != "pods of nobody":
            cached.deployment_gone(deployment(kind=kind))
        if order != "pods":
            cached.observe_pod(pod(priority=3, deleting=True), 1)
            cached.pod_gone(pod())
        assert not any(
            vars(cached)[name] for name in ("_readings", "_deployments", "_priorities", "_pods", "_pods_of")
        )
        assert not cached.problems()


def test_a_pod_that_another_deployment_takes_is_that_ones() -> None:
    cached = cache()
    cached.observe_pod(pod(conditions=READY), 0)
    assert cached.counts(KEY).ready == 1
    cached.observe_pod(pod(owner="other-5f", conditions=READY), 1)
    assert (cached.counts(KEY).ready, cached.counts(ModelKey("a", "other")).ready) == (0, 1)


def test_who_says_no_replicas_has_one() -> None:
    cached = cache()
    item = deployment()
    del item["spec"]["replicas"]
    cached.observe_deployment(item)
    assert cached.deployments[KEY].replicas == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"since": "x"}', '{"activity": 5}', '{"x":' + "[" * 100_000], ids=len
)
def test_what_stands_in_our_annotation_may_be_anything(text: str) -> None:
    cached = cache(deployment({OWN + "scaled": text}))
    assert cached.deployments[KEY].recorded is None


@pytest.mark.parametrize(
    "clients", [",".join(f"n{number}" for number in range(65)), "a b", "B", "x" * 64, "a,*x", "é"]
)
def test_clients_that_are_no_namespaces_or_too_many_are_refused(clients: str) -> None:
    """What one writes is told to every activator, with what all others write."""
    cached = cache(deployment({OWN + "clients": clients}))
    assert KEY not in cached.deployments
    (complaint,) = cached.problems()
    assert complaint.text.startswith(OWN + "clients: ")
    assert len(complaint.text) < 300


def proxy(*args: str, **more: Any) -> dict[str, Any]:
    return {"containers": [{"args": ["proxy", *args], **more}]}


def doubled(times: int) -> list[dict[str, str]]:
    """The last variable, V<times>, is 16 << times characters long."""
    more = [{"name": f"V{n}", "value": f"$(V{n - 1})$(V{n - 1})"} for n in range(1, times + 1)]
    return [{"name": "V0", "value": "x" * 16}, *more]


ELSEWHERE = {"valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (proxy("--model=" + "m" * 256), "the model's name has 256 characters; 255 at most are served"),
        (
            proxy("--model=$(M)", env=[{"name": "M"} | ELSEWHERE]),
            "--model: what '$(M)' is, the template does not say; write it",
        ),
        (
            proxy(env=[{"name": "BERTH_PROXY_MODEL"} | ELSEWHERE]),
            "--model: what '$(BERTH_PROXY_MODEL)' is, the template does not say; write it",
        ),
        *(
            (proxy(f"--container-concurrency={limit}"), f"--container-concurrency: '{limit}' is invalid; use a whole number, 0 to 1000000")
            for limit in ("$(LIMIT)", "many", "-1", "1000001")
        ),
        (
            proxy("--model=$(V9)", env=doubled(40)),
            "--model: what '$(V9)' is, the template does not say; write it",
        ),
        (
            {"a": "x" * (128 * 1024 - 67)},
            "the pod template has 131073 bytes; a model that is scaled has 131072 at most",
        ),
    ],
)  # fmt: skip
def test_a_template_of_which_one_cannot_be_sure_is_refused(spec: dict[str, Any], said: str) -> None:
    """Of what sleeps an activator would refuse every request by a name that is not its own."""
    cached = cache(deployment(spec=spec))
    (complaint,) = cached.problems()
    assert complaint.text == said


def test_variables_that_double_each_other_are_not_put_together() -> None:
    """Forty of them are a kilobyte of a template, and 16 TiB of text."""
    template = {"spec": proxy("--model=$(V4)", "--http-listen=$(V40):9", "--tls-cert=$(V9)", env=doubled(40))}
    tracemalloc.start()
    try:
        found = read_proxy(template)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.model == "x" * 256
    assert found.tls
    assert peak < 1 << 20


def test_a_value_may_be_as_long_as_any_that_is_read() -> None:
    def model(times: int, more: str = "") -> str:
        return read_proxy({"spec": proxy(f"--model=$(V{times}){more}", env=doubled(times))}).model

    assert model(7, "y") == "x" * 2048 + "y"
    assert model(8) == "$(V8)"  # with the flag's name, longer than a word may be
    assert model(9) == "$(V9)"
    env = [{"name": "BERTH_PROXY_MODEL", "value": "$(V8)"}]
    assert read_proxy({"spec": proxy(env=[*doubled(8), *env])}).model == "x" * 4096
    env = [{"name": "BERTH_PROXY_MODEL", "value": "$(V8)x"}]
    assert read_proxy({"spec": proxy(env=[*doubled(8), *env])}).model == "$(BERTH_PROXY_MODEL)"


@pytest.mark.parametrize("text", ["NaN", "Inf", "+Inf", "-Inf", "infinity"])
@pytest.mark.parametrize(
    "name",
    [
        "target",
        "target-utilization-percentage",
        "panic-window-percentage",
        "panic-threshold-percentage",
        "target-burst-capacity",
    ],
)
def test_what_is_no_finite_number_is_refused(name: str, text: str) -> None:
    """Knative takes some of these; then a request at zero waits for nothing, without a word."""
    cached = cache(deployment({GROUP + name: text}))
    (complaint,) = cached.problems()
    assert f"{GROUP}{name}" in complaint.text
    assert text in complaint.text
    assert not cached.deployments


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["targt"], f"{GROUP}targt is not read; did you mean {GROUP}target?"),
        (["minscale"], f"{GROUP}minscale is not read; did you mean {GROUP}min-scale?"),
        (["maxScal"], f"{GROUP}maxScal is not read; did you mean {GROUP}max-scale?"),
        (["activationScale"], f"{GROUP}activationScale is not read; did you mean {GROUP}activation-scale?"),
        (["xyz"], f"{GROUP}xyz is not read"),
        (
            ["a1", "a2", "a3", "a4", "a5"],
            f"{GROUP}a1 is not read; {GROUP}a2 is not read; {GROUP}a3 is not read; and 2 more",
        ),
    ],
)
def test_an_annotation_that_there_is_not_is_reported_with_the_one_that_is_meant(
    names: list[str], said: str
) -> None:
    """A typo in an annotation's name was silent."""
    cached = cache()
    item = deployment(dict.fromkeys((GROUP + name for name in names), "1"))
    cached.observe_deployment(item)
    (complaint,) = cached.problems()
    assert (complaint.reason, complaint.text, complaint.uid) == ("UnknownAnnotation", said, "d")
    assert cached.deployments[KEY].spec.target == 70.0  # what it does not read changes nothing
    cached.observe_deployment(item)
    assert not cached.problems()
    cached.observe_deployment(deployment())
    cached.observe_deployment(item)
    assert len(cached.problems()) == 1
    cached.deployment_gone(item)
    cached.observe_deployment(item)
    assert len(cached.problems()) == 1


def test_a_class_that_is_misspelt_is_told_though_nothing_is_scaled() -> None:
    cached = cache(deployment({GROUP + "clas": KPA, GROUP + "min-scale": "1"}, kind=None))
    (complaint,) = cached.problems()
    assert complaint.text.endswith(f"did you mean {GROUP}class?")
    assert not cached.deployments


def test_what_there_is_is_told_of_nobody_and_both_complaints_are_told() -> None:
    """Every name of Knative's, in each spelling that is read."""
    cached = cache()
    known = {name: "" for name in ANNOTATIONS if name != "class"} | {
        "minScale": "",
        "targetBurstCapacity": "",
    }
    cached.observe_deployment(deployment({GROUP + name: text for name, text in known.items()}, kind=None))
    assert not cached.problems()
    cached.observe_deployment(deployment({GROUP + "target": "x", GROUP + "tagret": "1"}))
    assert {one.reason for one in cached.problems()} == {"InvalidAnnotation", "UnknownAnnotation"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 600), ("25m", 1500), ("0s", None), ("1500ms", None), ("-1s", None), ("5", None)],
)
@pytest.mark.parametrize("name", ["progress-deadline", "progressDeadline"])
def test_knatives_progress_deadline_is_read(name: str, text: str | None, seconds: int | None) -> None:
    """It was 600 s whatever was written."""
    cached, key = cache(), f"serving.knative.dev/{name}"
    cached.observe_deployment(deployment(template={} if text is None else {key: text}))
    if seconds is None:
        (complaint,) = cached.problems()
        assert key in complaint.text
    else:
        assert cached.deployments[KEY].progress_deadline_ns == seconds * 10**9


def managed(manager: str, *, subresource: str | None = "scale", field: str = "f:replicas") -> dict[str, Any]:
    entry = {
        "manager": manager,
        "time": "2026-01-01T00:00:00Z",
        "operation": "Update",
        "apiVersion": "apps/v1",
    }
    entry |= {"fieldsV1": {"f:spec": {field: {}}}}
    item = deployment()
    item["metadata"]["managedFields"] = [entry | ({"subresource": subresource} if subresource else {})]
    return item


@pytest.mark.parametrize("manager", ["kube-controller-manager", "keda"])
def test_who_scales_beside_us_is_seen_by_the_field_that_it_owns(manager: str) -> None:
    item = managed(manager)
    assert scaled_by(item) == scaled_by(keep_deployment(item)) == (manager, "2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "item",
    [
        managed("berth", subresource=None),
        managed("kubectl"),
        managed("kubectl-scale"),
        managed("kube-controller-manager", subresource="status"),
        managed("kube-controller-manager", field="f:paused"),
        deployment(),
    ],
    ids=range(6),
)
def test_neither_our_writes_nor_a_persons_are_an_autoscalers(item: dict[str, Any]) -> None:
    assert scaled_by(item) is scaled_by(keep_deployment(item)) is None


def test_gates_are_known_by_the_names_of_the_first_few_and_a_node_is_requested_by_one_word_alone() -> None:
    cached = cache()
    cached.observe_pod(keep_pod(gated(pod("g", node="", phase="Pending"), *"abcde")), 0)
    for uid, reason in (("u", "Unschedulable"), ("v", "WaitingForCapacity")):
        conditions = {"PodScheduled": ("False", reason)}
        cached.observe_pod(keep_pod(pod(uid, node="", phase="Pending", conditions=conditions)), 0)
    found = {one.uid: one for one in cached.pods(KEY)}
    assert found["g"].gates == ("a", "b", "c")
    assert [uid for uid, one in found.items() if one.asks_for_node] == ["u"]
    counts = cached.counts(KEY)
    assert counts == Counts(unschedulable=2, gated=1)
    assert (counts.made, counts.admitted, counts.on_their_way) == (3, 2, 2)


def test_what_a_bound_itself_allows_goes() -> None:
    cached, limits = cache(), {"hold-requests": "1000000", "hold-timeout": "600", "overflow-pods": "1000"}
    clients = {"clients": ",".join(f"n{number}" for number in range(64))}
    own = {OWN + name: text for name, text in {**limits, **clients}.items()}
    cached.observe_deployment(deployment(own, spec=proxy("--model=" + "m" * 255)))
    options = cached.deployments[KEY].options
    assert (options.limits.requests, options.limits.seconds, options.overflow_pods) == (10**6, 600.0, 1000)
    assert len(options.clients) == 65
    cached.observe_deployment(deployment(own, spec={"a": "x" * (128 * 1024 - 68)}))
    assert cached.problems() == []
    for name, text in (("hold-timeout", "0.01h"), ("hold-timeout", "36")):
        cached.observe_deployment(deployment({OWN + name: text}))
        assert cached.deployments[KEY].options.limits.seconds == 36.0


def test_a_model_is_called_as_its_proxy_serves_it_or_its_template_says() -> None:
    cached, names = cache(), {OWN + "model-name": "named", OWN + "model-id": "id"}
    for template, spec, name in (
        (names, proxy("--model=served"), "served"),
        (names, {}, "named"),
        ({OWN + "model-id": "id"}, {}, "id"),
        ({}, {}, "m"),
    ):
        cached.observe_deployment(deployment(template=template, spec=spec))
        assert cached.deployments[KEY].public_name == name


def test_equal_templates_have_an_equal_hash() -> None:
    assert template_text({"a": 1, "b": {"c": 2, "d": 3}}) == template_text({"b": {"d": 3, "c": 2}, "a": 1})


def test_all_of_knatives_annotations_are_known() -> None:
    names = (
        "activation-scale class initial-scale max-scale metric metric-aggregation-algorithm min-scale "
        "panic-threshold-percentage panic-window-percentage scale-down-delay scale-to-zero-pod-retention-period "
        "target target-burst-capacity target-utilization-percentage window"
    )
    assert unknown({GROUP + name: "" for name in names.split()}) == ""
