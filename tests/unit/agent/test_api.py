"""Calls beside what the agent does by itself."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest

import agent.api
import agent.stage
import agent.stage_queue
from berth.contract.ids import ModelName
from berth.contract.pod import ModelPod, PodRef
from berth.contract.report import ModelState
from berth.kube.errors import KubeUnreachable
from berth.triton.errors import TritonRefused
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_api import CallingPod, Context, Refused, api_for, outcome, staged
from tests.fakes.agent_node import Node, on_server
from tests.fakes.objects import GIB


async def test_a_pod_that_goes_on_keeps_its_model_and_one_that_ends_does_not(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api = api_for(node, knows)
    await staged(api, "model-p1")
    await outcome(api)
    request = pb.UnloadRequest(model_name="model-p1")
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_KEPT
    assert list(node.repository.records()) == [on_server("p1")]
    knows.deleting = True  # the API server says so; the agent's own watch is behind
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    assert node.repository.records() == {}


async def test_no_model_is_unloaded_while_it_is_unknown_whether_its_pod_ends(tmp_path: Path) -> None:
    class Away(CallingPod):
        async def current(self, ref: PodRef) -> ModelPod:
            raise KubeUnreachable("connection refused")

    node = Node(tmp_path)
    api = api_for(node, Away())
    await staged(api, "model-p1")
    await outcome(api)
    with pytest.raises(Refused, match="connection refused") as refused:
        await api.Unload(pb.UnloadRequest(model_name="model-p1"), Context())
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert list(node.repository.records()) == [on_server("p1")]
    assert list(node.triton.loaded) == [on_server("p1")]


async def test_a_load_requested_while_one_is_failing_tells_why_it_failed(
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
    progress = await outcome(api_for(node))
    assert progress.state == pb.MODEL_STATE_FAILED
    assert "tensorflow9" in progress.reason


async def test_a_load_requested_after_one_has_failed_tells_why(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.triton.errors = [TritonRefused("unable to find backend tensorflow9")]
    await node.lifecycle.start_load(await node.stage())
    assert "tensorflow9" in (await outcome(api_for(node))).reason


async def test_a_load_of_what_was_never_staged_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*has not been staged"):
        await outcome(api_for(Node(tmp_path)))


async def test_a_load_tells_each_state_on_its_way_and_the_class_of_a_failure(tmp_path: Path) -> None:
    node = Node(tmp_path)
    api, request = api_for(node), pb.LoadRequest(model_name="model-p1")
    await staged(api, "model-p1")
    node.triton.errors = [TritonRefused("CUDA out of memory")]
    told = [progress async for progress in api.Load(request, Context())]
    assert [progress.state for progress in told if progress.state != pb.MODEL_STATE_STAGED] == [
        pb.MODEL_STATE_LOADING,
        pb.MODEL_STATE_FAILED,
    ]
    assert (told[-1].reason, told[-1].failure_class) == ("CUDA out of memory", pb.FAILURE_CLASS_CAPACITY)
    # Its files are there: to ask again is to try again.
    told = [progress async for progress in api.Load(request, Context())]
    assert (told[-1].state, told[-1].reason, told[-1].failure_class) == (
        pb.MODEL_STATE_READY,
        "",
        pb.FAILURE_CLASS_UNSPECIFIED,
    )


async def test_a_watch_repeats_itself_and_leaves_nobody_waiting_when_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.api, "_WATCH_REPEAT_SECONDS", 0.01)
    node = Node(tmp_path)
    api = api_for(node)
    await staged(api, "model-p1")
    before = asyncio.all_tasks()
    watch = api.WatchModel(pb.WatchModelRequest(model_name="model-p1"), Context())
    async with asyncio.timeout(5):
        first, again = await anext(watch), await anext(watch)
    assert first == again
    monkeypatch.setattr(agent.api, "_WATCH_REPEAT_SECONDS", 60)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_list_is_of_the_callers_own_model_and_tells_no_way_to_triton(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api = api_for(node, knows)
    await node.lifecycle.start_load(await node.stage())
    await node.stage("p2")
    (own,) = (await api.ListModels(pb.ListModelsRequest(), Context())).models
    assert (own.model_name, own.state, own.measured_bytes) == ("model-p1", pb.MODEL_STATE_READY, 3 * GIB)
    assert not own.HasField("gateway")
    knows.caller = "anonymous"  # which has none yet
    assert list((await api.ListModels(pb.ListModelsRequest(), Context())).models) == []


async def test_the_model_of_a_pod_that_is_gone_is_unloaded_by_its_own_last_word(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api, request = api_for(node, knows), pb.UnloadRequest(model_name="model-p1")
    await node.lifecycle.start_load(await node.stage())
    knows.gone = True
    assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    assert (list(node.models), node.repository.records()) == ([], {})


async def test_what_has_been_unloaded_may_be_unloaded_again(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api, request = api_for(node, knows), pb.UnloadRequest(model_name="model-p1")
    await node.stage()
    knows.deleting = True
    for _ in range(3):
        assert (await api.Unload(request, Context())).outcome == pb.UnloadResponse.OUTCOME_UNLOADED
    with pytest.raises(Refused, match="INVALID_ARGUMENT"):
        await api.Unload(pb.UnloadRequest(model_name="a/b"), Context())
    with pytest.raises(Refused, match="may use model 'model-p1' only"):
        await api.Unload(pb.UnloadRequest(model_name="model-p2"), Context())


async def test_an_unload_goes_on_when_its_caller_has_gone(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api, knows.deleting = api_for(node, knows), True
    await node.stage()
    (model,) = node.models
    await node.lifecycle.start_load(model)
    call = asyncio.ensure_future(api.Unload(pb.UnloadRequest(model_name="model-p1"), Context()))
    async with asyncio.timeout(5):
        while model.state is not ModelState.UNLOADING:
            await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(5):
        while node.repository.records():
            await asyncio.sleep(0.001)


async def test_refusals_do_not_fill_the_nodes_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = api_for(Node(tmp_path))
    with caplog.at_level("INFO"):
        for _ in range(200):
            with pytest.raises(Refused):
                await outcome(api, "another")
    assert 40 <= len([one for one in caplog.records if one.message == "call refused"]) < 100
