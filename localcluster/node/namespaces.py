"""Namespaces and cgroups that end with their owner: `async with Namespaces(...) as node`.

The owner stays outside. It starts processes inside with `enter` before their command, finds the node's
files below `root`, and talks to its addresses over sockets that were made inside.
"""

import asyncio
import ctypes
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from localcluster.node import cgroups, guard
from localcluster.processes import DYING_WITH_PARENT, StartFailed, tail

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_UNSHARE = (
    *("unshare", "--mount", "--net", "--pid", "--cgroup", "--ipc", "--uts"),
    *("--fork", "--kill-child", "--mount-proc"),
)
# A process enters cgroups by writing 0 into them; then the namespaces, whose first process has the pid $1.
_ENTER = 'for file in $2; do echo 0 >"$file"; done; pid=$1; shift 2; exec nsenter -t "$pid" -m -n -p -C -i -u -- "$@"'
_START = 'for file in $1; do echo 0 >"$file"; done; shift; exec "$@"'
_START_SECONDS = 30.0


class Namespaces:
    """Use as an async context manager. `directory` is the owner's, and is removed with the rest."""

    def __init__(self, directory: Path, *, interface: str, env: Mapping[str, str]) -> None:
        self.name = f"berth-node-{secrets.token_hex(6)}"
        self._directory, self._interface, self._env = directory, interface, dict(env)
        self._stack = AsyncExitStack()
        self._cgroups: list[Path] = []
        self._pid = 0

    async def __aenter__(self) -> "Namespaces":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def enter(self) -> list[str]:
        """Put it before a command, and the command runs inside."""
        return ["/bin/sh", "-c", _ENTER, "enter", str(self._pid), self._cgroup_files()]

    @property
    def root(self) -> Path:
        """The node's file system, seen from outside."""
        return Path(f"/proc/{self._pid}/root")

    def processes(self) -> set[int]:
        """Everybody inside, by the pid that the owner sees."""
        return cgroups.processes(self._cgroups)

    async def connect(self, host: str, port: int) -> socket.socket:
        """A socket that is connected to an address inside. Raises OSError."""
        return await self._inside(lambda: socket.create_connection((host, port), timeout=10))

    async def listen(self, host: str, port: int) -> socket.socket:
        """A socket that listens on an address inside. Raises OSError."""
        return await self._inside(lambda: socket.create_server((host, port)))

    async def receive(self, host: str, port: int) -> socket.socket:
        """A socket that datagrams to an address inside come to. Raises OSError."""

        def bound() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind((host, port))
            return made

        return await self._inside(bound)

    async def _inside(self, make: Callable[[], socket.socket]) -> socket.socket:
        """A socket belongs for ever to the network that it was made in; the thread that makes them lives in the node's."""
        made = await asyncio.get_running_loop().run_in_executor(self._thread, make)
        made.setblocking(False)
        return made

    async def _start(self) -> None:
        await self._start_guard()
        self._stack.push_async_callback(asyncio.to_thread, guard.end, self.name, self._directory)
        self._cgroups = cgroups.make(self.name)
        await self._start_init()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="inside", initializer=_join_network, initargs=(self._pid,)
        )
        self._stack.callback(self._thread.shutdown)

    async def _start_guard(self) -> None:
        watching = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "localcluster.node.guard", self.name, str(self._directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._env,
            start_new_session=True,
        )

        async def release() -> None:
            assert watching.stdin is not None
            watching.stdin.close()
            await watching.wait()

        self._stack.push_async_callback(release)
        assert watching.stdout is not None
        await watching.stdout.readline()

    async def _start_init(self) -> None:
        log = self._directory / "init.log"
        command = [*_UNSHARE, sys.executable, "-m", "localcluster.node.init", self._interface]
        with log.open("ab") as errors:
            first = await asyncio.create_subprocess_exec(
                *(*DYING_WITH_PARENT, "/bin/sh", "-c", _START, "start", self._cgroup_files(), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=self._env,
                start_new_session=True,
            )
        self._stack.push_async_callback(_killed, first)
        assert first.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            said = await first.stdout.readline()
        if said != b"ready\n":
            raise StartFailed(f"the node's namespaces could not be made:\n{tail(log)}")
        self._pid = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text())

    def _cgroup_files(self) -> str:
        return " ".join(str(directory / "cgroup.procs") for directory in self._cgroups)


async def _killed(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _join_network(pid: int) -> None:
    """Move this thread alone into the network of a process."""
    with open(f"/proc/{pid}/ns/net") as network:
        if _LIBC.setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
