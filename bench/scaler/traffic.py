"""Clients of a model as pods of a cluster are: through its Service, by connections that they keep while they may.

Where a connection goes is asked of the Service's slices when it is made, as with kube-proxy, and it stays there. What
a client is not answered, or not rightly, is lost: nothing is tried again.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from berth.contract.endpoint import Endpoint

# Far more than a model takes to come up here.
_ANSWER_SECONDS: Final = 90.0
_LIMIT_BYTES: Final = 2**17
# As kube-proxy: by chance, whatever seed a test gives its own.
_chance: Final = random.SystemRandom()


class Answer(NamedTuple):
    """`seconds`: from the first byte out to the last one in. `retry_after`: it says when to ask again."""

    status: int
    body: bytes
    seconds: float
    retry_after: bool = False


class Lost(Exception):
    """No answer has come, or one that ends too soon."""


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def is_over(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by their names in lower case, body."""
        self.writer.write(request)
        await self.writer.drain()
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "chunked" in headers.get("transfer-encoding", ""):
            body = await self._chunks()
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body

    async def _chunks(self) -> bytes:
        body = bytearray()
        while size := int((await self.reader.readline()).split(b";")[0], 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return bytes(body)


class Client:
    """One pod's HTTP client. `resolve`: where a new connection may go at this moment."""

    def __init__(self, resolve: Callable[[], Sequence[Endpoint]], source: str) -> None:
        self._resolve, self._source = resolve, source
        self._idle: list[_Connection] = []
        self.connections = 0

    async def ask(self, request: bytes) -> Answer:
        """Raises Lost."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                status, headers, body = await self._ask(request)
        except (OSError, EOFError, TimeoutError) as error:
            raise Lost(f"{type(error).__name__}: {error} after {time.monotonic() - began:.2f} s") from error
        return Answer(status, body, time.monotonic() - began, "retry-after" in headers)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().writer.close()

    async def _ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = self._kept() or await self._connected()
        try:
            status, headers, body = await connection.ask(request)
        except BaseException:
            connection.writer.close()
            raise
        if headers.get("connection", "").lower() != "close":
            self._idle.append(connection)
        else:
            connection.writer.close()
        return status, headers, body

    def _kept(self) -> _Connection | None:
        while self._idle:
            found = self._idle.pop()
            if not found.is_over:
                return found
            found.writer.close()
        return None

    async def _connected(self) -> _Connection:
        targets = self._resolve()
        if not targets:
            raise ConnectionRefusedError("the Service leads nowhere")
        target = _chance.choice(targets)
        self.connections += 1
        try:
            reader, writer = await asyncio.open_connection(
                target.host, target.port, local_addr=(self._source, 0), limit=_LIMIT_BYTES
            )
        except OSError as error:
            raise ConnectionError(f"{target}: {error}") from error
        return _Connection(reader, writer)


def request_of(method: str, path: str, body: bytes, **headers: str) -> bytes:
    """Of HTTP/1.1. Underscores in names of headers are hyphens."""
    lines = [f"{method} {path} HTTP/1.1", "Host: model", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
