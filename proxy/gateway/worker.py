"""One of several processes that serve a plane; `proxy.gateway.worker_pool` starts it and sends it everything.

    python -m proxy.gateway.worker SOCKET LISTENING,LISTENING LISTENING,LISTENING

The arguments are descriptors: of the channel, and of each port's sockets. It ends when its channel does.
"""

import asyncio
import base64
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from berth.contract.gateway import ReplicaSpec
from berth.runtime.errors import EXIT_CANNOT_START, CannotStart, ConfigError
from berth.runtime.logs import configure_logging
from berth.runtime.tasks import wait_until_set
from proxy.gateway.channel import Channel
from proxy.gateway.plane_config import PlaneConfig
from proxy.gateway.serving import Server, open_server
from proxy.gateway.spec import Events, FromWorker, Spec, ToWorker
from proxy.memory import settle

_STATUS_SECONDS: Final = 1.0
# While a replica drains.
_LOOK_SECONDS: Final = 0.05


class Worker:
    """Applies what it receives, and reports its status."""

    def __init__(self, control: socket.socket) -> None:
        self._server: Server | None = None
        self._config: asyncio.Future[PlaneConfig] = asyncio.get_running_loop().create_future()
        # The last one, until there is a server to which it is applied.
        self._spec: Spec | None = None
        self._limits: dict[str, tuple[int, int]] = {}
        self._wake, self._is_over, self._drains_all = asyncio.Event(), False, False
        self._channel = Channel(control, ToWorker, self._take, self._ended)

    def _ended(self) -> None:
        self._is_over = True
        self._wake.set()

    def _take(self, message: ToWorker, descriptors: list[int]) -> None:
        if message.config is not None:
            # From the first process alone, over a socket that no other process has.
            self._config.set_result(pickle.loads(base64.b64decode(message.config)))  # noqa: S301
        if message.limit_of is not None:
            self._limits[message.limit_of] = (descriptors[0], descriptors[1])
        if message.spec is not None:
            if self._server is None:
                self._spec = message.spec
            else:
                self._server.apply(message.spec)
        if message.stats is not None and self._server is not None:
            self._server.publish_stats(message.stats)
        self._drains_all = self._drains_all or message.drain_all
        self._wake.set()

    def _limit_of(self, replica: ReplicaSpec) -> tuple[int, int] | None:
        """They belong to the replica from then on."""
        return self._limits.pop(replica.pod_uid, None)

    async def run(self, sockets: Sequence[Sequence[socket.socket]]) -> int:
        config = await self._config
        configure_logging(format=config.logs.log_format, level=config.logs.log_level)
        settle()
        # Of many replicas that become ready at once not every one is worth a status of all.
        events = Events(self._wake, includes_readiness=config.tenancy is None)
        try:
            async with open_server(
                config, events, self._spec, sockets=sockets, limit_of=self._limit_of
            ) as server:
                self._server = server
                await self._report(server, events)
        except (CannotStart, ConfigError) as error:
            self._channel.send(FromWorker(failure=str(error)))
            return EXIT_CANNOT_START
        return 0

    async def _report(self, server: Server, events: Events) -> None:
        is_drained = False
        while not self._is_over:
            self._wake.clear()
            if self._drains_all and not is_drained:
                is_drained = True
                await server.drain_all()
            self._channel.send(
                FromWorker(
                    status=server.status(),
                    is_idle=is_drained and server.is_idle,
                    crashes=tuple(events.take_crashes()),
                )
            )
            pause = _LOOK_SECONDS if is_drained or server.drains else _STATUS_SECONDS
            await wait_until_set(self._wake, timeout_seconds=pause)


def _sockets(argument: str) -> list[socket.socket]:
    return [socket.socket(fileno=int(one)) for one in argument.split(",")]


async def main(control: socket.socket, sockets: Sequence[Sequence[socket.socket]]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        # A terminal's signal reaches every process; the first one decides when this one ends.
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    try:
        return await Worker(control).run(sockets)
    finally:
        for one in (one for of_port in sockets for one in of_port):
            one.close()


if __name__ == "__main__":
    with (
        socket.socket(fileno=int(sys.argv[1])) as control_socket,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        sys.exit(runner.run(main(control_socket, [_sockets(one) for one in sys.argv[2:]])))
