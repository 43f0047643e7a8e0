"""The processes that serve the node's models, as one: this process itself, or several workers."""

import asyncio
import base64
import logging
import os
import pickle
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from berth.contract.gateway import ReplicaSpec
from berth.runtime.errors import EXIT_CRASH, CannotStart
from berth.runtime.logs import fields
from berth.runtime.process import starting
from proxy.gateway.channel import Channel
from proxy.gateway.config import GatewayOptions
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.registry import Registry
from proxy.gateway.serving import access_of, open_data_plane
from proxy.gateway.shared_limit import SharedLimit
from proxy.gateway.spec import ReplicaStats, Spec, Status

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05
_START_SECONDS: Final = 20.0
_END_SECONDS: Final = 5.0

Died = Callable[[frozenset[str]], None]


class Workers(Protocol):
    """What serves."""

    # After Triton's death all that serve have told who was in it.
    settle_seconds: float

    @property
    def port(self) -> int:
        """The one in use, also when 0 was asked for."""
        ...

    def on_news(self, wake: Callable[[], None], died: Died) -> None:
        """`wake`: what they say is news. `died`: Triton has, with requests of these in it."""
        ...

    def apply(self, orders: Spec) -> None: ...

    def statuses(self) -> list[Status]: ...

    def seconds(self) -> int:
        """Another number whenever a copy's second may have closed. May be asked on any thread."""
        ...

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        """For the doors."""
        ...

    def drain_all(self) -> None: ...

    async def idle(self) -> None: ...


class InProcess:
    """This process serves."""

    settle_seconds = 0.0

    def __init__(self, node: DataPlane, port: int) -> None:
        self._node, self.port = node, port

    def on_news(self, wake: Callable[[], None], died: Died) -> None:
        self._node.changed, self._node.triton_crashed = wake, died

    def apply(self, orders: Spec) -> None:
        self._node.apply(orders)

    def statuses(self) -> list[Status]:
        return [self._node.status()]

    def seconds(self) -> int:
        return self._node.seconds

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        self._node.publish_stats(stats)

    def drain_all(self) -> None:
        self._node.drain_all()

    async def idle(self) -> None:
        while not self._node.is_idle:
            await asyncio.sleep(_LOOK_SECONDS)


