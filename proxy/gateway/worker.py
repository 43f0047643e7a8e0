"""One of several serving processes of a gateway; `proxy.gateway.worker_pool` starts it and tells it everything.

    python -m proxy.gateway.worker SOCKET LISTENING

The arguments are descriptors. It ends when its socket does.
"""

import asyncio
import base64
import pickle
import signal
import socket
import sys
from typing import Any, Final

import uvloop

from berth.contract.gateway import ReplicaSpec
from berth.runtime.errors import EXIT_CANNOT_START, CannotStart, ConfigError
from berth.runtime.logs import configure_logging
from berth.runtime.tasks import wait_until_set
from proxy.gateway.channel import Channel
from proxy.gateway.config import GatewayOptions
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.serving import open_data_plane
from proxy.gateway.spec import ReplicaStats, Spec
from proxy.memory import settle

_WORD_SECONDS: Final = 1.0
# While a copy drains.
_LOOK_SECONDS: Final = 0.05


class Worker:
    """What was told, and what is said about it."""

    def __init__(self, control: socket.socket) -> None:
        self._node: DataPlane | None = None
        self._options: asyncio.Future[GatewayOptions] = asyncio.get_running_loop().create_future()
        self._limits: dict[str, tuple[int, int]] = {}
        self._looks, self._over = asyncio.Event(), asyncio.Event()
        self._ends = False
        self._channel = Channel(control, self._take, self._over.set)

    def _take(self, told: dict[str, Any], descriptors: list[int]) -> None:
        if "options" in told:
            # From the first process alone, over a socket that nobody else has.
            self._options.set_result(pickle.loads(base64.b64decode(told["options"])))  # noqa: S301
        if "limit" in told:
            self._limits[told["limit"]] = (descriptors[0], descriptors[1])
        if self._node is None:
            return
        if "orders" in told:
            self._node.apply(Spec.from_json(told["orders"]))
        if "stats" in told:
            self._node.publish_stats({uid: ReplicaStats.from_json(one) for uid, one in told["stats"].items()})
        if told.get("end"):
            self._ends = True
            self._node.drain_all()
        self._looks.set()

    def _limit_of(self, copy: ReplicaSpec) -> tuple[int, int]:
        """They are the copy's from then on."""
        return self._limits.pop(copy.pod_uid)

    async def run(self, listening: socket.socket) -> int:
        options = await self._options
        configure_logging(format=options.log_format, level=options.log_level)
        settle()
        try:
            async with open_data_plane(
                options, share=options.workers, listening=listening, limit_of=self._limit_of
            ) as (node, _):
                self._node = node
                node.changed = self._looks.set
                node.triton_crashed = lambda inside: self._channel.send({"died": sorted(inside)})
                await self._speak(node)
        except (CannotStart, ConfigError) as error:
            self._channel.send({"failure": str(error)})
            return EXIT_CANNOT_START
        return 0

    async def _speak(self, node: DataPlane) -> None:
        while not self._over.is_set():
            self._looks.clear()
            status = node.status()
            self._channel.send({"status": status.to_json(), "idle": self._ends and node.is_idle})
            drains = self._ends or any(served.is_draining for served in node)
            await wait_until_set(self._looks, timeout_seconds=_LOOK_SECONDS if drains else _WORD_SECONDS)


async def main(control: socket.socket, listening: socket.socket) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        # A terminal's signal reaches every process; the first one decides when this one ends.
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    return await Worker(control).run(listening)


if __name__ == "__main__":
    with (
        socket.socket(fileno=int(sys.argv[1])) as control_socket,
        socket.socket(fileno=int(sys.argv[2])) as listening_socket,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        sys.exit(runner.run(main(control_socket, listening_socket)))
