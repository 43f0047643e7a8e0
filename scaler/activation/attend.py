"""The scaler's end of `berth.v1.Scaler/Attend`: activators attach, are told what to hold, and report what they hold.

An activator is told all at first, then what has changed, the newest word of each model alone: one that reads slowly makes
nothing grow. What it says is believed of the models that it was told of, of its own pod's address, and within bounds.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.ids import PodUid
from berth.contract.scaling import BEAT_SECONDS, Assignment, ModelKey, Report
from berth.kube.errors import KubeError
from berth.runtime.grpc_options import listen_on, server_options
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerServicer, add_ScalerServicer_to_server
from scaler.activation.activators import Activator, Activators
from scaler.activation.callers import Caller, Callers, NotAllowed, TooMany, Unauthenticated
from scaler.activation.messages import assignment_message, is_sane, report_of
from scaler.activation.ports import PortPair
from scaler.activation.slices import is_ipv4
from scaler.activation.sources import Sources
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

# Calls of the system's own together, of all others, and of one namespace's. An activator has one, two while it dials
# anew.
_MOST_SYSTEM, _MOST_SCOPED, _MOST_OF_ONE = 128, 256, 8
_HELLO_SECONDS: Final = 10.0
# One that takes nothing for so long is given up; it dials again.
_WRITE_SECONDS: Final = 30.0
_MESSAGE_BYTES: Final = 1024 * 1024
_METADATA_BYTES: Final = 24 * 1024
# What one may send in the long run and at once: messages, of which some reports are as much as one more. Whoever sends
# more is read more slowly.
_RATE, _BURST, _REPORTS_EACH = 200.0, 400.0, 20
_MOST_REPORTS: Final = 10_000
_CONNECTIONS, _CALLS = 1024, 512
_PROBE_SECONDS: Final = 1.0
# A token is looked at when a stream begins.
_STREAM_SECONDS: Final = 3600.0
_LAST_WORDS_SECONDS: Final = 0.2


class NotLeading(Exception):
    """Another replica does, or this one does not know enough yet. `leader`: HOST:PORT, where it is known."""

    def __init__(self, leader: str = "") -> None:
        super().__init__("this replica does not lead")
        self.leader = leader


class Core(Protocol):
    """What becomes of it. Nothing of this waits."""

    def require_leading(self) -> None:
        """Raises NotLeading until this replica leads and has looked at everything there is."""
        ...

    def attached(self, activator: Activator) -> None:
        """One more: what it is to hold is to be told before this returns."""
        ...

    def detached(self, activator: Activator) -> None:
        """Its stream has ended, whatever has become of it."""
        ...

    def opened(self, model: ModelKey) -> None:
        """An activator has opened the model's ports, or closed them."""
        ...

    def reported(self, activator: Activator, report: Report) -> None:
        """What it holds of a model, and has held."""
        ...


_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (TooMany, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidValue, grpc.StatusCode.INVALID_ARGUMENT),
    (NotLeading, grpc.StatusCode.UNAVAILABLE),
    (KubeError, grpc.StatusCode.UNAVAILABLE),
)
_TOLD: Final = tuple(kind for kind, _ in _CODES)


@dataclass(slots=True)
class Figures:
    """What has come over all streams since the start."""

    reports: int = 0
    # Of models that the activator has nothing to do with, or of what cannot be.
    left_aside: int = 0
    # Messages after which whoever sent them was read more slowly.
    slowed: int = 0


@dataclass(frozen=True, slots=True)
class Attached:
    """One activator: for how long its stream has been here, and how many requests it holds, of all models."""

    name: str
    seconds: float
    held: int


