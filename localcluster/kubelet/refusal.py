"""What a process kubelet cannot do, found before anything is started."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

from localcluster.kubelet.images import Image, Images

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


class CannotRun(Exception):
    """The pod requests something that this kubelet does not do; the message names it."""


def check(pod: JsonObject, images: Images) -> None:
    """Raise CannotRun for the first thing that cannot be done."""
    spec = pod["spec"]
    for field in _POD_FIELDS:
        if spec.get(field):
            raise CannotRun(f"spec.{field} is not supported by the process kubelet")
    for volume in spec.get("volumes") or []:
        _check_volume(volume)
    for container in containers_of(spec):
        _check_container(container, images.of(container["image"]))


def containers_of(spec: JsonObject) -> Iterator[JsonObject]:
    """Init containers first, in their order."""
    yield from spec.get("initContainers") or []
    yield from spec["containers"]


def entrypoint_of(container: JsonObject, image: Image) -> tuple[str, ...]:
    """What is run before the container's arguments. Raises CannotRun where neither pod nor image says it."""
    command = tuple(container.get("command") or image.entrypoint)
    if not command:
        raise CannotRun(
            f"container {container['name']!r}: image {container['image']!r} cannot be pulled here; "
            "give a command that is on this machine"
        )
    return command


def search_path(image: Image) -> str:
    """Where the programs of a container are looked for."""
    machine = os.environ.get("PATH", os.defpath)
    return machine if image.programs is None else f"{image.programs}{os.pathsep}{machine}"


def _check_volume(volume: JsonObject) -> None:
    kinds = set(volume) - {"name"}
    if not kinds <= _VOLUMES:
        raise CannotRun(f"volume {volume['name']!r}: {', '.join(sorted(kinds))} cannot be mounted here")
    for source in (volume.get("projected") or {}).get("sources") or []:
        if not set(source) <= _SOURCES:
            raise CannotRun(f"volume {volume['name']!r}: projected {', '.join(source)} is not supported")


def _check_container(container: JsonObject, image: Image) -> None:
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
    program = entrypoint_of(container, image)[0]
    if "$(" not in program and shutil.which(program, path=search_path(image)) is None:
        raise CannotRun(f"container {name!r}: no program {program!r} on this machine")
