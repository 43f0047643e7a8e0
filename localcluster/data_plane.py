"""A node's data plane without a cluster: its gateway, its sidecars, and an agent whose replicas are all there.

    python -m localcluster.data_plane --listen HOST:PORT --gateway HOST:PORT --control PATH --replicas FILE

runs that agent alone. A sidecar's token is its pod's uid.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from berth.contract.endpoint import Address, Endpoint
from berth.contract.gateway import ReplicaLimits, ReplicaSpec, server_name_of, ticket_of
from berth.v1 import node_agent_pb2 as pb
from berth.v1 import node_agent_pb2_grpc as services
from localcluster.processes import end, spawn, tail

GATEWAY_PORT: Final = 8472
# Of a sidecar, on an address of its own.
HTTP_PORT, GRPC_PORT, ADMIN_PORT = 9000, 9001, 9090
_SECRET: Final = b"of a node that is none"
_AGAIN_SECONDS: Final = 0.05
_START_SECONDS: Final = 20.0


def replica_of(
    model: str, pod_uid: str, *, limits: ReplicaLimits | None = None, server_name: str | None = None
) -> ReplicaSpec:
    """One pod's replica of a model."""
    return ReplicaSpec(
        ticket=ticket_of(_SECRET, pod_uid),
        namespace="default",
        pod=f"pod-{pod_uid}",
        pod_uid=pod_uid,
        model=model,
        server_name=server_name or server_name_of(model, pod_uid),
        limits=limits or ReplicaLimits(),
    )


class Agent(services.NodeAgentServicer):
    """What a gateway and sidecars receive from an agent. `send` changes the replicas."""

    def __init__(self, gateway: Endpoint, control: Path, replicas: Sequence[ReplicaSpec]) -> None:
        self.replicas, self._gateway, self._control = list(replicas), gateway, control
        self.received: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def WatchModel(  # noqa: N802 - as generated
        self, request: pb.WatchModelRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.ModelStatus]:
        uid = dict(context.invocation_metadata() or ())["authorization"]
        (replica,) = [one for one in self.replicas if f"Bearer {one.pod_uid}" == uid]
        gateway = pb.Gateway(endpoint=str(self._gateway), ticket=replica.ticket)
        yield pb.ModelStatus(
            model_name=request.model_name, state=pb.MODEL_STATE_READY, reason="", gateway=gateway
        )
        await asyncio.Event().wait()

    async def Unload(  # noqa: N802 - as generated
        self, request: pb.UnloadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.UnloadResponse:
        return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)

    def send(self, replicas: Sequence[ReplicaSpec]) -> None:
        self.replicas = list(replicas)
        self.say({"replicas": [one.to_json() for one in self.replicas]})

    def say(self, words: dict[str, Any]) -> None:
        """To the gateway, if it is there."""
        if self._writer is not None:
            self._writer.write(json.dumps(words).encode() + b"\n")

    async def speak(self) -> None:
        """Send the gateway all replicas, again after each restart of it."""
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self._control)
                with closing(writer):
                    await self._converse(reader, writer)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            self.send(self.replicas)
            while line := await reader.readline():
                self.received.append(json.loads(line))
        finally:
            self._writer = None