class Attendance(ScalerServicer):
    """All streams. `tell` is the other direction; it may be called at any time and never waits."""

    def __init__(
        self,
        core: Core,
        callers: Callers,
        activators: Activators,
        sources: Sources,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._core, self._callers, self._activators = core, callers, activators
        self._sources, self._clock_ns = sources, clock_ns
        self._sessions: dict[PodUid, _Session] = {}
        # Calls of each scope that have not ended.
        self._open: Counter[str | None] = Counter()
        self._version = 0
        self._probes: set[asyncio.Task[None]] = set()
        self.figures = Figures()

    def tell(self, model: ModelKey, assignments: Mapping[PodUid, Assignment]) -> None:
        """What each activator is to do for a model; those that are not among them have nothing to do with it."""
        for uid, session in self._sessions.items():
            session.tell(model, assignments.get(uid), self._next_version)

    def attached(self) -> list[Attached]:
        now_ns = self._clock_ns()
        return [
            Attached(one.one.name, (now_ns - one.began_ns) / SECOND_NS, sum(one.held.values()))
            for one in self._sessions.values()
        ]

    def sources_changed(self) -> None:
        """Somebody's addresses are others now."""
        for session in self._sessions.values():
            session.look()

    def end(self) -> None:
        """This replica does not lead any more: who is attached looks for the one that does."""
        for session in list(self._sessions.values()):
            session.end.set()

    async def Attend(  # noqa: N802
        self, requests: AsyncIterator[pb.AttendRequest], context: Context
    ) -> AsyncIterator[pb.AttendResponse]:
        try:
            caller = await self._callers.caller(_metadata_of(context), _source_of(context))
        except _TOLD as error:
            await self._refuse(requests, context, error)
        self._open[caller.scope] += 1
        try:
            await self._attend(caller, requests, context)
        except _TOLD as error:
            # Where nobody reads, this ends with the connection; the call is counted until then.
            await self._refuse(requests, context, error)
        finally:
            self._open[caller.scope] -= 1
        return
        yield  # what is sent is written by the session, which can give a reader up

    async def _refuse(
        self, requests: AsyncIterator[pb.AttendRequest], context: Context, error: Exception
    ) -> NoReturn:
        """gRPC's asyncio clients forget the status of a call that ends while they write (grpc/grpc#36066). A read that
        was given up a moment ago may still be under way below, where there is one at a time (InternalError)."""
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        log.info("activator refused", extra=fields(code=code.name, reason=error))
        with suppress(TimeoutError, StopAsyncIteration, grpc.aio.InternalError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await anext(requests)
        leader = (("leader", error.leader),) if isinstance(error, NotLeading) and error.leader else ()
        await context.abort(code, str(error)[:1000], leader)
        raise AssertionError("abort always raises") from error

    async def _attend(
        self, caller: Caller, requests: AsyncIterator[pb.AttendRequest], context: Context
    ) -> None:
        """Raises what is to be told."""
        self._require_room(caller)
        session = await self._begin(caller, requests)
        try:
            await self._serve(session, requests, context)
        finally:
            self._leave(session)

    def _require_room(self, caller: Caller) -> None:
        """Raises TooMany. Nobody takes another's room: neither the system's nor another namespace's. Calls that
        cannot end because nobody reads them count, too."""
        mine = self._open[caller.scope]
        scoped = self._open.total() - self._open[None]
        full = mine > _MOST_SYSTEM if caller.scope is None else mine > _MOST_OF_ONE or scoped > _MOST_SCOPED
        if full:
            raise TooMany("too many activators are attached")

    async def _begin(self, caller: Caller, requests: AsyncIterator[pb.AttendRequest]) -> "_Session":
        hello = await _hello(requests)
        self._core.require_leading()
        if hello.address not in caller.addresses or not is_ipv4(hello.address):
            raise NotAllowed(f"pod {caller.ref} does not have the address that it says")
        if (before := self._sessions.get(caller.uid)) is not None:
            before.end.set()  # the activator knows better than we that it is over
        one = self._activators.attach(caller.uid, str(caller.ref), hello.address, caller.scope)
        one.leaving = hello.leaving
        session = self._sessions[caller.uid] = _Session(one, self._sources, self._clock_ns())
        log.info("activator attached", extra=fields(activator=one.name, address=one.address, scope=one.scope))
        self._core.attached(one)
        return session

    async def _serve(
        self, session: "_Session", requests: AsyncIterator[pb.AttendRequest], context: Context
    ) -> None:
        """Until the activator ends it, or we do. Raises what is to be told."""
        tasks = [
            asyncio.create_task(self._read(session, requests)),
            asyncio.create_task(session.write(context)),
            asyncio.create_task(session.end.wait()),
        ]
        try:
            async with asyncio.timeout(_STREAM_SECONDS):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error
        if session.end.is_set():
            self._core.require_leading()

    async def _read(self, session: "_Session", requests: AsyncIterator[pb.AttendRequest]) -> None:
        pace = _Pace()
        async for request in requests:
            if request.WhichOneof("part") == "hello":
                self._hello_again(session, request.hello)
            else:
                self._take(session, request.reports.reports)
            pause = pace.pause(1 + len(request.reports.reports) / _REPORTS_EACH)
            if pause > 0:
                self.figures.slowed += 1
                await asyncio.sleep(pause)

    def _hello_again(self, session: "_Session", hello: pb.ActivatorHello) -> None:
        one = session.one
        if hello.address != one.address:
            raise InvalidValue("an activator does not move; begin a new stream")
        if hello.leaving != one.leaving:
            one.leaving = hello.leaving
            for model in list(session.told):
                self._core.opened(model)

    def _take(self, session: "_Session", reports: Any) -> None:
        if len(reports) > _MOST_REPORTS:
            raise InvalidValue(f"{len(reports)} reports at once; at most {_MOST_REPORTS} are read")
        one, news = session.one, []
        for said in reports:
            self.figures.reports += 1
            model = ModelKey(said.namespace, said.name)
            told = session.told.get(model)
            if told is None or not session.since[model] <= said.version <= told.version or not is_sane(said):
                self.figures.left_aside += 1
                continue
            report = report_of(model, said, told)
            if self._activators.opened(one, model, PortPair(report.rest_port, report.grpc_port)):
                news.append(model)
            if report.held or report.arrived or report.average_held or session.held.get(model):
                session.held[model] = report.held
                self._core.reported(one, report)
        is_first, one.has_told = not one.has_told, True
        for model in list(session.told) if is_first else news:
            self._core.opened(model)

    def _leave(self, session: "_Session") -> None:
        one = session.one
        self._sources.leave(session.follower)
        if self._sessions.get(one.uid) is not session:
            return
        del self._sessions[one.uid]
        self._activators.detach(one, self._clock_ns())
        log.info("activator detached", extra=fields(activator=one.name, leaving=one.leaving))
        self._core.detached(one)
        if one.open and not one.leaving:
            probe = asyncio.create_task(self._probe(one))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe(self, one: Activator) -> None:
        """A process that is gone refuses at once: nobody is to be led there any more."""
        port = next(port for pair in one.open.values() for port in pair if port)
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(one.address, port)
        except ConnectionRefusedError:
            if one.uid not in self._sessions:
                models = list(one.open)
                self._activators.detach(one, self._clock_ns(), dead=True)
                log.warning("activator is gone", extra=fields(activator=one.name))
                for model in models:
                    self._core.opened(model)
        except (OSError, TimeoutError):
            pass  # who cannot be reached from here may serve others
        else:
            writer.close()

    def _next_version(self) -> int:
        """Grows over restarts and changes of the leader, too."""
        self._version = max(self._version + 1, self._clock_ns() // 1000)
        return self._version


class _Session:
    """One stream: what has been told on it, and what is still to be."""

    def __init__(self, one: Activator, sources: Sources, began_ns: int) -> None:
        self.one, self.began_ns = one, began_ns
        self.end = asyncio.Event()
        # As it is known to the activator, or will be by what is on its way.
        self.told: dict[ModelKey, Assignment] = {}
        # The version of each since which it is told of that model without a break: what is said of an older one is
        # not of the ports that are open now.
        self.since: dict[ModelKey, int] = {}
        self.held: dict[ModelKey, int] = {}
        self.follower = sources.follow()
        self._news: dict[ModelKey, Assignment | None] = {}
        self._wake = asyncio.Event()
        # By namespace: how many of the models it is told of let its pods call.
        self._clients: dict[str, int] = {}

    def tell(self, model: ModelKey, assignment: Assignment | None, version: Callable[[], int]) -> None:
        before = self.told.get(model)
        if assignment is None:
            if before is None:
                return
            del self.told[model], self.since[model]
            self.held.pop(model, None)
            self.one.open.pop(model, None)
        else:
            if before is not None and replace(assignment, version=before.version) == before:
                return
            assignment = self.told[model] = replace(assignment, version=version())
            self.since.setdefault(model, assignment.version)
        self._count(before, -1)
        self._count(assignment, 1)
        self._news[model] = assignment
        self._wake.set()

    def look(self) -> None:
        if self.follower.has_news:
            self._wake.set()

    async def write(self, context: Context) -> None:
        """All that there is, then what changes, or that nothing has. Raises TooMany for one that does not read."""
        whole = True
        while True:
            self._wake.clear()
            # In this order: an activator knows whose an address is before it lets a model's clients in by it.
            self.follower.want(self._namespaces())
            await _write(context, self._message(whole=whole))
            whole = False
            await wait_until_set(self._wake, timeout_seconds=BEAT_SECONDS)

    def _message(self, *, whole: bool) -> pb.AttendResponse:
        news, self._news = self._news, {}
        return pb.AttendResponse(
            whole=whole,
            assignments=[
                said
                for model, assignment in news.items()
                if not (whole and assignment is None)
                and (said := assignment_message(model, assignment)) is not None
            ],
            sources=self.follower.take(),
        )

    def _count(self, assignment: Assignment | None, by: int) -> None:
        for namespace in () if assignment is None else assignment.clients:
            self._clients[namespace] = self._clients.get(namespace, 0) + by
            if not self._clients[namespace]:
                del self._clients[namespace]

    def _namespaces(self) -> frozenset[str]:
        """Whose pods' addresses it is told. One that is a tenant's own hears of no other tenant's."""
        wanted = frozenset(self._clients) - {"*"}
        return wanted if self.one.scope is None else wanted & {self.one.scope}


class _Pace:
    """A bucket of what one may send; the pause after which it may go on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._have, self._at = clock, _BURST, clock()

    def pause(self, worth: float) -> float:
        now = self._clock()
        self._have = min(_BURST, self._have + (now - self._at) * _RATE) - worth
        self._at = now
        return max(0.0, -self._have / _RATE)


@asynccontextmanager
async def serving(attendance: Attendance, listen: Endpoint) -> AsyncIterator[int]:
    """The gRPC server; gives its port. Raises CannotStart."""
    server = grpc.aio.server(
        options=server_options(
            message_bytes=_MESSAGE_BYTES,
            metadata_bytes=_METADATA_BYTES,
            connections=_CONNECTIONS,
            every_seconds=10,
            within_seconds=5,
        ),
        maximum_concurrent_rpcs=_CALLS,
    )
    add_ScalerServicer_to_server(attendance, server)  # type: ignore[no-untyped-call]
    port = await listen_on(server, listen, flag="--attend-listen")
    try:
        yield port
    finally:
        attendance.end()
        await server.stop(0.5)


# A call.


async def _write(context: Context, message: pb.AttendResponse) -> None:
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await context.write(message)
    except TimeoutError:
        raise TooMany("the stream is not read") from None


async def _hello(requests: AsyncIterator[pb.AttendRequest]) -> pb.ActivatorHello:
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            first = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidValue("the stream came without a hello") from None
    if first.WhichOneof("part") != "hello":
        raise InvalidValue("the first message is not hello")
    return first.hello


def _metadata_of(context: Context) -> dict[str, str]:
    """What the caller says beside its messages, as far as it is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _source_of(context: Context) -> str:
    """The address that the call comes from, without the port, which each connection has anew."""
    return unquote(context.peer()).rpartition(":")[0]
