"""One of several serving processes; `proxy.workers` starts it and tells it everything.

    python -m proxy.worker SOCKET [SLOTS PLACES]

The arguments are descriptors. It ends when its socket does.
"""

import asyncio
import base64
import json
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from typing import Any

import uvloop

from berth.runtime.errors import EXIT_CANNOT_START, CannotStart, ConfigError
from berth.runtime.logs import configure_logging
from berth.runtime.tasks import supervise, wait_until_set
from proxy.config import ProxyOptions
from proxy.memory import settle
from proxy.request.endpoint import UpstreamCluster
from proxy.request.replica import Replica
from proxy.server import Server, open_upstream, own_replica, serving

_FIGURES_SECONDS = 1.0
_IDLE_LOOK_SECONDS = 0.1
_LINE_BYTES = 1024 * 1024


class _Said:
    """What the first process has said last."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()


async def main(control: socket.socket, shared: tuple[int, int] | None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        # A terminal's signal reaches every process; the first one decides when this one ends.
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    reader, writer = await asyncio.open_unix_connection(sock=control, limit=_LINE_BYTES)
    with closing(writer):
        return await _serve(reader, writer, shared)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shared: tuple[int, int] | None
) -> int:
    options: ProxyOptions = _unpacked(json.loads(await reader.readline())["options"])
    configure_logging(format=options.log_format, level=options.log_level)
    settle()
    said = _Said()
    copy, where = own_replica(options, shared=shared), UpstreamCluster()
    async with open_upstream(copy, where) as upstream:
        try:
            async with (
                serving(options, copy, upstream, share_ports=True) as server,
                supervise() as tasks,
            ):
                tasks.eternal("figures", _tell_figures(server, said, writer))
                async for order in _orders(reader):
                    await _obey(order, server, copy, where, said)
        except (CannotStart, ConfigError) as error:
            writer.write(json.dumps({"failure": str(error)}).encode() + b"\n")
            await writer.drain()
            return EXIT_CANNOT_START
    return 0


async def _orders(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """What the first process says, until it ends; what it has not read by then makes of its end a reset."""
    with suppress(ConnectionError):
        while line := await reader.readline():
            yield json.loads(line)


async def _obey(
    order: dict[str, Any], server: Server, copy: Replica, where: UpstreamCluster, said: _Said
) -> None:
    if order.get("stop"):
        await server.stop_accepting()
        said.stopping.set()
        return
    if order["access"] is not None:
        where.move(_unpacked(order["access"]))
    copy.facts = _unpacked(order["facts"])
    copy.triton_says(order["notServed"])
    copy.withheld = order["refusing"]


async def _tell_figures(server: Server, said: _Said, writer: asyncio.StreamWriter) -> None:
    while True:
        stops = said.stopping.is_set()
        told = {"figures": server.figures().to_json(), "takesNothingNew": stops}
        writer.write(json.dumps(told).encode() + b"\n")
        if stops:
            await asyncio.sleep(_IDLE_LOOK_SECONDS)
        else:
            await wait_until_set(said.stopping, timeout_seconds=_FIGURES_SECONDS)


def _unpacked(text: str) -> Any:
    """From the first process alone, over a socket that nobody else has."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301


if __name__ == "__main__":
    with (
        socket.socket(fileno=int(sys.argv[1])) as control_socket,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        limits = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 2 else None
        sys.exit(runner.run(main(control_socket, limits)))
