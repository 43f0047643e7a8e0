"""The proxy in front of a real Triton with another tenant's model beside the own one."""

import asyncio
import gzip
import io
import json
import os
import shutil
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from grpc.aio import AioRpcError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from agent.admission import NodeRules, admit
from berth.contract.endpoint import Endpoint, UnixSocket
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.triton.admin import open_admin
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.data_plane import GATEWAY_PORT, GRPC_PORT, HTTP_PORT, sidecar_at
from localcluster.data_plane import agent as agent_of_replicas
from localcluster.inference import infer_grpc, infer_rest, is_hidden
from localcluster.processes import end, spawn, tail
from localcluster.samples import SIMPLE_MODEL
from proxy.config import ProxyOptions
from proxy.gateway.app import serving as by_gateway
from proxy.gateway.config import GatewayOptions
from proxy.gateway.serving import Server, open_server
from proxy.gateway.spec import Events
from proxy.gateway.standalone import plane_config, static_spec
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.eventually import until
from tests.fakes.sidecars import sidecar as sidecar_of
from tests.fakes.slots import held

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANY = Endpoint("127.0.0.1", 0)


@dataclass
class Sidecar:
    """A running proxy and the Triton behind it."""

    http: str
    grpc: str
    triton: str
    keys: TritonKeys
    process: asyncio.subprocess.Process
    replica: Replica
    # How often the other model had run or failed before anybody came.
    theirs: tuple[int, int] = (-1, -1)
    where: UpstreamCluster = field(default_factory=UpstreamCluster)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["proxy", "gateway", "sidecar"])
async def sidecar(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Sidecar]:
    """The data plane of one model by itself; one replica of a gateway's; and the same through a pod's sidecar."""
    directory, keys = tmp_path_factory.mktemp("triton"), TritonKeys.generate()
    (directory / "models").mkdir()
    for name in ("mine", "theirs"):
        shutil.copytree(SIMPLE_MODEL, directory / "models" / name)
    write_slow_model(directory / "models" / "slow")
    backends = triton.prepare_backends(directory / "backends")
    with cluster_network() as network:
        address, prefix = f"{network}.0.1", f"berth-test-{os.getpid()}"
        command = triton.command(
            address=address, models=directory / "models", backends=backends, keys=keys, shm_prefix=prefix
        )
        process = await spawn(command, log=directory / "log", env=triton.environment(os.environ))
        try:
            await load_models(address, keys, directory)
            where = UpstreamCluster(
                UpstreamEndpoint(
                    Endpoint(address, triton.HTTP_PORT),
                    Endpoint(address, triton.GRPC_PORT),
                    keys.inference_http_headers,
                    keys.inference_grpc_metadata,
                )
            )
            if request.param != "proxy":
                by_sidecar = network if request.param == "sidecar" else None
                async for running in serve_by_gateway(where, directory, keys, process, by_sidecar):
                    yield running
                return
            async for running in serve(where, address, keys, process):
                yield running
        finally:
            await end(process, grace_seconds=5)
            triton.remove_shared_memory(prefix)


