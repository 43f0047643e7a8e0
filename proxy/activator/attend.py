"""The activator's end of `berth.v1.Scaler/Attend`: it dials, says who it is, does what it is told, and reports.

A scaler that is away changes nothing here. A replica that does not lead names the one that does; whichever cannot be
reached is left for `--scaler` after a pause that grows.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.scaling import BEAT_SECONDS, Assignment, ModelKey, Report
from berth.runtime.backoff import Backoff
from berth.runtime.grpc_options import channel_options, keepalive
from berth.runtime.logs import fields
from berth.v1 import scaler_pb2 as pb
from berth.v1.scaler_pb2_grpc import ScalerStub
from proxy.activator.assign import Assigned, Changes

log = logging.getLogger(__name__)

# The whole of ten thousand models and their copies.
_MESSAGE_BYTES: Final = 64 * 1024**2
# Until its first word. It may have a thousand models to look at.
_FIRST_SECONDS: Final = 20.0
# A stream that has told for so long was a good one: the next pause is short again.
_GOOD_SECONDS: Final = 5.0
# A scaler that has said nothing for so long tells nothing now, whether or not its connection has ended.
_SILENT_SECONDS: Final = 3 * BEAT_SECONDS
# To connect. A Service that names one that is gone leads to another at the next try.
_CONNECT_MILLISECONDS: Final = 1500
_LEAST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
# From one replica to the one it names, without a pause: two that name each other are asked no oftener.
_REDIRECTS: Final = 3
# What happens within this time is told together, but for the first.
_GATHER_SECONDS: Final = 0.01
# Of one message. The scaler reads a mebibyte, which thousands of models fill that have the longest names there are.
_MOST_REPORTS, _MOST_BYTES = 5000, 900 * 1024


class Plane(Protocol):
    """`proxy.activator.models.Models`, as far as it is needed here."""

    async def apply(self, assignment: Assignment) -> None: ...
    async def remove(self, key: ModelKey) -> None: ...
    def reports(self, now: float, *, whole: bool = False) -> list[Report]: ...


class Link:
    """`run` is for ever. `wake` and `leave` may be called at any time and never wait."""

    def __init__(
        self,
        scaler: Endpoint,
        token_file: Path,
        address: str,
        assigned: Assigned,
        plane: Plane,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[Report], None] = lambda report: None,
    ) -> None:
        """`on_report` is told of every report, whether or not it reaches anybody."""
        self._scaler, self._token_file, self._address = scaler, token_file, address
        self._assigned, self._plane, self._clock, self._on_report = assigned, plane, clock, on_report
        self._leader: Endpoint | None = None
        # What is to be told, the newest of each model: no scaler that is away makes it grow.
        self._pending: dict[ModelKey, Report] = {}
        self._news = asyncio.Event()
        self.is_leaving = False
        # Since when this stream tells without a break, and when it did last.
        self._told_since: float | None = None
        self._heard_at = 0.0
        # For how long the last stream was one.
        self._lasted_seconds = 0.0
        self.attached_times = 0

    @property
    def is_attached(self) -> bool:
        return self._told_since is not None

    @property
    def told_for(self) -> float | None:
        """For how many seconds a scaler has been telling without a break; None: none is now."""
        now = self._clock()
        if self._told_since is None or now - self._heard_at > _SILENT_SECONDS:
            return None
        return now - self._told_since

    def wake(self, report: Report) -> None:
        """A request waits for which there is no copy."""
        self._note([report])
        self._news.set()

    def leave(self) -> None:
        """From now on the scaler is asked to lead nobody here any more."""
        self.is_leaving = True
        self._news.set()

    async def run(self) -> None:
        backoff = Backoff(initial_seconds=_LEAST_PAUSE, cap_seconds=_LONGEST_PAUSE)
        redirects, told = 0, ""
        while True:
            target, self._leader = self._leader or self._scaler, None
            self._lasted_seconds = 0.0
            try:
                await self._attend(target)
                reason = "the stream ended"
            except _Away as error:
                reason, self._leader = str(error), error.leader
            if self._lasted_seconds >= _GOOD_SECONDS:
                backoff.reset()
                redirects = 0
            level = logging.DEBUG if reason == told else logging.WARNING
            log.log(level, "scaler is away", extra=fields(scaler=target, reason=reason, leader=self._leader))
            told = reason
            redirects += self._leader is not None
            if self._leader is None or redirects > _REDIRECTS:
                await asyncio.sleep(backoff.next())

    async def _attend(self, target: Endpoint) -> None:
        """One stream. Raises _Away."""
        metadata = self._metadata()
        async with _channel(target) as channel:
            stub: ScalerStub = ScalerStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attend(metadata=metadata)
            try:
                await self._follow(call, target)
            except grpc.aio.AioRpcError as error:
                raise _Away.of(error) from error
            except asyncio.InvalidStateError as error:  # grpc.aio, where a call ends while it is written to
                raise _Away("the stream broke off") from error
            finally:
                self._told_since = None
                call.cancel()

    async def _follow(self, call: Any, target: Endpoint) -> None:
        """gRPC's asyncio client forgets the status of a call that ends while it writes (grpc/grpc#36066), so nothing
        more is written than who we are until the scaler has spoken."""
        leaving, messages = self.is_leaving, aiter(call)
        await call.write(pb.AttendRequest(hello=pb.ActivatorHello(address=self._address, leaving=leaving)))
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                first = await anext(messages)
        except TimeoutError:
            raise _Away("the scaler says nothing") from None
        except StopAsyncIteration:
            raise _Away("the stream ended before it began") from None
        await self._take(first)
        attached_at = self._told_since = self._heard_at = self._clock()
        self.attached_times += 1
        log.info("attached", extra=fields(scaler=target, models=len(self._assigned)))
        tasks = [asyncio.create_task(self._read(messages)), asyncio.create_task(self._write(call, leaving))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._lasted_seconds = self._clock() - attached_at
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _read(self, messages: AsyncIterator[pb.AttendResponse]) -> None:
        async for message in messages:
            now = self._clock()
            if now - self._heard_at > _SILENT_SECONDS:
                self._told_since = now
            self._heard_at = now
            await self._take(message)

    async def _take(self, message: pb.AttendResponse) -> None:
        await self.carry_out(self._assigned.take(message, self._clock()))

    async def carry_out(self, changes: Changes) -> None:
        """One model that cannot be applied does not hold up the others."""
        for model in changes.remove:
            await self._safely(self._plane.remove(model), model)
        for assignment in changes.apply:
            await self._safely(self._plane.apply(assignment), assignment.model)

    async def _safely(self, work: Awaitable[None], model: ModelKey) -> None:
        try:
            await work
        except Exception as error:
            log.error("an assignment was not carried out", extra=fields(model=str(model)), exc_info=error)

    async def _write(self, call: Any, leaving: bool) -> None:
        """First of all models what is open, then what happens, and every second what is held."""
        self._pending.clear()
        self._note(self._plane.reports(self._clock(), whole=True))
        is_first = True
        while True:
            if leaving != self.is_leaving:
                leaving = self.is_leaving
                hello = pb.ActivatorHello(address=self._address, leaving=leaving)
                await call.write(pb.AttendRequest(hello=hello))
            if self._pending or is_first:
                await call.write(self._message())
                is_first = False
                await asyncio.sleep(_GATHER_SECONDS)
            if not self._pending:
                await self._news.wait()
            self._news.clear()

    def turn(self) -> None:
        """Every second: what is held, and what has happened to ports."""
        self._note(self._plane.reports(self._clock()))
        if self._pending:
            self._news.set()

    def _message(self) -> pb.AttendRequest:
        """Of what is to be told as much as goes."""
        told: list[pb.HoldReport] = []
        size = 0
        for model, report in list(self._pending.items())[:_MOST_REPORTS]:
            one = report_message(report)
            size += one.ByteSize()
            if size > _MOST_BYTES:
                break
            del self._pending[model]
            told.append(one)
        return pb.AttendRequest(reports=pb.HoldReports(reports=told))

    def _note(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._on_report(report)
            before = self._pending.get(report.model)
            self._pending[report.model] = report if before is None else _together(before, report)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The kubelet replaces the token while the pod lives. Raises _Away."""
        try:
            token = self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise _Away(f"--token-file: {self._token_file}: {reason}") from error
        return (("authorization", f"Bearer {token}"),)


class _Away(Exception):
    """The scaler is not there now. `leader`: who is to be asked instead."""

    leader: Endpoint | None = None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> "_Away":
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


def _together(earlier: Report, later: Report) -> Report:
    """Two that were not told yet, as one."""
    return replace(
        later,
        arrived=earlier.arrived + later.arrived,
        forwarded=earlier.forwarded + later.forwarded,
        average_held=max(earlier.average_held, later.average_held),
        wake=earlier.wake or later.wake,
        served_ago=later.served_ago or earlier.served_ago,
    )


def report_message(report: Report) -> pb.HoldReport:
    return pb.HoldReport(
        version=report.version,
        namespace=report.model.namespace,
        name=report.model.name,
        held=report.held,
        average_held=report.average_held,
        arrived=report.arrived,
        forwarded=report.forwarded,
        held_bytes=report.held_bytes,
        oldest_seconds=report.oldest_seconds,
        wake=report.wake,
        rest_port=report.rest_port,
        grpc_port=report.grpc_port,
        served_ago=report.served_ago,
    )
