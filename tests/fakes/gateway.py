"""A node's gateway as a sidecar sees it: it takes connections with a good ticket, and notes what comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from berth.contract.endpoint import Endpoint
from proxy.request.traffic import Figures
from proxy.wire.preamble import ACCEPTED, PREAMBLE_BYTES, Kind, read_preamble
from proxy.wire.report import DRAINED, Report, says

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TICKET = bytes(range(32))


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says what it hears, and ends when its peer does."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


class FakeGateway:
    """`serve`: what becomes of a connection after its preamble. Its end ends the connection."""

    def __init__(self, serve: Serve = echo, ticket: bytes = TICKET) -> None:
        self.serve, self.ticket = serve, ticket
        self.not_ready: str | None = None
        self.figures = Figures()
        # What was heard, by kind; of REPORT connections the words.
        self.heard: list[Kind] = []
        self.words: list[str] = []
        self.refused = 0
        # Until it says so no REPORT is answered, and no "drain" either.
        self.is_silent, self.is_drained = False, True
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reporting: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    @property
    def serving(self) -> int:
        """Connections that are served now, REPORT among them."""
        return len(self._tasks)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As when its process is killed: nobody hears a word."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell(self) -> None:
        """Say how it is, on every REPORT connection."""
        for writer in self._reporting:
            writer.write(Report(self.not_ready, self.figures.to_json()).to_line())

    def drained(self) -> None:
        for writer in self._reporting:
            writer.write(DRAINED)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            # asyncio's streams take a task that was cancelled for a broken one.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._greet(reader, writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            self._reporting.discard(writer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        preamble = read_preamble(await reader.readexactly(PREAMBLE_BYTES))
        if preamble.ticket != self.ticket:
            self.refused += 1
            return
        self.heard.append(preamble.kind)
        writer.write(ACCEPTED)
        if preamble.kind is Kind.REPORT:
            await self._report(reader, writer)
        else:
            await self.serve(reader, writer)

    async def _report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reporting.add(writer)
        telling = asyncio.create_task(self._keep_telling())
        try:
            while line := await reader.readline():
                self.words += [word for word in ("leaving", "drain") if says(line, word)]
                if says(line, "drain") and self.is_drained:
                    writer.write(DRAINED)
        finally:
            telling.cancel()

    async def _keep_telling(self) -> None:
        while True:
            if not self.is_silent:
                self.tell()
            await asyncio.sleep(0.2)


@asynccontextmanager
async def gateway(serve: Serve = echo) -> AsyncIterator[FakeGateway]:
    one = FakeGateway(serve)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()