# Takes half a second, for four requests at once.
SLOW_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.5)
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one)]) for one in tensors]
"""
RULES = NodeRules(frozenset({"python"}), CodeRule.ANY)
SLOW_CONFIG = """
backend: "python"
input [{name: "IN", data_type: TYPE_UINT8, dims: [-1]}]
output [{name: "OUT", data_type: TYPE_UINT8, dims: [-1]}]
"""


def write_slow_model(directory: Path) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(SLOW_CONFIG)
    (directory / "1" / "model.py").write_text(SLOW_MODEL)


async def load_models(address: str, keys: TritonKeys, directory: Path) -> None:
    async with open_admin(Endpoint(address, triton.GRPC_PORT), keys) as admin:
        for _ in range(200):
            try:
                if await admin.version():
                    break
            except Exception:
                await asyncio.sleep(0.1)
        else:
            pytest.fail(tail(directory / "log"))
        for name, instances in (("mine", 1), ("theirs", 1), ("slow", 4)):
            admitted = admit(directory / "models" / name, ModelName(name), RULES)
            config = admitted.for_gpus([], kind="KIND_CPU")
            if instances > 1:
                config = {**config, "instance_group": [{"kind": "KIND_CPU", "count": instances}]}
            await admin.load(ModelName(name), config, timeout_seconds=60)


def options(model: str, **more: Any) -> ProxyOptions:
    wanted = {"max_json_bytes": 1024**2, "container_concurrency": 2, "queue_depth": 2, **more}
    return ProxyOptions(
        model=ModelName(model), http_listen=ANY, grpc_listen=ANY, request_timeout=30.0, **wanted
    )


@asynccontextmanager
async def standalone(wanted: ProxyOptions, where: UpstreamCluster) -> AsyncIterator[Server]:
    access = where.require()
    with_ports = replace(wanted, triton_http=access.http, triton_grpc=access.grpc)
    config = replace(plane_config(with_ports), triton=access)
    async with open_server(config, Events(asyncio.Event()), static_spec(with_ports)) as server:
        yield server


async def serve(
    where: UpstreamCluster, address: str, keys: TritonKeys, process: asyncio.subprocess.Process
) -> AsyncIterator[Sidecar]:
    async with standalone(options("mine"), where) as server:
        replica = server._only_replica().replica
        http, grpc_port = (f"127.0.0.1:{port}" for port in server.ports)
        sidecar = Sidecar(
            http, grpc_port, f"{address}:{triton.HTTP_PORT}", keys, process, replica, where=where
        )
        await until(lambda: replica.is_served)
        sidecar.theirs = await statistics_of(sidecar, "theirs")
        # The process that checks long bodies stays from the first one on: it is no test's own child.
        await ask(sidecar, "POST", "/v2/models/mine/infer", bytes(5000), **{"Content-Encoding": "gzip"})
        yield sidecar


async def serve_by_gateway(
    where: UpstreamCluster,
    directory: Path,
    keys: TritonKeys,
    process: asyncio.subprocess.Process,
    by_sidecar: str | None,
) -> AsyncIterator[Sidecar]:
    """Beside the other tenant's replica. The model has one name, so that what is said is Triton's to the byte.

    `by_sidecar`: the network of the agent and of a real sidecar's process; without it a sidecar of the tests' own.
    """
    access = where.require()
    keys.write(directory)
    wanted = GatewayOptions(
        triton_http=access.http,
        triton_grpc=access.grpc,
        triton_keys=directory,
        listen=ANY,
        admin_listen=ANY,
        control=UnixSocket(str(directory / "control")),
    )
    mine, theirs = (
        replica_of(name, name, server_name=name, limits=options(name).limits) for name in ("mine", "theirs")
    )
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(by_gateway(wanted))
        there, control = Endpoint("127.0.0.1", gateway.port), directory / "control"
        if by_sidecar is None:
            agent = await stack.enter_async_context(agent_at(str(control)))
            agent.tell([mine, theirs])
        else:
            listen = Endpoint(f"{by_sidecar}.0.3", GATEWAY_PORT)
            fake = agent_of_replicas(listen, gateway=there, control=control, replicas=[mine, theirs])
            await stack.enter_async_context(fake)
        stats = gateway.control_plane.stats
        await until(lambda: "mine" in stats() and stats()["mine"].figures.model_ready)
        server = gateway._workers._server  # type: ignore[attr-defined]
        (replica,) = (one.replica for one in server._data_plane if one.spec == mine)
        sidecar = Sidecar("", "", f"{access.http}", keys, process, replica, where=where)
        if by_sidecar is None:
            sidecar.http = await stack.enter_async_context(sidecar_of(gateway.port, mine.ticket, Kind.REST))
            sidecar.grpc = await stack.enter_async_context(sidecar_of(gateway.port, mine.ticket, Kind.GRPC))
        else:
            address = f"{by_sidecar}.1.2"
            await stack.enter_async_context(sidecar_at(address, mine, agent=listen, directory=directory))
            sidecar.http, sidecar.grpc = f"{address}:{HTTP_PORT}", f"{address}:{GRPC_PORT}"
        sidecar.theirs = await statistics_of(sidecar, "theirs")
        yield sidecar


async def ask(
    sidecar: Sidecar, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        url = aiohttp.client.URL(f"http://{sidecar.http}{path}", encoded=True)
        async with session.request(
            method, url, data=None if body is None else io.BytesIO(body), headers=headers
        ) as answer:
            return answer.status, await answer.text()


async def test_inference_over_both_front_ends(sidecar: Sidecar) -> None:
    await infer_rest(sidecar.http, "mine")
    await infer_grpc(sidecar.grpc, "mine")


async def test_json_inference(sidecar: Sidecar) -> None:
    tensors = [
        {"name": f"INPUT{i}", "shape": [16], "datatype": "INT32", "data": list(range(16))} for i in range(2)
    ]
    status, text = await ask(
        sidecar, "POST", "/v2/models/mine/infer", json.dumps({"inputs": tensors}).encode()
    )
    assert (status, json.loads(text)["outputs"][1]["data"]) == (200, [0] * 16)


async def test_several_at_once_share_the_breaker(sidecar: Sidecar) -> None:
    answers = await asyncio.gather(
        *(infer_rest(sidecar.http, "mine") for _ in range(4)), return_exceptions=True
    )
    assert answers == [None] * 4
    assert (sidecar.replica.admissions.running, sidecar.replica.admissions.waiting) == (0, 0)


async def test_a_foreign_model_is_answered_as_one_that_does_not_exist(sidecar: Sidecar) -> None:
    for name in ("theirs", "missing"):
        assert await is_hidden(sidecar.http, sidecar.grpc, name)


@pytest.mark.parametrize(
    ("method", "suffix"),
    [
        ("GET", ""),
        ("GET", "/ready"),
        ("GET", "/config"),
        ("GET", "/stats"),
        ("GET", "/versions/1"),
        ("POST", "/infer"),
        ("POST", "/generate"),
        ("POST", "/generate_stream"),
    ],
)
async def test_hidden_answers_are_tritons_own_for_a_missing_model(
    sidecar: Sidecar, method: str, suffix: str
) -> None:
    body = b'{"inputs":[]}' if method == "POST" else None
    mine = await ask(sidecar, method, f"/v2/models/theirs{suffix}", body)
    async with aiohttp.ClientSession(headers=sidecar.keys.inference_http_headers) as session:
        url = f"http://{sidecar.triton}/v2/models/missing{suffix}"
        async with session.request(method, url, data=body) as answer:
            expected = (answer.status, json.loads(await answer.text()))
    assert (mine[0], json.loads(mine[1].replace("theirs", "missing"))) == expected


async def test_hidden_rpcs_are_tritons_own_for_a_missing_model(sidecar: Sidecar) -> None:
    requests = {
        "ModelReady": pb.ModelReadyRequest,
        "ModelMetadata": pb.ModelMetadataRequest,
        "ModelConfig": pb.ModelConfigRequest,
        "ModelStatistics": pb.ModelStatisticsRequest,
    }
    for method, request in requests.items():
        through = await outcome(sidecar.grpc, method, request(name="theirs"), ())
        metadata = tuple(sidecar.keys.inference_grpc_metadata.items())
        address = f"{sidecar.triton.rpartition(':')[0]}:{triton.GRPC_PORT}"
        direct = await outcome(address, method, request(name="missing"), metadata)
        assert str(through).replace("theirs", "missing") == str(direct), method


async def outcome(address: str, method: str, request: Any, metadata: Any) -> Any:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            return await getattr(stub, method)(request, metadata=metadata)
        except AioRpcError as error:
            return error.code(), error.details()


async def test_triton_itself_is_closed_without_the_key(sidecar: Sidecar) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/v2", "/v2/models/mine", "/v2/health/ready", "/v2/models/stats"):
            async with session.get(f"http://{sidecar.triton}{path}") as answer:
                assert answer.status == 403, path


async def test_a_client_that_brings_keys_of_its_own_gains_nothing(sidecar: Sidecar) -> None:
    stolen = {"berth-admin-key": sidecar.keys.admin}
    status, _ = await ask(sidecar, "POST", "/v2/repository/models/mine/unload", b"{}", **stolen)
    assert status == 403
    metadata = tuple(sidecar.keys.admin_grpc_metadata.items())
    code, _ = await outcome(
        sidecar.grpc, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="mine"), metadata
    )
    assert code is grpc.StatusCode.PERMISSION_DENIED
    await infer_rest(sidecar.http, "mine")


async def test_index_metadata_and_statistics_show_the_own_model_only(sidecar: Sidecar) -> None:
    _, index = await ask(sidecar, "POST", "/v2/repository/index", b"{}")
    assert json.loads(index) == [{"name": "mine", "version": "1", "state": "READY"}]
    _, server = await ask(sidecar, "GET", "/v2")
    assert not {"model_repository", "system_shared_memory", "trace"} & set(json.loads(server)["extensions"])
    _, stats = await ask(sidecar, "GET", "/v2/models/stats")
    assert [one["name"] for one in json.loads(stats)["model_stats"]] == ["mine"]
    index_rpc = await outcome(sidecar.grpc, "RepositoryIndex", pb.RepositoryIndexRequest(), ())
    assert [(row.name, row.version, row.state) for row in index_rpc.models] == [("mine", "1", "READY")]
    statistics = await outcome(sidecar.grpc, "ModelStatistics", pb.ModelStatisticsRequest(), ())
    assert [one.name for one in statistics.model_stats] == ["mine"]
    metadata = await outcome(sidecar.grpc, "ServerMetadata", pb.ServerMetadataRequest(), ())
    assert "model_repository" not in metadata.extensions
    assert metadata.name == "triton"


async def test_health_is_the_proxys_own(sidecar: Sidecar) -> None:
    assert (await ask(sidecar, "GET", "/v2/health/live"))[0] == 200
    assert (await ask(sidecar, "GET", "/v2/health/ready"))[0] == 200
    sidecar.replica.withheld = "the GPU is broken"
    try:
        assert (await ask(sidecar, "GET", "/v2/health/live"))[0] == 200
        assert (await ask(sidecar, "GET", "/v2/health/ready"))[0] == 400
        assert (await ask(sidecar, "GET", "/v2/models/mine/ready"))[0] == 400
        assert not (await outcome(sidecar.grpc, "ServerReady", pb.ServerReadyRequest(), ())).ready
    finally:
        sidecar.replica.withheld = None


DEEP = b"[" * 200_000
HUGE = b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[10000000000],"data":[1]}]}'
KILLERS: dict[str, tuple[str, bytes, dict[str, str], int]] = {
    "deep array": ("infer", DEEP, {}, 400),
    "deep object in an unknown key": ("infer", b'{"inputs":[],"x":' + b'{"a":' * 200_000, {}, 400),
    "deep generate": ("generate", b'{"x":' + DEEP, {}, 400),
    "deep generate_stream": ("generate_stream", b'{"x":' + DEEP, {}, 400),
    "deep and gzipped": ("infer", gzip.compress(DEEP), {"Content-Encoding": "gzip"}, 400),
    "deep and deflated": ("infer", zlib.compress(DEEP), {"Content-Encoding": "deflate"}, 400),
    "packed in a way of its own": ("infer", b"{}", {"Content-Encoding": "br"}, 415),
    "a bomb": ("infer", gzip.compress(b" " * 2**21), {"Content-Encoding": "gzip"}, 413),
    "two packings end to end": ("infer", gzip.compress(b"{}") * 2, {"Content-Encoding": "gzip"}, 400),
    "an input that is none": ("infer", b'{"inputs":[null]}', {}, 400),
    "an input that is a number": ("infer", b'{"inputs":[18446744073709551616]}', {}, 400),
    "an output that is a list": ("infer", b'{"inputs":[],"outputs":[[1.5]]}', {}, 400),
    "outputs that are an object": ("infer", b'{"inputs":[],"outputs":{"name":[1]}}', {}, 400),
    "classes of an empty output": (
        "infer",
        b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[0],"data":[]}],'
        b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":2}}]}',
        {},
        400,
    ),
    "huge shape": ("infer", HUGE, {}, 400),
    "huge shape of an input that is none": ("infer", HUGE.replace(b"INPUT0", b"NONE"), {}, 400),
    "huge shape in a binary header": (
        "infer",
        HUGE + b"1234",
        {"Inference-Header-Content-Length": str(len(HUGE))},
        400,
    ),
    "header beyond the body": ("infer", b"{}", {"Inference-Header-Content-Length": "3"}, 400),
    "header that is no number": ("infer", b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
    "too large": ("infer", b" " * (1024**2 + 1), {}, 413),
    "shared memory": (
        "infer",
        b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1],"parameters":{"shared_memory_region":"r"}}]}',
        {},
        400,
    ),
}


@pytest.mark.parametrize("case", sorted(KILLERS))
async def test_no_request_for_the_own_model_takes_triton_down(sidecar: Sidecar, case: str) -> None:
    route, body, headers, status = KILLERS[case]
    assert (await ask(sidecar, "POST", f"/v2/models/mine/{route}", body, **headers))[0] == status
    assert sidecar.process.returncode is None
    await infer_rest(sidecar.http, "mine")


async def test_deep_json_on_the_index_route_stays_here(sidecar: Sidecar) -> None:
    assert (await ask(sidecar, "POST", "/v2/repository/index", DEEP))[0] == 400
    assert sidecar.process.returncode is None


async def test_a_large_binary_tensor_streams_through(sidecar: Sidecar) -> None:
    """4 MiB of tensor against a JSON limit of 1 MiB; the model refuses the shape, not the proxy."""
    tensor = InferInput("INPUT0", [1024**2], "INT32")
    tensor.set_data_from_numpy(np.zeros(1024**2, dtype=np.int32))
    body, json_size = InferenceServerClient.generate_request_body([tensor])
    status, text = await ask(
        sidecar, "POST", "/v2/models/mine/infer", body, **{"Inference-Header-Content-Length": str(json_size)}
    )
    assert status == 400
    assert "expected 2 inputs but got 1" in text  # Triton's words: it has read all of it


async def test_shared_memory_is_refused_over_grpc(sidecar: Sidecar) -> None:
    request = pb.ModelInferRequest(model_name="mine")
    tensor = request.inputs.add(name="INPUT0", datatype="INT32", shape=[16])
    tensor.parameters["shared_memory_region"].string_param = "theirs"
    code, details = await outcome(sidecar.grpc, "ModelInfer", request, ())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "shared memory is not available")


async def test_tritons_own_refusals_come_through_as_they_are(sidecar: Sidecar) -> None:
    request = pb.ModelInferRequest(model_name="mine")
    address = f"{sidecar.triton.rpartition(':')[0]}:{triton.GRPC_PORT}"
    metadata = tuple(sidecar.keys.inference_grpc_metadata.items())
    direct = await outcome(address, "ModelInfer", request, metadata)
    assert direct[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert await outcome(sidecar.grpc, "ModelInfer", request, ()) == direct
    request.model_version = "7"
    direct = await outcome(address, "ModelInfer", request, metadata)
    assert direct[0] is grpc.StatusCode.NOT_FOUND
    assert await outcome(sidecar.grpc, "ModelInfer", request, ()) == direct


async def test_calls_that_are_blocked_or_not_offered(sidecar: Sidecar) -> None:
    for method, request in (
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="mine")),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
        ("LogSettings", pb.LogSettingsRequest()),
    ):
        code, _ = await outcome(sidecar.grpc, method, request, ())
        assert code is grpc.StatusCode.PERMISSION_DENIED, method
    async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
        with pytest.raises(AioRpcError) as refused:
            await channel.unary_unary("/inference.GRPCInferenceService/Unheard")(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_grpc_health_check_and_watch(sidecar: Sidecar) -> None:
    async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x01"
        watch.cancel()


async def test_a_deadline_counts_the_wait_and_leaves_no_trace(sidecar: Sidecar) -> None:
    async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
        await channel.channel_ready()
        with held(sidecar.replica.admissions, 2):
            await late_by_its_wait(sidecar, channel)
    assert sidecar.replica.admissions.running == 0


async def late_by_its_wait(sidecar: Sidecar, channel: grpc.aio.Channel) -> None:
    with pytest.raises(AioRpcError) as late:
        await GRPCInferenceServiceStub(channel).ModelInfer(
            pb.ModelInferRequest(model_name="mine"), timeout=0.2
        )
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    while sidecar.replica.admissions.waiting:
        await asyncio.sleep(0.01)


async def test_a_full_queue_is_said_over_both_protocols(sidecar: Sidecar) -> None:
    with held(sidecar.replica.admissions, 2):
        waiting = [asyncio.create_task(infer_rest(sidecar.http, "mine")) for _ in range(2)]
        while sidecar.replica.admissions.waiting < 2:
            await asyncio.sleep(0.01)
        status, text = await ask(sidecar, "POST", "/v2/models/mine/infer", b'{"inputs":[]}')
        assert (status, json.loads(text)) == (503, {"error": "pending request queue full"})
        refused = await outcome(sidecar.grpc, "ModelInfer", pb.ModelInferRequest(model_name="mine"), ())
        assert refused == (grpc.StatusCode.UNAVAILABLE, "pending request queue full")
        assert (await ask(sidecar, "GET", "/v2/models/mine/ready"))[0] == 200  # probes wait for nobody
    await asyncio.gather(*waiting)


async def statistics_of(sidecar: Sidecar, model: str) -> tuple[int, int]:
    """How often Triton has run or failed a model, by its own count."""
    async with (
        aiohttp.ClientSession(headers=sidecar.keys.inference_http_headers) as session,
        session.get(f"http://{sidecar.triton}/v2/models/{model}/stats") as answer,
    ):
        (stats,) = (await answer.json())["model_stats"]
    return stats["inference_count"], stats["inference_stats"]["fail"]["count"]


def add_request(model: str, *, id: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id)
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[16])
        request.raw_input_contents.append(np.arange(16, dtype=np.int32).tobytes())
    return request


async def test_a_stream_of_messages_is_tritons_own(sidecar: Sidecar) -> None:
    """Own, foreign, wrong version, broken: the answers are those that Triton itself gives."""
    requests = [add_request("mine", id="1"), add_request("missing", id="2"), add_request("mine", id="3")]
    requests[2].model_version = "7"
    requests.append(pb.ModelInferRequest(model_name="mine", id="4"))
    requests.append(add_request("mine", id="5"))
    seen = []
    for address, metadata in (
        (sidecar.grpc, ()),
        (
            f"{sidecar.triton.rpartition(':')[0]}:{triton.GRPC_PORT}",
            tuple(sidecar.keys.inference_grpc_metadata.items()),
        ),
    ):
        async with grpc.aio.insecure_channel(address) as channel:
            call = GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=metadata)
            answers = []
            for request in requests:
                await call.write(request)
                answer = await call.read()
                answers.append(
                    (
                        answer.error_message,
                        answer.infer_response.id,
                        answer.infer_response.SerializeToString(),
                    )
                )
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        seen.append(answers)
    assert seen[0] == seen[1]
    assert [one[0][:26] for one in seen[0]] == [
        "",
        "Request for unknown model:",
        "Request for unknown model:",
        seen[0][3][0][:26],
        "",
    ]


async def test_packed_requests_are_answered_like_plain_ones(sidecar: Sidecar) -> None:
    tensors = [
        {"name": f"INPUT{i}", "shape": [16], "datatype": "INT32", "data": list(range(16))} for i in range(2)
    ]
    body = json.dumps({"inputs": tensors}).encode()
    plain = await ask(sidecar, "POST", "/v2/models/mine/infer", body)
    assert plain[0] == 200
    for encoding, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        assert (
            await ask(sidecar, "POST", "/v2/models/mine/infer", packed, **{"Content-Encoding": encoding})
            == plain
        )
    async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
        for packing in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(
                add_request("mine"), compression=packing
            )
            assert len(answer.raw_output_contents) == 2


@pytest.mark.parametrize("size", [3, 300_000, 8_000_000])
async def test_large_messages_pass_over_grpc(sidecar: Sidecar, size: int) -> None:
    """The model refuses the shape, in Triton's words: it has read all of it."""
    request = pb.ModelInferRequest(model_name="mine")
    request.inputs.add(name="INPUT0", datatype="UINT8", shape=[size])
    request.raw_input_contents.append(bytes(size))
    refused = await outcome(sidecar.grpc, "ModelInfer", request, ())
    assert refused[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected 2 inputs but got 1" in refused[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(sidecar: Sidecar) -> AsyncIterator[str]:
    """The gRPC address of the slow model's own proxy, which has no limit."""
    wanted = options("slow", container_concurrency=0)
    async with standalone(wanted, sidecar.where) as server:
        yield f"127.0.0.1:{server.ports[1]}"


def slow_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[b"abc"])
    request.inputs.add(name="IN", datatype="UINT8", shape=[3])
    return request


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("deadline", {grpc.StatusCode.DEADLINE_EXCEEDED}),
        ("cancel", {None}),
        ("12 KB of metadata", {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}),
        ("60 KB of metadata", {grpc.StatusCode.RESOURCE_EXHAUSTED}),
    ],
)
@pytest.mark.parametrize("count", [1, 12])
async def test_what_ends_calls_in_triton_ends_no_other(
    slow: str, how: str, expected: set[grpc.StatusCode | None], count: int
) -> None:
    """All of them on one connection. What Triton says of a call at its deadline it says several times."""
    async with grpc.aio.insecure_channel(slow) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        neighbours = [asyncio.ensure_future(infer(slow_request())) for _ in range(2)]
        await asyncio.sleep(0.1)  # they run
        size = int(how.split()[0]) * 1000 if "metadata" in how else 0
        ended = [
            infer(
                slow_request(),
                timeout=0.2 if how == "deadline" else None,
                metadata=[("x-large", "a" * size)] if size else None,
            )
            for _ in range(count)
        ]
        if how == "cancel":
            await asyncio.sleep(0.1)
            assert all(call.cancel() for call in ended)
        codes = {None if how == "cancel" else await call.code() for call in ended}
        assert codes <= expected
        for answer in await asyncio.gather(*neighbours, infer(slow_request())):
            assert answer.raw_output_contents == [b"abc"]


