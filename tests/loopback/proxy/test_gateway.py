"""The gateway in front of a real Triton: several replicas, two of them of one public name, and hostile pods."""

import asyncio
import io
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from agent.admission import NodeRules, admit
from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.triton.admin import open_admin
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.inference import infer_grpc, infer_rest
from localcluster.processes import end, spawn, tail
from localcluster.samples import SIMPLE_MODEL
from proxy.gateway.app import Gateway, serving
from proxy.gateway.config import GatewayOptions
from proxy.wire.preamble import Kind, Preamble
from tests.fakes.agent_control import Agent, agent_at, replica_of
from tests.fakes.eventually import until
from tests.fakes.sidecars import Refused, connect, reports, sidecar

pytestmark = pytest.mark.asyncio(loop_scope="module")

RULES = NodeRules(frozenset({"python"}), CodeRule.ANY)
# Two revisions of one name, in two namespaces; and a model that no pod's ticket opens any more.
ONE, TWO = replica_of("uid-1", "resnet"), replica_of("uid-2", "resnet", namespace="two")
GONE = replica_of("uid-gone", "gone")
SLOW = replica_of("uid-slow", "slow", limits=ReplicaLimits(container_concurrency=2))
SLOW_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.3)
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one)]) for one in tensors]
"""
SLOW_CONFIG = """
backend: "python"
input [{name: "IN", data_type: TYPE_UINT8, dims: [-1]}]
output [{name: "OUT", data_type: TYPE_UINT8, dims: [-1]}]
"""


@dataclass
class Place:
    """A gateway, its agent, and a sidecar of each kind for each replica."""

    gateway: Gateway
    agent: Agent
    port: int
    rest: dict[str, str]
    grpc: dict[str, str]
    triton: Endpoint
    keys: TritonKeys
    process: asyncio.subprocess.Process
    directory: Path
    restart: Callable[[], Awaitable[None]]

    async def known(self, *replicas: ReplicaSpec) -> None:
        self.agent.tell(replicas)
        wanted = {replica.pod_uid for replica in replicas}
        await until(lambda: {replica.pod_uid for replica in self.gateway.control_plane.registry} == wanted)

    async def executed(self, replica: ReplicaSpec) -> int:
        async with aiohttp.ClientSession() as session:
            url = f"http://{self.triton}/v2/models/{replica.server_name}/stats"
            async with session.get(url, headers=self.keys.inference_http_headers) as answer:
                (row,) = (await answer.json())["model_stats"]
                return int(row["inference_stats"]["success"]["count"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    directory, keys = tmp_path_factory.mktemp("triton"), TritonKeys.generate()
    models = directory / "models"
    models.mkdir()
    for replica in (ONE, TWO, GONE):
        shutil.copytree(SIMPLE_MODEL, models / replica.server_name)
    slow = models / SLOW.server_name
    (slow / "1").mkdir(parents=True)
    (slow / "config.pbtxt").write_text(SLOW_CONFIG)
    (slow / "1" / "model.py").write_text(SLOW_MODEL)
    keys.write(directory)
    backends = triton.prepare_backends(directory / "backends")
    with cluster_network() as network:
        address, prefix = f"{network}.0.1", f"berth-gateway-{os.getpid()}"
        command = triton.command(
            address=address, models=models, backends=backends, keys=keys, shm_prefix=prefix
        )
        async with AsyncExitStack() as stack:

            async def start() -> None:
                process = await spawn(command, log=directory / "log", env=triton.environment(os.environ))
                stack.push_async_callback(end, process, grace_seconds=5)
                await load(address, keys, directory)
                if running is not None:
                    running.process = process

            running: Place | None = None
            process = await spawn(command, log=directory / "log", env=triton.environment(os.environ))
            stack.callback(triton.remove_shared_memory, prefix)
            stack.push_async_callback(end, process, grace_seconds=5)
            await load(address, keys, directory)
            here = Endpoint(address, triton.HTTP_PORT)
            options = GatewayOptions(
                triton_http=here,
                triton_grpc=Endpoint(address, triton.GRPC_PORT),
                triton_keys=directory,
                listen=Endpoint("127.0.0.1", 0),
                control=UnixSocket(str(directory / "control")),
                admin_listen=Endpoint("127.0.0.1", 0),
            )
            gateway = await stack.enter_async_context(serving(options))
            agent = await stack.enter_async_context(agent_at(str(directory / "control")))
            port = gateway.port
            running = Place(gateway, agent, port, {}, {}, here, keys, process, directory, start)
            for replica in (ONE, TWO, SLOW, GONE):
                for kind, sidecars in ((Kind.REST, running.rest), (Kind.GRPC, running.grpc)):
                    sidecars[replica.pod_uid] = await stack.enter_async_context(
                        sidecar(port, replica.ticket, kind)
                    )
            await running.known(ONE, TWO, SLOW)
            for replica in (ONE, TWO, SLOW):
                await ready(running, replica)
            yield running


async def ready(place: Place, replica: ReplicaSpec) -> None:
    async with asyncio.timeout(30), reports(place.port, replica.ticket) as lines:
        while (await lines.next()).get("notReady") is not None:
            pass


async def load(address: str, keys: TritonKeys, directory: Path) -> None:
    async with open_admin(Endpoint(address, triton.GRPC_PORT), keys) as admin:
        for _ in range(200):
            try:
                if await admin.version():
                    break
            except Exception:
                await asyncio.sleep(0.1)
        else:
            pytest.fail(tail(directory / "log"))
        for replica in (ONE, TWO, GONE, SLOW):
            name = ModelName(replica.server_name)
            config = admit(directory / "models" / name, name, RULES).for_gpus([], kind="KIND_CPU")
            if replica is SLOW:
                config = {**config, "instance_group": [{"kind": "KIND_CPU", "count": 4}]}
            await admin.load(name, config, timeout_seconds=60)


async def ask(address: str, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = aiohttp.client.URL(f"http://{address}{path}", encoded=True)
        data = None if body is None else io.BytesIO(body)
        async with session.request(method, url, data=data) as answer:
            return answer.status, await answer.text()


def sample() -> bytes:
    tensors = [
        {"name": f"INPUT{i}", "shape": [16], "datatype": "INT32", "data": list(range(16))} for i in range(2)
    ]
    return json.dumps({"inputs": tensors}).encode()


async def test_one_public_name_for_two_replicas(place: Place) -> None:
    """Each answers to its own ticket alone, under the name that its clients know."""
    for replica, other in ((ONE, TWO), (TWO, ONE)):
        before = await place.executed(replica), await place.executed(other)
        await infer_rest(place.rest[replica.pod_uid], "resnet")
        await infer_grpc(place.grpc[replica.pod_uid], "resnet")
        async with asyncio.timeout(10):  # Triton counts once it has answered
            while await place.executed(replica) < before[0] + 2:
                await asyncio.sleep(0.02)
        assert await place.executed(replica) == before[0] + 2
        assert await place.executed(other) == before[1]


async def test_every_route_shows_the_public_name_only(place: Place) -> None:
    at = place.rest[ONE.pod_uid]
    for method, path, body in (
        ("GET", "/v2/models/resnet", None),
        ("GET", "/v2/models/resnet/config", None),
        ("GET", "/v2/models/resnet/stats", None),
        ("GET", "/v2/models/stats", None),
        ("POST", "/v2/repository/index", b""),
        ("POST", "/v2/models/resnet/infer", sample()),
    ):
        status, text = await ask(at, method, path, body)
        assert status == 200, (path, text)
        assert '"resnet"' in text, (path, text)
        assert "resnet-" not in text, (path, text)
    status, text = await ask(at, "POST", "/v2/models/resnet/infer", b'{"inputs": []}')
    assert status == 400
    assert "resnet-" not in text
    for name in (ONE.server_name, TWO.server_name, GONE.server_name, "missing"):
        status, text = await ask(at, "POST", f"/v2/models/{name}/infer", sample())
        assert status in (400, 404), text
        assert "unknown model" in text
        assert (await ask(at, "GET", f"/v2/models/{name}/ready"))[0] != 200


async def test_every_rpc_shows_the_public_name_only(place: Place) -> None:
    async with grpc.aio.insecure_channel(place.grpc[ONE.pod_uid]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answers = [
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="resnet")),
            await stub.ModelConfig(pb.ModelConfigRequest(name="resnet")),
            await stub.ModelStatistics(pb.ModelStatisticsRequest(name="resnet")),
            await stub.ModelStatistics(pb.ModelStatisticsRequest()),
            await stub.RepositoryIndex(pb.RepositoryIndexRequest()),
            await stub.ModelInfer(infer_request("resnet")),
        ]
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="resnet"))).ready
        stream = stub.ModelStreamInfer(iter([infer_request("resnet"), infer_request("missing")]))
        answers += [answer async for answer in stream]
        (refused,) = (one for one in answers if getattr(one, "error_message", ""))
        assert "unknown model: 'missing'" in refused.error_message
        for answer in answers:
            assert answer is refused or "resnet" in str(answer)
            assert "resnet-" not in str(answer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(pb.ModelInferRequest(model_name="resnet"))
        assert "resnet-" not in str(caught.value.details())
        for name in (ONE.server_name, TWO.server_name, GONE.server_name, "missing"):
            assert not (await stub.ModelReady(pb.ModelReadyRequest(name=name))).ready
            with pytest.raises(grpc.aio.AioRpcError, match="unknown model"):
                await stub.ModelInfer(infer_request(name))


def infer_request(name: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=name)
    for i in range(2):
        tensor = request.inputs.add(name=f"INPUT{i}", datatype="INT32", shape=[16])
        tensor.contents.int_contents.extend(range(16))
    return request


async def test_the_real_client_with_binary_tensors(place: Place) -> None:
    def infer() -> Any:
        with InferenceServerClient(place.rest[TWO.pod_uid]) as client:
            inputs = []
            for i in range(2):
                one = InferInput(f"INPUT{i}", [16], "INT32")
                one.set_data_from_numpy(np.arange(16, dtype=np.int32), binary_data=True)
                inputs.append(one)
            outputs = [InferRequestedOutput("OUTPUT0", binary_data=True)]
            answer = client.infer("resnet", inputs, outputs=outputs)
            return answer.get_response()["model_name"], answer.as_numpy("OUTPUT0")

    name, output = await asyncio.to_thread(infer)
    assert name == "resnet"
    assert list(output) == [2 * i for i in range(16)]


HOSTILE: dict[str, bytes] = {
    "no ticket": b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64,
    "gRPC at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(32),
    "a ticket of nothing": Preamble(Kind.REST, bytes(32)).to_bytes(),
    "of a deleted pod": Preamble(Kind.REST, GONE.ticket).to_bytes(),
    "of a deleted pod, for reports": Preamble(Kind.REPORT, GONE.ticket).to_bytes(),
    "its own but for one bit": Preamble(Kind.GRPC, bytes([ONE.ticket[0] ^ 1]) + ONE.ticket[1:]).to_bytes(),
    "another version": Preamble(Kind.REST, ONE.ticket).to_bytes().replace(b"\x01", b"\x02", 1),
    "no such kind": b"BERTH\x01\x09\x00" + ONE.ticket,
    "garbage": os.urandom(100),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_client_without_a_ticket_gets_no_response(place: Place, what: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(HOSTILE[what])
    async with asyncio.timeout(1.5):  # at once: before a preamble's time is up
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await infer_rest(place.rest[ONE.pod_uid], "resnet")


async def test_anothers_ticket_opens_anothers_model_and_it_alone(place: Place) -> None:
    reader, writer = await connect(place.port, TWO.ticket, Kind.REST)
    writer.write(b"GET /v2/models/%b/ready HTTP/1.1\r\nHost: x\r\n\r\n" % ONE.server_name.encode())
    assert b" 200 " not in await reader.readline()
    writer.close()


async def test_a_slow_preamble_has_two_seconds_and_a_whole_one_may_come_in_bits(place: Place) -> None:
    whole = Preamble(Kind.REST, ONE.ticket).to_bytes()
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    for byte in whole + b"GET /v2/models/resnet/ready HTTP/1.1\r\nHost: x\r\n\r\n":
        writer.write(bytes([byte]))
        await writer.drain()
    assert await reader.readexactly(1) == b"\x01"
    assert b" 200 " in await reader.readline()
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(whole[:39])
    async with asyncio.timeout(10):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_thousands_of_connections_of_one_pod_take_no_place_of_another(place: Place) -> None:
    """Silent ones, half preambles, and as many accepted ones as it gets."""
    writers: list[asyncio.StreamWriter] = []
    accepted = 0
    for number in range(1500):
        _, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writers.append(writer)
        if number % 3 == 0:
            writer.write(b"BERTH\x01")
        elif number % 3 == 1:
            writer.write(Preamble(Kind.REST, ONE.ticket).to_bytes())
    await infer_rest(place.rest[TWO.pod_uid], "resnet")
    await infer_grpc(place.grpc[TWO.pod_uid], "resnet")
    accepted = sum(status.connections for status in place.gateway._workers.statuses())
    assert accepted <= 1500
    for writer in writers:
        writer.close()
    await infer_rest(place.rest[ONE.pod_uid], "resnet")


async def test_a_limit_of_two_is_two_in_triton(place: Place) -> None:
    body = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "UINT8", "data": [1]}]}).encode()
    loop, at = asyncio.get_running_loop(), place.rest[SLOW.pod_uid]
    began = loop.time()
    answers = await asyncio.gather(*(ask(at, "POST", "/v2/models/slow/infer", body) for _ in range(6)))
    assert [status for status, _ in answers] == [200] * 6
    assert loop.time() - began > 0.85  # three rounds of 0.3 s


@pytest.mark.keeps_child
async def test_a_replica_that_kills_triton_is_ejected(place: Place) -> None:
    """The agent gets a report each time; after the second the replica alone is ejected, with the reason."""
    body = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "UINT8", "data": [1]}]}).encode()
    control_plane = place.gateway.control_plane
    for _ in range(2):
        control_plane._crashed_at = float("-inf")  # of long ago
        asking = asyncio.create_task(ask(place.rest[SLOW.pod_uid], "POST", "/v2/models/slow/infer", body))
        await until(
            lambda: (
                "slow" in str(control_plane.stats()["uid-slow"])
                or control_plane.stats()["uid-slow"].figures.running
            )
        )
        place.process.send_signal(signal.SIGKILL)
        status, _ = await asking
        assert status == 503
        assert await place.agent.hears() == {"tritonDied": {"suspects": ["uid-slow"]}}
        await place.restart()
        await ready(place, ONE)
    status, text = await ask(place.rest[SLOW.pod_uid], "POST", "/v2/models/slow/infer", body)
    assert status == 503
    assert "Triton has died" in text
    await infer_rest(place.rest[ONE.pod_uid], "resnet")


async def test_at_last_the_pod_goes(place: Place) -> None:
    async with reports(place.port, ONE.ticket) as lines:
        lines.ask_to_drain()
        while not (await lines.next()).get("drained"):
            pass
    await place.known(TWO)
    with pytest.raises(Refused):
        await connect(place.port, ONE.ticket, Kind.REST)
    await infer_rest(place.rest[TWO.pod_uid], "resnet")
