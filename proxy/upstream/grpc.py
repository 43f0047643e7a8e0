"""Connections to Triton's gRPC port, shared by all clients of all replicas of a process.

It knows nothing of clients: the owner of a stream (`GrpcRequest`) receives what Triton says of it. A slow client
holds up its own stream alone, by that stream's window; the connection itself is always read.
"""

import asyncio
import logging
from typing import Any, Final, Protocol

from berth.contract.endpoint import Address, UnixSocket
from berth.runtime.logs import fields
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.grpc_head import MOST_LIST_BYTES, AnswerKind, AnswerPolicy, Keys
from proxy.transport.h2_connection import H2Connection
from proxy.transport.tcp import keep_alive
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.interface import Lost, UpstreamRequest
from proxy.wire.grpc_status import try_again
from proxy.wire.h2.client import CannotOpen, ClientCodec
from proxy.wire.h2.events import (
    Data,
    Ended,
    Event,
    GoAway,
    Headers,
    Owned,
    PeerSettings,
    Reset,
    Trailers,
    WholeAnswer,
)
from proxy.wire.h2.fields import FieldReader, Fields
from proxy.wire.h2.frames import ErrorCode
from proxy.wire.h2.sending import Buffer
from proxy.wire.h2.stream import Stream

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# After a connection that could not be made: twice as long each time.
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 2.0


class GrpcRequest(UpstreamRequest, Protocol):
    """Over a stream of an HTTP/2 connection."""

    def connected(self) -> None:
        """There is a connection now: ask for it again."""
        ...

    def answer_whole(self, answer: WholeAnswer) -> None: ...

    def answer_began(self, fields: Fields[AnswerKind], *, end: bool) -> None: ...

    def answer_data(self, data: Data) -> None: ...

    def answer_ended(self, fields: Fields[AnswerKind]) -> None: ...


class AnswerReaders:
    """How Triton's blocks are read; one for a process."""

    def __init__(self) -> None:
        policy = AnswerPolicy()
        self.heads: FieldReader[AnswerKind] = FieldReader(policy, is_answer=True)
        self.trailers: FieldReader[AnswerKind] = FieldReader(policy, is_trailers=True)


class Watcher(Protocol):
    """The observer of a connection's life."""

    def connection_over(self, connection: "UpstreamConnection", replicas: list[object]) -> None:
        """It has ended, with calls of these replicas in it that Triton had."""
        ...


