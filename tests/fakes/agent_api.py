"""The agent's API on a fake node."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from agent.access import Access
from agent.api import NodeAgentApi
from agent.auth import Authenticator, NotAllowed
from agent.gateway_access import GatewayAccess
from agent.gpus import GpuReading
from agent.metrics import AgentMetrics
from agent.replicas import Replicas
from agent.stage import StageLimits, Stager
from berth.contract.endpoint import Endpoint
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_node import GPU, Node
from tests.fakes.objects import pod

GATEWAY = Endpoint("10.0.0.7", 1)


class LivingPods:
    """A guard for which every pod lives on this node and may use its own model. `more`: of each pod."""

    def __init__(self, **more: Any) -> None:
        self._more = more

    async def admit(self, ref: PodRef) -> ModelPod:
        found = pod(ref.uid, on="n1", **self._more)
        found["metadata"]["namespace"] = ref.namespace
        return parse_model_pod(found, Keys())


def stager_of(
    node: Node, access: Access, *, metrics: AgentMetrics, max_model_bytes: int, keep_free: float = 0.0
) -> Stager:
    return Stager(
        access,
        node.lifecycle,
        node.repository,
        node.models,
        admission=node.admission,
        gate=node.gate,
        metrics=metrics,
        limits=StageLimits(max_model_bytes=max_model_bytes, keep_free=keep_free),
    )


def api_of(
    node: Node,
    authenticator: Authenticator,
    guard: Any,
    *,
    readings: Callable[[], tuple[GpuReading, ...]] | None = None,
    registry: CollectorRegistry | None = None,
    max_model_bytes: int = 10,
    keep_free: float = 0.0,
) -> NodeAgentApi:
    readings = readings or (lambda: tuple(node.gpus.readings))
    metrics = AgentMetrics(registry or CollectorRegistry())
    access = Access(authenticator, guard, node.models, readings)
    stager = stager_of(node, access, metrics=metrics, max_model_bytes=max_model_bytes, keep_free=keep_free)
    gateway = GatewayAccess(Replicas(node.models, b"secret", readings, {}), GATEWAY)
    return NodeAgentApi(access, node.models, node.repository, node.lifecycle, stager, gateway, metrics)


class CallingPod:
    """An authenticator and a guard for which every caller is the pod `caller` of this node; one without a model's name
    if its name begins so. `changes`: what is different about its pod, `gone`: it has ended."""

    def __init__(self) -> None:
        self.caller, self.deleting, self.gone = "p1", False, False
        self.changes: dict[str, Any] = {}
        self.metadata: list[Mapping[str, str]] = []

    async def pod_of(self, metadata: Mapping[str, str], source: str) -> PodRef:
        self.metadata.append(metadata)
        return self._pod().ref

    async def admit(self, ref: PodRef) -> ModelPod:
        if self.gone:
            raise NotAllowed(f"pod {ref} has ended")
        return self._pod()

    async def current(self, ref: PodRef) -> ModelPod | None:
        return None if self.gone else self._pod()

    def _pod(self) -> ModelPod:
        marks = {Keys().model_id: None} if self.caller.startswith("anonymous") else {}
        found = pod(self.caller, **{"on": "n1", "choice": GPU, "annotations": marks, **self.changes})
        if self.deleting:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return parse_model_pod(found, Keys())


class Refused(Exception):
    """The call ended with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Context:
    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self._metadata or None

    def peer(self) -> str:
        return "ipv4:10.0.0.9:5555"

    async def abort(self, code: Any, details: str, trailing: Any = ()) -> None:
        raise Refused(code, details)


async def outcome(api: NodeAgentApi, name: str = "model-p1") -> pb.LoadProgress:
    request = pb.LoadRequest(model_name=name)
    return [progress async for progress in api.Load(request, Context())][-1]


def digest_of(files: Sequence[tuple[str, bytes]]) -> str:
    """As the API says that a digest is counted."""
    parts = (path.encode() + b"\0" + str(len(body)).encode() + b"\0" + body for path, body in files)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def header(name: str, digest: str = "") -> pb.StageRequest:
    return pb.StageRequest(header=pb.StageHeader(model_name=name, digest=digest))


def file(path: str, size: int = 1) -> pb.StageRequest:
    return pb.StageRequest(file=pb.StageFile(path=path, size=size))


def commit(digest: str) -> pb.StageRequest:
    return pb.StageRequest(commit=pb.StageCommit(digest=digest))


# A model of one file of one byte.
DIGEST = digest_of([("1/model.py", b"y")])
HEADER, FILE = header("model-p1"), file("1/model.py")
CHUNK, COMMIT = pb.StageRequest(chunk=b"y"), commit(DIGEST)


def manifest(config: str | None, *paths: str, model: str = "model-p1") -> pb.StageRequest:
    header = pb.StageHeader(model_name=model, files=[pb.StageFile(path=path, size=1) for path in paths])
    if config is not None:
        header.config = config.encode()
    return pb.StageRequest(header=header)


async def stream(
    *parts: pb.StageRequest, then: asyncio.Event | None = None
) -> AsyncIterator[pb.StageRequest]:
    """`then` comes its end."""
    for part in parts:
        yield part
    if then is not None:
        await then.wait()


async def sent(api: NodeAgentApi, *parts: pb.StageRequest, then: asyncio.Event | None = None) -> Any:
    return await api.Stage(stream(*parts, then=then), Context())


async def staged(api: NodeAgentApi, name: str, *, digest: str = "") -> Any:
    """Stage one file of one byte. `digest`: what the header says."""
    return await sent(api, header(name, digest), FILE, CHUNK, COMMIT)


async def watched(api: NodeAgentApi, name: str) -> list[pb.ModelStatus]:
    """What a watch says at once."""
    stream = api.WatchModel(pb.WatchModelRequest(model_name=name), Context())
    async for status in stream:
        await stream.aclose()
        return [status]
    return []


def api_for(
    node: Node,
    caller: CallingPod | None = None,
    readings: Callable[[], tuple[GpuReading, ...]] | None = None,
    **more: Any,
) -> NodeAgentApi:
    """The API as one pod calls it."""
    caller = caller or CallingPod()
    return api_of(node, caller, caller, readings=readings, **more)
