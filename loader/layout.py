"""What makes a directory a Triton model, and where one is inside of what was given. Pure but for looking."""

from pathlib import Path

from berth.runtime.errors import Failed

CONFIG_FILE = "config.pbtxt"
# A lone file is version 1 under the name that its backend looks for (Triton's default_model_filename).
_MODEL_FILES = {".onnx": "model.onnx", ".plan": "model.plan", ".pt": "model.pt", ".py": "model.py"}


def find_model(directory: Path, *, source: str) -> Path:
    """`directory`, or the only directory in it, whichever holds a model. Raises Failed."""
    if _looks_like_model(directory):
        return directory
    kept = kubelets_own(directory)
    inner = [entry for entry in directory.iterdir() if entry.is_dir() and entry.name not in kept]
    if len(inner) == 1 and _looks_like_model(inner[0]):
        return inner[0]
    raise Failed(
        f"{source} holds no Triton model: {CONFIG_FILE} or a version directory such as 1/ is expected"
    )


def kubelets_own(directory: Path) -> frozenset[str]:
    """What a kubelet keeps in the directory of a mounted ConfigMap or Secret: `..data`, and the directory of
    the moment, to which it is a link. Whatever the volume holds is a link through `..data`."""
    if not (directory / "..data").is_symlink():
        return frozenset()
    return frozenset(entry.name for entry in directory.iterdir() if entry.name.startswith(".."))


def place_file(name: str, *, source: str) -> str:
    """Where a lone model file goes. Raises Failed for one that no backend would find."""
    target = _MODEL_FILES.get(Path(name).suffix.lower())
    if target is None:
        known = ", ".join(sorted(_MODEL_FILES))
        raise Failed(
            f"{source}: an archive (.tar, .tar.gz, .tgz, .zip) or a model file ({known}) is expected"
        )
    return f"1/{target}"


def _looks_like_model(directory: Path) -> bool:
    return (directory / CONFIG_FILE).is_file() or any(
        entry.is_dir() and entry.name.isdigit() for entry in directory.iterdir()
    )
