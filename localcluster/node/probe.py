"""Can this machine run a real node? `python -m localcluster.node.probe` says why not, in one sentence."""

import os
import secrets
import shutil
import subprocess
import sys

from localcluster import images
from localcluster.node import cgroups

_SYSTEM_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin:/usr/lib/cni"
# Program, on PATH or among the CNI plugins -> Debian's package that has it.
_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "bridge": "containernetworking-plugins",
    "host-local": "containernetworking-plugins",
    "portmap": "containernetworking-plugins",
    "loopback": "containernetworking-plugins",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
_CONTROLLERS = {"cpu", "cpuacct", "cpuset", "memory", "devices", "pids", "freezer"}
_NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--cgroup", "--ipc", "--uts", "--fork", "--mount-proc")
# In namespaces of its own, so that nothing of the trial is left.
_TRIAL = (
    "mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir /run/upper /run/work && "
    "mount -t overlay -o lowerdir=/var,upperdir=/run/upper,workdir=/run/work overlay /var && "
    "ip link add node0 type bridge && nft add table ip berth-probe && echo 1 >/proc/sys/net/ipv4/ip_forward"
)


def lacking() -> str | None:
    """What this machine lacks, None if a node can run here."""
    return _rights() or _programs() or images.lacking() or _cgroups() or _namespaces()


def _rights() -> str | None:
    return None if os.geteuid() == 0 else "only root may make a node's namespaces and cgroups"


def missing_packages() -> list[str]:
    """Debian's packages of programs that are not here."""
    return sorted({p for program, p in _PROGRAMS.items() if shutil.which(program, path=_SYSTEM_PATH) is None})


def _programs() -> str | None:
    packages = missing_packages()
    return f"not installed: {' '.join(packages)}" if packages else None


def _cgroups() -> str | None:
    found = {name for hierarchy in cgroups.hierarchies() for name in hierarchy.options.split(",")}
    if missing := _CONTROLLERS - found:
        return f"cgroup version 1 is not mounted for {', '.join(sorted(missing))}; version 2 is not supported here"
    try:
        made = cgroups.make(f"berth-probe-{secrets.token_hex(4)}")
    except OSError as error:
        return f"cgroups may not be made here: {error}"
    cgroups.remove(made)
    return None


def _namespaces() -> str | None:
    tried = subprocess.run(
        [*_NAMESPACES, "sh", "-c", _TRIAL], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"namespaces do not work here: {tried.stderr.strip()}"


if __name__ == "__main__":
    reason = lacking()
    sys.exit(None if reason is None else f"no real node on this machine: {reason}")
