"""Calls beside what the agent does by itself."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from agent.api import NodeAgentApi
from agent.gpus import GpuReading, GpusUnknown
from agent.metrics import AgentMetrics
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import Failure, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.triton.admin import IndexState
from berth.triton.errors import TritonRefused
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_node import GPU, Node
from tests.fakes.objects import GIB, pod


class Knows:
    """Whoever calls is the pod `caller`, and lives here; an anonymous one if it is called so."""

    def __init__(self) -> None:
        self.caller, self.deleting = "p1", False

    async def pod_of(self, metadata: Mapping[str, str]) -> PodRef:
        return self._pod().ref

    async def admit(self, ref: PodRef) -> ModelPod:
        return self._pod()

    async def current(self, ref: PodRef) -> ModelPod:
        return self._pod()

    def _pod(self) -> ModelPod:
        marks = {Keys().model_id: None} if self.caller.startswith("anonymous") else {}
        found = pod(self.caller, on="n1", choice=GPU, annotations=marks)
        if self.deleting:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return parse_model_pod(found, Keys())


class Refused(Exception):
    """The call ended with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, details: str) -> None:
        raise Refused(code, details)


def api_of(
    node: Node, knows: Knows | None = None, readings: Callable[[], tuple[GpuReading, ...]] | None = None
) -> NodeAgentApi:
    knows = knows or Knows()
    return NodeAgentApi(
        authenticator=knows,
        guard=knows,  # type: ignore[arg-type]
        models=node.models,
        repository=node.repository,
        lifecycle=node.lifecycle,
        readings=readings or (lambda: tuple(node.gpus.readings)),
        access=pb.TritonAccess(),
        metrics=AgentMetrics(CollectorRegistry()),
        max_model_bytes=10,
    )


async def outcome(api: NodeAgentApi, name: str = "model-p1") -> pb.LoadProgress:
    request = pb.LoadRequest(model_name=name)
    return [progress async for progress in api.Load(request, Context())][-1]


DIGEST = hashlib.sha256(b"1/x\0" + b"1\0" + b"y").hexdigest()


async def staged(api: NodeAgentApi, name: str, *, digest: str = "") -> pb.StageResponse:
    """Stage one file of one byte. `digest`: what the header says."""

    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name=name, digest=digest))
        yield pb.StageRequest(file=pb.StageFile(path="1/x", size=1))
        yield pb.StageRequest(chunk=b"y")
        yield pb.StageRequest(commit=pb.StageCommit(digest=DIGEST))

    return await api.Stage(parts(), Context())


async def watched(api: NodeAgentApi, name: str) -> list[pb.ModelStatus]:
    """What a watch says at once."""
    stream = api.WatchModel(pb.WatchModelRequest(model_name=name), Context())
    async for status in stream:
        await stream.aclose()
        return [status]
    return []


