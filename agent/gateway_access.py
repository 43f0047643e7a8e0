"""What a pod gets of the node's gateway: its endpoint, its ticket, and the limits that it requests."""

import asyncio
from collections.abc import Sequence

from agent.models import Model
from agent.replicas import Replicas, read_limits
from berth.contract.endpoint import Endpoint
from berth.v1 import node_agent_pb2 as pb


class GatewayAccess:
    """`wakes`: set where limits have changed."""

    def __init__(
        self, replicas: Replicas, endpoint: Endpoint | None, wakes: Sequence[asyncio.Event] = ()
    ) -> None:
        self._replicas, self._endpoint, self._wakes = replicas, endpoint, wakes

    def of(self, model: Model) -> pb.Gateway | None:
        """Only for a pod that has proved which it is. None where the node has no gateway."""
        if self._endpoint is None:
            return None
        return pb.Gateway(endpoint=str(self._endpoint), ticket=self._replicas.ticket(model.ref.uid))

    def set_limits(self, model: Model, limits: pb.ReplicaLimits) -> None:
        """What the pod requests of the gateway from now on. Raises InvalidValue."""
        if self._replicas.set_limits(model.ref.uid, read_limits(limits)):
            for wake in self._wakes:
                wake.set()

    def gpu_failure(self, model: Model) -> str:
        """What is broken of the GPU of a model that serves."""
        return self._replicas.gpu_failure(model)
