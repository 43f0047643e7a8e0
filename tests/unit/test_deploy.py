"""What `deploy/` says, looked at without an API server: credentials, addresses, and the very commands that
make a node's directory ready, run as their users with their capabilities."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.repository import Repository
from agent.serving.restart import RESTART_FILE
from berth import cli
from berth.contract.activation import SCALER_AUDIENCE
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import BINDER_AUDIENCE
from berth.runtime.options import CommonOptions, parse_options
from berth.triton.keys import TritonKeys
from proxy.activator.config import ActivatorOptions
from scaler.config import ScalerOptions
from scaler.core.deployments import MOST_HOLD_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"
KEYS, REPOSITORY = "/run/berth/keys", "/var/lib/berth/repository"
TRITON, GATEWAY = "/run/berth/triton", "/run/berth/gateway"
AGENT = 65532  # the image's user
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
"""One that any user may run."""

Json = dict[str, Any]


@cache
def every_document() -> list[Json]:
    paths = [path for path in sorted(DEPLOY.rglob("*.yaml")) if "patch" not in path.name]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def documents(kind: str) -> dict[str, Json]:
    return {d["metadata"]["name"]: d for d in every_document() if d.get("kind") == kind}


def pods() -> dict[str, Json]:
    owners = documents("DaemonSet") | documents("Deployment")
    return {name: owner["spec"]["template"]["spec"] for name, owner in owners.items()}


def containers(pod: Json) -> Iterator[Json]:
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


def test_the_api_servers_token_is_in_the_container_that_uses_it_alone() -> None:
    """Triton runs tenants' code, and a model's pod belongs to a tenant."""
    holders = {}
    for name, pod in pods().items():
        assert pod["automountServiceAccountToken"] is False, name
        tokens = {
            volume["name"]
            for volume in pod["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "audience" not in source.get("serviceAccountToken", {"audience": ""})
        }
        holders[name] = {
            (container["name"], mount["mountPath"])
            for container in containers(pod)
            for mount in container.get("volumeMounts", [])
            if mount["name"] in tokens or mount["mountPath"].startswith("/var/run/secrets/kubernetes.io")
        }
    assert holders == {
        "berth-activator": set(),
        "berth-agent": {("agent", CREDENTIALS)},
        "berth-binder": {("binder", CREDENTIALS)},
        "berth-kube-scheduler": {("kube-scheduler", CREDENTIALS)},
        "berth-scaler": {("scaler", CREDENTIALS)},
        "berth-server": set(),
        "simple": set(),
    }


def test_no_service_account_hands_out_tokens_by_itself() -> None:
    accounts = documents("ServiceAccount")
    assert set(accounts) == {
        "berth-activator",
        "berth-agent",
        "berth-binder",
        "berth-kube-scheduler",
        "berth-scaler",
        "berth-server",
    }
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())


@pytest.mark.parametrize("name", ["berth-agent", "berth-binder", "berth-kube-scheduler", "berth-scaler"])
def test_a_mounted_token_comes_with_all_that_a_client_in_a_pod_reads(name: str) -> None:
    pod = pods()[name]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "api-access"]
    files = set()
    for source in volume["projected"]["sources"]:
        if token := source.get("serviceAccountToken"):
            files.add(token["path"])
        for kind in ("configMap", "downwardAPI"):
            files |= {item["path"] for item in source.get(kind, {}).get("items", [])}
    assert files == {"token", "ca.crt", "namespace"}


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
def test_addresses_of_both_families_make_flags_that_can_be_read(address: str) -> None:
    arguments = [
        argument.replace("$(HOST_IP)", address).replace("$(POD_IP)", address).partition("=")[2]
        for container in containers(pods()["simple"])
        for argument in container["args"]
        if "_IP)" in argument
    ]
    assert len(arguments) == 5
    assert {Endpoint.parse(argument).host for argument in arguments} == {address}


NODE_PODS = ("berth-server", "berth-agent")
ACTIVATOR_PORTS = {"port": 20000, "endPort": 29999}


def test_an_activator_has_no_right_and_a_token_for_the_scaler_alone() -> None:
    bindings = documents("RoleBinding") | documents("ClusterRoleBinding")
    holders = {subject["name"] for binding in bindings.values() for subject in binding["subjects"]}
    assert "berth-scaler" in holders
    assert "berth-activator" not in holders
    (volume,) = pods()["berth-activator"]["volumes"]
    (source,) = volume["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == SCALER_AUDIENCE


def test_the_scaler_asks_the_binder_with_a_token_for_that_alone() -> None:
    volumes = {volume["name"]: volume for volume in pods()["berth-scaler"]["volumes"]}
    (source,) = volumes["binder-token"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == BINDER_AUDIENCE


def test_the_scaler_reads_a_config_map_that_may_come_later() -> None:
    """autoscaling D2: no manifest mounted one."""
    pod = pods()["berth-scaler"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["config"]["configMap"] == {"name": "config-autoscaler", "optional": True}
    (container,) = containers(pod)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"--config={mounts['config']}" in container["args"]


@pytest.mark.parametrize(
    ("pod", "process"), [("berth-scaler", ScalerOptions), ("berth-activator", ActivatorOptions)]
)
def test_what_scales_takes_the_flags_that_it_is_given(pod: str, process: type[CommonOptions]) -> None:
    (container,) = containers(pods()[pod])
    command, *flags = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in container["args"]]
    options = parse_options(process, process=command, summary="", argv=flags, environ={})
    listening = {
        getattr(options, name).port for name in ("control_listen", "admin_listen") if hasattr(options, name)
    }
    assert {port["containerPort"] for port in ports_of(container)} == listening
    tokens = [flag.partition("=")[2] for flag in flags if "token" in flag.partition("=")[0]]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(any(token == f"{mount}/token" for mount in mounts) for token in tokens)


@pytest.mark.parametrize("name", ["berth-scaler", "berth-activator"])
def test_who_scales_reaches_what_it_needs_and_is_reached_by_whom_it_serves(name: str) -> None:
    policy = documents("NetworkPolicy")[name]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    let_in = [port for rule in policy["ingress"] for port in rule["ports"]]
    listening = [
        {"port": port["containerPort"]} for port in ports_of(container_of(name, name.removeprefix("berth-")))
    ]
    holds = [ACTIVATOR_PORTS] if name == "berth-activator" else []
    assert sorted(let_in, key=str) == sorted([*listening, *holds], key=str)


def test_only_activators_attach_to_the_scaler() -> None:
    policy = documents("NetworkPolicy")["berth-scaler"]["spec"]
    (rule,) = [rule for rule in policy["ingress"] if {"port": 9093} in rule["ports"]]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "berth-activator"}


ANYBODY, ANYWHERE, NAMESPACE = "anybody", " of any namespace", "kubernetes.io/metadata.name"


def reached(name: str, way: str, end: str) -> set[str]:
    """By a policy: who, and at which ports. A pod is called by its name, with where it is if that is not our namespace."""
    found = set()
    for rule in documents("NetworkPolicy")[name]["spec"][way]:
        for peer in rule.get(end, [{}]):
            assert set(peer) <= {"podSelector", "namespaceSelector"}
            pod = peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name", ANYBODY)
            where = peer.get("namespaceSelector")
            labels = "" if where is None else ANYWHERE
            if where:
                labels = f" of {where['matchLabels'][NAMESPACE]}"
            found |= {f"{pod}{labels}{_port(port)}" for port in rule.get("ports", [{}])}
    return found


def _port(port: Json) -> str:
    """A port, a range, or any."""
    more = f"-{port['endPort']}" if "endPort" in port else ""
    kind = f"/{port['protocol']}" if "protocol" in port else ""
    return f":{port['port']}{more}{kind}" if port else ""


NAMES, API = {f"{ANYBODY}:53/TCP", f"{ANYBODY}:53/UDP"}, {f"{ANYBODY}:443", f"{ANYBODY}:6443"}
ACTIVATORS = f"berth-activator{ANYWHERE}"
# Policy → who comes in, whom it goes out to; None: to whomever it wants. A tenant's own activators are in its namespace.
REACHED: dict[str, tuple[set[str], set[str] | None]] = {
    "berth-scaler": (
        {f"{ACTIVATORS}:9093", f"{ANYBODY}:8490"},
        API | NAMES | {"berth-server:8473", "berth-binder:8482", f"{ACTIVATORS}:20000-29999"},
    ),
    "berth-activator": (
        {f"{ANYBODY}:20000-29999", f"{ANYBODY}:9090"},
        NAMES | {"berth-scaler:9093", f"{ANYBODY}{ANYWHERE}"},
    ),
    "berth-binder-asked": ({f"{ANYBODY}:8480", "berth-scaler:8482"}, None),
    # A replica that does not lead passes on to the one that does.
    "berth-scaler-external-metrics": ({f"{ANYBODY}:8491"}, {"berth-scaler:8491"}),
    "berth-scaler-keda": ({f"{ANYBODY} of keda:9094", "berth-scaler:9094"}, {"berth-scaler:9094"}),
}


@pytest.mark.parametrize("name", REACHED)
def test_who_reaches_whom_when_models_are_scaled(name: str) -> None:
    comes_in, goes_out = REACHED[name]
    assert reached(name, "ingress", "from") == comes_in
    policy = documents("NetworkPolicy")[name]["spec"]
    assert set(policy["policyTypes"]) == ({"Ingress"} if goes_out is None else {"Ingress", "Egress"})
    if goes_out is not None:
        assert reached(name, "egress", "to") == goes_out


@pytest.mark.parametrize("name", ["berth-scaler", "berth-activator"])
def test_of_those_that_scale_one_at_a_time_may_be_taken_away(name: str) -> None:
    spec = documents("PodDisruptionBudget")[name]["spec"]
    deployment = documents("Deployment")[name]["spec"]
    assert spec["selector"] == deployment["selector"]
    assert spec["maxUnavailable"] == 1 < deployment["replicas"]


def test_an_activator_has_the_time_that_its_drain_takes_and_that_takes_as_long_as_any_request_may_wait() -> (
    None
):
    assert ActivatorOptions.drain_timeout >= MOST_HOLD_SECONDS + 30  # and then it is answered
    seconds = ActivatorOptions.drain_delay + ActivatorOptions.drain_timeout
    assert pods()["berth-activator"]["terminationGracePeriodSeconds"] > seconds


def container_of(pod: str, name: str) -> Json:
    (found,) = [container for container in containers(pods()[pod]) if container["name"] == name]
    return found


def test_triton_has_a_pod_without_rights_and_the_agent_one_without_tenants_code() -> None:
    images = {name: {container["image"] for container in pods()[name]["containers"]} for name in NODE_PODS}
    assert images == {"berth-server": {"tritonserver", "berth"}, "berth-agent": {"berth"}}
    accounts = {name: pods()[name]["serviceAccountName"] for name in NODE_PODS}
    assert accounts == {name: name for name in NODE_PODS}
    bindings = documents("RoleBinding") | documents("ClusterRoleBinding")
    holders = {subject["name"] for binding in bindings.values() for subject in binding["subjects"]}
    assert "berth-agent" in holders
    assert "berth-server" not in holders


def test_triton_writes_in_nothing_that_outlives_its_pod_but_where_its_socket_is() -> None:
    triton, volumes = container_of("berth-server", "triton"), pods()["berth-server"]["volumes"]
    lasting = {volume["name"] for volume in volumes if "emptyDir" not in volume}
    writable = {
        m["mountPath"] for m in triton["volumeMounts"] if m["name"] in lasting and not m.get("readOnly")
    }
    assert writable == {TRITON}
    assert all("sizeLimit" in volume["emptyDir"] for volume in volumes if volume["name"] not in lasting)


def seen_of(container: Json, place: str) -> set[str]:
    """What a container has of a directory of the node: paths, read-only ones in brackets."""
    return {
        f"({m['mountPath']})" if m.get("readOnly") else m["mountPath"]
        for m in container["volumeMounts"]
        if m["mountPath"].startswith(place)
    }


def test_what_a_container_sees_of_the_others() -> None:
    """Triton runs tenants' code: it finds no way to the gateway's orders, nor a secret that is not its own."""
    triton, gateway, agent = (
        container_of("berth-server", "triton"),
        container_of("berth-server", "gateway"),
        container_of("berth-agent", "agent"),
    )
    assert seen_of(triton, "/run") == {f"({KEYS}/server-flags)", f"({KEYS}/inference)", TRITON}
    assert seen_of(gateway, "/") == {f"({KEYS}/inference)", f"({TRITON})", GATEWAY}
    assert seen_of(agent, "/run") == {f"({KEYS})", f"({TRITON})", f"({GATEWAY})"}
    for container in (triton, gateway, agent):
        for mount in container["volumeMounts"]:
            assert mount["mountPath"].endswith(mount.get("subPath", "")), mount


def test_the_same_sockets_are_meant_on_both_sides() -> None:
    """gRPC adds the port to the path that Triton is given; whoever connects names the whole."""
    (start,) = container_of("berth-server", "triton")["args"]
    address = f"unix:{TRITON}/grpc"
    assert f" --grpc-address={address} " in start
    assert " --http-address=127.0.0.1 " in start
    flags = [
        dict(argument.partition("=")[::2] for argument in container_of(pod, name)["args"])
        for pod, name in (("berth-server", "gateway"), ("berth-agent", "agent"))
    ]
    gateway, agent = flags
    assert gateway["--triton-grpc"] == agent["--triton-grpc"] == f"{address}:8001"
    assert gateway["--triton-http"] == "127.0.0.1:8000"
    assert gateway["--control"] == agent["--gateway-control"] == f"unix:{GATEWAY}/control"
    assert agent["--gateway"].rpartition(":")[2] == gateway["--listen"].rpartition(":")[2] == "8472"


@pytest.mark.parametrize(
    "pod", [*NODE_PODS, "berth-binder", "berth-kube-scheduler", "berth-scaler", "berth-activator", "simple"]
)
def test_a_container_has_no_more_of_linux_than_it_needs(pod: str) -> None:
    """Root, and one capability with it, is had by the init container that gives directories away, alone."""
    for container in containers(pods()[pod]):
        context = pods()[pod].get("securityContext", {}) | container["securityContext"]
        gives_away = container["name"] == "directories"
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["capabilities"] == {"drop": ["ALL"]} | ({"add": ["CHOWN"]} if gives_away else {})
        assert context.get("runAsNonRoot", False) is not gives_away
        assert user_of({"securityContext": context})[1] == (0 if gives_away else AGENT), "not root's group"
        assert not {"privileged", "procMount"} & set(context)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pods()[pod])


def test_only_what_the_proxies_and_loaders_use_is_on_the_nodes_address() -> None:
    ports = {
        name: {p["hostPort"] for c in pods()[name]["containers"] for p in ports_of(c) if "hostPort" in p}
        for name in NODE_PODS
    }
    assert ports == {"berth-server": {8472}, "berth-agent": {8470}}
    assert ports_of(container_of("berth-server", "triton")) == []
    # What Triton's metrics say is of every model of the node, and their port asks for no key.
    assert "--allow-metrics=false" in container_of("berth-server", "triton")["args"][0]


def ports_of(container: Json) -> list[Json]:
    ports: list[Json] = container.get("ports", [])
    return ports


@pytest.mark.parametrize("name", NODE_PODS)
def test_a_nodes_pods_are_replaced_when_somebody_says_so(name: str) -> None:
    """Never by an update of the DaemonSet alone: a new Triton loads every model of its node anew."""
    assert documents("DaemonSet")[name]["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_tritons_pod_is_not_spared_when_the_nodes_memory_runs_short() -> None:
    """A pod of a system class has the oom_score_adj of the kubelet's own: all others would die first."""
    classes = documents("PriorityClass")
    assert classes[pods()["berth-server"]["priorityClassName"]]["value"] <= 1_000_000_000
    assert "memory" in container_of("berth-server", "triton")["resources"]["requests"]


