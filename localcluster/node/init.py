"""The first process of a node's namespaces: makes the node's mounts and network, then reaps until its owner ends.

`python -m localcluster.node.init ADDRESS/LENGTH`, started in new namespaces by `localcluster.node.namespaces`.
Says `ready` on its standard output; ends when its standard input does, and with it everything in the
namespaces.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_interface
from pathlib import Path

from localcluster.node.cgroups import Hierarchy, hierarchies

BRIDGE = "node0"
# What programs on a node write outside of any configured directory.
_WRITTEN = Path("/var")
_OVERLAY = Path("/run/overlay")
STATE = Path("/run/node")
"""For containerd's and the kubelet's own data; on a file system that an overlay can lie on."""


def mount_all() -> None:
    """Own /run and /sys, an own layer over /var, and the node's cgroups as if they were the whole machine's."""
    found = hierarchies()
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    STATE.mkdir()
    upper, work = _OVERLAY / "upper", _OVERLAY / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    layers = f"lowerdir={_WRITTEN},upperdir={upper},workdir={work}"
    _run("mount", "-t", "overlay", "-o", layers, "overlay", str(_WRITTEN))
    _run("umount", "-R", "/sys/fs/cgroup")
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "cgroup", "/sys/fs/cgroup")
    for hierarchy in found:
        _mount_cgroup(hierarchy)


def _mount_cgroup(hierarchy: Hierarchy) -> None:
    where = Path("/sys/fs/cgroup", hierarchy.mount_point.name)
    where.mkdir()
    _run("mount", "-t", "cgroup", "-o", hierarchy.options, "cgroup", str(where))
    for controller in hierarchy.options.split(","):
        if "," in hierarchy.options and "=" not in controller and controller != "none":
            with suppress(FileExistsError):
                Path("/sys/fs/cgroup", controller).symlink_to(where.name)


def make_network(interface: str) -> None:
    """A bridge that carries the node's address. It is the way to everywhere, which ends there."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", interface, "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    # Without a default route the kubelet finds no address for its node.
    _run("ip", "route", "add", "default", "via", str(ip_interface(interface).ip), "dev", BRIDGE)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if bridged.exists():
        # A pod that calls a Service whose pod is beside it: the answer has to come back through the rules.
        bridged.write_text("1")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(command)}: {error.stderr.strip()}")


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    mount_all()
    make_network(sys.argv[1])
    signal.signal(signal.SIGCHLD, _reap)
    _reap()
    print("ready", flush=True)
    sys.stdin.buffer.read()
