"""Triton's REST port: ready, with the model, and inference that it answers when the test lets it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from berth.contract.endpoint import Endpoint

BODY = {"inputs": [{"name": "I", "shape": [1], "datatype": "INT32", "data": [1]}]}


class FakeTriton:
    """`running`: inference requests that have come and are not answered; `most`: the most of them at once."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer = b"{}"
        self.port = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or b"0")
                await reader.readexactly(size)
                if b"/infer " in head:
                    self.running += 1
                    self.most = max(self.most, self.running)
                    await self.may_answer.wait()
                    self.running -= 1
                size = len(self.answer)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, self.answer))


@asynccontextmanager
async def fake_triton() -> AsyncIterator[FakeTriton]:
    one = FakeTriton()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        one.may_answer.set()
        server.close()
