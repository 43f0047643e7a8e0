"""What a process kubelet cannot do, found before anything is started."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

_VOLUMES = frozenset({"emptyDir", "hostPath", "projected", "configMap", "downwardAPI"})
_SOURCES = frozenset({"serviceAccountToken", "configMap", "downwardAPI"})
_POD_FIELDS = (
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "activeDeadlineSeconds",
    "resourceClaims",
    "ephemeralContainers",
)
_CONTAINER_FIELDS = ("envFrom", "stdin", "tty", "volumeDevices")
_ENTRYPOINTS = {"berth": ("berth",)}


class CannotRun(Exception):
    """The pod asks for something that this kubelet does not do; the message names it."""


def check(pod: JsonObject) -> None:
    """Raise CannotRun for the first thing that cannot be done."""
    spec = pod["spec"]
    for field in _POD_FIELDS:
        if spec.get(field):
            raise CannotRun(f"spec.{field} is not supported by the process kubelet")
    for volume in spec.get("volumes") or []:
        _check_volume(volume)
    for container in containers_of(spec):
        _check_container(container)


def containers_of(spec: JsonObject) -> Iterator[JsonObject]:
    """Init containers first, in their order."""
    yield from spec.get("initContainers") or []
    yield from spec["containers"]


def program_of(container: JsonObject) -> tuple[str, ...]:
    """The image's entrypoint, where no image can be asked: Berth's own is known.

    Raises CannotRun for any other image without a command.
    """
    if container.get("command"):
        return ()
    repository = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[0]
    entrypoint = _ENTRYPOINTS.get(repository)
    if entrypoint is None:
        raise CannotRun(
            f"container {container['name']!r}: image {container['image']!r} cannot be pulled here; "
            "give a command that is on this machine"
        )
    return entrypoint


def _check_volume(volume: JsonObject) -> None:
    kinds = set(volume) - {"name"}
    if not kinds <= _VOLUMES:
        raise CannotRun(f"volume {volume['name']!r}: {', '.join(sorted(kinds))} cannot be mounted here")
    for source in (volume.get("projected") or {}).get("sources") or []:
        if not set(source) <= _SOURCES:
            raise CannotRun(f"volume {volume['name']!r}: projected {', '.join(source)} is not supported")


def _check_container(container: JsonObject) -> None:
    name = container["name"]
    for field in _CONTAINER_FIELDS:
        if container.get(field):
            raise CannotRun(f"container {name!r}: {field} is not supported by the process kubelet")
    if (container.get("lifecycle") or {}).get("postStart"):
        raise CannotRun(f"container {name!r}: lifecycle.postStart is not supported by the process kubelet")
    for variable in container.get("env") or []:
        unknown = set(variable.get("valueFrom") or {}) - {"fieldRef"}
        if unknown:
            raise CannotRun(f"container {name!r}: env {variable['name']}: {unknown.pop()} is not supported")
    program = container["command"][0] if container.get("command") else program_of(container)[0]
    if program != "berth" and "$(" not in program and not _is_there(program):
        raise CannotRun(f"container {name!r}: no program {program!r} on this machine")


def _is_there(program: str) -> bool:
    return Path(program).is_file() if "/" in program else shutil.which(program) is not None
