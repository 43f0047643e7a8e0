"""Which pod calls, and which model is its own."""

from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from agent.gpus import GpuReading, GpusUnknown
from berth.contract.ids import GpuUuid, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.contract.report import Failure, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_api import CallingPod, Context, Refused, api_for, outcome, staged, watched
from tests.fakes.agent_node import Node, on_server
from tests.fakes.objects import GIB


async def test_an_anonymous_pod_is_one_model_the_first_that_it_stages(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    knows.caller, api = "anonymous", api_for(node, knows)
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
    assert list(node.repository.records()) == [on_server("anonymous", "first")]
    assert [status.model_name for status in await watched(api, "first")] == ["first"]
    assert (await outcome(api, "first")).state == pb.MODEL_STATE_READY


async def test_an_id_is_anothers_until_that_pod_and_its_model_are_gone(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    knows.changes, api = {"annotations": {Keys().model_id: "mine"}}, api_for(node, knows)
    await staged(api, "mine")
    knows.caller = "p2"
    with pytest.raises(Refused, match="model id 'mine' on this node belongs to pod team/p1") as refused:
        await staged(api, "mine")
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    node.models.lose_pod(PodUid("p1"))
    await node.lifecycle.start_unload(on_server("p1", "mine"))
    await staged(api, "mine")
    assert list(node.repository.records()) == [on_server("p2", "mine")]


async def test_a_name_is_anybodys_and_each_pod_is_served_by_its_own_files(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api = api_for(node, knows)
    for uid in ("anonymous-1", "anonymous-2"):
        knows.caller = uid
        await staged(api, "net")
        assert (await outcome(api, "net")).state == pb.MODEL_STATE_READY
    assert set(node.triton.loaded) == {on_server(uid, "net") for uid in ("anonymous-1", "anonymous-2")}
    assert [config["name"] for config in node.triton.configs] == node.triton.loads
    assert [status.model_name for status in await watched(api, "net")] == ["net"]
    assert all("-" not in message.rpartition(" ")[2] for _, message in node.events.said)


async def test_a_pod_that_nobody_has_placed_takes_no_name_whatever_it_asks(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    knows.caller, knows.changes = "self-placed", {"choice": None}
    api = api_for(node, knows)
    for ask in (lambda: watched(api, "model-self-placed"), lambda: outcome(api, "model-self-placed")):
        with pytest.raises(Refused, match="has no GPU choice") as refused:
            await ask()
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert list(node.models) == []


def reading(uuid: str, index: int) -> GpuReading:
    return GpuReading(GpuUuid(uuid), index, "T4", GIB, 0, 0.0)


async def test_a_gpu_that_is_gone_is_reported_to_the_pod_and_to_the_binder(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with pytest.raises(Refused, match="was given GPU GPU-a, which this node does not have") as refused:
        await staged(api_for(node, readings=lambda: (reading("GPU-z", 0),)), "model-p1")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    (model,) = node.models
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    await staged(api_for(node), "model-p1")  # it is back
    assert model.failure is None


async def test_gpus_that_nobody_has_seen_yet_are_waited_for(tmp_path: Path) -> None:
    def unknown() -> tuple[GpuReading, ...]:
        raise GpusUnknown("NVML has not answered for 5 s")

    with pytest.raises(Refused, match="NVML has not answered") as refused:
        await staged(api_for(Node(tmp_path), readings=unknown), "model-p1")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_api_server_that_is_away_is_no_refusal(tmp_path: Path) -> None:
    """A loader asks again after UNAVAILABLE, and ends after anything else."""

    class Away(CallingPod):
        async def pod_of(self, metadata: Mapping[str, str], source: str) -> PodRef:
            raise error

    for error in (KubeUnreachable("connection refused"), response_error(503, "ServiceUnavailable", "later")):
        api = api_for(Node(tmp_path), Away())
        with pytest.raises(Refused, match=str(error)) as refused:
            await staged(api, "model-p1")
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE


async def test_callers_are_known_by_their_text_metadata(tmp_path: Path) -> None:
    knows = CallingPod()
    api = api_for(Node(tmp_path), knows)
    await api.ListModels(pb.ListModelsRequest(), Context(("authorization", "Bearer x"), ("trace-bin", b"\0")))
    await api.ListModels(pb.ListModelsRequest(), Context())
    assert knows.metadata == [{"authorization": "Bearer x"}, {}]


@pytest.mark.parametrize("asked", ["ListModels", "WatchModel", "Load", "Stage", "Unload"])
async def test_a_pod_that_has_ended_is_reported_whatever_it_asks(tmp_path: Path, asked: str) -> None:
    node, knows, registry = Node(tmp_path), CallingPod(), CollectorRegistry()
    api, knows.gone = api_for(node, knows, registry=registry), True
    calls = {
        "ListModels": lambda: api.ListModels(pb.ListModelsRequest(), Context()),
        "WatchModel": lambda: watched(api, "model-p1"),
        "Load": lambda: outcome(api),
        "Stage": lambda: staged(api, "model-p1"),
        "Unload": lambda: api.Unload(pb.UnloadRequest(model_name="model-p1"), Context()),
    }
    with pytest.raises(Refused, match="has ended") as refused:
        await calls[asked]()  # type: ignore[no-untyped-call]
    code = refused.value.code.name
    assert code == "PERMISSION_DENIED"
    assert registry.get_sample_value("berth_agent_calls_total", {"method": asked, "code": code}) == 1
    assert list(node.models) == []
