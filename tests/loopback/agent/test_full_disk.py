"""A disk that fills up while a model arrives: one clear status, and nothing half-done stays."""

import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from agent.admission import CodeGate, NodeRules
from agent.api import NodeAgentApi, serve
from agent.auth import TrustingAuthenticator
from agent.gpus import GpuReading
from agent.metrics import AgentMetrics
from agent.models import Models
from agent.repository import Repository
from agent.serving.lifecycle import Lifecycle
from berth.contract.endpoint import Endpoint
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import CodeRule
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentStub
from localcluster.addresses import free_port
from tests.fakes.objects import GIB, pod

CHOICE = GpuChoice(GpuUuid("GPU-a"), 0, GIB)
METADATA = (("berth-pod", "team/p1/p1"),)
MIB = 1024**2


class EmptyTriton:
    """Holds no model and refuses to be told of one."""

    async def index(self) -> dict[str, Any]:
        return {}


class Guard:
    """Every pod lives here and may use its own model."""

    async def admit(self, ref: PodRef) -> ModelPod:
        return parse_model_pod(pod(ref.uid, on="n1", choice=CHOICE), Keys())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


async def staging(agent: NodeAgentStub, size: int) -> pb.StageResponse:
    body = b"x" * size
    digest = hashlib.sha256(b"1/weights\0" + str(size).encode() + b"\0" + body).hexdigest()

    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
        yield pb.StageRequest(file=pb.StageFile(path="1/weights", size=size))
        for at in range(0, size, MIB):
            yield pb.StageRequest(chunk=body[at : at + MIB])
        yield pb.StageRequest(commit=pb.StageCommit(digest=digest))

    answer: pb.StageResponse = await agent.Stage(parts(), metadata=METADATA)
    return answer


async def test_a_full_disk_and_then_a_model_that_fits(disk: Path) -> None:
    repository, models, metrics = Repository(disk), Models(), AgentMetrics(CollectorRegistry())
    repository.open()
    rules, gate = NodeRules(frozenset({"python"}), CodeRule.ANY), CodeGate(CodeRule.ANY)
    lifecycle = Lifecycle(
        models=models,
        repository=repository,
        triton=EmptyTriton(),  # type: ignore[arg-type]
        gpus=None,  # type: ignore[arg-type]
        reported=None,  # type: ignore[arg-type]
        events=None,  # type: ignore[arg-type]
        metrics=metrics,
        rules=rules,
        gate=gate,
        load_timeout_seconds=1,
        unload_timeout_seconds=1,
    )
    api = NodeAgentApi(
        authenticator=TrustingAuthenticator(),
        guard=Guard(),  # type: ignore[arg-type]
        models=models,
        repository=repository,
        lifecycle=lifecycle,
        readings=lambda: (GpuReading(CHOICE.uuid, 0, "T4", 16 * GIB, 0, 0.0),),
        access=pb.TritonAccess(),
        metrics=metrics,
        rules=rules,
        gate=gate,
        max_model_bytes=GIB,
    )
    listen = Endpoint("127.0.0.1", free_port("127.0.0.1"))
    server = await serve(api, listen)
    try:
        async with grpc.aio.insecure_channel(str(listen)) as channel:
            agent: NodeAgentStub = NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await staging(agent, 4 * MIB)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "No space left on device" in (refused.value.details() or "")
            assert list((disk / "staging").iterdir()) == []
            assert list((disk / "models").iterdir()) == []
            assert (await staging(agent, MIB)).bytes == MIB
            assert [entry.name for entry in (disk / "models").iterdir()] == ["model-p1"]
    finally:
        await server.stop(0)
