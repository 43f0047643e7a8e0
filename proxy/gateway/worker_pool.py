"""The processes that serve a plane, as one: this process itself, or several workers."""

import asyncio
import base64
import logging
import os
import pickle
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, Protocol

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import EXIT_CRASH, CannotStart
from berth.runtime.listening import listening_sockets
from berth.runtime.logs import fields
from berth.runtime.process import starting
from proxy.gateway.channel import Channel
from proxy.gateway.plane_config import PlaneConfig
from proxy.gateway.registry import Registry
from proxy.gateway.serving import Server, open_server
from proxy.gateway.shared_limit import SharedLimit
from proxy.gateway.spec import Events, FromWorker, ReplicaStats, Spec, Status, ToWorker

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05
_START_SECONDS: Final = 20.0
_END_SECONDS: Final = 5.0


class Workers(Protocol):
    """What serves."""

    # So long after a crash of Triton all processes have reported whose requests were in it.
    settle_seconds: float

    @property
    def ports(self) -> tuple[int, ...]:
        """Those in use, in the order of the config, also where 0 was requested."""
        ...

    def apply(self, spec: Spec) -> None: ...

    def statuses(self) -> Sequence[Status]: ...

    def seconds(self) -> int:
        """Another number whenever a replica's second may have closed. May be asked on any thread."""
        ...

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        """To the pods' proxies."""
        ...

    async def drain_all(self) -> None:
        """Take nothing new."""
        ...

    async def idle(self) -> None:
        """Return when nothing is left of what was under way. After `drain_all`."""
        ...


class InProcess:
    """This process serves."""

    settle_seconds = 0.0

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ports = server.ports

    def apply(self, spec: Spec) -> None:
        self._server.apply(spec)

    def statuses(self) -> Sequence[Status]:
        return [self._server.status()]

    def seconds(self) -> int:
        return self._server.seconds

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        self._server.publish_stats(stats)

    async def drain_all(self) -> None:
        await self._server.drain_all()

    async def idle(self) -> None:
        while not self._server.is_idle:
            await asyncio.sleep(_LOOK_SECONDS)


