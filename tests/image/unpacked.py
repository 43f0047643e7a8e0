"""An image as files: what `docker run` would see, read out of its OCI archive."""

import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Unpacked:
    root: Path
    config: dict[str, Any]
    """User, Env, Entrypoint … of the image's configuration."""
    size_bytes: int
    """Of all files, each counted once."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the image as process 1, as its user, with its environment and nothing of ours."""
        inside = [
            "unshare",
            "--pid",
            "--fork",
            "chroot",
            f"--userspec={self.config['User']}",
            str(self.root),
            *command,
        ]
        # What container runtimes add for a user that /etc/passwd does not have.
        environment = {"HOME": "/", **dict(one.split("=", 1) for one in self.config["Env"])}
        return subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=60)


def unpack(archive: Path, root: Path) -> Unpacked:
    with tarfile.open(archive) as outer:
        (manifest_of,) = _json(outer, "index.json")["manifests"]
        manifest = _json(outer, _blob(manifest_of))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=outer.extractfile(_blob(layer))) as inner:
                inner.extractall(root, filter="fully_trusted")  # devices, links and owners included
        config = _json(outer, _blob(manifest["config"]))["config"]
    return Unpacked(root, config, sum(_sizes(root)))


def layers(archive: Path) -> Iterator[Iterator[tarfile.TarInfo]]:
    """The entries of every layer, the base's first."""
    with tarfile.open(archive) as outer:
        (manifest_of,) = _json(outer, "index.json")["manifests"]
        for layer in _json(outer, _blob(manifest_of))["layers"]:
            with tarfile.open(fileobj=outer.extractfile(_blob(layer))) as inner:
                yield iter(inner)


def _sizes(root: Path) -> Iterator[int]:
    """What each file takes on a disk of 4 KiB blocks, as `du` counts it."""
    seen = set()
    for path in root.rglob("*"):
        found = path.lstat()
        if found.st_ino not in seen:
            seen.add(found.st_ino)
            yield found.st_blocks * 512


def _json(tar: tarfile.TarFile, path: str) -> dict[str, Any]:
    file = tar.extractfile(path)
    assert file is not None, path
    read: dict[str, Any] = json.load(file)
    return read


def _blob(descriptor: dict[str, Any]) -> str:
    return "blobs/sha256/" + str(descriptor["digest"]).removeprefix("sha256:")
