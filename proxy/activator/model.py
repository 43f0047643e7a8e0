"""One model as the activator holds it: its ports, its queue, its copies, and what is told of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from berth.contract.scaling import Assignment, HoldState, ModelKey, Report
from proxy.activator.answers import Asleep, HeldAnswers, HeldRest, Memory
from proxy.activator.hold import OVERDUE, Bounds, Hold
from proxy.activator.passing import Passing
from proxy.activator.pod import Pod
from proxy.activator.pods import Pods
from proxy.activator.port import BoundedClients, Doorstep, Port
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

# A copy has limits of its own, which it tells clients by itself: these are the most that any may have.
_REQUEST_SECONDS: Final = 3600.0
_REQUEST_BYTES: Final = 1024**3
_JSON_BYTES: Final = 64 * 1024**2
# Connections beside those of the requests that may wait.
_IDLE_CONNECTIONS: Final = 1024
_FLAGS: Final = Flags(json="max-json-bytes", request="max-request-bytes", inflight="hold-bytes")
_ELSEWHERE: Final = "the model is not served here any more: connect again"
_GONE: Final = "the model is gone"


@dataclass(frozen=True, slots=True)
class Common:
    """What all models of a process share. `bounds_of`: a namespace's part of what there is. `is_allowed`: whether a
    client at an address may call a model."""

    host: str
    bounds_of: Callable[[str], Bounds]
    rest: RestShared
    grpc: GrpcCommon
    readers: AnswerReaders
    crowd: Watermark
    is_allowed: Callable[[ModelKey, str], bool]
    doorstep: Doorstep


class HeldModel:
    """`apply` is for one caller at a time."""

    hold: Hold

    def __init__(self, told: Assignment, common: Common, woken: Callable[["HeldModel"], None]) -> None:
        """`woken`: called when a request waits for which there is no copy, and none waited before."""
        self.told, self._common, self._woken = told, common, woken
        self.key = told.model
        self._bounds = common.bounds_of(self.key.namespace)
        self.copy = self._make_copy()
        memory = Memory(told.public_name)
        self._asleep = Asleep(memory)
        self.pods = Pods(
            None if told.tls else memory,
            common.grpc.batch,
            common.readers,
            self._look_at_pods,
            self.hold,
            self._bounds.looks,
            patience_seconds=told.limits.seconds,
        )
        self._room = Budget(told.limits.requests + _IDLE_CONNECTIONS, self._bounds.connections)
        self.rest, self.grpc = self._make_rest(), self._make_grpc()
        self._passing = (
            self._make_passing(lambda pod: pod.told.rest_port),
            self._make_passing(lambda pod: pod.told.grpc_port),
        )
        self.rest_port = Port(self._rest_client, self._allows, common.doorstep)
        self.grpc_port = Port(self._grpc_client, self._allows, common.doorstep)
        # Version, ports: as they were told last.
        self._reported: tuple[int, int, int] | None = None
        self._was_busy = self._is_ending = False

    def _make_copy(self) -> Replica:
        told, bounds = self.told, self._bounds

        def make_hold(meter: LoadMeter) -> Hold:
            self.hold = Hold(meter, told.limits, bounds, self._wake)
            return self.hold

        name = told.public_name.encode()
        copy = Replica(
            Names(name, name),
            ReplicaLimits(
                request_timeout_seconds=_REQUEST_SECONDS,
                max_json_bytes=_JSON_BYTES,
                max_request_bytes=_REQUEST_BYTES,
                max_inflight_bytes=told.limits.bytes,
            ),
            process_budget=bounds.memory,
            admissions=make_hold,
            flags_of=lambda limits: _FLAGS,
        )
        copy.facts = ModelFacts(is_known=False)
        copy.triton_says(None)  # it may sleep: whoever asks for inference is served
        return copy

    def _make_rest(self) -> HeldRest:
        # Where a copy is differs from request to request; what is told of it in a head does not.
        here = Endpoint(self.key.name, self.told.rest_port)
        where = UpstreamCluster(UpstreamEndpoint(here, here))
        front = HeldRest(self._common.rest, self.copy, cluster=where, pool=self.pods)
        front.asleep = self._asleep
        front.clients = BoundedClients(self.copy.rest, self._room, lambda one: one.abort())
        return front

    def _make_grpc(self) -> GrpcDownstream:
        local = HeldAnswers(self.copy, self._asleep)
        front = GrpcDownstream(self.copy, self._common.grpc, triton=self.pods, local=local)
        front.overdue = OVERDUE
        front.clients = BoundedClients(self.copy.grpc, self._room, lambda one: one.abort("no room"))
        return front

    def _make_passing(self, port_of: Callable[[Pod], int]) -> Passing:
        return Passing(self.hold, self.pods, self._common.crowd, self._room, port_of)

    def _rest_client(self) -> asyncio.BaseProtocol:
        return self._passing[0].connection() if self.told.tls else RestConnection(self.rest)

    def _grpc_client(self) -> asyncio.BaseProtocol:
        return self._passing[1].connection() if self.told.tls else GrpcConnection(self.grpc)

    def _allows(self, address: str) -> bool:
        return self._common.is_allowed(self.key, address)

    # What it is told.

    async def apply(self, told: Assignment) -> None:
        """A later assignment of the same model, of the same name and kind."""
        self.told = told
        self.hold.set_limits(told.limits)
        self.pods.patience_seconds = told.limits.seconds
        self.rest.overdue = self.grpc.overdue = f"{OVERDUE}: {told.waits_for}" if told.waits_for else OVERDUE
        self.rest.arrival_seconds = self.grpc.arrival_seconds = told.limits.seconds
        self.copy.budget.limit_bytes = told.limits.bytes
        self._room.limit_bytes = told.limits.requests + _IDLE_CONNECTIONS
        self.pods.assign(told.endpoints)
        self._refuse(_ELSEWHERE if told.state is HoldState.OFF else told.hopeless or None)
        await self._open_ports()
        self._ask_clients_to_leave()

    async def _open_ports(self) -> None:
        is_off = self._is_ending or self.told.state is HoldState.OFF
        await self.rest_port.open(self._common.host, 0 if is_off else self.told.rest_port)
        await self.grpc_port.open(self._common.host, 0 if is_off else self.told.grpc_port)

    def _refuse(self, reason: str | None) -> None:
        """Nobody is to wait any more, and why. What copies serve they go on serving."""
        if reason is not None and self.pods.any_open and self.told.state is not HoldState.OFF:
            reason = None
        if reason != self.copy.closed:
            self.copy.closed = reason
            self.grpc.readiness_changed()
        self.pods.refuse(reason)
        if reason is not None:
            for passing in self._passing:
                passing.end_waiting()
            self.hold.let_all_go()

    def _ask_clients_to_leave(self) -> None:
        """While its Service leads elsewhere: answers end their connection, and calls are told to go."""
        is_ending = self._is_ending or self.told.state is HoldState.OFF
        self.rest.ends_idle = is_ending
        self.rest.is_draining = is_ending or self.told.state is not HoldState.HOLD
        if self.rest.is_draining:
            self.grpc.stop_accepting()

    def _look_at_pods(self) -> None:
        """Other copies are open, or have other slots."""
        self._asleep.is_asleep = not self.pods.any_open
        if self.told.hopeless:
            self._refuse(self.told.hopeless)
        self.hold.allow(self.pods.slots(self.told.share))

    # What it tells.

    def _wake(self) -> None:
        self.pods.look_again()
        self._woken(self)

    @property
    def has_news(self) -> bool:
        """Whether the next report says anything that the last did not."""
        hold = self.hold
        is_busy = bool(hold.held or hold.arrived)
        return is_busy or self._was_busy or self._reported != self._listening

    @property
    def _listening(self) -> tuple[int, int, int]:
        return self.told.version, self.rest_port.number, self.grpc_port.number

    def report(self, now: float) -> Report:
        """Of the time since the last."""
        counted = self.hold.look(now)
        self.copy.tick(now)
        self._was_busy = bool(counted.held or counted.arrived)
        self._reported = self._listening
        version, rest, grpc = self._listening
        return Report(
            version=version,
            model=self.key,
            held=counted.held,
            average_held=counted.average_held,
            arrived=counted.arrived,
            forwarded=counted.forwarded,
            held_bytes=self.copy.budget.used_bytes,
            oldest_seconds=counted.oldest_seconds,
            wake=self.hold.wakes,
            rest_port=rest,
            grpc_port=grpc,
            served_ago=counted.served_ago,
        )

    async def tick(self, now: float) -> None:
        """Every second."""
        self.rest.tick(now)
        self.grpc.tick(now)
        self.pods.tick(now)
        for passing in self._passing:
            passing.tick(now)
        self.hold.hand_out()
        await self._open_ports()  # one that was taken may be free
        if self._is_ending or self.told.state is not HoldState.HOLD:
            self.grpc.stop_accepting()  # those too that have come since

    # The end.

    @property
    def is_busy(self) -> bool:
        """Somebody's request is under way, or its answer not delivered."""
        if self.hold.held or self.hold.running or any(len(passing) for passing in self._passing):
            return True
        return self.grpc.busy_connections > 0 or any(client.is_busy for client in self.rest.clients)

    def stop_accepting(self) -> None:
        """Nobody new; whoever is here ends what is under way, or held."""
        self._is_ending = self.rest.ends_idle = True
        self.rest_port.close()
        self.grpc_port.close()
        self.rest.stop_accepting()
        self.grpc.stop_accepting()

    def end(self) -> None:
        """As `stop_accepting`, and whoever waits is told."""
        self.stop_accepting()
        self._end_waiting()

    def _end_waiting(self) -> None:
        self.copy.closed = _GONE
        self.pods.refuse(_GONE)
        for passing in self._passing:
            passing.end_waiting()
        self.hold.let_all_go()

    async def close(self) -> None:
        self.rest_port.close()
        self.grpc_port.close()
        self.rest.close()
        self.grpc.close()
        for passing in self._passing:
            passing.close()
        await self.pods.close()
