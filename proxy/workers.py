"""Several processes that serve the same ports with one limit and one report.

The first process knows the model, the agent and the end; the workers serve. Each worker hears of
every change over its own socket and tells its figures every second. A worker that dies takes the
proxy with it: the pod's restart is the cure, as it is for a proxy of one process.
"""

import asyncio
import base64
import json
import logging
import os
import pickle
import socket
import sys
from contextlib import suppress
from typing import Any

from berth.runtime.errors import EXIT_CRASH, CannotStart
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.config import ProxyOptions
from proxy.request.admission import shared_limit
from proxy.request.endpoint import UpstreamCluster
from proxy.request.replica import Replica, queue_depth
from proxy.request.traffic import Figures

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_START_SECONDS = 20.0
_END_SECONDS = 5.0
_TELL_SECONDS = 5.0
_LINE_BYTES = 1024 * 1024


class _Worker:
    """One process and its socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer
        self.figures = Figures()
        self.takes_nothing_new = False
        self.started = asyncio.Event()
        self.failure = ""

    def tell(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def listen(self) -> None:
        """Take what it says until it ends."""
        with suppress(ConnectionError):  # it died before it read what it was told
            while line := await self._reader.readline():
                self._take(json.loads(line))
        self.started.set()

    def _take(self, said: dict[str, Any]) -> None:
        if "failure" in said:
            self.failure = said["failure"]
        elif "figures" in said:
            self.figures = Figures.from_json(said["figures"])
            self.takes_nothing_new = said["takesNothingNew"]
            self.started.set()

    def close(self) -> None:
        self._writer.close()


class Crew:
    """The workers, as one data plane."""

    def __init__(self, options: ProxyOptions, copy: Replica, where: UpstreamCluster) -> None:
        self._options, self._copy, self._where = options, copy, where
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def __aenter__(self) -> "Crew":
        """Raises CannotStart where a worker cannot serve."""
        options = self._options
        shared: tuple[int, ...] = ()
        if options.container_concurrency:
            shared = shared_limit(options.container_concurrency, queue_depth(options.limits))
        try:
            for _ in range(options.workers):
                self._workers.append(await _spawn(options, shared))
        finally:
            for descriptor in shared:
                os.close(descriptor)
        listening = [asyncio.create_task(worker.listen()) for worker in self._workers]
        self._tasks = [*listening, asyncio.create_task(self._tell())]
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(worker.started.wait() for worker in self._workers))
        except TimeoutError:
            await self.__aexit__()
            raise CannotStart("--workers: not all of them have started in time") from None
        for worker in self._workers:
            if worker.failure:
                await self.__aexit__()
                raise CannotStart(worker.failure)
        self._tasks += [asyncio.create_task(self._guard(worker)) for worker in self._workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await worker.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    worker.process.kill()
                await worker.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def figures(self) -> Figures:
        total = Figures()
        for worker in self._workers:
            total.add(worker.figures)
        total.model_ready = self._copy.is_served
        return total

    async def stop_accepting(self) -> None:
        for worker in self._workers:
            worker.tell({"stop": True})

    async def idle(self) -> None:
        """As a server's own. What a worker told before it stopped taking requests is old."""
        while not self._is_idle():
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_idle(self) -> bool:
        total = self.figures()
        busy = total.running or total.waiting or total.busy_connections
        return not busy and all(worker.takes_nothing_new for worker in self._workers)

    async def _tell(self) -> None:
        """Tell every worker how Triton is reached and whether the model is ready, for ever."""
        while True:
            change = self._copy.next_change()
            message = self._state()
            for worker in self._workers:
                worker.tell(message)
            for _ in range(int(_TELL_SECONDS / 0.5)):
                if await wait_until_set(change, timeout_seconds=0.5) or self._state() != message:
                    break

    def _state(self) -> dict[str, Any]:
        access = self._where.endpoint
        packed = None if access is None else base64.b64encode(pickle.dumps(access)).decode()
        return {
            "access": packed,
            "notServed": self._copy.not_served,
            "refusing": None if self._copy.not_served else self._copy.not_ready(),
            "facts": base64.b64encode(pickle.dumps(self._copy.facts)).decode(),
        }

    async def _guard(self, worker: _Worker) -> None:
        code = await worker.process.wait()
        if not self._stopping:
            log.critical("a worker has died", extra=fields(code=code))
            os._exit(EXIT_CRASH)


async def _spawn(options: ProxyOptions, shared: tuple[int, ...]) -> _Worker:
    """Start one. Options and keys travel over its socket, where no command line shows them."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "proxy.worker",
            str(theirs.fileno()),
            *map(str, shared),
            pass_fds=(theirs.fileno(), *shared),
            stdin=asyncio.subprocess.DEVNULL,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES)
    worker = _Worker(process, reader, writer)
    worker.tell({"options": base64.b64encode(pickle.dumps(options)).decode()})
    return worker
