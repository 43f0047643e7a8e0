"""The state of the control streams: what each activator has been assigned, what is still to be sent to it, and what of its
reports is believed. Pure: `control_server` does the I/O.

An activator gets a snapshot first, then what has changed, the newest of each model alone: one that reads slowly makes
nothing grow. Its reports are believed of the models that it was assigned, of its own pod's address, and within limits.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from berth.contract.activation import Assignment, Report
from berth.contract.activation_codec import decode_report, encode_assignment, encode_removal
from berth.contract.errors import InvalidValue
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from berth.v1 import scaler_pb2 as pb
from scaler.activation.activators import Activator, Activators
from scaler.activation.addresses import ClientAddresses, Json
from scaler.activation.ports import PortPair
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

_ANY_NAMESPACE: Final = "*"


@dataclass(frozen=True, slots=True)
class Connected:
    """One activator: for how long its stream has been open, and how many requests it buffers, of all models."""

    name: str
    seconds: float
    buffered: int


@dataclass(slots=True)
class Taken:
    """Of one message: the reports of load, the models whose open ports have changed, and how many reports were rejected:
    of models that are not assigned to the activator, or of what cannot be."""

    reports: list[Report] = field(default_factory=list)
    changed: list[ModelKey] = field(default_factory=list)
    rejected: int = 0


class Session:
    """One stream. `notify` is called when there is something to send, `end` when this stream is to end."""

    def __init__(
        self,
        activator: Activator,
        activators: Activators,
        addresses: ClientAddresses,
        began_ns: int,
        *,
        notify: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.activator, self.began_ns, self.end = activator, began_ns, end
        self._activators, self._notify = activators, notify
        # As the activator knows it, or will when it has read what is on its way.
        self.assigned: dict[ModelKey, Assignment] = {}
        # The version of each model since which it has been assigned without a break: a report of an older one is not of
        # the ports that are open now.
        self._since: dict[ModelKey, int] = {}
        self._buffered: dict[ModelKey, int] = {}
        self.subscription = addresses.subscribe()
        self._unsent: dict[ModelKey, Assignment | None] = {}
        # By namespace: how many of the assigned models let its pods call.
        self._clients: dict[str, int] = {}

    @property
    def buffered(self) -> int:
        return sum(self._buffered.values())

    # What is sent.

    def assign(self, model: ModelKey, assignment: Assignment | None, next_version: Callable[[], int]) -> None:
        before = self.assigned.get(model)
        if assignment is None:
            if before is None:
                return
            del self.assigned[model], self._since[model]
            self._buffered.pop(model, None)
            self.activator.open.pop(model, None)
        else:
            if before is not None and replace(assignment, version=before.version) == before:
                return
            assignment = self.assigned[model] = replace(assignment, version=next_version())
            self._since.setdefault(model, assignment.version)
        self._count_clients(before, -1)
        self._count_clients(assignment, 1)
        self._unsent[model] = assignment
        self._notify()

    def addresses_changed(self) -> None:
        if self.subscription.has_changes:
            self._notify()

    def message(self, *, snapshot: bool) -> pb.ControlResponse:
        """All that is to be sent now. In one message, because an activator has to know the namespace of an address before
        it lets a model's clients in by it."""
        self.subscription.select(self._namespaces())
        unsent, self._unsent = self._unsent, {}
        return pb.ControlResponse(
            snapshot=snapshot,
            assignments=list(_encoded(unsent, snapshot=snapshot)),
            client_addresses=self.subscription.take(),
        )

    def _count_clients(self, assignment: Assignment | None, by: int) -> None:
        for namespace in () if assignment is None else assignment.clients:
            self._clients[namespace] = self._clients.get(namespace, 0) + by
            if not self._clients[namespace]:
                del self._clients[namespace]

    def _namespaces(self) -> frozenset[str]:
        """Whose pods' addresses are sent. A tenant's own activator gets no other tenant's."""
        wanted = frozenset(self._clients) - {_ANY_NAMESPACE}
        return wanted if self.activator.scope is None else wanted & {self.activator.scope}

    # What comes.

    def greeted(self, hello: pb.ActivatorHello) -> bool:
        """A hello after the first; True if it drains from now on, or no more. Raises InvalidValue."""
        if hello.address != self.activator.address:
            raise InvalidValue("an activator does not move; begin a new stream")
        changed = hello.draining != self.activator.draining
        self.activator.draining = hello.draining
        return changed

    def take(self, messages: Iterable[pb.ModelReport]) -> Taken:
        taken = Taken()
        for message in messages:
            self._take_one(message, taken)
        if not self.activator.has_reported:
            self.activator.has_reported = True
            taken.changed = list(self.assigned)
        return taken

    def _take_one(self, message: pb.ModelReport, taken: Taken) -> None:
        model = ModelKey(message.namespace, message.name)
        assignment = self.assigned.get(model)
        if assignment is None or not self._since[model] <= message.version <= assignment.version:
            taken.rejected += 1
            return
        try:
            report = _bounded(decode_report(message), assignment)
        except InvalidValue:
            taken.rejected += 1
            return
        if self._activators.set_open(self.activator, model, PortPair(report.rest_port, report.grpc_port)):
            taken.changed.append(model)
        if report.buffered or report.arrived or report.average_buffered or self._buffered.get(model):
            self._buffered[model] = report.buffered
            taken.reports.append(report)


