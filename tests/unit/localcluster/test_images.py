"""What the images of a real node are made of, and that their archives are the same for the same content."""

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from localcluster.building import BuildFailed
from localcluster.images import oci, recipes
from localcluster.images.recipes import Recipe

BASE = recipes.base()


def test_the_base_stands_in_for_what_the_dockerfile_names() -> None:
    assert f"FROM {BASE.reference.removeprefix('docker.io/library/')} AS build" in recipes._dockerfile()
    arguments = BASE.files["mmdebstrap"].decode().splitlines()
    assert f"-slim-{arguments[-1]}" in BASE.reference


@pytest.mark.parametrize(
    "dockerfile",
    ["", "FROM scratch\n", "FROM python:3.11-slim-bookworm AS build\nFROM python:3.12-slim-bookworm\n"],
)
def test_another_base_is_refused(dockerfile: str) -> None:
    with pytest.raises(
        BuildFailed, match=r"Dockerfile: every stage must stand on the same python:3\.N-slim-SUITE"
    ):
        recipes._base_reference(dockerfile)


def test_the_context_of_berths_image_is_what_dockerignore_lets_in() -> None:
    files = recipes.berth(BASE).files
    assert {"Dockerfile", ".dockerignore", "requirements/runtime.txt", "agent/app.py", "berth/cli.py"} <= set(
        files
    )
    assert {path.partition("/")[0] for path in files if "/" in path} == {
        *("agent", "berth", "binder", "loader", "proxy", "requirements", "scaler"),
    }
    assert not any("__pycache__" in path for path in files)


def test_triton_gets_the_numpy_that_development_has() -> None:
    pins = recipes.tritonserver(BASE).files["requirements.txt"].decode()
    locked = (recipes.ROOT / "requirements" / "dev.txt").read_text()
    names = [line.partition("==")[0] for line in pins.splitlines() if "==" in line]
    assert names == ["numpy", "nvidia-pytriton"]
    assert all(line in locked.splitlines() for line in pins.splitlines())
    assert pins.count("--hash=sha256:") > len(names)


CHANGES = {
    "a file's content": replace(BASE, files={"mmdebstrap": b"x"}),
    "a file's name": replace(BASE, files={"other": BASE.files["mmdebstrap"]}),
    "where one file ends": replace(BASE, files={**BASE.files, "a": b""}),
    "the name": replace(BASE, name="other"),
    "the name that it goes by": replace(BASE, reference="other"),
    "what it stands on": replace(BASE, base="other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_recipe_is_another_image(change: str) -> None:
    assert CHANGES[change].key != BASE.key
    assert Recipe(name=BASE.name, files=dict(BASE.files), reference=BASE.reference).key == BASE.key


def written(directory: Path) -> Path:
    """An archive of an image with one layer of one program."""
    directory.mkdir()
    program = directory / "program"
    program.write_bytes(b"\x7fELF")
    oci.tar_of_program(directory / "layer.tar", "pause", program)
    archive = directory / "image.tar"
    layer, config = directory / "layer.tar", {"Entrypoint": ["/pause"]}
    oci.write_single_layer(archive, name="localhost/a:1", layer=layer, machine="x86_64", config=config)
    return archive


def test_an_archive_is_the_same_for_the_same_content(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one"), written(tmp_path / "other")
    assert one.read_bytes() == other.read_bytes()
    assert oci.digest(one) == oci.digest(other)


def test_an_archive_holds_each_blob_under_its_digest_and_names_the_image(tmp_path: Path) -> None:
    with tarfile.open(written(tmp_path / "image")) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    (manifest,) = json.loads(files["index.json"])["manifests"]
    assert manifest["annotations"]["io.containerd.image.name"] == "localhost/a:1"
    blobs = {path: content for path, content in files.items() if path.startswith("blobs/")}
    assert len(blobs) == 3
    assert all(hashlib.sha256(content).hexdigest() == Path(path).name for path, content in blobs.items())


def test_what_buildah_has_pushed_becomes_the_same_archive(tmp_path: Path) -> None:
    """containers/image's `dir:`: the manifest, and every blob under its bare digest."""
    archive = written(tmp_path / "image")
    with tarfile.open(archive) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    for path, content in files.items():
        (pushed / Path(path).name).write_bytes(content)
    digest = oci.digest(archive).removeprefix("sha256:")
    (pushed / digest).rename(pushed / "manifest.json")
    again = tmp_path / "again.tar"
    oci.write_from_directory(again, name="localhost/a:1", directory=pushed)
    assert oci.digest(again) == oci.digest(archive)
    with tarfile.open(again) as tar:
        assert sorted(tar.getnames()) == sorted(files)
