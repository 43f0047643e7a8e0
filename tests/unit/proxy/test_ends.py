"""A connection that is broken off, whatever has become of it before."""

import asyncio
import socket
import struct

import pytest

from proxy.transport.tcp import keep_alive, reset
from tests.fakes.uv import on_uvloop

LINGER = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("is_known", [False, True])
@on_uvloop
async def test_what_has_gone_already_may_be_reset(is_known: bool) -> None:
    """Data-plane D4: uvloop's socket raises ValueError then, and whoever asked for the reset gave nothing back."""
    gone = asyncio.Event()

    class There(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            gone.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        transport, _ = await asyncio.get_running_loop().create_connection(There, "127.0.0.1", port)
        if is_known:
            keep_alive(transport)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        peer.close()
        async with asyncio.timeout(30):
            await gone.wait()
            while is_known and transport.get_extra_info("socket").fileno() >= 0:
                await asyncio.sleep(0.001)
        reset(transport)
        reset(transport)
