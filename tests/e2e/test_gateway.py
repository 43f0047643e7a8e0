"""The path of a request: the pod's proxy, the node's gateway, Triton. What a ticket allows, and what goes on when a part dies."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from aiohttp import ClientError, ClientSession
from tritonclient.utils import InferenceServerException

from berth.contract.gateway import server_name_of
from berth.kube import paths
from berth.v1 import node_agent_pb2 as pb
from localcluster.cluster import GATEWAY_ADMIN_PORT, GATEWAY_PORT
from localcluster.inference import infer_grpc, infer_rest
from localcluster.parts import Part
from localcluster.samples import SIMPLE_MODEL, model_deployment, model_pod, packed
from proxy.wire.preamble import ACCEPTED, Kind, Preamble
from tests.e2e.support import Json, User, brief, get, is_ready
from tests.e2e.test_agent_api import agent_of, bearer, token_of
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFIG = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
PROGRAM = (SIMPLE_MODEL / "1" / "model.py").read_bytes()
ON_GPU_1 = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}
BODY = (
    '{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[16],"data":[7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7]},'
    '{"name":"INPUT1","datatype":"INT32","shape":[16],"data":[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]}]}'
)


def node_of(user: User, pod: Json) -> Any:
    return user.cluster.nodes[pod["spec"]["nodeName"]]


async def ticket_of_pod(user: User, pod: Json, model: str) -> bytes:
    """What the agent sends to the pod's own proxy."""
    request = pb.WatchModelRequest(model_name=model)
    async with agent_of(user, pod["spec"]["nodeName"]) as agent:
        status = await agent.WatchModel(request, metadata=bearer(await token_of(user, pod))).read()
    assert status.gateway.endpoint.endswith(f":{GATEWAY_PORT}")
    ticket: bytes = status.gateway.ticket
    return ticket


async def handshake(user: User, node: str, first: bytes, then: bytes = b"") -> bytes:
    """What the gateway answers to whoever sends this, until it closes or is silent for a while."""
    reader, writer = await asyncio.open_connection(user.cluster.nodes[node].address, GATEWAY_PORT)
    said = b""
    try:
        writer.write(first)
        if then and (said := await asyncio.wait_for(reader.read(1), 5)) == ACCEPTED:
            writer.write(then)
        while part := await asyncio.wait_for(reader.read(65536), 5):
            said += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return said


def asking(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode()


async def test_a_ticket_opens_its_own_model_and_nothing_else(user: User, source: str) -> None:
    for name in ("mine", "theirs"):
        await user.apply(model_pod(name, source=source, gpu_mem="1Gi", pod_spec=ON_GPU_1))
    (mine,), (theirs,) = await user.ready("mine"), await user.ready("theirs")
    ticket = await ticket_of_pod(user, mine, "mine")
    assert ticket != await ticket_of_pod(user, theirs, "theirs")
    first = Preamble(Kind.REST, ticket).to_bytes()
    opened = await handshake(user, "gpu-1", first, asking("/v2/models/mine"))
    assert opened.startswith(ACCEPTED + b"HTTP/1.1 200"), opened
    assert b'"name":"mine"' in opened.replace(b" ", b"")
    unknown = {
        name: await handshake(user, "gpu-1", first, asking(f"/v2/models/{name}"))
        for name in (
            "nobody",
            "theirs",
            *(
                server_name_of(name, pod["metadata"]["uid"])
                for name, pod in (("mine", mine), ("theirs", theirs))
            ),
        )
    }
    for name, said in unknown.items():
        assert re.sub(
            rb"\r\ncontent-length: \d+", b"", said.replace(name.encode(), b"nobody"), flags=re.I
        ) == (re.sub(rb"\r\ncontent-length: \d+", b"", unknown["nobody"], flags=re.I)), name
    for wrong in (bytes(32), bytes([ticket[0] ^ 1]) + ticket[1:], ticket[::-1]):
        assert await handshake(user, "gpu-1", Preamble(Kind.REST, wrong).to_bytes(), asking("/v2")) == b""
    for garbage in (asking("/v2/models/mine"), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(40), b"BERTH\x02"):
        assert await handshake(user, "gpu-1", garbage) == b""
    assert await handshake(user, "gpu-2", first, asking("/v2")) == b"", "on a node where the pod is not"
    await user.client.delete(paths.pod("default", "mine"), grace_seconds=0)

    async def closed() -> None:
        assert await handshake(user, "gpu-1", first, asking("/v2/models/mine")) == b""

    await eventually(closed, seconds=60, what="the ticket of a deleted pod to open nothing")
    await infer_rest(f"{theirs['status']['podIP']}:9000", "theirs")


@asynccontextmanager
async def namespaces(user: User, *names: str) -> AsyncIterator[None]:
    for name in names:
        await user.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "default", "namespace": name},
            },
        )
    try:
        yield
    finally:
        for name in names:
            for pod in (await user.client.get(paths.pods(name)))["items"]:
                await user.client.delete(paths.pod(name, pod["metadata"]["name"]), grace_seconds=1)


