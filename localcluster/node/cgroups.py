"""Cgroups (version 1) of the node's own: what it starts is inside them, whatever becomes of it.

One directory in every hierarchy, below the caller's own, so that the caller's limits hold for the node too.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROUNDS, _PAUSE_SECONDS = 200, 0.05
# A cpuset that names no processor and no memory takes no process.
_INHERITED = ("cpuset.cpus", "cpuset.mems")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy. `options` mount it again: `memory`, `cpu,cpuacct`, `none,name=systemd`."""

    options: str
    mount_point: Path
    own: Path
    """The caller's own directory in it."""


def hierarchies() -> list[Hierarchy]:
    """Every hierarchy of version 1 that is mounted here."""
    own = dict(_memberships())
    return [
        Hierarchy(options, mount_point, mount_point / os.path.relpath(own[controllers], root))
        for controllers, options, root, mount_point in _mounts()
        if controllers in own
    ]


def make(name: str) -> list[Path]:
    """A directory of this name in every hierarchy. Raises OSError where that is not allowed."""
    made = []
    for hierarchy in hierarchies():
        directory = hierarchy.own / name
        directory.mkdir()
        made.append(directory)
        for file in _INHERITED:
            if (directory / file).exists():
                (directory / file).write_text((hierarchy.own / file).read_text())
    return made


def processes(directories: list[Path]) -> set[int]:
    """Who is in these directories and below."""
    found: set[int] = set()
    for file in (file for directory in directories for file in directory.rglob("cgroup.procs")):
        with suppress(OSError):  # a cgroup that has just gone
            found.update(int(line) for line in file.read_text().split())
    return found


def end_all(directories: list[Path]) -> None:
    """Kill all processes inside, again until none is left, so that a child forked in between does not slip through."""
    for _ in range(_ROUNDS):
        found = processes(directories)
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def remove(directories: list[Path]) -> None:
    """Remove them with all below. A cgroup is busy for a moment after its last process."""
    for _ in range(_ROUNDS):
        for directory in directories:
            for path, _, _ in os.walk(directory, topdown=False):
                with suppress(OSError):
                    os.rmdir(path)
        if not any(directory.exists() for directory in directories):
            return
        time.sleep(_PAUSE_SECONDS)


def _memberships() -> list[tuple[str, str]]:
    """(controllers, path): the caller's place in each hierarchy of version 1."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return [(controllers, path) for _, controllers, path in lines if controllers]


def _mounts() -> list[tuple[str, str, str, Path]]:
    """(controllers, mount options, root, mount point) of each mounted hierarchy of version 1."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup":
            root, mount_point = fields.split(" ")[3:5]
            found.append((*_controllers(options.split(",")), root, Path(mount_point)))
    return found


def _controllers(options: list[str]) -> tuple[str, str]:
    """As /proc/self/cgroup names the hierarchy, and as `mount` wants to have it named."""
    named = [option for option in options if option.startswith("name=")]
    if named:
        return named[0], f"none,{named[0]}"
    words = [word for word in options if word not in _FLAGS and "=" not in word]
    return ",".join(words), ",".join(words)


# What else stands among the options of a cgroup mount.
_FLAGS = frozenset({"rw", "ro", "xattr", "noprefix", "clone_children", "cpuset_v2_mode"})