async def test_a_cancelled_call_leaves_no_trace(sidecar: Sidecar) -> None:
    async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
        await channel.channel_ready()
        with held(sidecar.replica.admissions, 2):
            call = GRPCInferenceServiceStub(channel).ModelInfer(add_request("mine"))
            while not sidecar.replica.admissions.waiting:
                await asyncio.sleep(0.01)
            call.cancel()
            while sidecar.replica.admissions.waiting:
                await asyncio.sleep(0.01)
    assert sidecar.replica.admissions.running == 0


@pytest.mark.parametrize("size", [8191, 8192])
async def test_a_header_is_taken_as_far_as_triton_takes_it(sidecar: Sidecar, size: int) -> None:
    status, text = await ask(sidecar, "GET", "/v2/models/mine", None, **{"X-Token": "t" * size})
    assert status == (200 if size == 8191 else 431), text
    async with aiohttp.ClientSession(headers=sidecar.keys.inference_http_headers) as session:
        asked = session.get(f"http://{sidecar.triton}/v2/models/mine", headers={"X-Token": "t" * size})
        if size == 8191:
            async with asked as answer:
                assert answer.status == 200
        else:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await asked


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
async def test_tritons_own_http_client_is_served(
    sidecar: Sidecar, compression: str | None, binary: bool
) -> None:
    def infer() -> np.ndarray[Any, Any] | None:
        with InferenceServerClient(sidecar.http) as client:
            tensors = [InferInput(f"INPUT{i}", [16], "INT32") for i in range(2)]
            for tensor in tensors:
                tensor.set_data_from_numpy(np.arange(16, dtype=np.int32), binary_data=binary)
            outputs = [InferRequestedOutput("OUTPUT0", binary_data=binary)]
            result = client.infer(
                "mine",
                tensors,
                outputs=outputs,
                request_compression_algorithm=compression,
                response_compression_algorithm=compression,
            )
            return result.as_numpy("OUTPUT0")

    # In a thread: that client does not know this loop.
    assert np.array_equal(await asyncio.to_thread(infer), 2 * np.arange(16))


