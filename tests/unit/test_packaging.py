"""What users install: the wheel, the pinned requirements, the image's recipe, every --help."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from berth.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = {"berth", "agent", "binder", "loader", "proxy", "scaler"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "berth.cli", command, "--help"], capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"usage: berth {command}" in shown.stdout
    assert "default" in shown.stdout


def test_a_command_that_is_none_exits_with_2() -> None:
    asked = subprocess.run([sys.executable, "-m", "berth.cli", "agnet"], capture_output=True, text=True)
    assert asked.returncode == 2
    assert "'agnet' is not a command" in asked.stderr


def test_the_wheel_holds_every_package_and_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: what an earlier build has left in the checkout must not get in
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    flags = ["--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(source)], check=True)
    (wheel,) = tmp_path.glob("berth-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist() if ".dist-info" not in name}
        scripts = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "berth = berth.cli:main" in archive.read(scripts).decode()
    assert tops == PACKAGES


def test_the_image_copies_every_package_that_it_runs() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"^COPY (\w+) \w+$", recipe, re.MULTILINE)) == PACKAGES | {"requirements"}
    assert re.search(r"^USER 65532:65532$", recipe, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["tini", "--", "berth"\]$', recipe, re.MULTILINE)
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert allowed >= PACKAGES


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_every_requirement_is_pinned_with_its_hashes(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    if name == "dev":
        wanted += [one for extra in project["optional-dependencies"].values() for one in extra]
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==\S+ \\$", text, re.MULTILINE))
    names = {re.split(r"[\[<>=]", one)[0].lower().replace("_", "-") for one in wanted}
    assert names <= pinned
    assert text.count("--hash=sha256:") >= len(pinned)


def versions(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def test_the_image_is_built_and_runs_with_the_versions_that_were_tested() -> None:
    image, tested = versions("runtime") | versions("build"), versions("dev")
    assert {"numpy", "setuptools"} <= set(image)
    assert {name: tested.get(name) for name in image} == image


@pytest.mark.parametrize("name", ["build", "runtime", "dev"])
def test_the_locks_tell_versions_and_not_where_they_come_from(name: str) -> None:
    """An index or a file of one machine is of no use on another."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert re.findall(r"^(?!    )(?![a-z0-9-]+==).+$", text, re.MULTILINE) in (
        [],
        ["# The following packages are considered to be unsafe in a requirements file:"],
    )
    assert "://" not in text