class UpstreamConnection(H2Connection[ClientCodec[AnswerKind, AnswerKind]]):
    """Opened at once: what is sent before it is connected waits in the codec."""

    most_at_once = 32  # Triton opens its window again behind each answer

    def __init__(
        self, address: Address, keys: Keys, readers: AnswerReaders, batch: WriteBatch, watcher: Watcher
    ) -> None:
        super().__init__(batch)
        self.address, self.keys, self._watcher = address, keys, watcher
        # Of headers in one call.
        self.most_list_bytes = MOST_LIST_BYTES
        self.codec = ClientCodec(readers.heads, readers.trailers, wake=self.wake)
        self.is_retired = False
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    @property
    def is_usable(self) -> bool:
        """Whether a call may ever be opened here again."""
        if self.is_retired or self.is_closed or (self.transport is not None and self.transport.is_closing()):
            return False
        return self.codec.is_usable

    @property
    def has_room(self) -> bool:
        """Whether a call that is sent now goes out now."""
        transport = self.transport
        if not self.is_writable or self.is_retired or transport is None:
            return False
        # The loop reports an end later than the transport knows of it: what is written meanwhile is lost.
        return not transport.is_closing() and self.codec.can_open

    def open(self, request: GrpcRequest, block: bytes) -> Stream:
        """Begin a call. Raises Refused where Triton takes no more."""
        try:
            stream = self.codec.open(block)
        except CannotOpen as error:
            raise try_again(f"Triton takes no more calls on this connection: {error}") from error
        stream.owner = request
        return stream

    def send_whole(self, request: GrpcRequest, block: bytes, data: Buffer) -> Stream | None:
        """A whole call at once; None where Triton takes no more."""
        try:
            stream = self.codec.send_call(block, data)
        except CannotOpen:
            return None
        stream.owner = request
        return stream

    def send(self, stream: Stream, data: Buffer, *, end: bool, owned: Owned | None = None) -> None:
        self.codec.send_data(stream, data, end=end, owned=owned)

    def reset(self, stream: Stream, code: ErrorCode = ErrorCode.CANCEL) -> None:
        self.codec.reset(stream, code)
        self._end_if_done()

    def retire(self) -> None:
        """Take no new calls; end with the last."""
        self.is_retired = True
        self._end_if_done()

    def tick(self, now: float) -> None:
        self.on_events(self.codec.tick(now))

    async def connected(self) -> bool:
        """Wait until it is, or cannot be."""
        await asyncio.wait([self._connecting])
        return self.transport is not None and not self.is_closed

    async def closed(self, reason: str) -> None:
        self.abort(reason)
        await asyncio.gather(self._connecting, return_exceptions=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keep_alive(transport)
        super().connection_made(transport)

    async def _connect(self) -> None:
        loop, address = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if isinstance(address, UnixSocket):
                    await loop.create_unix_connection(lambda: self, address.path)
                else:
                    await loop.create_connection(lambda: self, address.host, address.port)
        except (OSError, TimeoutError) as error:
            self.abort(f"Triton cannot be reached: {str(error) or 'no answer'}")
            return
        if self.is_closed and self.transport is not None:
            self.transport.abort()

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is WholeAnswer:
                event.stream.owner.answer_whole(event)
            elif type(event) is Data:
                self._on_data(event)
            elif type(event) is Headers:
                event.stream.owner.answer_began(event.fields, end=event.end)
            elif type(event) is Trailers:
                event.stream.owner.answer_ended(event.fields)
            else:
                self._on_other(event)
        self._end_if_done()

    def _on_data(self, data: Data) -> None:
        stream = data.stream
        if data.end:  # a gRPC server ends with trailers
            data.release()
            self.codec.reset(stream, ErrorCode.PROTOCOL_ERROR)
            stream.owner.answer_broke("Triton ended an answer without its status")
        else:
            stream.owner.answer_data(data)

    def _on_other(self, event: Any) -> None:
        if isinstance(event, Reset):
            why = f"Triton broke off ({event.message or _name(event.code)})"
            event.stream.owner.answer_broke("Triton is going away" if event.was_refused else why)
        elif isinstance(event, PeerSettings):
            self.most_list_bytes = min(MOST_LIST_BYTES, self.codec.peer_header_list)
        elif isinstance(event, GoAway):
            self.is_retired = True
        elif isinstance(event, Ended):
            log.warning("triton broke the protocol", extra=fields(code=event.code.name, reason=event.message))
            self.ended(event.streams, f"Triton broke the protocol ({event.code.name})")

    def on_lost(self, streams: list[Stream], reason: str) -> None:
        requests: list[GrpcRequest] = [stream.owner for stream in streams]
        # A connection that was never made had nothing in it.
        replicas = (
            [] if self.transport is None else list(dict.fromkeys(request.whose for request in requests))
        )
        self._watcher.connection_over(self, replicas)
        if self.transport is not None:
            reason = f"Triton is gone: {reason}"
        for request in requests:
            request.answer_broke(reason)

    def _end_if_done(self) -> None:
        if self.is_retired and not self.codec.streams and not self.is_closed:
            self.abort("no longer of use")


class Upstreams(Protocol):
    """Where calls go."""

    def at_hand(self) -> UpstreamConnection | None:
        """A connection, if what is sent on it goes out now."""
        ...

    def connection(self, caller: GrpcRequest) -> UpstreamConnection | None:
        """For a call that begins now. None: `connected` follows, or `answer_broke`. Raises NotServed."""
        ...


class TritonGrpc:
    """One connection for all calls, made when it is needed; a new one takes over when it can take no more."""

    def __init__(self, cluster: UpstreamCluster, batch: WriteBatch, *, lost: Lost | None = None) -> None:
        """`lost`: called with the requests that Triton had when it died, before they are refused."""
        self.batch = batch
        self._cluster, self._lost = cluster, lost
        self._readers = AnswerReaders()
        self._current: UpstreamConnection | None = None
        # Those too that only end their last calls.
        self.connections: set[UpstreamConnection] = set()
        self._pause, self._not_before, self._why = 0.0, 0.0, ""
        cluster.follow(self._moved)

    def at_hand(self) -> UpstreamConnection | None:
        """The connection, if what is sent on it goes out now."""
        current = self._current
        return current if current is not None and current.has_room else None

    def connection(self, caller: GrpcRequest | None = None) -> UpstreamConnection:
        """The one for a call that begins now. Raises NotServed."""
        current = self._current
        if current is not None and current.is_usable:
            return current
        endpoint = self._cluster.require()
        if asyncio.get_running_loop().time() < self._not_before:
            raise NotServed(self._why)
        if current is not None:
            current.retire()
        self._current = UpstreamConnection(
            endpoint.grpc, Keys(endpoint.grpc_metadata), self._readers, self.batch, self
        )
        self.connections.add(self._current)
        return self._current

    def connection_over(self, connection: UpstreamConnection, replicas: list[object]) -> None:
        self.connections.discard(connection)
        if connection.transport is None:
            self._pause = min(_LONGEST_PAUSE_SECONDS, 2 * self._pause or _FIRST_PAUSE_SECONDS)
            self._not_before = asyncio.get_running_loop().time() + self._pause
            self._why = f"Triton cannot be reached at {connection.address}"
        else:
            self._pause = self._not_before = 0.0
        if replicas:
            log.warning("triton is gone with calls in it", extra=fields(replicas=len(replicas)))
        if self._lost is not None:
            for replica in replicas:
                self._lost(replica)

    def tick(self, now: float) -> None:
        """Called every second."""
        for connection in list(self.connections):
            connection.tick(now)

    async def close(self) -> None:
        for connection in list(self.connections):
            await connection.closed("the proxy ends")

    def _moved(self, _: UpstreamEndpoint) -> None:
        """Calls that come now go elsewhere."""
        self._not_before = 0.0
        if self._current is not None:
            self._current.retire()
            self._current = None


def _name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(code)