@pytest.mark.parametrize("name", ["berth-scaler", "berth-activator"])
def test_who_scales_takes_no_servers_place(name: str) -> None:
    """Of a higher class it would: where a node's processors are all promised, a Triton with its models would go for it."""
    assert pods()[name]["priorityClassName"] == pods()["berth-server"]["priorityClassName"]


@pytest.mark.parametrize("name", ["berth-binder", "berth-kube-scheduler"])
def test_who_places_stays_where_memory_runs_short(name: str) -> None:
    """A kubelet ends no pod of a system class for that; its update takes no more room than it has (below)."""
    assert pods()[name]["priorityClassName"] == "system-cluster-critical"


@pytest.mark.parametrize("name", sorted(documents("Deployment").keys() - {"simple"}))
def test_a_drain_leaves_one_of_two(name: str) -> None:
    """elastic 1.4: a drain of two nodes at once must not end both replicas."""
    deployment = documents("Deployment")[name]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    budget = documents("PodDisruptionBudget")[name]
    assert budget["metadata"]["namespace"] == deployment["metadata"]["namespace"]
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}


def test_a_model_pod_keeps_no_node_and_no_disk() -> None:
    """elastic 1.4: an emptyDir keeps a cluster autoscaler from emptying a node, unless the pod says that it may go.
    node D8: it has a bound, or a download fills the node's disk."""
    template = documents("Deployment")["simple"]["spec"]["template"]
    local = {one["name"]: one["emptyDir"] for one in template["spec"]["volumes"] if "emptyDir" in one}
    said = template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"]
    assert set(said.split(",")) == set(local) == {"work"}
    assert all("sizeLimit" in volume for volume in local.values())


