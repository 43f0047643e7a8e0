"""A pod's GPU choice holds as it was first seen, where the pod requests it."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.auth import PodGuard
from agent.gpus import GpuReading
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, NodeName
from berth.contract.keys import Keys
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_api import CallingPod, Refused, api_for, outcome, staged, watched
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.objects import GIB, pod


def reading(uuid: str, index: int) -> GpuReading:
    return GpuReading(GpuUuid(uuid), index, "T4", GIB, 0, 0.0)


async def test_the_index_in_the_annotation_may_be_old(tmp_path: Path) -> None:
    node = Node(tmp_path)
    api = api_for(node, readings=lambda: (reading("GPU-z", 0), reading("GPU-a", 1)))
    await staged(api, "model-p1")
    assert list(node.repository.records()) == [on_server("p1")]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"choice": None}, "has no GPU choice"),
        ({"mem": "2Gi"}, f"requests {2 * GIB} bytes but was given {GIB}"),
        ({"annotations": {Keys().gpu_count: "2"}}, "requests 2 GPUs but was given 1"),
        ({"mem": None}, "requests no GPU memory"),
        # Placed by itself, past the binder, and asking for nothing.
        ({"mem": None, "choice": GpuChoice(GpuUuid("GPU-a"), 0, 0)}, "requests no GPU memory"),
        ({"mem": "0", "choice": GpuChoice(GpuUuid("GPU-a"), 0, 0)}, "requests no GPU memory"),
        (
            {"choice": GpuChoice(GpuUuid("GPU-elsewhere"), 0, GIB)},
            "was given GPU GPU-elsewhere, which this node",
        ),
    ],
)
async def test_a_pod_stages_only_what_the_binder_has_placed(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    node, knows = Node(tmp_path), CallingPod()
    knows.changes = changes
    with pytest.raises(Refused, match=why) as refused:
        await staged(api_for(node, knows), "model-p1")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert node.repository.records() == {}


CHOICE: dict[str, Any] = {"v": 1, "uuid": "GPU-a", "index": 0, "bytes": GIB}


@pytest.mark.parametrize(
    "choice",
    [
        "",
        "null",
        "[" * 100_000,
        json.dumps(CHOICE | {"index": "0"}),
        json.dumps(CHOICE | {"index": -1}),
        json.dumps(CHOICE | {"index": 10**30}),
        json.dumps(CHOICE | {"bytes": float(GIB)}),
        json.dumps(CHOICE | {"bytes": True}),
        json.dumps(CHOICE | {"uuid": ["GPU-a"]}),
        json.dumps(CHOICE | {"uuid": None}),
        json.dumps(CHOICE | {"v": 2}),
        json.dumps(CHOICE | {"others": {}}),
        json.dumps(CHOICE | {"others": [{"uuid": "GPU-a", "index": 0}]}),
        json.dumps(CHOICE | {"x": "y" * 300_000}),
    ],
)
async def test_a_gpu_choice_that_is_nonsense_is_one_clear_refusal(tmp_path: Path, choice: str) -> None:
    """Of a live pod, through the guard that reads it."""

    class Kube:
        async def get(self, path: str) -> dict[str, Any]:
            return pod("p1", on="n1", choice=choice)

    node, knows = Node(tmp_path), CallingPod()
    knows.admit = PodGuard(Kube(), node=NodeName("n1"), keys=Keys()).admit  # type: ignore[arg-type, method-assign]
    with pytest.raises(
        Refused, match=r"PERMISSION_DENIED: pod team/p1: annotation seldon.io/trtis-gpu: "
    ) as no:
        await staged(api_for(node, knows), "model-p1")
    assert len(str(no.value)) < 1100
    assert node.repository.records() == {}


async def test_a_choice_that_is_moved_after_the_pod_was_seen_moves_nothing(tmp_path: Path) -> None:
    node, knows = Node(tmp_path), CallingPod()
    api = api_for(node, knows)
    await watched(api, "model-p1")  # the first that the agent sees of the pod holds
    moves = [
        GpuChoice(GpuUuid("GPU-b"), 1, GIB),
        GpuChoice(GpuUuid("GPU-a"), 0, 2 * GIB),
        GpuChoice(GpuUuid("GPU-a"), 0, GIB, (GpuRef(GpuUuid("GPU-b"), 1),)),
        None,
    ]

    async def refused_all() -> None:
        for moved in moves:
            knows.changes = {"choice": moved}
            for call in (staged(api, "model-p1"), outcome(api)):
                with pytest.raises(
                    Refused, match=r"pod team/p1: its GPU choice was .*GPU-a.* and holds"
                ) as refused:
                    await call
                assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        knows.changes = {}

    await refused_all()
    assert node.repository.records() == {}
    await staged(api, "model-p1")
    await refused_all()
    (model,) = node.models
    record = node.repository.record(on_server("p1"))
    assert record is not None
    assert record.gpu == model.gpu == GPU
    knows.changes = {"choice": GpuChoice(GpuUuid("GPU-a"), 7, GIB)}  # an index is of its day
    assert (await outcome(api)).state == pb.MODEL_STATE_READY
    knows.changes = {"choice": moves[0]}
    assert [status.gpu_uuid for status in await watched(api, "model-p1")] == ["GPU-a"]  # who serves goes on
