"""Calls beside what the agent does by itself."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.api import NodeAgentApi
from agent.metrics import AgentMetrics
from berth.contract.ids import ModelName
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.triton.errors import TritonRefused
from berth.v1 import node_agent_pb2 as pb
from tests.fakes.agent_node import GPU, Node
from tests.fakes.objects import pod


class Knows:
    """Whoever calls is pod p1, and lives here."""

    async def pod_of(self, metadata: Mapping[str, str]) -> PodRef:
        return parse_model_pod(pod("p1"), Keys()).ref

    async def admit(self, ref: PodRef) -> ModelPod:
        return parse_model_pod(pod("p1", on="n1", choice=GPU), Keys())


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, details: str) -> None:
        raise AssertionError(f"{code}: {details}")


def api_of(node: Node) -> NodeAgentApi:
    return NodeAgentApi(
        authenticator=Knows(),
        guard=Knows(),  # type: ignore[arg-type]
        models=node.models,
        repository=node.repository,
        lifecycle=node.lifecycle,
        readings=tuple,
        access=pb.TritonAccess(),
        metrics=AgentMetrics(CollectorRegistry()),
        max_model_bytes=1,
    )


async def outcome(api: NodeAgentApi) -> pb.LoadProgress:
    request = pb.LoadRequest(model_name="model-p1")
    return [progress async for progress in api.Load(request, Context())][-1]


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
    with pytest.raises(AssertionError, match=r"FAILED_PRECONDITION.*has not been staged"):
        await outcome(api_of(Node(tmp_path)))