async def pod_ready(user: User, namespace: str, name: str) -> Json:
    async def check() -> Json:
        pod = await user.pod(name, namespace)
        assert is_ready(pod), brief(pod)
        return pod

    return await eventually(check, seconds=90, what=f"{namespace}/{name}")


async def post(pod: Json, model: str) -> str:
    """A REST inference of 7 and 2."""
    url = f"http://{pod['status']['podIP']}:9000/v2/models/{model}/infer"
    async with ClientSession() as session, session.post(url, data=BODY) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return text


async def test_two_namespaces_serve_one_name_on_one_node(
    user: User, source: str, url: Callable[[str, bytes], str]
) -> None:
    """The same public name and id; what answers is each one's own."""
    other = packed(
        **{"config.pbtxt": CONFIG, "1/model.py": PROGRAM.replace(b"left + right", b"left * right")}
    )
    sources = {"red": source, "blue": url("times.tar.gz", other)}
    async with namespaces(user, *sources):
        for namespace, uri in sources.items():
            await user.apply(
                model_pod("resnet", namespace=namespace, source=uri, gpu_mem="1Gi", pod_spec=ON_GPU_1)
            )
        red, blue = [await pod_ready(user, namespace, "resnet") for namespace in sources]
        assert red["spec"]["nodeName"] == blue["spec"]["nodeName"] == "gpu-1"
        for pod, result in ((red, "9"), (blue, "14")):
            for _ in range(3):
                said = (await post(pod, "resnet")).replace(" ", "")
                assert '"model_name":"resnet"' in said
                assert f'"data":[{",".join([result] * 16)}]' in said
        await infer_grpc(f"{red['status']['podIP']}:9001", "resnet")
        _, metrics = await get(f"http://{node_of(user, red).address}:{GATEWAY_ADMIN_PORT}/metrics")
        for namespace in sources:
            assert f'model="resnet",namespace="{namespace}",pod="resnet"' in sorted_labels(metrics)
        _, own = await get(f"http://{red['status']['podIP']}:9090/metrics")
        assert "blue" not in own

    async def gone() -> None:
        assert await user.models_on("gpu-1") == {}

    await eventually(gone, seconds=60, what="both models to be gone")


def sorted_labels(metrics: str) -> str:
    """The same text with the labels of each series in their names' order."""
    return re.sub(r"\{([^}]*)\}", lambda found: "{" + ",".join(sorted(found[1].split(","))) + "}", metrics)


