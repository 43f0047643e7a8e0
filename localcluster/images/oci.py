"""OCI archives of images, byte for byte the same for the same content.

An archive is the tar file of an image layout (opencontainers/image-spec, image-layout.md): `oci-layout`,
`index.json`, and `blobs/sha256/…`. containerd names an imported image by an annotation of its own in the index.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_TYPE = "application/vnd.oci.image"
_EPOCH = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_single_layer(
    archive: Path, *, name: str, layer: Path, machine: str, config: Mapping[str, Any]
) -> None:
    """An image of one layer, an uncompressed tar file; `config` is the image configuration's own `config`."""
    layer_digest, layer_bytes = _digest(layer), layer.stat().st_size
    image = _json(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "created": _EPOCH,
            "config": config,
            # buildah refuses to build on an image whose layers have none.
            "history": [{"created": _EPOCH, "created_by": "localcluster.images"}],
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_TYPE}.manifest.v1+json",
            "config": _descriptor("config.v1+json", _sha256(image), len(image)),
            "layers": [_descriptor("layer.v1.tar", layer_digest, layer_bytes)],
        }
    )
    descriptor = _descriptor("manifest.v1+json", _sha256(manifest), len(manifest))
    with tarfile.open(archive, "w") as tar:
        _add_index(tar, descriptor, name)
        for content in (image, manifest):
            _add(tar, f"blobs/sha256/{_sha256(content)}", content)
        _add_file(tar, f"blobs/sha256/{layer_digest}", layer)


def write_from_directory(archive: Path, *, name: str, directory: Path) -> None:
    """The image of a `dir:` of containers/image: `manifest.json`, and every blob under its bare digest."""
    manifest = (directory / "manifest.json").read_bytes()
    parts = json.loads(manifest)
    descriptor = _descriptor("manifest.v1+json", _sha256(manifest), len(manifest))
    with tarfile.open(archive, "w") as tar:
        _add_index(tar, descriptor, name)
        _add(tar, f"blobs/sha256/{_sha256(manifest)}", manifest)
        for part in (parts["config"], *parts["layers"]):
            blob = part["digest"].removeprefix("sha256:")
            _add_file(tar, f"blobs/sha256/{blob}", directory / blob)


def digest(archive: Path) -> str:
    """The digest of an archive's image, `sha256:…`: that of its manifest."""
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None, f"{archive} holds no index.json"
        (descriptor,) = json.load(index)["manifests"]
    return str(descriptor["digest"])


def tar_of_program(target: Path, path: str, program: Path) -> None:
    """A layer that holds one executable."""
    with tarfile.open(target, "w") as tar:
        _add_file(tar, path, program, mode=0o755)


def _add_index(tar: tarfile.TarFile, descriptor: Mapping[str, Any], name: str) -> None:
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.index.v1+json",
        "manifests": [{**descriptor, "annotations": annotations}],
    }
    _add(tar, "oci-layout", _LAYOUT)
    _add(tar, "index.json", _json(index))


def _descriptor(kind: str, sha256: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_TYPE}.{kind}", "digest": f"sha256:{sha256}", "size": size}


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _add_file(tar: tarfile.TarFile, path: str, source: Path, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = source.stat().st_size, mode
    with source.open("rb") as content:
        tar.addfile(entry, content)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
