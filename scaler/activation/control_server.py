"""The scaler's end of the control stream, `berth.v1.Scaler/Control`: who may open one, how fast it is read, when it ends."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from berth.contract.activation import HEARTBEAT_SECONDS, Report
from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.kube.errors import KubeError
from berth.runtime.grpc_options import listen_on, server_options
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerServicer, add_ScalerServicer_to_server
from scaler.activation.activators import Activator, Activators
from scaler.activation.authentication import (
    ActivatorIdentity,
    Authenticator,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
)
from scaler.activation.sessions import Connected, Session, Sessions
from scaler.activation.slices import is_ipv4

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

# Calls of the system's activators together, of all others, and of one namespace's. An activator has one, two while it
# dials again.
_MOST_SYSTEM, _MOST_SCOPED, _MOST_OF_ONE = 128, 256, 8
_HELLO_SECONDS: Final = 10.0
# A stream from which nothing is read for this long ends; the activator dials again.
_WRITE_SECONDS: Final = 30.0
_MESSAGE_BYTES: Final = 1024 * 1024
_METADATA_BYTES: Final = 24 * 1024
# What one activator may send in the long run and at once: messages, of which some reports count as one more. One that
# sends more is read more slowly.
_RATE, _BURST, _REPORTS_EACH = 200.0, 400.0, 20
_MOST_REPORTS: Final = 10_000
_CONNECTIONS, _CALLS = 1024, 512
_PROBE_SECONDS: Final = 1.0
# A token is reviewed when a stream begins.
_STREAM_SECONDS: Final = 3600.0
_LAST_READ_SECONDS: Final = 0.2


class NotLeading(Exception):
    """Another replica does, or this one does not know enough yet. `leader`: HOST:PORT, where it is known."""

    def __init__(self, leader: str = "") -> None:
        super().__init__("this replica does not lead")
        self.leader = leader


class Handler(Protocol):
    """`scaler.route_controller.RouteController`, as far as it is needed here. Nothing of this waits."""

    def require_leading(self) -> None:
        """Raises NotLeading until this replica leads and has made one pass over all models."""
        ...

    def connected(self, activator: Activator) -> None:
        """One more: its models are assigned to it before this returns."""
        ...

    def disconnected(self, activator: Activator) -> None:
        """Its stream has ended, for whatever reason."""
        ...

    def ports_changed(self, model: ModelKey) -> None:
        """An activator has opened the model's ports, or closed them."""
        ...

    def reported(self, activator: Activator, report: Report) -> None:
        """What it buffers of a model, and has buffered."""
        ...


_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (TooManyCalls, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidValue, grpc.StatusCode.INVALID_ARGUMENT),
    (NotLeading, grpc.StatusCode.UNAVAILABLE),
    (KubeError, grpc.StatusCode.UNAVAILABLE),
)
_REFUSED: Final = tuple(kind for kind, _ in _CODES)


@dataclass(slots=True)
class ControlStats:
    """Of all streams since the start. `rejected`: reports that were not believed; `throttled`: messages after which
    an activator was read more slowly."""

    reports: int = 0
    rejected: int = 0
    throttled: int = 0


