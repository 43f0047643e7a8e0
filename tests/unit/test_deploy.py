"""What `deploy/` says, looked at without an API server: credentials, addresses, and the very commands that
make a node's directory ready, run as their users with their capabilities."""

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.repository import Repository
from berth.contract.endpoint import Endpoint

DEPLOY = Path(__file__).parents[2] / "deploy"
CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"
REPOSITORY = "/var/lib/berth/repository"
AGENT = 65532  # the image's user

Json = dict[str, Any]


def documents(kind: str) -> dict[str, Json]:
    paths = [path for path in sorted(DEPLOY.rglob("*.yaml")) if "patch" not in path.name]
    found = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    return {d["metadata"]["name"]: d for d in found if d.get("kind") == kind}


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
        "berth-agent": {("agent", CREDENTIALS)},
        "berth-binder": {("binder", CREDENTIALS)},
        "berth-kube-scheduler": {("kube-scheduler", CREDENTIALS)},
        "simple": set(),
    }


def test_no_service_account_hands_out_tokens_by_itself() -> None:
    accounts = documents("ServiceAccount")
    assert set(accounts) == {"berth-agent", "berth-binder", "berth-kube-scheduler"}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())


@pytest.mark.parametrize("name", ["berth-agent", "berth-binder", "berth-kube-scheduler"])
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


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: it becomes the containers' users")


@pytest.fixture
def node() -> Iterator[Path]:
    """A node's disk that every user can look into, as pytest's own directories cannot be."""
    disk = Path(tempfile.mkdtemp(prefix="berth-node-"))
    disk.chmod(0o755)
    yield disk / "repository"
    shutil.rmtree(disk)


def run_init_containers(repository: Path) -> None:
    """Those of the DaemonSet that have the repository, with the user and the capabilities they are given."""
    repository.mkdir(exist_ok=True)  # hostPath: DirectoryOrCreate
    for container in pods()["berth-agent"]["initContainers"]:
        if any(mount["mountPath"] == REPOSITORY for mount in container["volumeMounts"]):
            run_as_its_container(container, repository)


def run_as_its_container(container: Json, repository: Path) -> None:
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    capabilities = ["-all", *(f"+{name.lower()}" for name in context["capabilities"].get("add", []))]
    user = context.get("runAsUser", AGENT)
    confined = [
        "setpriv",
        *(f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"),
        *(f"--bounding-set={','.join(capabilities)}", f"--inh-caps={','.join(capabilities)}"),
    ]
    command = [word.replace(REPOSITORY, str(repository)) for word in container["command"]]
    done = subprocess.run([*confined, *command], capture_output=True, text=True)
    assert done.returncode == 0, f"{container['name']}: {done.stderr}"


def as_the_agent(work: Callable[[], None]) -> int:
    """Exit status of work that is done as the agent's user: 0, or 1 where it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no other thread
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(AGENT)
            os.setuid(AGENT)  # and with that goes every capability
            work()
        except BaseException:  # the child must not go on as pytest
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def nothing(repository: Path) -> None:
    """A fresh node."""


def ran_before(repository: Path) -> None:
    """The DaemonSet was here, and a model is."""
    run_init_containers(repository)
    assert as_the_agent(Repository(repository).open) == 0
    assert as_the_agent(lambda: (repository / "models" / "resnet").mkdir()) == 0


def made_by_hand(repository: Path) -> None:
    """An earlier release, or a person, made both directories and gave them to the agent's user."""
    (repository / "models").mkdir(parents=True)
    for path in (repository, repository / "models"):
        os.chown(path, AGENT, AGENT)


def closed_to_all_but_root(repository: Path) -> None:
    repository.mkdir(mode=0o700)


@as_root
@pytest.mark.parametrize("before", [nothing, ran_before, made_by_hand, closed_to_all_but_root])
def test_the_agent_can_use_the_directory_that_the_init_containers_leave(
    node: Path, before: Callable[[Path], None]
) -> None:
    before(node)
    run_init_containers(node)
    # Triton starts beside the agent, and never becomes ready where this is missing.
    assert (node / "models").is_dir()
    assert as_the_agent(Repository(node).open) == 0
    assert as_the_agent(lambda: (node / "models" / "bert").mkdir()) == 0


@as_root
def test_without_the_init_containers_the_agent_cannot(node: Path) -> None:
    node.mkdir()
    assert as_the_agent(Repository(node).open) == 1
