"""What a pod that watches its model gets of the gateway."""

import asyncio
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent.gpus import GpuReading, GpusUnknown
from berth.contract.gateway import ticket_of
from berth.contract.ids import GpuUuid
from berth.contract.report import ModelState
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_api import Context, api_for, outcome, staged, watched
from tests.fakes.agent_node import Node
from tests.fakes.objects import GIB


async def test_a_watch_tells_each_change_how_to_reach_triton_and_ends_with_its_pod(tmp_path: Path) -> None:
    node, registry = Node(tmp_path), CollectorRegistry()
    api = api_for(node, registry=registry)
    await staged(api, "model-p1")
    (model,) = node.models
    watch = api.WatchModel(pb.WatchModelRequest(model_name="model-p1"), Context())
    first = await anext(watch)
    assert (first.model_name, first.state, first.gpu_uuid) == ("model-p1", pb.MODEL_STATE_STAGED, "GPU-a")
    assert (first.requested_bytes, first.HasField("measured_bytes")) == (GIB, False)
    assert first.gateway == pb.Gateway(endpoint="10.0.0.7:1", ticket=ticket_of(b"secret", "p1"))
    coming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.01)
    assert not coming.done()
    node.models.set(model, ModelState.FAILED, "so it is")
    said = await coming
    assert (said.state, said.reason) == (pb.MODEL_STATE_FAILED, "so it is")
    node.models.drop(model)
    assert [status async for status in watch] == []
    assert registry.get_sample_value("berth_agent_calls_total", {"method": "WatchModel", "code": "OK"}) == 1


async def test_a_model_that_serves_on_a_broken_gpu_is_reported_as_failed_while_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    whole = GpuReading(GpuUuid("GPU-a"), 0, "T4", 16 * GIB, 0, 0.0)
    readings = [whole]
    api = api_for(node, readings=lambda: tuple(readings) if readings else unknown())
    await staged(api, "model-p1")
    await outcome(api)

    def unknown() -> tuple[GpuReading, ...]:
        raise GpusUnknown("no driver")

    async def told() -> tuple[str, str]:
        (status,) = await watched(api, "model-p1")
        return pb.ModelState.Name(status.state).removeprefix("MODEL_STATE_"), status.reason

    assert await told() == ("READY", "")
    readings[:] = [replace(whole, healthy=False, broken=True, reason="XID 79")]
    assert await told() == ("FAILED", "GPU 0 (GPU-a): XID 79")
    readings.clear()  # nobody can tell: Triton's word holds
    assert await told() == ("READY", "")
    readings[:] = [replace(whole, uuid=GpuUuid("GPU-b"))]
    assert await told() == ("FAILED", "GPU GPU-a is not on this node any more")
    (model,) = node.models
    node.models.set(model, ModelState.LOADING)  # the load itself will tell
    assert await told() == ("LOADING", "")
