"""A gRPC client's connection: its calls to the own model, and what concerns them all."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, cast

from proxy.downstream.grpc.call import OPEN_BYTES, Call
from proxy.downstream.grpc.downstream import GrpcDownstream
from proxy.policy import cost
from proxy.policy.refusal import NotServed, in_grpc
from proxy.request.grpc_head import CallKind, list_bytes, timeout_of
from proxy.request.minimum_rate import TOO_SLOW
from proxy.transport.h2_connection import H2Connection
from proxy.transport.tcp import keep_alive, unsent_bytes
from proxy.wire.grpc_status import GrpcError, Status
from proxy.wire.h2.events import Data, Ended, Event, Headers, Reset, Trailers, WholeRequest
from proxy.wire.h2.frames import DEFAULT_MAX_FRAME, HEAD_BYTES, ErrorCode
from proxy.wire.h2.server import ServerCodec
from proxy.wire.h2.stream import Stream

_IDLE_SECONDS: Final = 3600.0
# A client has received the GOAWAY by then.
_LEAVING_SECONDS: Final = 1.0
# Of what has begun to come so much is not counted: a frame of the usual size, cut anywhere.
FREE_BYTES: Final = DEFAULT_MAX_FRAME + HEAD_BYTES
# Messages are checked for so long in one turn of the loop, and then others have theirs.
TIMESLICE_SECONDS: Final = 0.01


class GrpcConnection(H2Connection[ServerCodec[CallKind, None]]):
    """One client of one replica."""

    # Fewer than of answers: what all replicas' calls wait for must not pile up behind one's new ones.
    most_at_once = 8

    def __init__(self, downstream: GrpcDownstream) -> None:
        super().__init__(downstream.batch)
        self.downstream = downstream
        self.codec = ServerCodec(downstream.common.heads, downstream.common.trailers, wake=self.wake)
        self._quiet_since = time.monotonic()
        self._going_away = False
        # When it goes away, having said so before.
        self._leaves_at = math.inf
        # Of the replica's budget, for what has begun to come.
        self._kept_bytes = 0
        # What is still to be taken of what came, in later turns: a call goes on with what it has.
        self._backlog: deque[Event | Call] = deque()
        self._timeslice_from = 0.0

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport)
        if not self.downstream.clients.connected(self):
            cast(asyncio.Transport, transport).abort()
            self.is_closed = True
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._kept_bytes or self.codec.kept_bytes > FREE_BYTES:
            self._charge_kept()

    def _charge_kept(self) -> None:
        """A frame that never ends lies here for nothing."""
        kept = 0 if self.is_closed else max(0, self.codec.kept_bytes - FREE_BYTES)
        if self.downstream.replica.budget.change(self._kept_bytes, kept):
            self._kept_bytes = kept
        else:
            self.fail(ErrorCode.ENHANCE_YOUR_CALM, "no memory for frames that are not whole")

    def pause_writing(self) -> None:
        """The client does not read: nothing more is taken from it."""
        super().pause_writing()
        self._look_at_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_at_reading()

    def _look_at_reading(self) -> None:
        if self.transport is None or self.is_closed:
            return
        if self.is_writable and not self._rests:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def on_lost(self, streams: list[Stream], reason: str) -> None:
        self._backlog.clear()
        self._charge_kept()
        # First those that wait: what the others give back is not for them.
        for call in sorted(_calls(streams), key=lambda call: not call.stage.is_pending):
            call.client_left()
        self.downstream.clients.disconnected(self)

    def end(self, reason: str) -> None:
        self.fail(ErrorCode.NO_ERROR, reason)

    def tick(self, now: float) -> None:
        """Called every second: what has waited too long ends."""
        self.on_events(self.codec.tick(now))
        if now > self._leaves_at:
            self._go_away()
        for call in list(_calls(self.codec.streams.values())):
            if not call.is_late(now) or call.may_rest:
                if call.is_too_slow(now):
                    call.refuse(GrpcError(Status.DEADLINE_EXCEEDED, TOO_SLOW))
                elif call.is_taken_too_slowly(now):
                    call.cut()
                continue
            if call.stage.is_over:  # and the client does not take the answer
                self.codec.reset(call.stream, ErrorCode.CANCEL)
            elif self.downstream.overdue and now <= call.deadline and call.is_overdue(now):
                call.refuse(in_grpc(NotServed(self.downstream.overdue)))
            else:
                call.refuse(GrpcError(Status.DEADLINE_EXCEEDED, "request timeout"))
        if self.codec.streams:
            self._quiet_since = now
        elif self._going_away and not self._is_delivering:
            self.fail(ErrorCode.NO_ERROR, "idle")
        elif now - self._quiet_since > _IDLE_SECONDS:
            self.ask_to_leave()

    def ask_to_leave(self) -> None:
        """New calls are to go elsewhere. Those that are on their way are taken: it goes away a little later."""
        if not self.is_closed and self._leaves_at == math.inf:
            self._leaves_at = time.monotonic() + _LEAVING_SECONDS
            self.codec.announce_leaving("draining")

    def _go_away(self) -> None:
        """Take no more calls; the connection ends with its last."""
        if not self.is_closed and not self._going_away:
            self._going_away = True
            self.codec.go_away("draining")
            for call in list(_calls(self.codec.streams.values())):
                if call.watches:
                    call.refuse(GrpcError(Status.UNAVAILABLE, "draining"))

    @property
    def is_busy(self) -> bool:
        """A call is under way, or may be on its way, or its answer is not yet with the client."""
        if self.transport is None or self.is_closed:
            return False
        if self._leaves_at < math.inf and not self._going_away:
            return True
        return any(not call.watches for call in _calls(self.codec.streams.values())) or self._is_delivering

    @property
    def _is_delivering(self) -> bool:
        """Something that was sent is still here; at the end, when the pod goes, also with the system."""
        if self.transport is None:
            return False
        if self.codec.has_output:
            return True
        if self._going_away:
            return unsent_bytes(self.transport) > 0
        return self.transport.get_write_buffer_size() > 0

    # What a client sends.

    @property
    def timeslice_exhausted(self) -> bool:
        """Whether it has had its part of this turn."""
        return time.monotonic() - self._timeslice_from > TIMESLICE_SECONDS

    def on_events(self, events: list[Event]) -> None:
        if self._backlog:
            self._backlog.extend(events)
            return
        self._timeslice_from = time.monotonic()
        for place, event in enumerate(events):
            if type(event) is WholeRequest and self._take_fast_path(event):
                continue
            later = self._take(event)
            if later is not None:
                self._backlog.append(later)
                self._backlog.extend(events[place + 1 :])
                self._rest()
                return
            if self.is_closed:
                return

    def on_more(self) -> None:
        self._rest()

    def _rest(self) -> None:
        if not self._rests:
            self._rests = True
            self._look_at_reading()
            self.downstream.later(self._go_on)

    def _go_on(self) -> None:
        """With what an earlier turn has left."""
        self._rests = False
        self._timeslice_from = time.monotonic()
        backlog = self._backlog
        while backlog and not self.is_closed:
            one = backlog.popleft()
            later = self._advance(one) if isinstance(one, Call) else self._take(one)
            if later is not None:
                backlog.appendleft(later)
                self._rest()
                return
        if self.codec.has_more:
            self.data_received(b"")
        if not self._rests:
            self._look_at_reading()

    @staticmethod
    def _advance(call: Call) -> Call | None:
        return None if call.advance() else call

    def _take(self, event: Event) -> Call | None:
        """Returns the call that has more to do with what it got, in another turn."""
        if type(event) is Data:
            return self._take_data(event)
        if type(event) is WholeRequest:
            self.downstream.replica.grpc.received_bytes += len(event.data)
            call = self._begin(event)
            if not call.stage.is_over and not call.take_whole(event.data):
                return call
        elif type(event) is Headers:
            call = self._begin(event)
            if event.end:
                call.input_ends()
        elif type(event) is Reset:
            self._take_reset(event)
        elif type(event) is Trailers:
            event.stream.owner.input_ends()
        elif type(event) is Ended:
            self.ended(event.streams, event.message)
        return None

    def _begin(self, event: WholeRequest | Headers) -> Call:
        stream = event.stream
        call = stream.owner = Call(self, stream, event.fields, time.monotonic())
        call.begin()
        return call

    def _take_data(self, data: Data) -> Call | None:
        self.downstream.replica.grpc.received_bytes += len(data.data)
        call: Call = data.stream.owner
        return None if call.take(data) else call

    @staticmethod
    def _take_reset(reset: Reset) -> None:
        call: Call | None = reset.stream.owner
        if call is not None:
            call.client_left()

    def _take_fast_path(self, event: WholeRequest) -> bool:
        """The fast path of a ModelInfer of one message that nothing keeps waiting. It leaves out reading, and nothing
        else; False, with nothing done, where it is for the long way to decide."""
        fields, data, downstream = event.fields, event.data, self.downstream
        kind, guard = fields.kind, downstream.infer_guard
        message = guard.plain(data) if kind.is_usual and not self.is_closed else None
        if message is None or downstream.replica.is_too_large(len(message)):
            return False
        upstream = downstream.triton.at_hand()
        if upstream is None or list_bytes(fields) + upstream.keys.list_bytes > upstream.most_list_bytes:
            return False
        try:
            timeout = timeout_of(fields) if fields.values else None
        except GrpcError:
            return False
        now, size = time.monotonic(), len(data)
        call = Call(self, event.stream, fields, now)
        room = OPEN_BYTES + len(fields.forwarded) + size
        if not call.admit_at_once(now, cost.of_short_message(len(message)), room):
            return False
        block = kind.block + fields.forwarded + upstream.keys.block
        up = upstream.send_whole(call, block, guard.framed(message, data))
        assert up is not None, "a connection that has room takes it"
        event.stream.owner = call
        call.forwarded(upstream, up)
        if timeout is not None:
            call.watch_deadline(timeout)
        call.traffic.received_bytes += size
        return True


def _calls(streams: Iterable[Stream]) -> Iterator[Call]:
    """Of streams whose beginning has been looked at."""
    return (stream.owner for stream in streams if stream.owner is not None)