async def test_an_anonymous_pod_is_one_model_the_first_that_it_stages(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, api = "anonymous", api_of(node, knows)
    # To ask for a name is not to take it.
    assert await watched(api, "typo") == []
    with pytest.raises(Refused, match="FAILED_PRECONDITION"):
        await outcome(api, "typo")
    await staged(api, "first")
    for other in ("second", "third"):
        for call in (
            staged(api, other),
            outcome(api, other),
            watched(api, other),
            api.Unload(pb.UnloadRequest(model_name=other), Context()),
        ):
            with pytest.raises(
                Refused, match=f"has model 'first'; it cannot have '{other}' as well"
            ) as refused:
                await call
            assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert list(node.repository.records()) == ["first"]
    assert [status.model_name for status in await watched(api, "first")] == ["first"]
    assert (await outcome(api, "first")).state == pb.MODEL_STATE_READY


async def test_a_restarted_loader_may_stage_the_same_name_again(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, api = "anonymous", api_of(node, knows)
    assert not (await staged(api, "mine")).already_staged
    assert (await staged(api, "mine", digest=DIGEST)).already_staged
    assert not (await staged(api, "mine")).already_staged
    assert list(node.repository.records()) == ["mine"]


async def test_a_name_is_anothers_until_that_pod_and_its_model_are_gone(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    knows.caller, api = "anonymous-1", api_of(node, knows)
    await staged(api, "mine")
    knows.caller = "anonymous-2"
    with pytest.raises(Refused, match="belongs to pod team/anonymous-1") as refused:
        await staged(api, "mine")
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    await staged(api, "other")  # that refusal has given it no name
    node.models.lose_pod(PodUid("anonymous-1"))
    await node.lifecycle.start_unload(ModelName("mine"))
    knows.caller = "anonymous-3"
    await staged(api, "mine")
    record = node.repository.record(ModelName("mine"))
    assert record is not None
    assert record.pod.uid == "anonymous-3"


def reading(uuid: str, index: int) -> GpuReading:
    return GpuReading(GpuUuid(uuid), index, "T4", GIB, 0, 0.0)


async def test_the_index_in_the_annotation_may_be_old(tmp_path: Path) -> None:
    node = Node(tmp_path)
    api = api_of(node, readings=lambda: (reading("GPU-z", 0), reading("GPU-a", 1)))
    await staged(api, "model-p1")
    assert list(node.repository.records()) == ["model-p1"]


async def test_a_gpu_that_is_gone_is_told_to_the_pod_and_to_the_binder(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(Refused, match="was given GPU GPU-a, which this node does not have") as refused:
        await staged(api_of(node, readings=lambda: (reading("GPU-z", 0),)), "model-p1")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    (model,) = node.models
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    await staged(api_of(node), "model-p1")  # it is back
    assert model.failure is None


async def test_gpus_that_nobody_has_seen_yet_are_waited_for(tmp_path: Path) -> None:
    def unknown() -> tuple[GpuReading, ...]:
        raise GpusUnknown("NVML has not answered for 5 s")

    with pytest.raises(Refused, match="NVML has not answered") as refused:
        await staged(api_of(Node(tmp_path), readings=unknown), "model-p1")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_api_server_that_is_away_is_no_refusal(tmp_path: Path) -> None:
    """A loader asks again after UNAVAILABLE, and ends after anything else."""

    class Away(Knows):
        async def pod_of(self, metadata: Mapping[str, str]) -> PodRef:
            raise error

    for error in (KubeUnreachable("connection refused"), response_error(503, "ServiceUnavailable", "later")):
        api = api_of(Node(tmp_path), Away())
        with pytest.raises(Refused, match=str(error)) as refused:
            await staged(api, "model-p1")
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_pod_that_goes_on_keeps_its_model_and_one_that_ends_does_not(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), Knows()
    api = api_of(node, knows)
    await staged(api, "model-p1")
    await outcome(api)
    request = pb.UnloadRequest(model_name="model-p1")
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_KEPT
    assert list(node.repository.records()) == ["model-p1"]
    knows.deleting = True  # the API server says so; the agent's own watch is behind
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    assert node.repository.records() == {}


async def test_a_model_that_is_too_large_is_not_a_full_disk(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="model-p1"))
        yield pb.StageRequest(file=pb.StageFile(path="1/x", size=11))

    with pytest.raises(Refused) as refused:
        await api_of(Node(tmp_path)).Stage(parts(), Context())
    assert refused.value.code is grpc.StatusCode.OUT_OF_RANGE


async def test_a_load_asked_for_while_one_is_failing_tells_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    model = await node.stage()
    node.triton.errors = [TritonRefused("unable to find backend tensorflow9")]
    remove = node.repository.remove

    def slowly(name: ModelName) -> None:
        remove(name)
        time.sleep(0.3)  # in its thread: the files are gone, and the failure is not yet told

    monkeypatch.setattr(node.repository, "remove", slowly)
    load = node.lifecycle.start_load(model)  # what the reconciler does by itself
    while list(node.repository.models.iterdir()):
        assert not load.done()
        await asyncio.sleep(0.01)
    progress = await outcome(api_of(node))
    assert progress.state == pb.MODEL_STATE_FAILED
    assert "tensorflow9" in progress.reason


async def test_a_load_asked_for_after_one_has_failed_tells_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.triton.errors = [TritonRefused("unable to find backend tensorflow9")]
    await node.lifecycle.start_load(await node.stage())
    assert "tensorflow9" in (await outcome(api_of(node))).reason


async def test_a_load_of_what_was_never_staged_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*has not been staged"):
        await outcome(api_of(Node(tmp_path)))


async def test_files_of_a_pod_that_is_gone_do_not_take_the_place_of_its_successors(tmp_path: Path) -> None:
    """A pod deleted by force is gone at once, and its loader goes on for a while."""
    node, knows = Node(tmp_path), Knows()
    api, begun, go_on = api_of(node, knows), asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[pb.StageRequest]:
        yield pb.StageRequest(header=pb.StageHeader(model_name="mine"))
        yield pb.StageRequest(file=pb.StageFile(path="1/x", size=1))
        yield pb.StageRequest(chunk=b"y")
        begun.set()
        await go_on.wait()
        yield pb.StageRequest(commit=pb.StageCommit(digest=DIGEST))

    knows.caller = "anonymous-1"
    old = asyncio.ensure_future(api.Stage(slowly(), Context()))
    await begun.wait()
    node.models.lose_pod(PodUid("anonymous-1"))
    (gone,) = node.models
    node.models.drop(gone)  # it has no files: nothing holds it any more
    knows.caller = "anonymous-2"
    await staged(api, "mine")
    assert (await outcome(api, "mine")).state == pb.MODEL_STATE_READY
    go_on.set()
    with pytest.raises(Refused, match="anonymous-1 is gone") as refused:
        await old
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    record = node.repository.record(ModelName("mine"))
    assert record is not None
    assert record.pod.uid == "anonymous-2"
    assert node.triton.held[ModelName("mine")] is IndexState.READY
    assert list((tmp_path / "staging").iterdir()) == []
