"""Berth's image as a registry would have it, built from the repository's Dockerfile."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from berth.cli import COMMANDS
from localcluster import images
from localcluster.images import build, oci, recipes
from tests.image.unpacked import Unpacked, layers, unpack

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 320 * 1024**2
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def archive() -> Path:
    reason = images.lacking()
    if reason is not None:
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    return (await images.images()).berth.archive


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unpacked]:
    root = tmp_path_factory.mktemp("image")
    yield unpack(archive, root)
    shutil.rmtree(root)


def pinned() -> dict[str, str]:
    text = (ROOT / "requirements" / "runtime.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


async def test_it_is_small(image: Unpacked) -> None:
    assert image.size_bytes <= LIMIT_BYTES, f"{image.size_bytes / 1024**2:.1f} MiB"


async def test_it_runs_berth_under_an_init_as_nobody(image: Unpacked) -> None:
    assert image.config["User"] == "65532:65532"
    entrypoint = image.config["Entrypoint"]
    assert entrypoint == ["tini", "--", "berth"]
    ran = image.run(*entrypoint, "--help")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert set(re.findall(r"^  ([a-z]\S*) ", ran.stdout, re.MULTILINE)) >= {
        "activator",
        "agent",
        "binder",
        "gateway",
        "loader",
        "proxy",
        "scale",
        "scaler",
    }


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"demo"}))
async def test_every_command_starts(image: Unpacked, command: str) -> None:
    ran = image.run("berth", command, "--help")
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert f"usage: berth {command}" in ran.stdout


async def test_the_demo_says_where_it_is(image: Unpacked) -> None:
    ran = image.run("berth", "demo")
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "from a source checkout only" in ran.stderr


async def test_it_holds_the_tested_versions_and_nothing_that_installs(image: Unpacked) -> None:
    listing = "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]"
    ran = image.run("python", "-c", listing)
    assert ran.returncode == 0, ran.stderr
    found = dict(line.split() for line in ran.stdout.splitlines())
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}
    assert normal.pop("berth")
    assert normal == pinned()


async def test_everything_that_berth_imports_is_there_and_compiled(image: Unpacked) -> None:
    """Nothing can be compiled in a root that is read-only: a process would begin with it at every start."""
    loading = (
        "import pkgutil, sys, importlib, os\n"
        "for top in ('agent', 'berth', 'binder', 'loader', 'proxy', 'scaler'):\n"
        "    package = importlib.import_module(top)\n"
        "    for found in pkgutil.walk_packages(package.__path__, top + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "for module in list(sys.modules.values()):\n"
        "    path, cached = getattr(module, '__file__', None), getattr(module, '__cached__', None)\n"
        "    if path and path.startswith('/opt/') and path.endswith('.py') and not os.path.exists(str(cached)):\n"
        "        print(path)\n"
    )
    ran = image.run("python", "-W", "error::ImportWarning", "-c", loading)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


CLUSTER = {"server": "https://127.0.0.1:6443", "certificate-authority": "/etc/ssl/certs/ca-certificates.crt"}
PLUGIN = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "command": "echo",
    "args": [
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t"}}'
    ],
}


@pytest.mark.parametrize("user", [{"token": "t"}, {"exec": PLUGIN}, {"tokenFile": "/tmp/token"}])
async def test_what_it_lacks_of_the_kubernetes_client_is_not_needed_to_log_in(
    image: Unpacked, user: dict[str, object]
) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": CLUSTER}],
        "users": [{"name": "u", "user": user}],
    }
    (image.root / "tmp" / "kubeconfig").write_text(json.dumps(config))
    (image.root / "tmp" / "token").write_text("t")
    ran = image.run("python", "-c", LOGGING_IN, "/tmp/kubeconfig")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "Bearer t\n", "")


async def test_nor_to_log_in_from_a_pod(image: Unpacked) -> None:
    secrets = (
        image.root / "run/secrets/kubernetes.io/serviceaccount"
    )  # /var/run leads there, but out of the root
    secrets.mkdir(parents=True, exist_ok=True)
    (secrets / "token").write_text("t")
    shutil.copy(image.root / "etc/ssl/certs/ca-certificates.crt", secrets / "ca.crt")
    pod = ("KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443")
    ran = image.run("env", *pod, "python", "-c", LOGGING_IN)
    assert (ran.returncode, ran.stdout.lower(), ran.stderr) == (0, "bearer t\n", "")


LOGGING_IN = """
import asyncio, sys
from berth.kube.client import load_configuration, open_client

async def main(path):
    async with open_client(path):
        configuration = await load_configuration(path)
        print(await configuration.get_api_key_with_prefix("BearerToken", alias="authorization"))

asyncio.run(main(*sys.argv[1:] or [None]))
"""


async def test_no_file_tells_when_it_was_built(archive: Path) -> None:
    late = [entry.name for layer in layers(archive) for entry in layer if entry.mtime != 0]
    assert late == []


@pytest.mark.timeout(900)  # it builds one
async def test_a_second_build_makes_the_same_image(archive: Path) -> None:
    """Once for every Dockerfile and set of requirements: a change of a source file does not decide it."""
    base = recipes.base()
    recipe = recipes.berth(base)
    decisive = {path: content for path, content in recipe.files.items() if not path.endswith(".py")}
    proven = archive.with_name(f"reproduced-{replace(recipe, files=decisive).key}")
    if not proven.exists():
        assert await asyncio.to_thread(build.digest_built_anew, recipe, base=base) == oci.digest(archive)
        proven.touch()
