"""The agent's API on a fake node."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from agent.access import Access
from agent.api import NodeAgentApi
from agent.auth import Authenticator
from agent.gateway_access import GatewayAccess
from agent.gpus import GpuReading
from agent.metrics import AgentMetrics
from agent.replicas import Replicas
from agent.stage import StageLimits, Stager
from berth.contract.endpoint import Endpoint
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from tests.fakes.agent_node import Node
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
