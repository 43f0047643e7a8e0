"""The activator's end of the control stream, `berth.v1.Scaler/Control`: it dials, says who it is, applies what it is
assigned, and reports.

A scaler that is away changes nothing here. A replica that does not lead names the one that does; after any other failure
the client dials `--scaler` again, after a pause that grows.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from berth.contract.activation import HEARTBEAT_SECONDS, Assignment, Report
from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.runtime.backoff import Backoff
from berth.runtime.grpc_options import channel_options, keepalive
from berth.runtime.logs import fields
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerStub
from proxy.activator.assignments import Assignments, Changes
from proxy.activator.report_queue import ReportQueue

log = logging.getLogger(__name__)

# A snapshot of ten thousand models and their replicas.
_MESSAGE_BYTES: Final = 64 * 1024**2
# Until the first message of a scaler, which may have a thousand models to look at.
_FIRST_SECONDS: Final = 20.0
# After a stream that lasted this long the next pause is short again.
_GOOD_SECONDS: Final = 5.0
# A scaler that has sent nothing for this long is silent, whether or not its connection has ended.
_SILENT_SECONDS: Final = 3 * HEARTBEAT_SECONDS
# To connect. A Service that names a replica that is gone leads to another at the next try.
_CONNECT_MILLISECONDS: Final = 1500
_LEAST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
# From one replica to the one it names, without a pause: after that, two that name each other are dialled with pauses.
_REDIRECTS: Final = 3
# What happens within this time after a message is sent together.
_GATHER_SECONDS: Final = 0.01


class Plane(Protocol):
    """`proxy.activator.models.Models`, as far as it is needed here."""

    async def apply(self, assignment: Assignment) -> None: ...
    async def remove(self, key: ModelKey) -> None: ...
    def reports(self, now: float, *, whole: bool = False) -> list[Report]: ...


class StreamHealth:
    """For how long the scaler's messages have come without a break. Pure."""

    def __init__(self) -> None:
        # Of the stream; of its messages without a break, and of the last one.
        self._began_at = self._received_at = 0.0
        self._since: float | None = None

    @property
    def is_connected(self) -> bool:
        return self._since is not None

    def began(self, now: float) -> None:
        self._began_at = self._since = self._received_at = now

    def message_received(self, now: float) -> None:
        if now - self._received_at > _SILENT_SECONDS:
            self._since = now
        self._received_at = now

    def ended(self, now: float) -> float:
        """For how many seconds the stream lasted; 0 where it never began."""
        lasted_seconds = 0.0 if self._since is None else now - self._began_at
        self._since = None
        return lasted_seconds

    def connected_for(self, now: float) -> float | None:
        """Seconds; None: no scaler sends anything now."""
        if self._since is None or now - self._received_at > _SILENT_SECONDS:
            return None
        return now - self._since