async def test_what_json_has_no_words_for_comes_through(sidecar: Sidecar) -> None:
    """Triton takes NaN, and so does what was written anew; its refusal is of the type, not of the text."""
    tensors = [
        {"name": f"INPUT{i}", "shape": [2], "datatype": "INT32", "data": [float("nan"), float("-inf")]}
        for i in range(2)
    ]
    body = json.dumps({"inputs": tensors}).encode()
    status, text = await ask(sidecar, "POST", "/v2/models/mine/infer", body)
    async with (
        aiohttp.ClientSession(headers=sidecar.keys.inference_http_headers) as session,
        session.post(f"http://{sidecar.triton}/v2/models/mine/infer", data=body) as answer,
    ):
        assert (status, text) == (answer.status, await answer.text())


async def test_a_large_body_that_is_called_a_form_ends_no_process(sidecar: Sidecar) -> None:
    """What curl calls all that it sends; it takes more than 4 MiB to kill Triton by it."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    header = b'{"inputs":[{"name":"INPUT0","datatype":"UINT8","shape":[9000000],"parameters":{"binary_data_size":9000000}}]}'
    status, text = await ask(
        sidecar,
        "POST",
        "/v2/models/mine/infer",
        header + bytes(9_000_000),
        **form,
        **{"Inference-Header-Content-Length": str(len(header))},
    )
    assert (status, "expected 2 inputs but got 1" in text) == (400, True), text
    await infer_rest(sidecar.http, "mine")


SAME = {
    "metadata": ("GET", "/v2/models/{model}", None),
    "metadata of a version": ("GET", "/v2/models/{model}/versions/1", None),
    "metadata of a version that is none": ("GET", "/v2/models/{model}/versions/9", None),
    "config": ("GET", "/v2/models/{model}/config", None),
    "ready": ("GET", "/v2/models/{model}/ready", None),
    "no inputs": ("POST", "/v2/models/{model}/infer", b'{"inputs":[]}'),
    "a wrong type": (
        "POST",
        "/v2/models/{model}/infer",
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1]}]}',
    ),
    "a name that is none": (
        "POST",
        "/v2/models/{model}/infer",
        b'{"inputs":[{"name":"X","datatype":"INT32","shape":[1],"data":[1]}]}',
    ),
    "generate": ("POST", "/v2/models/{model}/generate", b'{"INPUT0":[1],"INPUT1":[2]}'),
}


@pytest.mark.parametrize("case", sorted(SAME))
async def test_good_and_bad_requests_are_answered_as_triton_answers(sidecar: Sidecar, case: str) -> None:
    method, path, body = SAME[case]
    path = path.format(model="mine")
    async with (
        aiohttp.ClientSession(headers=sidecar.keys.inference_http_headers) as session,
        session.request(method, f"http://{sidecar.triton}{path}", data=body) as answer,
    ):
        expected = (answer.status, await answer.text())
    assert await ask(sidecar, method, path, body) == expected


async def test_nothing_of_all_this_has_reached_the_other_model(sidecar: Sidecar) -> None:
    """After every attack above, and a few more: Triton's own statistics of the other tenant's model."""
    assert sidecar.theirs == (0, 0)
    paths = [
        "/v2/models/theirs/infer",
        "/v2/models/mine/../theirs/infer",
        "/v2/models/mine%2f..%2ftheirs/infer",
    ]
    paths += ["/v2/models/theirs/versions/1/infer", "/v2/models/theirs/generate", "//v2/models/theirs/infer"]
    tensors = [
        {"name": f"INPUT{i}", "shape": [16], "datatype": "INT32", "data": list(range(16))} for i in range(2)
    ]
    body = json.dumps({"model_name": "theirs", "inputs": tensors}).encode()
    for path in paths:
        status, _ = await ask(sidecar, "POST", path, body)
        assert status in (400, 404), path
    mine = await statistics_of(sidecar, "mine")
    assert (await ask(sidecar, "POST", "/v2/models/mine/infer", body))[
        0
    ] == 200  # the name in the body is nothing
    assert (await statistics_of(sidecar, "mine"))[0] == mine[0] + 1
    field = b"\x0a\x06theirs"
    for message in (
        add_request("theirs").SerializeToString(),
        add_request("mine").SerializeToString() + field,
        field + add_request("mine").SerializeToString() + field,
    ):
        async with grpc.aio.insecure_channel(sidecar.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(AioRpcError) as refused:
                await call(message)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    raw = b"POST /v2/models/mine/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n"
    smuggled = (
        b"0\r\n\r\nPOST /v2/models/theirs/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    host, _, port = sidecar.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw + smuggled + body)
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400")
    writer.close()
    assert await statistics_of(sidecar, "theirs") == sidecar.theirs
