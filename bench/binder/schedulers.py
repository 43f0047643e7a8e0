"""Who is measured: each a process that places the pods of one schedulerName."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.binder import objects
from bench.proxy.processes import cpu_seconds, peak_rss_bytes
from localcluster.addresses import free_port
from localcluster.processes import end, signal_group, spawn, tail

_PROFILE_SECONDS = 30.0  # an orderly end is needed only to write the profile


@dataclass(frozen=True, slots=True)
class Site:
    """What a scheduler needs to run. `profile`: where berth's cProfile goes, None without one."""

    directory: Path
    host: str
    binaries: Path
    kubeconfig: Path
    env: Mapping[str, str]
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """`pod(name, ask)` makes what it has to place; `command(site)` starts it."""

    name: str
    pod: Callable[[str, objects.Ask], objects.Json]
    command: Callable[[Site], list[str]]


class Process:
    """A running scheduler."""

    def __init__(self, contender: Contender, child: asyncio.subprocess.Process, log: Path) -> None:
        self._name, self._child, self._log = contender.name, child, log

    def freeze(self) -> None:
        signal_group(self._child.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        signal_group(self._child.pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._child.pid)

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self._child.pid)

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of its log."""
        if self._child.returncode is not None:
            raise RuntimeError(f"{self._name} ended with {self._child.returncode}:\n{tail(self._log)}")


@asynccontextmanager
async def running(contender: Contender, site: Site) -> AsyncIterator[Process]:
    """For the length of the block. Its log is in the site's directory."""
    log = site.directory / f"{contender.name.replace(' ', '-')}.log"
    child = await spawn(contender.command(site), log=log, env=site.env)
    process = Process(contender, child, log)
    try:
        yield process
    finally:
        process.thaw()  # a frozen process takes no SIGTERM
        await end(child, grace_seconds=0 if site.profile is None else _PROFILE_SECONDS)


def contenders(*, score_all: bool) -> list[Contender]:
    return [BERTH, KUBE, *([KUBE_ALL] if score_all else [])]


def _berth(site: Site) -> list[str]:
    """As users run it, but for the election."""
    profiled = [] if site.profile is None else ["-m", "cProfile", "-o", str(site.profile)]
    return [
        *(sys.executable, *profiled, "-m", "berth.cli", "binder", "--no-leader-elect"),
        f"--kubeconfig={site.kubeconfig}",
        f"--admin-listen={site.host}:{free_port(site.host)}",
    ]


def _kube(site: Site, **settings: object) -> list[str]:
    """Default plugins. Its own limit of 50 requests per second would be all that is measured: lifted."""
    program = site.binaries / "kube-scheduler"
    if not os.access(program, os.X_OK):
        raise SystemExit(f"bench.binder: no {program}; unset KUBEBUILDER_ASSETS to have one built")
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(site.kubeconfig), "qps": 5000, "burst": 10000},
        **settings,
    }
    path = site.directory / "kube-scheduler.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(program), f"--config={path}", "--secure-port=0"]


BERTH = Contender("berth", objects.berth_pod, _berth)
KUBE = Contender("kube-scheduler", objects.kube_pod, _kube)
KUBE_ALL = Contender(
    "kube-scheduler scoring all", objects.kube_pod, lambda site: _kube(site, percentageOfNodesToScore=100)
)
