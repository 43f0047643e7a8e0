"""Child processes with a log file, none of which outlives the local cluster.

Each child is killed by the kernel when its parent dies (PR_SET_PDEATHSIG). What a child starts in
turn carries the cluster's id in its environment, by which `localcluster.guard` finds and ends it.
"""

import asyncio
import errno
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from berth.runtime.backoff import Backoff
from berth.runtime.tasks import wait_until_set

CLUSTER_ID_VARIABLE = "BERTH_LOCALCLUSTER_ID"
# Before a command: the kernel kills it when the thread that has started it ends.
DYING_WITH_PARENT = (shutil.which("setpriv") or "/usr/bin/setpriv", "--pdeathsig", "KILL", "--")
_LOG_TAIL_BYTES = 4000


class StartFailed(Exception):
    """A part of the cluster did not come up; the message holds the end of its log."""


async def spawn(
    command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
) -> asyncio.subprocess.Process:
    """Start a child in a session of its own, with stdout and stderr appended to `log`. Raises OSError.

    setpriv makes it die with its parent: whatever Python ran between fork and exec would run in a copy of
    this process, whose other threads (gRPC's, for one) are gone, and crashes there now and then.
    """
    _require_program(command[0], env, cwd)
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *DYING_WITH_PARENT,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )


def _require_program(name: str, env: Mapping[str, str], cwd: Path | None) -> None:
    """Raises OSError as exec would: setpriv would only end with 127."""
    found = shutil.which(
        str((cwd or Path()) / name) if "/" in name else name, path=env.get("PATH", os.defpath)
    )
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such program", name)


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


@asynccontextmanager
async def reaping(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """A child, without what it starts, that does not outlive the block, also when that is cancelled."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def tail(log: Path, limit_bytes: int = _LOG_TAIL_BYTES) -> str:
    """The end of a log file."""
    try:
        return log.read_bytes()[-limit_bytes:].decode(errors="replace")
    except OSError:
        return ""


class Supervised:
    """A part that is started again when it dies, after a pause, as a kubelet would.

    `kill()` is a crash: it comes back. `stop()` keeps it away until `start()`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.log = name, log
        self._command, self._env, self._before = list(command), dict(env), before
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """None while it is not running."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        """Start it, and again whenever it ends."""
        assert self._task is None, f"{self.name} is started already"
        self._stopping.clear()
        await self._spawn()
        self._task = asyncio.create_task(self._keep_alive(), name=f"keep {self.name}")

    async def stop(self, *, grace_seconds: float = 5.0) -> None:
        """End it in order and keep it away. Does nothing if it is not started."""
        if self._task is None:
            return
        self._stopping.set()
        if self._process is not None:
            await end(self._process, grace_seconds=grace_seconds)
        await self._task
        self._task = None

    def kill(self) -> None:
        """kill -9, as a crash: only the process itself, so that its children must cope."""
        if self.pid is None:
            raise ProcessLookupError(f"{self.name} is not running")
        os.kill(self.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        if self._before is not None:
            self._before()
        self._process = await spawn(self._command, log=self.log, env=self._env)

    async def _keep_alive(self) -> None:
        backoff = Backoff(initial_seconds=0.5, cap_seconds=5.0)
        loop = asyncio.get_running_loop()
        while True:
            assert self._process is not None
            began = loop.time()
            await self._process.wait()
            signal_group(self._process.pid, signal.SIGKILL)  # what the dead one left behind
            if loop.time() - began > 30:
                backoff.reset()
            if await wait_until_set(self._stopping, timeout_seconds=backoff.next()):
                return
            await self._spawn()
            if self._stopping.is_set():
                signal_group(self._process.pid, signal.SIGKILL)  # `stop` has ended the one before it