class Sessions:
    """Of all activators that are connected. `assign` may be called at any time and never waits."""

    def __init__(self, activators: Activators, clock_ns: Callable[[], int]) -> None:
        self._activators, self._clock_ns = activators, clock_ns
        self._addresses = ClientAddresses()
        self._sessions: dict[PodUid, Session] = {}
        self._version = 0

    def __contains__(self, uid: PodUid) -> bool:
        return uid in self._sessions

    def begin(self, activator: Activator, *, notify: Callable[[], None], end: Callable[[], None]) -> Session:
        """An earlier stream of the same activator ends: it knows better than we that it is over."""
        if (before := self._sessions.get(activator.uid)) is not None:
            before.end()
        session = self._sessions[activator.uid] = Session(
            activator, self._activators, self._addresses, self._clock_ns(), notify=notify, end=end
        )
        return session

    def leave(self, session: Session) -> bool:
        """Its stream has ended; False where the activator has another by now."""
        self._addresses.unsubscribe(session.subscription)
        if self._sessions.get(session.activator.uid) is not session:
            return False
        del self._sessions[session.activator.uid]
        self._activators.disconnect(session.activator, self._clock_ns())
        return True

    def assign(self, model: ModelKey, assignments: Mapping[PodUid, Assignment]) -> None:
        """What each activator is to do for a model; from those without an assignment it is removed."""
        for uid, session in self._sessions.items():
            session.assign(model, assignments.get(uid), self._next_version)

    def set_client(self, pod: Json) -> None:
        """A pod that may call some model."""
        self._addresses.set_pod(pod)
        self._addresses_changed()

    def delete_client(self, pod: Json) -> None:
        self._addresses.delete_pod(pod)
        self._addresses_changed()

    def _addresses_changed(self) -> None:
        for session in self._sessions.values():
            session.addresses_changed()

    def end(self) -> None:
        """This replica does not lead any more: its activators look for the one that does."""
        for session in list(self._sessions.values()):
            session.end()

    def connected(self) -> list[Connected]:
        now_ns = self._clock_ns()
        return [
            Connected(one.activator.name, (now_ns - one.began_ns) / SECOND_NS, one.buffered)
            for one in self._sessions.values()
        ]

    def _next_version(self) -> int:
        """Grows over restarts and changes of the leader, too."""
        self._version = max(self._version + 1, self._clock_ns() // 1000)
        return self._version


def _bounded(report: Report, assignment: Assignment) -> Report:
    """No activator buffers more than it may, and the ports of a model are those that it was assigned."""
    most = assignment.limits.requests
    return replace(
        report,
        buffered=min(report.buffered, most),
        average_buffered=min(report.average_buffered, float(most)),
        buffered_bytes=min(report.buffered_bytes, assignment.limits.bytes),
        rest_port=report.rest_port if report.rest_port == assignment.rest_port else 0,
        grpc_port=report.grpc_port if report.grpc_port == assignment.grpc_port else 0,
    )


def _encoded(unsent: Mapping[ModelKey, Assignment | None], *, snapshot: bool) -> Iterator[pb.ModelAssignment]:
    """Much of an assignment comes from a tenant: one that does not fit the message must not hold back the others."""
    for model, assignment in unsent.items():
        if assignment is None:
            if not snapshot:
                yield encode_removal(model)
            continue
        try:
            yield encode_assignment(assignment)
        except (TypeError, ValueError) as error:
            log.error(
                "an assignment cannot be sent", extra={"fields": {"model": str(model), "error": str(error)}}
            )
