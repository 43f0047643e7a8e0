"""gRPC servers of a test, on free ports of the loopback interface."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from berth.contract.endpoint import Endpoint

Add = Callable[[grpc.aio.Server], None]


@asynccontextmanager
async def serving(add: Add, *, port: int = 0) -> AsyncIterator[int]:
    """Serve what `add` adds; yields the port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    add(server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def reached(add: Add, call: Callable[[Endpoint, Any], Awaitable[None]]) -> None:
    """Let `call(endpoint, tries)` find nobody at first, then a server: `tries(work, away)` repeats `work`, which
    raises `away` meanwhile. It must not take much longer than the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def tries(work: Callable[[], Awaitable[object]], away: type[Exception]) -> None:
        for _ in range(2):
            try:
                await work()
            except away:
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("there is nobody yet")
        async with serving(add, port=port), asyncio.timeout(5):
            while True:
                try:
                    await work()
                    return
                except away:
                    await asyncio.sleep(0.05)

    await call(Endpoint("127.0.0.1", port), tries)