def test_the_licence_comes_with_the_package() -> None:
    text = (DEPLOY.parent / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    dockerfile = (DEPLOY.parent / "Dockerfile").read_text()
    assert "COPY pyproject.toml README.md LICENSE ./" in dockerfile  # pip puts it beside the package
    assert "!LICENSE" in (DEPLOY.parent / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("name", sorted(documents("Deployment").keys() - {"simple", "berth-activator"}))
def test_an_update_needs_no_more_room_than_there_is(name: str) -> None:
    deployment = documents("Deployment")[name]["spec"]
    assert deployment["replicas"] == 2  # one leads
    assert deployment["strategy"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


@pytest.mark.parametrize(
    ("pod", "name", "port"),
    [
        ("berth-agent", "agent", "admin"),
        ("berth-server", "gateway", "gateway-admin"),
        *((f"berth-{name}", name, "admin") for name in ("binder", "scaler", "activator")),
    ],
)
def test_a_process_may_start_slowly_and_is_asked_where_it_answers_at_once(
    pod: str, name: str, port: str
) -> None:
    """Readiness waits for all that is mirrored, or for a scaler's word, which may be away: nobody is ended for that.
    Nor for an answer that is late because others have the node's processors."""
    container = container_of(pod, name)
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["httpGet"] == live["httpGet"] == {"path": "/livez", "port": port}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port}
    assert port in {one["name"] for one in container["ports"]}
    assert start["periodSeconds"] * start["failureThreshold"] >= 120, "as berth.kube.client goes by"


def test_an_answer_may_be_late_on_a_busy_node() -> None:
    probes = {
        (pod, container["name"], probe): container[probe]["timeoutSeconds"]
        for pod, spec in pods().items()
        for container in spec["containers"]
        for probe in ("livenessProbe", "readinessProbe")
        if probe in container
        and pod != "berth-kube-scheduler"  # Kubernetes' own program, as it is deployed elsewhere
    }
    assert len(probes) == 14
    assert set(probes.values()) == {5}, probes


def test_triton_opens_no_connection() -> None:
    policy = documents("NetworkPolicy")["berth-server"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "berth-server"}
    assert policy["egress"] == []
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}


@pytest.mark.parametrize("name", NODE_PODS)
def test_a_network_policy_lets_in_what_listens_and_no_more(name: str) -> None:
    policy = documents("NetworkPolicy")[name]["spec"]
    let_in = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    listening = {port["containerPort"] for c in pods()[name]["containers"] for port in ports_of(c)}
    assert let_in == listening


POLICIES = documents("ValidatingAdmissionPolicy")


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_breaks_refuses_what_it_is_for_and_nothing_else(name: str) -> None:
    """What a match condition leaves out is written whatever becomes of the policy's expressions."""
    spec = POLICIES[name]["spec"]
    assert spec["failurePolicy"] == "Fail"
    assert spec["matchConditions"]
    assert not any("variables." in condition["expression"] for condition in spec["matchConditions"])


def test_every_policy_is_in_force() -> None:
    bindings = documents("ValidatingAdmissionPolicyBinding").values()
    assert {binding["spec"]["policyName"] for binding in bindings} == set(POLICIES)
    assert all(binding["spec"]["validationActions"] == ["Deny"] for binding in bindings)
    assert not any("matchResources" in binding["spec"] for binding in bindings)


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
@pytest.mark.parametrize(
    ("pod", "name", "ports"),
    [("berth-agent", "agent", [8472, 8470, 8471]), ("berth-server", "gateway", [8472, 8473])],
)
def test_a_nodes_addresses_can_be_read_in_both_families(
    pod: str, name: str, ports: list[int], address: str
) -> None:
    given = [
        argument.replace("$(HOST_IP)", address).replace("$(POD_IP)", address).partition("=")[2]
        for argument in container_of(pod, name)["args"]
        if "_IP)" in argument
    ]
    assert [Endpoint.parse(argument).port for argument in given] == ports
    assert {Endpoint.parse(argument).host for argument in given} == {address}


def test_both_pods_of_a_node_make_it_ready_in_the_same_way() -> None:
    server, agent = (pods()[name] for name in NODE_PODS)
    assert server["initContainers"] == agent["initContainers"]
    shared = [[v for v in pod["volumes"] if "hostPath" in v] for pod in (server, agent)]
    assert shared[0] == shared[1]
    assert {volume["hostPath"]["path"] for volume in shared[0]} == {KEYS, REPOSITORY, TRITON, GATEWAY}


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: it becomes the containers' users")


@dataclass(frozen=True)
class Disk:
    """The directories of a node that Berth's pods share."""

    keys: Path
    repository: Path
    triton: Path
    gateway: Path

    def named(self, text: str) -> str:
        """With these directories in place of a container's."""
        places = {KEYS: self.keys, REPOSITORY: self.repository, TRITON: self.triton, GATEWAY: self.gateway}
        for path, place in places.items():
            text = text.replace(path, str(place))
        return text


@pytest.fixture
def node() -> Iterator[Disk]:
    """A node's disk that every user can look into, as pytest's own directories cannot be."""
    disk = Path(tempfile.mkdtemp(prefix="berth-node-"))
    disk.chmod(0o755)
    yield Disk(disk / "keys", disk / "repository", disk / "triton", disk / "gateway")
    shutil.rmtree(disk)


def start(pod: str, disk: Disk) -> None:
    """The init containers of a DaemonSet's pod, with the users and capabilities that they are given."""
    for directory in (disk.keys, disk.repository, disk.triton, disk.gateway):
        directory.mkdir(exist_ok=True)  # hostPath: DirectoryOrCreate
    for container in pods()[pod]["initContainers"]:
        run(container, disk)


def run(container: Json, disk: Disk) -> None:
    """Its command, or what it gives to the image's entry point."""
    words = [disk.named(word) for word in container.get("command") or container["args"]]
    if "command" in container:
        done = as_its_container(container, *words)
        assert done.returncode == 0, f"{container['name']}: {done.stderr}"
    else:
        assert user_of(container) == (AGENT, AGENT)
        assert as_the_agent(lambda: sys.exit(cli.main(words))) == 0, container["name"]


def as_its_container(container: Json, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the user and the capabilities of a container."""
    return subprocess.run(confined(container, *command), capture_output=True, text=True)


def confined(container: Json, *command: str) -> list[str]:
    """The command with the user and the capabilities of a container."""
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    capabilities = ["-all", *(f"+{name.lower()}" for name in context["capabilities"].get("add", []))]
    user, group = user_of(container)
    return [
        "setpriv",
        *(f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"),
        *(f"--bounding-set={','.join(capabilities)}", f"--inh-caps={','.join(capabilities)}"),
        *command,
    ]


def user_of(container: Json) -> tuple[int, int]:
    """User and group, as a kubelet gives them: of the image's `USER 65532:65532` it takes the user alone."""
    context = container["securityContext"]
    return context.get("runAsUser", AGENT), context.get("runAsGroup", 0)


def as_triton(*command: str) -> subprocess.CompletedProcess[str]:
    return as_its_container(container_of("berth-server", "triton"), *command)


def as_the_gateway(*command: str) -> subprocess.CompletedProcess[str]:
    return as_its_container(container_of("berth-server", "gateway"), *command)


def as_the_agents_container(*command: str) -> subprocess.CompletedProcess[str]:
    return as_its_container(container_of("berth-agent", "agent"), *command)


def as_the_agent(work: Callable[[], object]) -> int:
    """Exit status of work that is done as the agent's user: 0, or 1 where it raised."""
    assert ThreadPoolExecutor, "imported here: the agent's user may not read where Python is"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no other thread
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(AGENT)
            os.setuid(AGENT)  # and with that goes every capability
            work()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except BaseException:  # the child must not go on as pytest
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def nothing(disk: Disk) -> None:
    """A fresh node."""


def ran_before(disk: Disk) -> None:
    """The DaemonSets were here, and a model is."""
    start("berth-agent", disk)
    assert as_the_agent(Repository(disk.repository).open) == 0
    assert as_the_agent(lambda: (disk.repository / "models" / "resnet").mkdir()) == 0


def rebooted(disk: Disk) -> None:
    """What is in memory is gone."""
    ran_before(disk)
    shutil.rmtree(disk.keys)


def made_by_hand(disk: Disk) -> None:
    """An earlier release, or a person, made both directories and gave them to the agent's user."""
    (disk.repository / "models").mkdir(parents=True)
    for path in (disk.repository, disk.repository / "models"):
        os.chown(path, AGENT, AGENT)


def keys_of_another_group(disk: Disk) -> None:
    """Berth ran here under a group that Triton is not of."""
    ran_before(disk)
    for key in disk.keys.iterdir():
        os.chown(key, -1, 0)


def closed_to_all_but_root(disk: Disk) -> None:
    disk.repository.mkdir(mode=0o700)


def without_sockets(disk: Disk) -> None:
    """A version ran here that had Triton listen on the node's address."""
    ran_before(disk)
    for directory in (disk.triton, disk.gateway):
        directory.rmdir()


def killed(disk: Disk) -> None:
    """Whoever listened has not taken its socket away, and was another user than today's."""
    ran_before(disk)
    for path in (disk.triton / "grpc:8001", disk.gateway / "control"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        os.chown(path.parent, 4711, 4711)


@as_root
@pytest.mark.parametrize("order", [NODE_PODS, NODE_PODS[::-1]])
@pytest.mark.parametrize(
    "before",
    [
        nothing,
        ran_before,
        rebooted,
        made_by_hand,
        keys_of_another_group,
        closed_to_all_but_root,
        without_sockets,
        killed,
    ],
)
def test_the_agent_and_triton_can_use_what_the_init_containers_leave(
    node: Disk, before: Callable[[Disk], None], order: tuple[str, str]
) -> None:
    before(node)
    start(order[0], node)
    # Triton may start before the agent does, and never becomes ready where this is missing.
    assert (node.repository / "models").is_dir()
    made = TritonKeys.read(node.keys)
    start(order[1], node)
    assert TritonKeys.read(node.keys) == made
    assert as_the_agent(lambda: TritonKeys.read(node.keys)) == 0
    assert as_the_agent(Repository(node.repository).open) == 0
    record = node.repository / "models" / "bert.json"
    assert as_the_agent(lambda: record.write_text("{}")) == 0
    used = (record, node.keys / "server-flags", node.keys / "inference")
    assert as_triton("cat", *map(str, used)).returncode == 0
    assert as_the_gateway("cat", str(node.keys / "inference")).returncode == 0
    with listening(as_triton_starts, node.triton / "grpc:8001") as path:
        assert as_the_gateway(*connecting(path)).returncode == 0
        assert as_the_agents_container(*connecting(path)).returncode == 0
        assert as_its_container(STRANGER, *connecting(path)).returncode != 0
    with listening(as_the_gateway_starts, node.gateway / "control") as path:
        assert as_the_agents_container(*connecting(path)).returncode == 0


STRANGER: Json = {
    "securityContext": {"runAsUser": 1001, "runAsGroup": 1001, "capabilities": {"drop": ["ALL"]}}
}
LISTEN = """
import os, socket, sys
path = sys.argv[1]
if os.path.exists(path):
    os.unlink(path)
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def connecting(path: Path) -> list[str]:
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    return [SYSTEM_PYTHON, "-c", code, str(path)]


@contextmanager
def listening(command: Callable[..., list[str]], path: Path) -> Iterator[Path]:
    """Somebody who listens on a socket, put there in place of what was."""
    words = command(SYSTEM_PYTHON, "-c", LISTEN, str(path))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield path
        process.kill()


def as_triton_starts(*command: str) -> list[str]:
    """With Triton's user, and what its shell does to the rights of the files that it makes."""
    triton = container_of("berth-server", "triton")
    (start,) = triton["args"]
    (mask,) = re.findall(r"umask [0-7]+", start)
    return confined(triton, *triton["command"], f'{mask} && exec "$@"', "sh", *command)


def as_the_gateway_starts(*command: str) -> list[str]:
    return confined(container_of("berth-server", "gateway"), *command)


@as_root
def test_triton_could_change_nothing_on_the_node_if_its_mounts_were_writable(node: Disk) -> None:
    ran_before(node)
    repository = (node.repository, node.repository / "models", node.repository / "staging")
    for place in (node.keys, node.gateway, *repository):
        refused = as_triton("touch", str(place / "x"))
        assert "Permission denied" in refused.stderr


@as_root
def test_the_keys_are_for_berths_pods_alone(node: Disk) -> None:
    ran_before(node)
    modes = {key.name: key.stat().st_mode & 0o777 for key in node.keys.iterdir()}
    assert modes == {"admin": 0o440, "inference": 0o440, "server-flags": 0o440, "tickets": 0o400}
    assert all(key.stat().st_gid == AGENT for key in node.keys.iterdir())
    assert as_triton("cat", str(node.keys / "tickets")).returncode != 0, "with it one makes any pod's ticket"


@as_root
def test_without_the_init_containers_the_agent_cannot(node: Disk) -> None:
    node.repository.mkdir()
    assert as_the_agent(Repository(node.repository).open) == 1


@pytest.mark.parametrize("keys", [None, "--http-restricted-api=a:b:c\n"])
def test_triton_does_not_start_without_its_keys(tmp_path: Path, keys: str | None) -> None:
    triton, file = container_of("berth-server", "triton"), tmp_path / "server-flags"
    if keys is not None:
        file.write_text(keys)
    (start,) = triton["args"]
    start = start.replace(f"{KEYS}/server-flags", str(file)).replace("/tmp/started", f"{tmp_path}/started")
    program = tmp_path / "tritonserver"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([*triton["command"], start], env=path, capture_output=True, text=True, check=False)
    assert (ran.returncode == 0) is (keys is not None)
    assert ran.stdout.strip().endswith("" if keys is None else keys.strip())
    assert bool(ran.stdout) is (keys is not None)


@pytest.mark.parametrize(
    ("at_start", "now", "is_alive"),
    [
        (None, None, True),
        ("heeded", "heeded", True),
        ("heeded", None, True),
        (None, "because", False),
        ("heeded", "because", False),
    ],
)
def test_triton_is_ended_by_what_was_asked_since_its_start_whatever_the_clock_says(
    tmp_path: Path, at_start: str | None, now: str | None, is_alive: bool
) -> None:
    """And by nothing older, so that it does not end for ever."""
    triton = container_of("berth-server", "triton")
    (start,) = triton["args"]
    shell, flag, probe = triton["livenessProbe"]["exec"]["command"]
    started, file = tmp_path / "started", tmp_path / RESTART_FILE

    def say(text: str | None) -> None:
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text + "\n")
            os.utime(file, (2**31, 2**31))  # from the days before the clock was set right

    say(at_start)
    before, _, server = start.partition("exec ")
    assert server.startswith("tritonserver ")
    (tmp_path / "server-flags").touch()
    before = before.replace("/run/berth/keys", str(tmp_path))
    before = before.replace("/tmp/started", str(started)).replace("/var/lib/berth/repository", str(tmp_path))
    before = before.replace("/run/berth/keys/server-flags", "/dev/null")
    subprocess.run([shell, flag, before + "true"], check=True)
    say(now)
    with socket.socket(socket.AF_UNIX) as grpc:
        grpc.bind(str(tmp_path / "grpc:8001"))
    probe = probe.replace("/tmp/started", str(started)).replace("/var/lib/berth/repository", str(tmp_path))
    probe = probe.replace(TRITON, str(tmp_path))
    answered = subprocess.run(
        [shell, flag, f"curl() {{ return 0; }}; {probe}"], capture_output=True, text=True, check=False
    )
    assert (answered.returncode == 0) is is_alive
    assert answered.stdout == ("" if is_alive else "because\n")


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
def test_a_triton_without_its_socket_is_not_alive(tmp_path: Path, probe: str) -> None:
    """A server that has gone takes its socket away, even when that is its successor's by then."""
    shell, flag, script = container_of("berth-server", "triton")[probe]["exec"]["command"]
    script = f"curl() {{ return 0; }}; {script.replace(TRITON, str(tmp_path))}"
    assert subprocess.run([shell, flag, script], check=False, capture_output=True).returncode != 0
    with socket.socket(socket.AF_UNIX) as grpc:
        grpc.bind(str(tmp_path / "grpc:8001"))
    assert subprocess.run([shell, flag, script], check=False, capture_output=True).returncode == 0
