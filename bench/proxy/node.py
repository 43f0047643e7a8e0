"""The copies of the gateway under measurement, and an agent that tells it of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from berth.contract.gateway import ReplicaSpec, server_name_of, ticket_of


def copy_of(uid: str) -> ReplicaSpec:
    return ReplicaSpec(
        ticket=ticket_of(b"bench", uid),
        namespace="bench",
        pod=uid,
        pod_uid=uid,
        model="mine",
        server_name=str(server_name_of("mine", uid)),
    )


COPIES = {uid: copy_of(uid) for uid in ("quiet", "flood")}


@asynccontextmanager
async def told(control: Path) -> AsyncIterator[None]:
    """As the agent would."""
    async with asyncio.timeout(30):
        while not control.exists():
            await asyncio.sleep(0.05)
    _, writer = await asyncio.open_unix_connection(str(control))
    writer.write(json.dumps({"replicas": [one.to_json() for one in COPIES.values()]}).encode() + b"\n")
    await asyncio.sleep(2)  # until they are ready
    yield
    writer.close()