class _Process:
    """One worker, as the first process knows it."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, crew: "WorkerPool") -> None:
        self.process, self._crew = process, crew
        self.status: Status | None = None
        self.failure = ""
        self.is_idle = False
        self.spoke = asyncio.Event()
        self.channel = Channel(sock, self._take, self.spoke.set)

    def _take(self, said: dict[str, Any], _: list[int]) -> None:
        self.failure = said.get("failure", self.failure)
        if "died" in said:
            self._crew.died(frozenset(said["died"]))
        if "status" in said:
            before = self.status
            self.status, self.is_idle = Status.from_json(said["status"]), said["idle"]
            self._crew.heard += 1
            if before is None or _asks(before) != _asks(self.status):
                self._crew.wake()
        self.spoke.set()


def _asks(status: Status) -> tuple[frozenset[str], ...]:
    """What something is to be done about at once."""
    return status.idle, status.drain_requests, status.leaving


class WorkerPool:
    """Several workers, with one limit and one report for each copy. One that dies takes the gateway with it:
    whatever it held of the limits is free again, and the agent tells everything anew.
    """

    settle_seconds = 1.0

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._processes: list[_Process] = []
        self._guards: list[asyncio.Task[None]] = []
        self._registry = Registry()
        self._limits: dict[str, SharedLimit] = {}
        self._stopping = False
        # Words, of all of them.
        self.heard = 0
        self.port = 0
        self.wake: Callable[[], None] = lambda: None
        self.died: Died = lambda inside: None

    async def __aenter__(self) -> "WorkerPool":
        """Raises CannotStart where a worker cannot serve."""
        try:
            for _ in range(self._options.workers):
                await self._spawn()
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.gather(*(one.spoke.wait() for one in self._processes))
        except TimeoutError:
            await self.__aexit__()
            raise CannotStart("--workers: not all of them have started in time") from None
        except BaseException:
            await self.__aexit__()
            raise
        for one in self._processes:
            if one.status is None:
                await self.__aexit__()
                raise CannotStart(one.failure or "--workers: one of them has ended at once")
        self._guards = [asyncio.create_task(self._guard(one)) for one in self._processes]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for guard in self._guards:
            guard.cancel()
        await asyncio.gather(*self._guards, return_exceptions=True)
        for one in self._processes:
            one.channel.close()
        for one in self._processes:
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await one.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    one.process.kill()
                await one.process.wait()
        for limit in self._limits.values():
            limit.close()

    async def _spawn(self) -> None:
        """Options travel over its socket, where no command line shows them."""
        listening = self._listening()
        ours, theirs = socket.socketpair()
        with theirs, listening:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "proxy.gateway.worker",
                str(theirs.fileno()),
                str(listening.fileno()),
                pass_fds=(theirs.fileno(), listening.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
            )
        one = _Process(process, ours, self)
        self._processes.append(one)
        one.channel.send({"options": base64.b64encode(pickle.dumps(self._options)).decode()})

    def _listening(self) -> socket.socket:
        """One for each worker, all of one port. Raises CannotStart."""
        listen = self._options.listen
        with starting("--listen", listen):
            family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
            one = socket.socket(family, socket.SOCK_STREAM)
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind((listen.host, self.port or listen.port))
            except OSError:
                one.close()
                raise
        self.port = one.getsockname()[1]
        return one

    async def _guard(self, one: _Process) -> None:
        code = await one.process.wait()
        if not self._stopping:
            log.critical("a worker has died", extra=fields(code=code))
            os._exit(EXIT_CRASH)

    # As a plane.

    def on_news(self, wake: Callable[[], None], died: Died) -> None:
        self.wake, self.died = wake, died

    def apply(self, orders: Spec) -> None:
        changes = self._registry.apply(orders.copies)
        for copy in changes.ended:
            self._limits.pop(copy.pod_uid).close()
        for copy in changes.new:
            limit = self._limits[copy.pod_uid] = SharedLimit(copy.limits)
            for one in self._processes:
                one.channel.send({"limit": copy.pod_uid}, limit.descriptors)
        for copy in changes.changed:
            self._limits[copy.pod_uid].resize(copy.limits)
        told = replace(orders, copies=tuple(self._share_of(copy) for copy in orders.copies)).to_json()
        for one in self._processes:
            one.channel.send({"orders": told})

    def _share_of(self, copy: ReplicaSpec) -> ReplicaSpec:
        """What each worker's part of a copy may hold and have in Triton, so that all together keep to it."""
        part = replace(
            self._options.ceilings, max_inflight_bytes=copy.limits.max_inflight_bytes // len(self._processes)
        )
        return replace(copy, limits=part.clip(copy.limits))

    def statuses(self) -> list[Status]:
        for limit in self._limits.values():
            limit.settle()
        return [one.status or Status() for one in self._processes]

    def seconds(self) -> int:
        return self.heard

    def publish_stats(self, stats: Mapping[str, ReplicaStats]) -> None:
        told = {uid: one.to_json() for uid, one in stats.items()}
        for one in self._processes:
            one.channel.send({"stats": told})

    def drain_all(self) -> None:
        for one in self._processes:
            one.is_idle = False
            one.channel.send({"end": True})

    async def idle(self) -> None:
        while not all(one.is_idle for one in self._processes):
            await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def open_workers(options: GatewayOptions) -> AsyncIterator[Workers]:
    """Raises CannotStart or ConfigError."""
    if options.workers > 1:
        access_of(options)  # to be told of here, where it is a matter of an option
        async with WorkerPool(options) as crew:
            yield crew
        return
    async with open_data_plane(options) as (node, port):
        yield InProcess(node, port)
