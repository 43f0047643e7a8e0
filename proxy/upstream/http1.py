"""Connections to Triton's REST port: one request at a time on each, kept for the next."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from berth.contract.endpoint import Endpoint
from proxy.request.endpoint import UpstreamCluster
from proxy.transport.tcp import keep_alive
from proxy.upstream.interface import Lost, UpstreamRequest
from proxy.wire.http1 import (
    HEAD_BYTES,
    HEAD_END,
    BadChunks,
    BadResponse,
    ChunkReader,
    ResponseHead,
    read_response,
)
from proxy.wire.lookup import Lookup

_CONNECT_SECONDS = 5.0
_CONNECT_TRIES = 3
# Of a process. More requests than so many are not with Triton's REST port at once, whatever their limits say.
_MOST_CONNECTIONS = 2048
_KEPT_CONNECTIONS = 128
_WRITE_HIGH: Final = 256 * 1024
# Heads of 1xx before an answer. Triton sends none or one; a model's own server may send whatever it likes.
_MOST_INTERIM: Final = 16
# After so much of a body others have their turn: hundreds of long answers may be here at once.
_LONG_BYTES: Final = 64 * 1024


class HttpRequest(UpstreamRequest, Protocol):
    """Over HTTP/1.1."""

    def connected(self, upstream: "UpstreamHttp") -> None:
        """The request can be written now."""
        ...

    @property
    def takes_chunks(self) -> bool:
        """Whether a chunked body may come as it is; else it comes without its chunks."""
        ...

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        """The head and the first of the body. `raw`: the bytes of both, if the head is to go out as it came."""
        ...

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None:
        """All of an answer, as one piece: its body begins at `start`. The connection serves others already."""
        ...

    def answer_data(self, data: bytes) -> None: ...

    def answer_ended(self) -> None:
        """The answer is complete."""
        ...

    def later(self, do: Callable[[], None]) -> None:
        """In one of its replica's next turns."""
        ...

    def upstream_writable(self) -> None:
        """The connection takes more of the request, or no more: `is_writable` tells."""
        ...


class Pool(Protocol):
    """Where connections come from."""

    def take(self, request: HttpRequest) -> "UpstreamHttp | None":
        """A connection that is there; else None, and `connected` or `answer_broke` follows. Raises NotServed."""
        ...

    @property
    def has_idle(self) -> bool: ...

    def take_idle(self, request: HttpRequest) -> "UpstreamHttp":
        """One that waits; `has_idle` has just said that there is one."""
        ...


