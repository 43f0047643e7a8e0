"""What becomes of a pod's model when somebody edits the pod while it serves."""

from pathlib import Path
from typing import Any

import pytest

from agent.models import Model, Models
from agent.pods import note_pod
from agent.serving.reconcile import plan
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.kube.informer import Change, ChangeKind
from berth.triton.admin import IndexEntry, IndexState
from tests.fakes.agent_node import GPU, Node
from tests.fakes.objects import pod

KEYS, UID = Keys(), PodUid("p1")
SPOILED: list[dict[str, Any]] = [
    {"choice": "rubbish"},
    {"annotations": {KEYS.model_name: "a/b"}},
    {"annotations": {KEYS.gpu_count: "many"}},
    {"mem": None, "choice": None},
]


def saw(models: Models, **changes: Any) -> None:
    note_pod(models, Change(ChangeKind.SET, pod("p1", on="n1", **{"choice": GPU, **changes})), KEYS)


async def serving_since_before(directory: Path) -> tuple[Node, Model]:
    """A node whose agent has just been started: all that it has is what lies in the repository."""
    earlier = Node(directory)
    await earlier.stage(served=True)
    node = Node(directory)
    (record,) = node.repository.records().values()
    assert record is not None
    return node, node.models.adopt(record)


def wanted(node: Node, model: Model) -> tuple[bool, bool]:
    """Whether it is to be unloaded, and to be loaded."""
    assert model.server_name is not None
    index = {model.server_name: IndexEntry(IndexState.READY)}
    todo = plan({model.ref.uid: model}, node.repository.records(), index)
    return model.server_name in todo.unload, model.ref.uid in todo.load


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_pod_that_cannot_be_read_keeps_its_model_while_it_lives(
    tmp_path: Path, spoiled: dict[str, Any]
) -> None:
    node, model = await serving_since_before(tmp_path)
    saw(node.models, **spoiled)
    assert model.is_wanted
    assert wanted(node, model) == (False, True)


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_pod_that_cannot_be_read_gives_its_memory_back_when_it_ends(
    tmp_path: Path, spoiled: dict[str, Any]
) -> None:
    node, model = await serving_since_before(tmp_path)
    saw(node.models, phase="Running")
    saw(node.models, phase="Failed", **spoiled)
    assert wanted(node, model) == (True, False)


async def test_a_strangers_pod_is_nobodys_model(tmp_path: Path) -> None:
    node = Node(tmp_path)
    saw(node.models, mem=None, choice=None)
    saw(node.models, choice="rubbish")
    assert list(node.models) == []


async def test_pods_that_their_owner_has_put_here_take_neither_a_name_nor_a_line_of_the_report(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    for n in range(2000):
        squatter = pod(f"squatter-{n}", on="n1", annotations={KEYS.model_id: "model-p1"})
        note_pod(node.models, Change(ChangeKind.SET, squatter), KEYS)
    saw(node.models)
    assert [model.name for model in node.models] == ["model-p1"]


async def test_a_pod_that_is_gone_wants_no_model(tmp_path: Path) -> None:
    node, model = await serving_since_before(tmp_path)
    saw(node.models)
    assert model.is_wanted
    note_pod(node.models, Change(ChangeKind.GONE, pod("p1", on="n1", choice="rubbish")), KEYS)
    assert wanted(node, model) == (True, False)
