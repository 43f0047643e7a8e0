"""Which replica a new connection belongs to, and whether there is room for it. For a plane of many replicas."""

import asyncio
from collections.abc import Callable

from proxy.gateway.connection_limits import ConnectionLimit, PendingConnections
from proxy.gateway.data_plane import DataPlane
from proxy.gateway.fair_reader import FairReader, FairReadScheduler
from proxy.gateway.handshake import Handshake, Handshakes
from proxy.gateway.replica import ServedReplica
from proxy.wire.preamble import Kind, Preamble


class Router:
    """By ticket."""

    def __init__(
        self,
        data_plane: DataPlane,
        scheduler: FairReadScheduler,
        *,
        pending: PendingConnections[Handshake],
        most_connections: int,
    ) -> None:
        self._data_plane, self._scheduler = data_plane, scheduler
        self.limit = ConnectionLimit(most_connections)
        self.handshakes = Handshakes(self, pending)

    def route(self, preamble: Preamble) -> Callable[[], asyncio.Protocol] | None:
        served = self._data_plane.find(preamble.ticket)
        if served is None:
            return None
        if preamble.kind is Kind.REPORT:
            takes = served.takes_report() and not self._data_plane.is_draining
            return served.report if takes else None
        if served.is_draining or not self.limit.take(served.connections):
            served.replica.rejected()
            return None
        served.connections += 1
        downstream = served.downstream(preamble.kind)
        return lambda: FairReader(
            downstream.connection(), served.share, self._scheduler, lambda: self._gone(served)
        )

    def _gone(self, served: ServedReplica) -> None:
        served.connections -= 1
        self.limit.give_back()