@asynccontextmanager
async def used(pod: Json, model: str) -> AsyncIterator[list[BaseException]]:
    """REST and gRPC without a pause for as long as the block lasts, and what went wrong with them."""
    failures: list[BaseException] = []
    over = asyncio.Event()

    async def use(infer: Callable[[str, str], Awaitable[None]], port: int) -> None:
        while not over.is_set():
            try:
                await infer(f"{pod['status']['podIP']}:{port}", model)
            except (InferenceServerException, ClientError, OSError) as error:
                failures.append(error)
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        group.create_task(use(infer_rest, 9000))
        group.create_task(use(infer_grpc, 9001))
        try:
            yield failures
        finally:
            over.set()


async def serves(user: User, pod: Json, model: str, *, seconds: float) -> None:
    """Wait until both protocols answer and the pod is Ready."""

    async def check() -> None:
        try:
            await infer_rest(f"{pod['status']['podIP']}:9000", model)
            await infer_grpc(f"{pod['status']['podIP']}:9001", model)
        except (InferenceServerException, ClientError, OSError) as error:
            # A probe needs a moment to notice what has just been killed.
            raise AssertionError(error) from error
        found = await user.pod(pod["metadata"]["name"])
        assert is_ready(found), brief(found)

    await eventually(check, seconds=seconds, what=f"{model} to be served")


async def killed(part: Part) -> None:
    """kill -9; returns when another process is there in its place."""
    before = part.pid
    part.kill()

    async def again() -> None:
        assert part.pid not in (None, before)

    await eventually(again, what=f"{part.name} to run again")


@pytest.mark.nightly
async def test_models_serve_on_while_the_agent_is_away_and_when_it_is_back(user: User, source: str) -> None:
    await user.apply(model_pod("lasting", source=source, gpu_mem="1Gi", pod_spec=ON_GPU_1))
    (pod,) = await user.ready("lasting")
    agent = node_of(user, pod).agent
    ticket = await ticket_of_pod(user, pod, "lasting")

    async def told_again() -> bytes:
        try:
            return await ticket_of_pod(user, pod, "lasting")
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"the agent is not back: {error.details()}") from error

    async with used(pod, "lasting") as failures:
        await agent.stop(grace_seconds=0)
        await asyncio.sleep(3)
        assert is_ready(await user.pod("lasting"))
        await agent.start()
        assert await eventually(told_again) == ticket
        await user.ready("lasting")
        await asyncio.sleep(2)
    assert failures == []


@pytest.mark.nightly
async def test_a_killed_gateway_is_back_and_so_are_its_models_pods(user: User, source: str) -> None:
    await user.apply(model_pod("through", source=source, gpu_mem="1Gi", pod_spec=ON_GPU_1))
    (pod,) = await user.ready("through")
    gateway = node_of(user, pod).gateway
    await killed(gateway)
    await serves(user, pod, "through", seconds=60)
    again = await user.pod("through")
    assert [status["restartCount"] for status in again["status"]["containerStatuses"]] == [0]


@pytest.mark.nightly
async def test_without_a_gateway_a_pods_proxy_says_so_and_its_pod_is_not_ready(
    user: User, source: str
) -> None:
    await user.apply(model_pod("closed", source=source, gpu_mem="1Gi", pod_spec=ON_GPU_1))
    (pod,) = await user.ready("closed")
    gateway = node_of(user, pod).gateway
    await gateway.stop(grace_seconds=5)
    try:

        async def unready() -> None:
            assert not is_ready(await user.pod("closed"))

        await eventually(unready, seconds=60, what="the pod not to be ready")
        status, _ = await get(f"http://{pod['status']['podIP']}:9000/v2/models/closed")
        assert status == 503
        with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            await infer_grpc(f"{pod['status']['podIP']}:9001", "closed")
    finally:
        await gateway.start()
    await user.ready("closed")
    await infer_rest(f"{pod['status']['podIP']}:9000", "closed")


SLOWLY = PROGRAM.replace(
    b"    def execute(self, requests):\n",
    b"    def execute(self, requests):\n        import time; time.sleep(8)\n",
)


