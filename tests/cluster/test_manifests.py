"""Every manifest of `deploy/` is accepted by the real API server, as kustomize renders it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.binaries import control_plane_directory
from localcluster.cluster import LocalCluster

DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZATIONS = ("base", "extender")


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
    parts = [(part, document) for part in KUSTOMIZATIONS for document in rendered(part)]
    return [
        pytest.param(document, id=f"{where}:{document['kind']}/{document['metadata']['name']}")
        for where, document in (*parts, *samples)
    ]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("document", documents())
async def test_the_api_server_takes_it(cluster: LocalCluster, document: dict[str, Any]) -> None:
    """Server-side dry run with strict field validation: an unknown or misspelt field is an error."""
    await cluster.apply([document], dry_run=True)


def test_the_kustomization_names_every_manifest() -> None:
    base = DEPLOY / "base"
    listed = set(yaml.safe_load((base / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in base.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_extender_is_the_base_and_more() -> None:
    """The overlay changes nothing of the base but the binder's own Deployment."""
    base = {(d["kind"], d["metadata"]["name"]): d for d in rendered("base")}
    extended = {(d["kind"], d["metadata"]["name"]): d for d in rendered("extender")}
    assert {key for key in base if extended[key] != base[key]} == {("Deployment", "berth-binder")}
