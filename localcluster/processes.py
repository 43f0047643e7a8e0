"""Child processes with a log file, none of which outlives the local cluster.

Each child is told by the kernel to die with its parent (PR_SET_PDEATHSIG). What a child starts in
turn carries the cluster's id in its environment, by which `localcluster.guard` finds and ends it.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

CLUSTER_ID_VARIABLE = "BERTH_LOCALCLUSTER_ID"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_LOG_TAIL_BYTES = 4000


class StartFailed(Exception):
    """A part of the cluster did not come up; the message holds the end of its log."""


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def spawn(
    command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
) -> asyncio.subprocess.Process:
    """Start a child in a session of its own, with stdout and stderr appended to `log`. Raises OSError."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a child and whatever it started in its session; nothing if all have gone."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


async def end(process: asyncio.subprocess.Process, *, grace_seconds: float) -> None:
    """SIGTERM, wait, SIGKILL: to the whole group. Returns when the child has ended."""
    if process.returncode is None and grace_seconds > 0:
        signal_group(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await process.wait()
    signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def tail(log: Path, limit_bytes: int = _LOG_TAIL_BYTES) -> str:
    """The end of a log file."""
    try:
        return log.read_bytes()[-limit_bytes:].decode(errors="replace")
    except OSError:
        return ""