@pytest.mark.nightly
async def test_when_triton_dies_those_are_told_whose_requests_were_in_it(
    user: User, source: str, url: Callable[[str, bytes], str]
) -> None:
    slow = url("dreamer.tar.gz", packed(**{"config.pbtxt": CONFIG, "1/model.py": SLOWLY}))
    await user.apply(
        model_pod("dreamer", source=slow, gpu_mem="1Gi", pod_spec=ON_GPU_1),
        model_pod("innocent", source=source, gpu_mem="1Gi", pod_spec=ON_GPU_1),
    )
    (dreamer,), (innocent,) = await user.ready("dreamer"), await user.ready("innocent")
    node = node_of(user, dreamer)
    asked = asyncio.create_task(post(dreamer, "dreamer"))

    async def runs() -> None:
        _, metrics = await get(f"http://{dreamer['status']['podIP']}:9090/metrics")
        assert re.search(r"^berth_proxy_running_requests 1(\.0)?$", metrics, re.M), metrics

    await eventually(runs, seconds=60, what="the request to be in Triton")
    await killed(node.triton)
    with pytest.raises((AssertionError, ClientError)):
        await asked
    assert "request" in await user.event(dreamer, "TritonDied")
    assert not [event for event in await user.events(innocent) if event["reason"] == "TritonDied"]
    _, metrics = await get(f"http://{node.address}:{GATEWAY_ADMIN_PORT}/metrics")
    told = dict(
        re.findall(
            r'^berth_gateway_triton_crashes_with_requests_total\{.*pod="(\w+)".*\} (\S+)$', metrics, re.M
        )
    )
    assert (float(told["dreamer"]), float(told["innocent"])) == (1, 0)
    await serves(user, innocent, "innocent", seconds=120)
    await user.ready("dreamer", seconds=120)


async def test_a_rolling_update_loses_no_request(user: User, source: str) -> None:
    """Each request goes to a pod that is Ready and not ending, as a Service's do."""
    deployment = model_deployment("rolling", source=source, gpu_mem="1Gi")
    deployment["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await user.apply(deployment)
    (before,) = await user.ready("rolling")
    failures: list[BaseException] = []
    answers, over = 0, asyncio.Event()

    async def use() -> None:
        nonlocal answers
        while not over.is_set():
            ready = [pod for pod in await user.pods("rolling") if is_ready(pod)]
            assert ready, "maxUnavailable is 0"
            address = ready[0]["status"]["podIP"]
            try:
                await infer_rest(f"{address}:9000", "rolling")
                await infer_grpc(f"{address}:9001", "rolling")
                answers += 2
            except (InferenceServerException, ClientError, OSError) as error:
                failures.append(error)

    async with asyncio.TaskGroup() as group:
        group.create_task(use())
        deployment["spec"]["template"]["metadata"]["annotations"]["example.com/version"] = "2"
        await user.apply(deployment)

        async def replaced() -> Json:
            pod = await user.pod_of("rolling")
            assert pod["metadata"]["uid"] != before["metadata"]["uid"]
            assert is_ready(pod)
            return pod

        after = await eventually(replaced, seconds=90, what="the new pod alone")

        async def gone() -> None:
            listed = await user.client.get(paths.pods("default"), labelSelector="app=rolling")
            assert [pod["metadata"]["uid"] for pod in listed["items"]] == [after["metadata"]["uid"]]

        await eventually(gone, seconds=60, what="the old pod to be gone")
        over.set()
    assert failures == []
    assert answers > 20


async def test_of_triton_a_pod_finds_nothing_without_a_key(user: User) -> None:
    """Its gRPC has no port. Here, where a pod's loopback is an address, its REST is found, and asks for the key."""
    node = user.cluster.nodes["gpu-1"]
    for port in (8001, 8002):
        with socket.socket() as probe:
            assert probe.connect_ex((node.address, port)) != 0, port
    for path in ("/v2/models/x", "/v2/health/ready", "/v2/models/x/stats"):
        status, _ = await get(f"http://{node.address}:8000{path}")
        assert status == 403, path