class UpstreamHttp(asyncio.Protocol):
    """One connection. `request` None: it waits in the pool."""

    # The transport's own, once there is one.
    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]

    def __init__(self, pool: "UpstreamPool", address: Endpoint) -> None:
        self._pool, self.address = pool, address
        self.request: HttpRequest | None = None
        # The replica that it counts for, until it waits in the pool or has gone.
        self.counts_for: object | None = None
        self.transport: asyncio.Transport | None = None
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._left: int | None = 0
        self._chunks: ChunkReader | None = None
        # The request has been written to its end: only then may the connection serve another.
        self.request_done = False
        self.is_writable = True
        # Heads that came before the one of the answer.
        self._interim = 0
        # Why it is not read: its request takes nothing more; it waits for its turn.
        self._is_stopped = self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH)
        self.write, self.is_closing = self.transport.write, self.transport.is_closing
        keep_alive(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        request, self.request = self.request, None
        if request is None:
            return
        if self._head is not None and self._left is None and self._chunks is None and exc is None:
            request.answer_ended()  # a body that ends with its connection
        else:
            request.answer_broke(f"Triton broke off{f' ({exc})' if exc else ''}")

    @property
    def is_answering(self) -> bool:
        """The answer is on its way, and as long as was said: nothing of it is still to be computed."""
        return self._head is not None and self._head.length is not None

    def pause_writing(self) -> None:
        self.is_writable = False
        if self.request is not None:
            self.request.upstream_writable()

    def resume_writing(self) -> None:
        self.is_writable = True
        if self.request is not None:
            self.request.upstream_writable()

    def stop(self, stopped: bool) -> None:
        """Read no more of the answer, or go on."""
        self._is_stopped = stopped
        self._regulate()

    def _wait(self, request: HttpRequest) -> None:
        if not self._waits:
            self._waits = True
            self._regulate()
            request.later(self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        self._regulate()

    def _regulate(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._is_stopped or self._waits:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def abort(self) -> None:
        """End it without a callback."""
        self.request = None
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        request = self.request
        if request is None:  # an answer without a request
            self.abort()
            return
        if self._head is not None:
            self._body(request, data)
            return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        try:
            self._response(request, data)
        except BadResponse as error:
            self.abort()
            request.answer_broke(f"Triton's answer cannot be read ({error})")

    def _response(self, request: HttpRequest, data: bytes) -> None:
        end = data.find(HEAD_END) + len(HEAD_END)
        if end < len(HEAD_END):
            if len(data) > HEAD_BYTES:
                raise BadResponse("its head is too long")
            self._buffer = data
            return
        head = self._pool.read_head(data[:end])
        size = len(data) - end
        if head.length == size and self.request_done and head.keeps_alive and head.status >= 200:
            # Given back first: the request that this answer's end admits finds it.
            self.request = None
            self._pool.give_back(self)
            request.answer_whole(head, data, end)
            return
        if head.status < 200:
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise BadResponse("it says again and again that it is yet to come")
            if size:
                self._response(request, data[end:])
            return
        if head.is_chunked and not self._pool.takes_chunked:
            raise BadResponse("it does not say how long it is")
        self._interim = 0
        self._head = head
        self._left = head.length
        self._chunks = ChunkReader() if head.is_chunked else None
        if self._left is not None and not self._chunks and size > self._left:
            raise BadResponse("more body than its Content-Length")
        body, done = self._taken(request, data[end:] if size else b"")
        request.answer_began(head, body, data if head.plain_is_raw else None)
        if done and self.request is request:  # it may have ended this connection
            self._done(request)

    def _body(self, request: HttpRequest, data: bytes) -> None:
        size = len(data)  # as it came: many small chunks are much work and little content
        try:
            data, done = self._taken(request, data)
        except BadResponse as error:
            self.abort()
            request.answer_broke(str(error))
            return
        request.answer_data(data)
        if self.request is not request:
            return
        if done:
            self._done(request)
        elif size >= _LONG_BYTES:
            self._wait(request)

    def _taken(self, request: HttpRequest, data: bytes) -> tuple[bytes, bool]:
        """Count off a piece of the body: what goes on of it, and whether it is the last. Raises BadResponse."""
        if self._chunks is not None:
            try:
                content, size = self._chunks.feed(data)
            except BadChunks as error:
                raise BadResponse(str(error)) from error
            if size < len(data):
                raise BadResponse("bytes after the last chunk")
            return (data if request.takes_chunks else content), self._chunks.is_done
        if self._left is None:
            return data, False
        self._left -= len(data)
        if self._left < 0:
            raise BadResponse("more body than its Content-Length")
        return data, self._left == 0

    def _done(self, request: HttpRequest) -> None:
        head = self._head
        assert head is not None
        self._head, self._chunks = None, None
        self.request = None
        if head.keeps_alive and self.request_done:
            self._pool.give_back(self)
        else:
            self.abort()
        request.answer_ended()


class UpstreamPool:
    """All connections to one Triton's REST port, for all replicas of the process.

    There are so many at most; who comes then waits, and the replicas take turns. One replica may have one more than
    are free: a replica that keeps many, by bodies and answers that never end, leaves as many for the others.
    """

    def __init__(
        self,
        cluster: UpstreamCluster,
        *,
        most: int = _MOST_CONNECTIONS,
        lost: Lost | None = None,
        takes_chunked: bool = True,
    ) -> None:
        """`lost`: called with the request that Triton had when a connection broke off. `takes_chunked`: answers, too, that do
        not say how long they are."""
        self._cluster, self._most, self._lost = cluster, most, lost
        self.takes_chunked = takes_chunked
        self._idle: list[UpstreamHttp] = []
        self._all: set[UpstreamHttp] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        # Connections in use, or being made, by replica.
        self._in_use: dict[object, int] = {}
        self._waiting: OrderedDict[object, deque[HttpRequest]] = OrderedDict()
        self._heads: Lookup[ResponseHead] = Lookup(entries=512, key_bytes=2048)
        cluster.follow(lambda _: self._drop_idle())

    def take(self, request: HttpRequest) -> UpstreamHttp | None:
        """A connection that is there; else None, and `connected` or `answer_broke` follows. Raises NotServed."""
        self._cluster.require()
        whose = request.whose
        if whose not in self._waiting and self._any_idle():
            return self.take_idle(request)
        if whose not in self._waiting and self._has_room(whose):
            self._connect_for(request)
        else:
            self._waiting.setdefault(whose, deque()).append(request)
        return None

    @property
    def in_use(self) -> int:
        """Connections with a request, or being made for one: each once, whichever step its making is at."""
        return sum(self._in_use.values())

    @property
    def answering(self) -> int:
        """Of those in use, the ones whose answer only has to come."""
        return sum(upstream.is_answering for upstream in self._all)

    def _has_room(self, whose: object, returned: int = 0) -> bool:
        """`returned`: so many are given back just now."""
        free = self._most - len(self._all) - len(self._connecting) + len(self._idle) + returned
        return free > 0 and self._in_use.get(whose, 0) <= free

    @property
    def has_idle(self) -> bool:
        idle = self._idle
        return bool(idle) and not self._waiting and (not idle[-1].is_closing() or self._any_idle())

    def _any_idle(self) -> bool:
        """The loop reports a connection's end later than it knows of it: what is written meanwhile is lost."""
        idle = self._idle
        while idle and idle[-1].is_closing():
            idle.pop()
        return bool(idle)

    def take_idle(self, request: HttpRequest) -> UpstreamHttp:
        """One that waits; `has_idle` has just said that there is one."""
        upstream = self._idle.pop()
        self._begin_use(upstream, request)
        return upstream

    def _begin_use(self, upstream: UpstreamHttp, request: HttpRequest) -> None:
        whose = request.whose
        upstream.request, upstream.counts_for = request, whose
        self._in_use[whose] = self._in_use.get(whose, 0) + 1

    def _end_use(self, upstream: UpstreamHttp) -> None:
        whose, upstream.counts_for = upstream.counts_for, None
        if whose is not None:
            self._count_off(whose)

    def _count_off(self, whose: object) -> None:
        left = self._in_use[whose] - 1
        if left:
            self._in_use[whose] = left
        else:
            del self._in_use[whose]

    def give_back(self, upstream: UpstreamHttp) -> None:
        endpoint = self._cluster.endpoint
        if endpoint is None or upstream.address is not endpoint.http:
            upstream.abort()
            return
        self._end_use(upstream)
        if self._waiting and (request := self._next(returned=1)) is not None:
            self._begin_use(upstream, request)
            request.connected(upstream)
        elif len(self._idle) >= _KEPT_CONNECTIONS:
            upstream.abort()
        else:
            self._idle.append(upstream)

    def lost(self, upstream: UpstreamHttp) -> None:
        if upstream.request is not None and upstream.request_done and self._lost is not None:
            self._lost(upstream.request.whose)
        self._all.discard(upstream)
        self._end_use(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)
        self._serve_next()

    def read_head(self, raw: bytes) -> ResponseHead:
        """Raises BadResponse."""
        head = self._heads.get(raw)
        if head is None:
            head = read_response(raw)
            self._heads.remember(raw, head)
        return head

    async def close(self) -> None:
        self._waiting.clear()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for upstream in list(self._all):
            upstream.abort()

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for upstream in idle:
            upstream.abort()

    def _next(self, *, returned: int = 0) -> HttpRequest | None:
        """Who is next: of the replica whose turn it is and that may have one more, who has waited longest and still does."""
        for _ in range(len(self._waiting)):
            whose, requests = self._waiting.popitem(last=False)
            while requests and not requests[0].wants_connection:
                requests.popleft()
            request = requests.popleft() if requests and self._has_room(whose, returned) else None
            if requests:
                self._waiting[whose] = requests
            if request is not None:
                return request
        return None

    def _serve_next(self) -> None:
        request = self._next()
        if request is None:
            return
        if self._any_idle():
            request.connected(self.take_idle(request))
        else:
            self._connect_for(request)

    def _connect_for(self, request: HttpRequest) -> None:
        whose = request.whose
        self._in_use[whose] = self._in_use.get(whose, 0) + 1
        task = asyncio.create_task(self._connect(request, whose))
        self._connecting.add(task)
        task.add_done_callback(self._tried)

    def _tried(self, task: asyncio.Task[None]) -> None:
        """What came of it is among all connections, or leaves its place to who waits."""
        self._connecting.discard(task)
        self._serve_next()

    async def _connect(self, request: HttpRequest, whose: object) -> None:
        """To where Triton is; to where it has gone meanwhile, if that is elsewhere."""
        for _ in range(_CONNECT_TRIES):
            endpoint = self._cluster.require()
            try:
                upstream = await self._connection(endpoint.http)
                if upstream.is_closing():  # what would be written is not read
                    raise ConnectionResetError("it ended the connection at once")
            except (OSError, TimeoutError) as error:
                reason = f"Triton cannot be reached: {str(error) or 'no answer'}"
                if self._cluster.endpoint is endpoint:
                    break
            else:
                if self._cluster.endpoint is endpoint:
                    self._all.add(upstream)
                    upstream.request, upstream.counts_for = request, whose
                    request.connected(upstream)
                    return
                upstream.abort()
                reason = "Triton has moved"
        self._count_off(whose)
        request.answer_broke(reason)

    async def _connection(self, address: Endpoint) -> UpstreamHttp:
        """It has no request yet: what comes of it before a request answers none."""
        make: Callable[[], UpstreamHttp] = lambda: UpstreamHttp(self, address)  # noqa: E731
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, upstream = await asyncio.get_running_loop().create_connection(make, address.host, address.port)
        return upstream