@asynccontextmanager
async def agent(
    listen: Endpoint, *, gateway: Endpoint, control: Path, replicas: Sequence[ReplicaSpec]
) -> AsyncIterator[Agent]:
    """Runs it until the block ends."""
    one, server = Agent(gateway, control, replicas), grpc.aio.server()
    services.add_NodeAgentServicer_to_server(one, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(str(listen))
    await server.start()
    speaking = asyncio.create_task(one.speak())
    try:
        yield one
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        await server.stop(0)


def berth(*words: object) -> list[str]:
    """A command of this checkout."""
    return [sys.executable, "-m", "berth.cli", *map(str, words)]


def gateway_command(
    *, listen: Endpoint, control: Path, admin: Endpoint, http: Endpoint, grpc: Address, key: Path | None
) -> list[str]:
    keys = [] if key is None else ["--triton-keys", key]
    return berth(
        *("gateway", "--triton-http", http, "--triton-grpc", grpc, *keys),
        *("--listen", listen, "--control", f"unix:{control}", "--admin-listen", admin),
        *("--log-level", "warning"),
    )


def sidecar_command(
    replica: ReplicaSpec, *, agent: Endpoint, token: Path, http: str, grpc: str, admin: str
) -> list[str]:
    token.write_text(replica.pod_uid)
    return berth(
        *("proxy", "--model", replica.model, "--agent", agent, "--token-file", token, "--http-listen", http),
        *("--grpc-listen", grpc, "--admin-listen", admin, "--drain-delay", 0, "--log-level", "warning"),
    )


@dataclass
class Node:
    """A running gateway with its agent, and sidecars as they are opened. Each listens on an address of its own."""

    network: str
    directory: Path
    agent: Agent
    gateway: Endpoint
    admin: Endpoint
    process: asyncio.subprocess.Process
    stack: AsyncExitStack
    sidecars: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def sidecar(self, replica: ReplicaSpec) -> str:
        """Open the sidecar of a replica; its address. Raises RuntimeError if it does not listen."""
        address = f"{self.network}.1.{len(self.sidecars) + 2}"
        agent = Endpoint(f"{self.network}.0.3", GATEWAY_PORT)
        opened = sidecar_at(address, replica, agent=agent, directory=self.directory)
        self.sidecars[replica.pod_uid] = await self.stack.enter_async_context(opened)
        return address


@asynccontextmanager
async def sidecar_at(
    address: str, replica: ReplicaSpec, *, agent: Endpoint, directory: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A sidecar that serves on this address. Raises RuntimeError if it does not."""
    log = directory / f"sidecar-{replica.pod_uid}.log"
    command = sidecar_command(
        replica,
        agent=agent,
        token=directory / f"token-{replica.pod_uid}",
        http=f"{address}:{HTTP_PORT}",
        grpc=f"{address}:{GRPC_PORT}",
        admin=f"{address}:{ADMIN_PORT}",
    )
    process = await spawn(command, log=log, env=os.environ)
    try:
        await until_ready(process, Endpoint(address, ADMIN_PORT), log)
        yield process
    finally:
        await end(process, grace_seconds=0)


@asynccontextmanager
async def node(
    network: str,
    directory: Path,
    replicas: Sequence[ReplicaSpec],
    *,
    http: Endpoint,
    grpc: Address,
    key: str | None = None,
    more: Sequence[str] = (),
) -> AsyncIterator[Node]:
    """A gateway before a Triton that holds the replicas, on 127.X.0.2, its agent on 127.X.0.3 and sidecars on 127.X.1.Y.

    `network`: 127.X; `key`: Triton's inference key; `more`: flags of the gateway.
    """
    listen, admin = Endpoint(f"{network}.0.2", GATEWAY_PORT), Endpoint(f"{network}.0.2", ADMIN_PORT)
    control, log = directory / "control", directory / "gateway.log"
    path = None
    if key is not None:
        path = directory / "inference"
        path.write_text(key + "\n")
    command = gateway_command(listen=listen, control=control, admin=admin, http=http, grpc=grpc, key=path)
    connection = agent(
        Endpoint(f"{network}.0.3", GATEWAY_PORT), gateway=listen, control=control, replicas=replicas
    )
    async with AsyncExitStack() as stack:
        process = await spawn([*command, *more], log=log, env=os.environ)
        stack.push_async_callback(end, process, grace_seconds=0)
        speaking = await stack.enter_async_context(connection)
        await until_ready(process, admin, log)
        yield Node(network, directory, speaking, listen, admin, process, stack)


async def until_ready(process: asyncio.subprocess.Process, admin: Endpoint, log: Path) -> None:
    """Wait until /readyz says so. Raises RuntimeError with what it did instead and the end of the log."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_SECONDS):
            while process.returncode is None:
                if await _is_ready(admin):
                    return
                await asyncio.sleep(_AGAIN_SECONDS)
    ended = process.returncode
    did = f"was not ready in {_START_SECONDS:.0f} s" if ended is None else f"ended with status {ended}"
    raise RuntimeError(f"{admin} {did}:\n{tail(log)}")


async def _is_ready(admin: Endpoint) -> bool:
    try:
        reader, writer = await asyncio.open_connection(admin.host, admin.port)
        writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
    except OSError:
        return False
    return b" 200 " in answer.partition(b"\r\n")[0]


async def _main(options: argparse.Namespace) -> None:
    replicas = [ReplicaSpec.from_json(one) for one in json.loads(options.replicas.read_text())]
    async with agent(options.listen, gateway=options.gateway, control=options.control, replicas=replicas):
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m localcluster.data_plane")
    parser.add_argument("--listen", type=Endpoint.parse, required=True)
    parser.add_argument("--gateway", type=Endpoint.parse, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--replicas", type=Path, required=True)
    asyncio.run(_main(parser.parse_args()))
