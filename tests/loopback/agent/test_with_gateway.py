"""The agent's line to a real gateway, which is a process of its own, in front of a real Triton."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent.gateway_link import GatewayLink
from agent.models import Model, Models
from agent.replicas import Replicas
from berth.contract.endpoint import UnixSocket
from berth.contract.gateway import ReplicaSpec, ticket_of
from berth.contract.ids import PodUid
from berth.contract.report import CodeRule, ModelState
from localcluster import triton
from localcluster.addresses import free_port
from localcluster.processes import end, spawn, tail
from proxy.wire.preamble import Kind
from tests.fakes.agent_node import Node
from tests.fakes.sidecars import Refused, connect, sidecar
from tests.loopback.agent.served import CONFIG, Served, serving

SECRET = b"of this node"
ECHO = """
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        tensors = [pb_utils.get_input_tensor_by_name(request, "I").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("O", one)]) for one in tensors]
"""
BODY = {"inputs": [{"name": "I", "shape": [1], "datatype": "INT32", "data": [7]}]}


@dataclass
class Place:
    served: Served
    directory: Path
    port: int
    stack: AsyncExitStack
    tables: list[Models] = field(default_factory=list)

    async def gateway(self) -> asyncio.subprocess.Process:
        command = [
            *(sys.executable, "-m", "berth.cli", "gateway", f"--listen=127.0.0.1:{self.port}"),
            f"--triton-http={self.served.address}:{triton.HTTP_PORT}",
            f"--triton-grpc={self.served.address}:{triton.GRPC_PORT}",
            f"--triton-keys={self.directory}",
            f"--control=unix:{self.directory}/control",
            "--admin-listen=127.0.0.1:0",
        ]
        process = await spawn(command, log=self.directory / "gateway.log", env=dict(os.environ))
        self.stack.push_async_callback(end, process, grace_seconds=1)
        return process

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Node]:
        """An agent's parts with its line, for the length of the block."""
        tables: list[Replicas] = []

        def current(but: Collection[PodUid]) -> tuple[ReplicaSpec, ...]:
            return tables[0].current(but)

        link = GatewayLink(UnixSocket(f"{self.directory}/control"), current, lambda _: None)
        node = Node(self.served.directory, triton=self.served.admin, code=CodeRule.ANY, link=link)
        node.gpus.instance_kind = "KIND_CPU"
        tables.append(Replicas(node.models, SECRET, lambda: tuple(node.gpus.readings), {}))

        async def follow() -> None:
            while True:
                change = node.models.next_change()
                link.wake.set()
                await change.wait()

        tasks = [asyncio.create_task(link.run()), asyncio.create_task(follow())]
        try:
            yield node
        finally:
            await node.lifecycle.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serves(self, node: Node, uid: str, *, namespace: str = "team", seconds: float = 0.0) -> Model:
        files = {"config.pbtxt": CONFIG, "1/model.py": ECHO.format(seconds=seconds)}
        model = await node.stage(uid, files=files, name="net", namespace=namespace)
        await node.lifecycle.start_load(model)
        assert model.state is ModelState.READY, model.reason
        return model

    async def answers(self, uid: str) -> None:
        """Until a request of this pod's clients is answered, under the name that they know."""
        async with asyncio.timeout(30):
            while (said := await self.asked(uid)) is None or said[0] != 200:
                await asyncio.sleep(0.05)
        assert said[1]["model_name"] == "net"
        assert said[1]["outputs"][0]["data"] == [7]

    async def asked(self, uid: str) -> tuple[int, dict[str, Any]] | None:
        """None where the gateway is away, or does not know the ticket."""
        async with sidecar(self.port, ticket_of(SECRET, uid), Kind.REST) as address:
            with suppress(aiohttp.ClientError, OSError):
                async with aiohttp.ClientSession() as session:
                    url = f"http://{address}/v2/models/net/infer"
                    async with session.post(url, json=BODY) as answer:
                        return answer.status, await answer.json()
        return None

    async def refuses(self, uid: str) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await connect(self.port, ticket_of(SECRET, uid), Kind.REST)
                except Refused:
                    return
                writer.close()
                await asyncio.sleep(0.05)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with serving(tmp_path / "node") as served, AsyncExitStack() as stack:
        served.keys.write(tmp_path)
        yield Place(served, tmp_path, free_port("127.0.0.1"), stack)
        print(tail(tmp_path / "gateway.log"))


async def test_either_side_starts_anew_and_every_replica_is_served_again(place: Place) -> None:
    """Two pods of two namespaces serve one name; neither the gateway nor Triton is asked anything by hand."""
    gateway = await place.gateway()
    async with place.agent() as node:
        await place.serves(node, "p1")
        await place.serves(node, "p2", namespace="other")
        for uid in ("p1", "p2"):
            await place.answers(uid)
        gateway.kill()
        await gateway.wait()
        await place.gateway()
        for uid in ("p1", "p2"):
            await place.answers(uid)
        await place.refuses("nobody")
    for uid in ("p1", "p2"):
        await place.answers(uid)  # the agent is away
    async with place.agent() as again:
        for record in again.repository.records().values():
            assert record is not None
            model = again.models.adopt(record)
            model.pod_lives = True
            await again.lifecycle.start_load(model)
        assert again.triton.loads == []
        for uid in ("p1", "p2"):
            await place.answers(uid)


async def test_requests_that_are_under_way_come_to_their_end_before_an_unload(place: Place) -> None:
    await place.gateway()
    async with place.agent() as node:
        model = await place.serves(node, "p1", seconds=2.0)
        await place.answers("p1")
        asking = asyncio.create_task(place.asked("p1"))
        await asyncio.sleep(0.5)
        node.models.lose_pod(model.ref.uid)  # it vanishes without a word
        name = model.server_name
        assert name is not None
        unload = node.lifecycle.start_unload(name)
        said = await asking
        assert said is not None
        assert said[0] == 200, said
        await unload
        assert list(node.models) == []
        await place.refuses("p1")


async def test_files_that_are_staged_anew_serve_under_the_same_ticket(place: Place) -> None:
    await place.gateway()
    async with place.agent() as node:
        for _ in range(2):
            await place.serves(node, "p1")
            await place.answers("p1")
