"""A peer that is gone without a word, on a stream on which nothing is said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import CannotStart
from berth.runtime.grpc_options import keepalive, listen_on, server_options

EVERY, WITHIN = 1, 1
# Longer than gRPC pings a stream without data by its own defaults.
QUIET = 4 * EVERY


class Silence(grpc.GenericRpcHandler):
    """Streams that say nothing, until they are ended."""

    def __init__(self) -> None:
        self.open = 0

    def service(self, handler_call_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._stream)

    async def _stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            await asyncio.sleep(600)
        finally:
            self.open -= 1
        yield b""


class Wire:
    """Between the two; cut, it passes nothing on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_cut = False
        self._ended = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        passing = [asyncio.create_task(self._pass(*ends)) for ends in ((reader, back), (there, writer))]
        await self._ended.wait()
        for end in (writer, back):
            end.close()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.is_cut:
                writer.write(data)

    def end(self) -> None:
        self._ended.set()


@asynccontextmanager
async def stream(
    silence: Silence, *, client: list[Any], server: list[Any]
) -> AsyncIterator[tuple[Any, Wire]]:
    there = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 100), *server])
    there.add_generic_rpc_handlers((silence,))
    wire = Wire(there.add_insecure_port("127.0.0.1:0"))
    await there.start()
    relay = await asyncio.start_server(wire.accept, "127.0.0.1", 0)
    target = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    try:
        async with grpc.aio.insecure_channel(target, options=client) as channel:
            call = channel.stream_stream("/a/B")()
            await call.write(b"hello")
            yield call, wire
            call.cancel()
    finally:
        wire.end()
        relay.close()
        await there.stop(0)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_peer_that_is_gone_is_noticed_however_quiet_the_stream_is(side: str) -> None:
    silence = Silence()
    options: dict[str, list[Any]] = {"client": [], "server": []}
    options[side] = list(keepalive(every_seconds=EVERY, within_seconds=WITHIN))
    async with stream(silence, **options) as (call, wire):
        await asyncio.sleep(QUIET)
        assert not call.done()
        assert silence.open == 1
        wire.is_cut = True
        async with asyncio.timeout(20):
            while not call.done() if side == "client" else silence.open:
                await asyncio.sleep(0.05)


def test_every_server_is_bounded_and_reads_no_stream_ahead() -> None:
    options = dict(
        server_options(message_bytes=7, metadata_bytes=8, connections=9, every_seconds=30, within_seconds=10)
    )
    assert options == {
        "grpc.max_receive_message_length": 7,
        "grpc.max_metadata_size": 8,
        "grpc.absolute_max_metadata_size": 8,
        "grpc.max_allowed_incoming_connections": 9,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.max_connection_idle_ms": 60_000,
        "grpc.http2.bdp_probe": 0,
        "grpc.so_reuseport": 0,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.http2.ping_timeout_ms": 10_000,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    }


async def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    first, second = grpc.aio.server(), grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = await listen_on(first, Endpoint("127.0.0.1", 0), flag="--listen")
    with pytest.raises(CannotStart, match=f"--other-listen: cannot listen on 127.0.0.1:{port}"):
        await listen_on(second, Endpoint("127.0.0.1", port), flag="--other-listen")
    await first.stop(None)
    await second.stop(None)
