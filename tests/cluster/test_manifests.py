"""Every manifest of `deploy/` is accepted by the real API server."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.cluster import LocalCluster

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents() -> list[Any]:
    found = []
    for path in sorted(DEPLOY.rglob("*.yaml")):
        if path.name == "kustomization.yaml":
            continue
        for document in yaml.safe_load_all(path.read_text()):
            name = f"{path.relative_to(DEPLOY)}:{document['kind']}/{document['metadata']['name']}"
            found.append(pytest.param(document, id=name))
    return found


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("document", documents())
async def test_the_api_server_takes_it(cluster: LocalCluster, document: dict[str, Any]) -> None:
    """Server-side dry run with strict field validation: an unknown or misspelt field is an error."""
    await cluster.apply([document], dry_run=True)


def test_the_kustomization_names_every_manifest() -> None:
    base = DEPLOY / "base"
    listed = set(yaml.safe_load((base / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in base.glob("*.yaml")} - {"kustomization.yaml"}
