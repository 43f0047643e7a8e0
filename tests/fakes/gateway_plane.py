"""One process of a gateway without sockets: replicas that are real, with fakes of their clients and of Triton."""

import asyncio
from typing import Any

from berth.contract.gateway import ReplicaSpec
from proxy.gateway.connection_limits import PendingConnections
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.fair_reader import FairReadScheduler
from proxy.gateway.replica import ServedReplica
from proxy.gateway.routing import Router
from proxy.gateway.spec import Events, Spec
from proxy.policy.names import Names
from proxy.request.replica import Replica
from proxy.wire.preamble import Kind, Preamble
from tests.fakes.agent_control import replica_of
from tests.fakes.data_plane import Wire


class Clients:
    """The clients of one replica and one protocol; records what it is told."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.readiness_changes = self.stops = self.closes = self.busy_connections = 0

    def connection(self) -> asyncio.Protocol:
        return asyncio.Protocol()

    def tick(self, now: float) -> None:
        self.ticks.append(now)

    def readiness_changed(self) -> None:
        self.readiness_changes += 1

    def stop_accepting(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self.closes += 1


class Poller:
    """What polls Triton for a replica, and learns nothing."""

    def __init__(self, replica: Replica, watched: list[Replica]) -> None:
        self._replica, self._watched = replica, watched
        self.nudges = 0

    async def poll(self) -> None:
        self._watched.append(self._replica)
        try:
            await asyncio.Event().wait()
        finally:
            self._watched.remove(self._replica)

    def nudge(self) -> None:
        self.nudges += 1


class Plane:
    """The data plane and the router of one process, whose replicas Triton serves."""

    def __init__(self, most_connections: int = 100) -> None:
        self.downstreams: list[Clients] = []
        self.watched: list[Replica] = []
        self.pollers: list[Poller] = []
        self.shared: tuple[int, int] | None = None
        scheduler, self.events = FairReadScheduler(), Events(asyncio.Event())
        self.data_plane = DataPlane(lambda spec: self._make(spec, scheduler))
        self.router = Router(
            self.data_plane, scheduler, pending=PendingConnections(), most_connections=most_connections
        )

    def _make(self, spec: ReplicaSpec, scheduler: FairReadScheduler) -> ServedReplica:
        names = Names(spec.model.encode(), spec.server_name.encode())
        replica = Replica(names, spec.limits, shared=self.shared)
        replica.triton_says(None)
        self.pollers.append(Poller(replica, self.watched))
        return ServedReplica(spec, replica, self._downstream, self.pollers[-1], self.events, scheduler)

    def _downstream(self, *_: Any) -> Clients:
        self.downstreams.append(Clients())
        return self.downstreams[-1]

    def replica(self, uid: str) -> Replica:
        return self.data_plane._by_uid[uid].replica

    async def apply(self, spec: Spec) -> None:
        self.data_plane.apply(spec)
        await asyncio.sleep(0)

    def connect(self, uid: str, kind: Kind = Kind.REST) -> Any:
        """A connection, or None where it is rejected."""
        make = self.router.route(Preamble(kind, replica_of(uid).ticket))
        if make is None:
            return None
        protocol = make()
        protocol.connection_made(Wire())
        return protocol


def spec_of(*uids: str, **more: Any) -> Spec:
    return Spec(replicas=tuple(replica_of(uid) for uid in uids), **more)
