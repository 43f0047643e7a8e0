"""A small HTTP server of model archives, for the demo and the tests."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(listening: socket.socket | None = None) -> AsyncIterator[Callable[[str, bytes], str]]:
    """Serve on a free port of loopback or on this socket. The value stores bytes under a name and returns their URL.

    Not on 127.0.0.1: in a pod that is the pod itself.
    """
    stored: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        body = stored.get(request.match_info["name"])
        return web.Response(status=404) if body is None else web.Response(body=body)

    application = web.Application()
    application.router.add_get("/{name}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listening or socket.create_server(("127.0.0.2", 0))).start()
    host, port = runner.addresses[0]

    def store(name: str, body: bytes) -> str:
        stored[name] = body
        return f"http://{host}:{port}/{name}"

    try:
        yield store
    finally:
        await runner.cleanup()