class ControlServer(ScalerServicer):
    """All streams."""

    def __init__(
        self,
        handler: Handler,
        authenticator: Authenticator,
        activators: Activators,
        sessions: Sessions,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._handler, self._authenticator = handler, authenticator
        self._activators, self.sessions, self._clock_ns = activators, sessions, clock_ns
        # Calls of each scope that have not ended.
        self._open: Counter[str | None] = Counter()
        self._probes: set[asyncio.Task[None]] = set()
        self.stats = ControlStats()

    def connected(self) -> list[Connected]:
        return self.sessions.connected()

    async def Control(  # noqa: N802
        self, requests: AsyncIterator[pb.ControlRequest], context: Context
    ) -> AsyncIterator[pb.ControlResponse]:
        try:
            identity = await self._authenticator.authenticate(_metadata_of(context), _source_of(context))
        except _REFUSED as error:
            await _refuse(requests, context, error)
        self._open[identity.scope] += 1
        try:
            await self._control(identity, requests, context)
        except _REFUSED as error:
            # Where the status is not read, this ends with the connection; the call is counted until then.
            await _refuse(requests, context, error)
        finally:
            self._open[identity.scope] -= 1
        return
        yield  # `_write_all` writes, so that it can stop where nothing is read

    async def _control(
        self, identity: ActivatorIdentity, requests: AsyncIterator[pb.ControlRequest], context: Context
    ) -> None:
        """Raises what is refused."""
        self._require_room(identity)
        hello = await _hello(requests)
        news, ended = asyncio.Event(), asyncio.Event()
        session = self._begin(identity, hello, news, ended)
        try:
            await _until_one_ends(
                self._read(session, requests), _write_all(session, news, context), ended.wait()
            )
            if ended.is_set():
                self._handler.require_leading()
        finally:
            self._leave(session)

    def _require_room(self, identity: ActivatorIdentity) -> None:
        """Raises TooManyCalls. No namespace takes another's room, nor the system's. Calls that cannot end because nothing
        is read of them count, too."""
        mine = self._open[identity.scope]
        scoped = self._open.total() - self._open[None]
        if identity.scope is None:
            is_full = mine > _MOST_SYSTEM
        else:
            is_full = mine > _MOST_OF_ONE or scoped > _MOST_SCOPED
        if is_full:
            raise TooManyCalls("too many activators are connected")

    def _begin(
        self,
        identity: ActivatorIdentity,
        hello: pb.ActivatorHello,
        news: asyncio.Event,
        ended: asyncio.Event,
    ) -> Session:
        self._handler.require_leading()
        if hello.address not in identity.addresses or not is_ipv4(hello.address):
            raise PermissionDenied(f"pod {identity.ref} does not have the address that it says")
        one = self._activators.connect(identity.uid, str(identity.ref), hello.address, identity.scope)
        one.draining = hello.draining
        session = self.sessions.begin(one, notify=news.set, end=ended.set)
        log.info(
            "activator connected", extra=fields(activator=one.name, address=one.address, scope=one.scope)
        )
        self._handler.connected(one)
        return session

    async def _read(self, session: Session, requests: AsyncIterator[pb.ControlRequest]) -> None:
        limiter = _RateLimiter()
        async for request in requests:
            if request.WhichOneof("part") == "hello":
                if session.greeted(request.hello):
                    self._ports_changed(session.assigned)
            else:
                self._take(session, request.reports)
            pause = limiter.pause(1 + len(request.reports.reports) / _REPORTS_EACH)
            if pause > 0:
                self.stats.throttled += 1
                await asyncio.sleep(pause)

    def _take(self, session: Session, message: pb.ModelReports) -> None:
        """Raises InvalidValue."""
        count = len(message.reports)
        if count > _MOST_REPORTS:
            raise InvalidValue(f"{count} reports at once; at most {_MOST_REPORTS} are read")
        taken = session.take(message.reports)
        self.stats.reports += count
        self.stats.rejected += taken.rejected
        for report in taken.reports:
            self._handler.reported(session.activator, report)
        self._ports_changed(taken.changed)

    def _ports_changed(self, models: Iterable[ModelKey]) -> None:
        for model in list(models):
            self._handler.ports_changed(model)

    def _leave(self, session: Session) -> None:
        one = session.activator
        if not self.sessions.leave(session):
            return
        log.info("activator disconnected", extra=fields(activator=one.name, draining=one.draining))
        self._handler.disconnected(one)
        if one.open and not one.draining:
            probe = asyncio.create_task(self._probe(one))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe(self, one: Activator) -> None:
        """A process that is gone refuses connections: nothing is routed there any more."""
        port = next(port for pair in one.open.values() for port in pair if port)
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(one.address, port)
        except ConnectionRefusedError:
            if one.uid not in self.sessions:
                models = list(one.open)
                self._activators.disconnect(one, self._clock_ns(), gone=True)
                log.warning("activator is gone", extra=fields(activator=one.name))
                self._ports_changed(models)
        except (OSError, TimeoutError):
            pass  # it cannot be reached from here, and may serve others
        else:
            writer.close()


class _RateLimiter:
    """A bucket of what one activator may send."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left, self._at = clock, _BURST, clock()

    def pause(self, cost: float) -> float:
        """Seconds after which it may go on."""
        now = self._clock()
        self._left = min(_BURST, self._left + (now - self._at) * _RATE) - cost
        self._at = now
        return max(0.0, -self._left / _RATE)


@asynccontextmanager
async def serving(control: ControlServer, listen: Endpoint) -> AsyncIterator[int]:
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
    add_ScalerServicer_to_server(control, server)  # type: ignore[no-untyped-call]
    port = await listen_on(server, listen, flag="--control-listen")
    try:
        yield port
    finally:
        control.sessions.end()
        await server.stop(0.5)


# A call.


async def _until_one_ends(*work: Coroutine[Any, Any, Any]) -> None:
    """Or the stream has lasted as long as it may. Raises what the work raises."""
    tasks = [asyncio.create_task(one) for one in work]
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


async def _write_all(session: Session, news: asyncio.Event, context: Context) -> None:
    """A snapshot, then what changes, or that nothing has. Raises TooManyCalls where it is not read."""
    snapshot = True
    while True:
        news.clear()
        message = session.message(snapshot=snapshot)
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await context.write(message)
        except TimeoutError:
            raise TooManyCalls("the stream is not read") from None
        snapshot = False
        await wait_until_set(news, timeout_seconds=HEARTBEAT_SECONDS)


async def _hello(requests: AsyncIterator[pb.ControlRequest]) -> pb.ActivatorHello:
    """Raises InvalidValue."""
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            first = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidValue("the stream came without a hello") from None
    if first.WhichOneof("part") != "hello":
        raise InvalidValue("the first message is not hello")
    return first.hello


async def _refuse(requests: AsyncIterator[pb.ControlRequest], context: Context, error: Exception) -> NoReturn:
    """gRPC's asyncio clients lose the status of a call that ends while they write (grpc/grpc#36066), so one more message is
    read first. A read that was cancelled a moment ago may still be under way below, where there is one at a time
    (InternalError)."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    log.info("activator refused", extra=fields(code=code.name, reason=error))
    with suppress(TimeoutError, StopAsyncIteration, grpc.aio.InternalError):
        async with asyncio.timeout(_LAST_READ_SECONDS):
            await anext(requests)
    leader = (("leader", error.leader),) if isinstance(error, NotLeading) and error.leader else ()
    await context.abort(code, str(error)[:1000], leader)
    raise AssertionError("abort always raises") from error


def _metadata_of(context: Context) -> dict[str, str]:
    """What the caller sends beside its messages, as far as it is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _source_of(context: Context) -> str:
    """The address that the call comes from, without the port, which each connection has anew."""
    return unquote(context.peer()).rpartition(":")[0]
