"""Of a node nothing is left, however its owner ends: no process, no cgroup, no mount, no file."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from localcluster.node import cgroups
from localcluster.processes import reaping
from tests.fakes.eventually import eventually

# An owner whose node holds what nodes hold: a daemon, a cgroup below the node's, a mount, files on /var.
OWNER = """
import asyncio, os, sys
from pathlib import Path
from localcluster.node.namespaces import Namespaces

INSIDE = '''
mkdir /sys/fs/cgroup/memory/kubepods && mkdir /var/lib/berth-trace && touch /var/lib/berth-trace/file
mkdir /run/there && mount -t tmpfs berth-trace /run/there
setsid sleep 1000 & echo $! >/sys/fs/cgroup/memory/kubepods/cgroup.procs
'''

async def main():
    directory = Path(sys.argv[1])
    async with Namespaces(directory, interface="10.88.0.10/24", env=dict(os.environ)) as node:
        made = await asyncio.create_subprocess_exec(*node.enter, "sh", "-ec", INSIDE)
        assert await made.wait() == 0
        print(node.name, *sorted(node.processes()), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@asynccontextmanager
async def owner(directory: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[int]]]:
    """A living owner, its node's name and the pids of everybody inside."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(directory)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    async with reaping(process):
        assert process.stdout is not None
        name, *pids = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()
        yield process, name, [int(pid) for pid in pids]
        await asyncio.wait_for(process.wait(), 30)


def traces(directory: Path, name: str, pids: list[int]) -> list[str]:
    """What there is of a node, in words."""
    cgroup = [str(h.own / name) for h in cgroups.hierarchies() if (h.own / name).exists()]
    files = [
        str(path) for path in (directory, Path("/var/lib/berth-trace"), Path("/run/there")) if path.exists()
    ]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "berth-trace" in line]
    return [*cgroup, *files, *mounts, *(f"pid {pid}" for pid in pids if Path(f"/proc/{pid}").exists())]


def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()


def end_in_order(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("end", [kill, end_in_order])
async def test_nothing_is_left(end: Callable[[asyncio.subprocess.Process], None]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="berth-node-"))
    async with owner(directory) as (process, name, pids):
        before = traces(directory, name, pids)
        assert len(pids) >= 3, "the first process, what started it, the daemon"
        assert any("/memory/" in trace for trace in before), before
        assert str(directory) in before
        end(process)

    async def gone() -> None:
        assert traces(directory, name, pids) == []

    await eventually(gone, seconds=20, what="no trace of the node")


@pytest.mark.usefixtures("able")
async def test_without_its_guard_no_process_outlives_the_owner_either() -> None:
    directory = Path(tempfile.mkdtemp(prefix="berth-node-"))
    async with owner(directory) as (process, name, pids):
        listed = subprocess.run(
            ["pgrep", "-f", f"localcluster.node.guard {name}"], capture_output=True, text=True
        )
        (watching,) = listed.stdout.split()
        os.kill(int(watching), signal.SIGKILL)
        process.kill()

    async def gone() -> None:
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    await eventually(gone, seconds=20, what="no process of the node")
    places = [hierarchy.own / name for hierarchy in cgroups.hierarchies()]
    cgroups.remove(places)
    shutil.rmtree(directory)