class ControlClient:
    """`run` is for ever. `report_now` and `drain` may be called at any time and never wait."""

    def __init__(
        self,
        scaler: Endpoint,
        token_file: Path,
        address: str,
        assignments: Assignments,
        plane: Plane,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> None:
        """`on_report` gets every report, whether or not it reaches a scaler."""
        self._scaler, self._token_file, self._address = scaler, token_file, address
        self._assignments, self._plane, self._clock, self._on_report = assignments, plane, clock, on_report
        self._queue = ReportQueue()
        self._has_news = asyncio.Event()
        self._health = StreamHealth()
        self.is_draining = False
        self.streams = 0

    @property
    def is_connected(self) -> bool:
        return self._health.is_connected

    @property
    def connected_for(self) -> float | None:
        """For how many seconds a scaler has sent messages without a break; None: none does now."""
        return self._health.connected_for(self._clock())

    def report_now(self, report: Report) -> None:
        """A request waits, and no replica is ready."""
        self._enqueue([report])
        self._has_news.set()

    def drain(self) -> None:
        """From now on the scaler is asked to assign nothing here any more."""
        self.is_draining = True
        self._has_news.set()

    async def run(self) -> None:
        backoff = Backoff(initial_seconds=_LEAST_PAUSE, cap_seconds=_LONGEST_PAUSE)
        redirects, logged = 0, ""
        leader: Endpoint | None = None
        while True:
            target, leader = leader or self._scaler, None
            lasted_seconds, away = await self._stream(target)
            reason, leader = str(away), away.leader
            if lasted_seconds >= _GOOD_SECONDS:
                backoff.reset()
                redirects = 0
            level = logging.DEBUG if reason == logged else logging.WARNING
            log.log(level, "scaler is away", extra=fields(scaler=target, reason=reason, leader=leader))
            logged = reason
            redirects += leader is not None
            if leader is None or redirects > _REDIRECTS:
                await asyncio.sleep(backoff.next())

    async def _stream(self, target: Endpoint) -> tuple[float, "ScalerAway"]:
        """One stream: for how many seconds it lasted, and why it ended."""
        away = ScalerAway("the stream ended")
        try:
            await self._connect(target)
        except ScalerAway as error:
            away = error
        finally:
            lasted_seconds = self._health.ended(self._clock())
        return lasted_seconds, away

    async def _connect(self, target: Endpoint) -> None:
        """Raises ScalerAway."""
        metadata = self._metadata()
        async with _channel(target) as channel:
            stub: ScalerStub = ScalerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Control(metadata=metadata)
            try:
                await self._follow(call, target)
            except grpc.aio.AioRpcError as error:
                raise ScalerAway.of(error) from error
            except asyncio.InvalidStateError as error:  # grpc.aio, where a call ends while it is written to
                raise ScalerAway("the stream broke") from error
            finally:
                call.cancel()

    async def _follow(self, call: Any, target: Endpoint) -> None:
        """gRPC's asyncio client loses the status of a call that ends while it writes (grpc/grpc#36066), so only the hello
        is written until the scaler has answered."""
        draining, messages = self.is_draining, aiter(call)
        await call.write(self._hello(draining))
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                first = await anext(messages)
        except TimeoutError:
            raise ScalerAway("the scaler says nothing") from None
        except StopAsyncIteration:
            raise ScalerAway("the stream ended before it began") from None
        await self._take(first)
        self._health.began(self._clock())
        self.streams += 1
        log.info("connected", extra=fields(scaler=target, models=len(self._assignments)))
        tasks = [asyncio.create_task(self._read(messages)), asyncio.create_task(self._write(call, draining))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _read(self, messages: AsyncIterator[pb.ControlResponse]) -> None:
        async for message in messages:
            self._health.message_received(self._clock())
            await self._take(message)

    async def _take(self, message: pb.ControlResponse) -> None:
        await self.carry_out(self._assignments.take(message, self._clock()))

    async def carry_out(self, changes: Changes) -> None:
        """One model that cannot be applied does not delay the others."""
        for model in changes.remove:
            await _safely(self._plane.remove(model), model)
        for assignment in changes.apply:
            await _safely(self._plane.apply(assignment), assignment.model)

    async def _write(self, call: Any, draining: bool) -> None:
        """First the open ports of all models, then what happens, and every second what is buffered."""
        self._queue.clear()
        self._enqueue(self._plane.reports(self._clock(), whole=True))
        is_first = True
        while True:
            if draining != self.is_draining:
                draining = self.is_draining
                await call.write(self._hello(draining))
            if self._queue or is_first:
                await call.write(self._queue.take())
                is_first = False
                await asyncio.sleep(_GATHER_SECONDS)
            if not self._queue:
                await self._has_news.wait()
            self._has_news.clear()

    def tick(self) -> None:
        """Every second: what is buffered, and what has happened to ports."""
        self._enqueue(self._plane.reports(self._clock()))
        if self._queue:
            self._has_news.set()

    def _enqueue(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._on_report(report)
            self._queue.add([report])

    def _hello(self, draining: bool) -> pb.ControlRequest:
        return pb.ControlRequest(hello=pb.ActivatorHello(address=self._address, draining=draining))

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The kubelet replaces the token while the pod lives. Raises ScalerAway."""
        try:
            token = self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ScalerAway(f"--token-file: {self._token_file}: {reason}") from error
        return (("authorization", f"Bearer {token}"),)


async def _safely(work: Awaitable[None], model: ModelKey) -> None:
    try:
        await work
    except Exception as error:
        log.error("an assignment was not carried out", extra=fields(model=str(model)), exc_info=error)


class ScalerAway(Exception):
    """No scaler that leads answers there. `leader`: the replica to dial instead."""

    leader: Endpoint | None = None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> "ScalerAway":
        away = cls(f"{error.details() or ''} ({error.code().name})".strip())
        trailing: Any = error.trailing_metadata()
        for key, value in trailing or ():
            if key == "leader" and error.code() is grpc.StatusCode.UNAVAILABLE:
                away.leader = _endpoint(value)
        return away


def _endpoint(text: object) -> Endpoint | None:
    try:
        return Endpoint.parse(text) if isinstance(text, str) else None
    except InvalidValue:
        return None


def _channel(target: Endpoint) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        str(target),
        options=channel_options(
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            *keepalive(every_seconds=10, within_seconds=5),
            # A channel of its own for each stream: we pause ourselves.
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MILLISECONDS),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ),
    )
