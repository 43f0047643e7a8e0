"""The agent's end of the gateway's control socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from berth.contract.gateway import ReplicaLimits, ReplicaSpec, server_name_of, ticket_of

SECRET = b"of this node"


def replica_of(
    uid: str,
    model: str = "simple",
    *,
    namespace: str = "one",
    limits: ReplicaLimits | None = None,
    **more: Any,
) -> ReplicaSpec:
    wanted: dict[str, Any] = {
        "ticket": ticket_of(SECRET, uid),
        "namespace": namespace,
        "pod": f"pod-{uid}",
        "pod_uid": uid,
        "model": model,
        "server_name": str(server_name_of(model, uid)),
        "limits": limits or ReplicaLimits(),
        **more,
    }
    return ReplicaSpec(**wanted)


class Agent:
    """What it says, and what it hears."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def tell(self, replicas: Iterable[ReplicaSpec]) -> None:
        self.say({"replicas": [copy.to_json() for copy in replicas]})

    def drain(self, uid: str, seconds: float) -> None:
        self.say({"drain": uid, "seconds": seconds})

    def say(self, told: dict[str, Any]) -> None:
        self.writer.write(json.dumps(told).encode() + b"\n")

    async def hears(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            line = await self._reader.readline()
        if not line:
            raise EOFError
        said: dict[str, Any] = json.loads(line)
        return said


@asynccontextmanager
async def agent_at(path: str) -> AsyncIterator[Agent]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield Agent(reader, writer)
    finally:
        writer.close()
