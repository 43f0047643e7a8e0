"""A gateway's control socket: records what it is told, says what the test says."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FakeGateway:
    """`drains`: answers a wish to drain at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received: list[dict[str, Any]] = []
        self.connections = 0
        self.drains = True
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2**24)

    async def stop(self) -> None:
        """As one that is killed: its connections end, and its socket stays where it is."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0)

    def say(self, line: bytes) -> None:
        for writer in self._writers:
            writer.write(line + b"\n")

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """As told last."""
        return next((line["replicas"] for line in reversed(self.received) if "replicas" in line), [])

    @property
    def wishes(self) -> list[str]:
        return [line["drain"] for line in self.received if "drain" in line]

    async def until(self, check: Callable[["FakeGateway"], bool], *, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not check(self):
                await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        while line := await reader.readline():
            received = json.loads(line)
            self.received.append(received)
            if self.drains and "drain" in received:
                writer.write(json.dumps({"drained": received["drain"]}).encode() + b"\n")
