"""Every manifest of `deploy/` is accepted by the real API server, as kustomize renders it."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.binaries import control_plane_directory
from localcluster.cluster import LocalCluster
from localcluster.deployment import AUTOSCALED
from localcluster.node import cluster as node

DEPLOY = Path(__file__).parents[2] / "deploy"
# The component is no kustomization by itself.
SCALED = str(AUTOSCALED)
KUSTOMIZATIONS = ("base", "extender", SCALED)
FILES = {SCALED: "autoscaling"}


def rendered(part: str) -> list[Any]:
    """What `kubectl apply -k deploy/<part>` would apply."""
    command = [str(control_plane_directory() / "kubectl"), "kustomize", str(DEPLOY / part)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


def documents() -> list[Any]:
    samples = [
        (path.name, document)
        for path in sorted((DEPLOY / "samples").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    parts = [(FILES.get(part, part), document) for part in KUSTOMIZATIONS for document in rendered(part)]
    return [
        pytest.param(document, id=f"{where}:{document['kind']}/{document['metadata']['name']}")
        for where, document in (*parts, *samples)
    ]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("document", documents())
async def test_the_api_server_takes_it(cluster: LocalCluster, document: dict[str, Any]) -> None:
    """Server-side dry run with strict field validation: an unknown or misspelt field is an error."""
    await cluster.apply([document], dry_run=True)


@pytest.mark.parametrize("part", ["base", "autoscaling"])
def test_the_kustomization_names_every_manifest(part: str) -> None:
    directory = DEPLOY / part
    said = yaml.safe_load((directory / "kustomization.yaml").read_text())
    listed = {*said["resources"], *(patch["path"] for patch in said.get("patches", []))}
    assert listed == {path.name for path in directory.glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.parametrize("part", KUSTOMIZATIONS)
def test_every_object_stays_where_its_file_puts_it(part: str) -> None:
    """A kustomization that sets a namespace moves every object into it, whatever stands in its file."""
    directories = {"base", FILES.get(part, part)}
    files = [path for where in directories for path in (DEPLOY / where).glob("*.yaml")]
    found = [document for path in files for document in yaml.safe_load_all(path.read_text())]
    wanted = {_key(d) for d in found if "metadata" in d}
    assert {_key(d) for d in rendered(part) if d["kind"] != "ConfigMap"} == wanted


def test_what_the_docs_say_to_apply_takes_every_image_from_the_registry(tmp_path: Path) -> None:
    """What an overlay sets for the base holds for none of a component's objects."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    block = (DEPLOY.parent / "docs" / "autoscaling.md").read_text().split("```yaml\n")[1].split("```")[0]
    assert block.startswith("# deploy/kustomization.yaml")
    (tmp_path / "deploy" / "kustomization.yaml").write_text(block)
    documents = rendered(str(tmp_path / "deploy"))
    specs = [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("DaemonSet", "Deployment")]
    images = [one["image"] for s in specs for one in (*s.get("initContainers", ()), *s["containers"])]
    assert len(specs) == 5
    assert {image.partition("/")[0] for image in images} == {"REGISTRY"}


def test_a_right_to_one_object_is_to_that_of_its_file() -> None:
    """kustomize puts the hashed name of a generated ConfigMap wherever a Role names an object of its name."""
    named = {
        n
        for d in rendered("extender")
        for rule in d.get("rules") or []
        for n in rule.get("resourceNames") or []
    }
    assert "berth-kube-scheduler" in named


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("owner", "containers"),
    [
        ("berth-agent", {"agent"}),
        ("berth-server", set()),
        ("berth-binder", {"binder"}),
        ("berth-kube-scheduler", {"kube-scheduler"}),
        ("berth-scaler", {"scaler"}),
        ("berth-activator", set()),
    ],
)
async def test_admission_mounts_no_token_beside_those_that_are_requested(
    cluster: LocalCluster, owner: str, containers: set[str]
) -> None:
    """A pod as it would be stored: Kubernetes adds a token to every container unless it is told not to."""
    every_document = {_key(d): d for part in KUSTOMIZATIONS for d in rendered(part)}.values()
    await cluster.apply([d for d in every_document if d["kind"] == "ServiceAccount"])
    (template,) = [d["spec"]["template"] for d in every_document if _owns_pods(d, owner)]
    spec = template["spec"] | {"runtimeClassName": None, "priorityClassName": None}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
    stored = await cluster.client.create("/api/v1/namespaces/berth-system/pods", pod, dryRun="All")
    every = [*stored["spec"].get("initContainers", []), *stored["spec"]["containers"]]
    assert len(every) > len(containers) or owner != "berth-agent"
    found = {c["name"] for c in every for mount in c.get("volumeMounts", []) if _is_credentials(mount)}
    assert found == containers


def _key(document: dict[str, Any]) -> tuple[str, str, str | None]:
    meta = document["metadata"]
    return document["kind"], meta["name"], meta.get("namespace")


def _owns_pods(document: dict[str, Any], name: str) -> bool:
    return document["kind"] in ("DaemonSet", "Deployment") and document["metadata"]["name"] == name


def _is_credentials(mount: dict[str, Any]) -> bool:
    return str(mount["mountPath"]).startswith("/var/run/secrets/kubernetes.io")


@pytest.mark.parametrize("part", KUSTOMIZATIONS[1:])
def test_what_is_laid_over_the_base_is_the_base_and_more(part: str) -> None:
    """It changes nothing of the base but the binder's own Deployment."""
    base, extended = ({_key(d): d for d in rendered(one)} for one in ("base", part))
    changed = {key for key in base if extended[key] != base[key]}
    assert changed == {("Deployment", "berth-binder", "berth-system")}


def test_the_real_node_runs_the_base_with_mock_gpus_and_a_runtime_class_and_nothing_else() -> None:
    """Taken back one by one, what the overlay of the real node changes leaves the base itself."""
    base = {_key(d): d for d in rendered("base")}
    overlaid = {_key(d): d for d in rendered(str(node.OVERLAY))}
    assert overlaid.pop(("RuntimeClass", "nvidia", None))["handler"] == "nvidia"
    assert overlaid.pop(("ConfigMap", "gpus", "berth-system"))["data"].keys() == {"gpus.yaml"}
    pod = overlaid["DaemonSet", "berth-agent", "berth-system"]["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    assert pod["volumes"].pop()["configMap"] == {"name": "gpus"}
    assert agent["volumeMounts"].pop()["mountPath"] == "/etc/berth-gpus"
    mocked = agent["args"].index("--nvml=mock:/etc/berth-gpus/gpus.yaml")
    agent["args"][mocked] = "--nvml=nvml"
    assert overlaid == base