class _Worker:
    """One worker, as the first process knows it."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, events: Events) -> None:
        self.process, self._events = process, events
        self.status: Status | None = None
        # How many statuses it has sent.
        self.reported = 0
        self.failure = ""
        self.is_idle = False
        self.spoke = asyncio.Event()
        self.channel = Channel(sock, FromWorker, self._take, self.spoke.set)

    def _take(self, message: FromWorker, _: list[int]) -> None:
        self.failure = message.failure or self.failure
        for suspects in message.crashes:
            self._events.triton_crashed(suspects)
        if message.status is not None:
            before, self.status, self.is_idle = self.status, message.status, message.is_idle
            self.reported += 1
            if before is None or before.needs_action != self.status.needs_action:
                self._events.changed()
        self.spoke.set()


class WorkerPool:
    """Several workers, with one limit and one set of stats for each replica. A worker that dies takes the pool's process
    with it: whatever it used of the limits is free again, and the restart starts from the agent's whole list.
    """

    settle_seconds = 1.0

    def __init__(self, config: PlaneConfig, events: Events, spec: Spec | None = None) -> None:
        """`spec`: applied by each worker before its ports are open."""
        self._config, self._events, self._first_spec = config, events, spec
        self._workers: list[_Worker] = []
        self._guards: list[asyncio.Task[None]] = []
        self._registry = Registry()
        self._limits: dict[str, SharedLimit] = {}
        self._stopping = False
        self.ports: tuple[int, ...] = ()

    async def __aenter__(self) -> "WorkerPool":
        """Raises CannotStart where a worker cannot serve."""
        try:
            for _ in range(self._config.workers):
                self._workers.append(await self._spawn())
            if self._first_spec is not None:
                self.apply(self._first_spec)
            # Over its socket, where no command line shows it. What comes before it is applied before the ports are open.
            config = base64.b64encode(pickle.dumps(self._config)).decode()
            self._send(ToWorker(config=config))
            await self._started()
        except BaseException:
            await self.__aexit__()
            raise
        self._guards = [asyncio.create_task(self._guard(one)) for one in self._workers]
        return self

    async def _started(self) -> None:
        """Raises CannotStart."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(one.spoke.wait() for one in self._workers))
        except TimeoutError:
            raise CannotStart("--workers: not all of them have started in time") from None
        for one in self._workers:
            if one.status is None:
                raise CannotStart(one.failure or "--workers: one of them has ended at once")

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for guard in self._guards:
            guard.cancel()
        await asyncio.gather(*self._guards, return_exceptions=True)
        for one in self._workers:
            one.channel.close()
        for one in self._workers:
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await one.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    one.process.kill()
                await one.process.wait()
        for limit in self._limits.values():
            limit.close()

    async def _spawn(self) -> _Worker:
        """Raises CannotStart where a port is taken."""
        listening = self._listen()
        ours, theirs = socket.socketpair()
        descriptors = [[one.fileno() for one in sockets] for sockets in listening]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "proxy.gateway.worker",
                str(theirs.fileno()),
                *(",".join(map(str, of_port)) for of_port in descriptors),
                pass_fds=(theirs.fileno(), *(one for of_port in descriptors for one in of_port)),
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            _close(listening)
        return _Worker(process, ours, self._events)

    def _listen(self) -> list[list[socket.socket]]:
        """A worker's own sockets for each port; all workers have the same ports. Raises CannotStart."""
        listening: list[list[socket.socket]] = []
        numbers = self.ports or tuple(port.listen.port for port in self._config.ports)
        try:
            for port, number in zip(self._config.ports, numbers, strict=True):
                with starting(port.flag, port.listen):
                    listening.append(listening_sockets(Endpoint(port.listen.host, number), share_port=True))
        except CannotStart:
            _close(listening)
            raise
        self.ports = tuple(sockets[0].getsockname()[1] for sockets in listening)
        return listening

    async def _guard(self, one: _Worker) -> None:
        code = await one.process.wait()
        if not self._stopping:
            log.critical("a worker has died", extra=fields(code=code))
            os._exit(EXIT_CRASH)

    def _send(self, message: ToWorker) -> None:
        for one in self._workers:
            one.channel.send(message)

    def apply(self, spec: Spec) -> None:
        changes = self._registry.apply(spec.replicas)
        for replica in changes.ended:
            limit = self._limits.pop(replica.pod_uid, None)
            if limit is not None:
                limit.close()
        for replica in changes.new:
            if self._config.shares_limit(replica.limits):
                limit = self._limits[replica.pod_uid] = SharedLimit(replica.limits)
                for one in self._workers:
                    one.channel.send(ToWorker(limit_of=replica.pod_uid), limit.descriptors)
        for replica in changes.changed:
            if replica.pod_uid in self._limits:
                self._limits[replica.pod_uid].resize(replica.limits)
        config = self._config
        parts = tuple(replace(one, limits=config.worker_limits(one.limits)) for one in spec.replicas)
        self._send(ToWorker(spec=replace(spec, replicas=parts)))

    def statuses(self) -> Sequence[Status]:
        for limit in self._limits.values():
            limit.settle()
        return [one.status or Status() for one in self._workers]

    def seconds(self) -> int:
        return sum(one.reported for one in self._workers)

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        self._send(ToWorker(stats=dict(stats)))

    async def drain_all(self) -> None:
        for one in self._workers:
            one.is_idle = False
        self._send(ToWorker(drain_all=True))

    async def idle(self) -> None:
        while not all(one.is_idle for one in self._workers):
            await asyncio.sleep(_LOOK_SECONDS)


def _close(listening: Sequence[Sequence[socket.socket]]) -> None:
    for sockets in listening:
        for one in sockets:
            one.close()


@asynccontextmanager
async def open_workers(
    config: PlaneConfig, events: Events, spec: Spec | None = None
) -> AsyncIterator[Workers]:
    """`spec`: applied before the ports are open. Raises CannotStart or ConfigError."""
    if config.workers > 1:
        async with WorkerPool(config, events, spec) as pool:
            yield pool
        return
    async with open_server(config, events, spec) as server:
        yield InProcess(server)
