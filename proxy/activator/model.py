"""One model on an activator: its ports, its buffer, its pods, and what is reported of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from berth.contract.activation import Assignment, Report, RouteMode
from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.contract.scaling import ModelKey
from proxy.activator.bounds import Bounds
from proxy.activator.local_answers import ActivatorAnswers, ActivatorRest, AtZero, LastAnswers
from proxy.activator.pod import Pod, PodParts
from proxy.activator.pods import Pods
from proxy.activator.port import BoundedClients, PendingClients, Port
from proxy.activator.throttler import TIMED_OUT, Throttler
from proxy.activator.tls_tunnel import TlsTunnels
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.grpc.downstream import GrpcCommon, GrpcDownstream
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestShared
from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import Flags
from proxy.request.budget import Budget
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.load import LoadMeter
from proxy.request.replica import Replica
from proxy.transport.tunnel import Watermark
from proxy.upstream.grpc import AnswerReaders

# A replica has limits of its own, which it tells clients by itself: these are the most that any may have.
_REQUEST_SECONDS: Final = 3600.0
_REQUEST_BYTES: Final = 1024**3
_JSON_BYTES: Final = 64 * 1024**2
# Connections beside those of the requests that may wait.
_IDLE_CONNECTIONS: Final = 1024
_FLAGS: Final = Flags(json="max-json-bytes", request="max-request-bytes", inflight="hold-bytes")
_REMOVED: Final = "the model is gone"


@dataclass(frozen=True, slots=True)
class Common:
    """What all models of a process share. `bounds_of`: a namespace's part of what there is. `is_allowed`: whether a
    client at an address may call a model."""

    host: str
    bounds_of: Callable[[str], Bounds]
    rest: RestShared
    grpc: GrpcCommon
    readers: AnswerReaders
    watermark: Watermark
    is_allowed: Callable[[ModelKey, str], bool]
    pending: PendingClients


class BufferedModel:
    """`apply` is for one caller at a time."""

    def __init__(
        self, assignment: Assignment, common: Common, cold_start: Callable[["BufferedModel"], None]
    ) -> None:
        """`cold_start`: called when a request waits, no replica is ready, and no request waited before."""
        self.assignment, self._common, self._report_cold_start = assignment, common, cold_start
        self.key = assignment.model
        bounds = common.bounds_of(self.key.namespace)
        self.throttler, self.replica = self._make_replica(bounds)
        answers = LastAnswers(assignment.public_name)
        self._at_zero = AtZero(answers)
        parts = PodParts(
            None if assignment.tls else answers, common.grpc.batch, common.readers, bounds.probe_load
        )
        self.pods = Pods(
            parts, self._pods_changed, self.throttler, patience_seconds=assignment.limits.seconds
        )
        self._room = Budget(assignment.limits.requests + _IDLE_CONNECTIONS, bounds.connections)
        self.rest, self.grpc = self._make_rest(), self._make_grpc()
        self._tunnels = (
            self._make_tunnels(lambda pod: pod.endpoint.rest_port),
            self._make_tunnels(lambda pod: pod.endpoint.grpc_port),
        )
        self.rest_port = Port(self._rest_client, self._allows, common.pending)
        self.grpc_port = Port(self._grpc_client, self._allows, common.pending)
        # Version, ports: as they were reported last.
        self._reported: tuple[int, int, int] | None = None
        self._was_busy = self._is_ending = False

    def _make_replica(self, bounds: Bounds) -> tuple[Throttler, Replica]:
        """The data plane's view of the model: what admits its requests is the throttler."""
        made: list[Throttler] = []

        def admissions(meter: LoadMeter) -> Throttler:
            made.append(Throttler(meter, self.assignment.limits, bounds, self._cold_start))
            return made[0]

        name = self.assignment.public_name.encode()
        replica = Replica(
            Names(name, name),
            ReplicaLimits(
                request_timeout_seconds=_REQUEST_SECONDS,
                max_json_bytes=_JSON_BYTES,
                max_request_bytes=_REQUEST_BYTES,
                max_inflight_bytes=self.assignment.limits.bytes,
            ),
            process_budget=bounds.memory,
            admissions=admissions,
            flags_of=lambda limits: _FLAGS,
        )
        replica.facts = ModelFacts(is_known=False)
        replica.triton_says(None)  # it may be at zero: requests for inference are served
        return made[0], replica

    def _make_rest(self) -> ActivatorRest:
        # Where a replica is differs from request to request; what is said of it in a head does not.
        here = Endpoint(self.key.name, self.assignment.rest_port)
        cluster = UpstreamCluster(UpstreamEndpoint(here, here))
        rest = ActivatorRest(self._common.rest, self.replica, cluster=cluster, pool=self.pods)
        rest.at_zero = self._at_zero
        rest.clients = BoundedClients(self.replica.rest, self._room, lambda one: one.abort())
        return rest

    def _make_grpc(self) -> GrpcDownstream:
        local = ActivatorAnswers(self.replica, self._at_zero)
        grpc = GrpcDownstream(self.replica, self._common.grpc, triton=self.pods, local=local)
        grpc.overdue = TIMED_OUT
        grpc.clients = BoundedClients(self.replica.grpc, self._room, lambda one: one.abort("no room"))
        return grpc

    def _make_tunnels(self, port_of: Callable[[Pod], int]) -> TlsTunnels:
        return TlsTunnels(self.throttler, self.pods, self._common.watermark, self._room, port_of)

    def _rest_client(self) -> asyncio.BaseProtocol:
        return self._tunnels[0].connection() if self.assignment.tls else RestConnection(self.rest)

    def _grpc_client(self) -> asyncio.BaseProtocol:
        return self._tunnels[1].connection() if self.assignment.tls else GrpcConnection(self.grpc)

    def _allows(self, address: str) -> bool:
        return self._common.is_allowed(self.key, address)

    # What it is assigned.

    async def apply(self, assignment: Assignment) -> None:
        """A later assignment of the same model, of the same name and kind."""
        self.assignment = assignment
        limits, waiting_for = assignment.limits, assignment.waiting_for
        self.throttler.set_limits(limits)
        self.pods.patience_seconds = limits.seconds
        self.rest.overdue = self.grpc.overdue = f"{TIMED_OUT}: {waiting_for}" if waiting_for else TIMED_OUT
        self.rest.arrival_seconds = self.grpc.arrival_seconds = limits.seconds
        self.replica.budget.limit_bytes = limits.bytes
        self._room.limit_bytes = limits.requests + _IDLE_CONNECTIONS
        self.pods.assign(assignment.endpoints)
        self._refuse(assignment.unavailable or None)
        await self._open_ports()
        self._ask_clients_to_leave()

    async def _open_ports(self) -> None:
        rest, grpc = self.assignment.rest_port, self.assignment.grpc_port
        await self.rest_port.open(self._common.host, 0 if self._is_ending else rest)
        await self.grpc_port.open(self._common.host, 0 if self._is_ending else grpc)

    def _refuse(self, reason: str | None) -> None:
        """No request is to wait any more, and why. What pods serve they go on serving."""
        if reason is not None and self.pods.any_open:
            reason = None
        if reason != self.replica.closed:
            self.replica.closed = reason
            self.grpc.readiness_changed()
        self._end_waiting(reason)

    def _end_waiting(self, reason: str | None) -> None:
        self.pods.refuse(reason)
        if reason is not None:
            for tunnels in self._tunnels:
                tunnels.end_waiting()
            self.throttler.release_all()

    def _ask_clients_to_leave(self) -> None:
        """While its Service leads to the replicas: answers end their connection, and calls get a GOAWAY."""
        self.rest.ends_idle = self._is_ending
        self.rest.is_draining = self._is_leaving
        if self._is_leaving:
            self.grpc.stop_accepting()

    @property
    def _is_leaving(self) -> bool:
        return self._is_ending or self.assignment.mode is RouteMode.SERVE

    def _pods_changed(self) -> None:
        """Other pods serve, or have other slots."""
        self._at_zero.is_at_zero = not self.pods.any_open
        if self.assignment.unavailable:
            self._refuse(self.assignment.unavailable)
        self.throttler.allow(self.pods.slots(self.assignment.activators))

    # What it reports.

    def _cold_start(self) -> None:
        self.pods.probe_now()
        self._report_cold_start(self)

    @property
    def has_news(self) -> bool:
        """Whether the next report says anything that the last did not."""
        throttler = self.throttler
        is_busy = bool(throttler.buffered or throttler.arrived)
        return is_busy or self._was_busy or self._reported != self._listening

    @property
    def _listening(self) -> tuple[int, int, int]:
        return self.assignment.version, self.rest_port.number, self.grpc_port.number

    def report(self, now: float) -> Report:
        """Of the time since the last."""
        counts = self.throttler.counts(now)
        self.replica.tick(now)
        self._was_busy = bool(counts.buffered or counts.arrived)
        self._reported = self._listening
        version, rest, grpc = self._listening
        return Report(
            version=version,
            model=self.key,
            buffered=counts.buffered,
            average_buffered=counts.average_buffered,
            arrived=counts.arrived,
            forwarded=counts.forwarded,
            buffered_bytes=self.replica.budget.used_bytes,
            oldest_seconds=counts.oldest_seconds,
            cold_start=self.throttler.needs_replica,
            rest_port=rest,
            grpc_port=grpc,
            served_ago=counts.served_ago,
        )

    async def tick(self, now: float) -> None:
        """Every second."""
        self.rest.tick(now)
        self.grpc.tick(now)
        self.pods.tick(now)
        for tunnels in self._tunnels:
            tunnels.tick(now)
        self.throttler.hand_out()
        await self._open_ports()  # one that was taken may be free
        if self._is_leaving:
            self.grpc.stop_accepting()  # those too that have come since

    # The end.

    @property
    def is_busy(self) -> bool:
        """A request is under way, or its answer not delivered."""
        throttler = self.throttler
        if throttler.buffered or throttler.running or any(len(tunnels) for tunnels in self._tunnels):
            return True
        return self.grpc.busy_connections > 0 or any(client.is_busy for client in self.rest.clients)

    def stop_accepting(self) -> None:
        """No new clients; what is under way or buffered ends as it would."""
        self._is_ending = self.rest.ends_idle = True
        self.rest_port.close()
        self.grpc_port.close()
        self.rest.stop_accepting()
        self.grpc.stop_accepting()

    def end(self) -> None:
        """As `stop_accepting`, and requests that wait are refused."""
        self.stop_accepting()
        self.replica.closed = _REMOVED
        self._end_waiting(_REMOVED)

    async def close(self) -> None:
        self.rest_port.close()
        self.grpc_port.close()
        self.rest.close()
        self.grpc.close()
        for tunnels in self._tunnels:
            tunnels.close()
        await self.pods.close()
