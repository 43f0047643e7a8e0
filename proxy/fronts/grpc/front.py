"""The gRPC front end: the port, what all its clients share, and what is answered here."""

import asyncio
import json
import logging
from collections.abc import Callable

from berth.runtime.logs import fields
from proxy.codecs import protobuf
from proxy.codecs.grpc_status import (
    Refused,
    Status,
    try_again,
)
from proxy.codecs.lookup import Lookup
from proxy.exchange.breaker import Breaker
from proxy.exchange.policy import HEALTH, HIDDEN_EXTENSIONS, SERVICE
from proxy.exchange.traffic import Traffic
from proxy.fronts.grpc.client import Call, ClientConnection
from proxy.fronts.grpc.head import CallHead, HeadReader
from proxy.fronts.grpc.upstream import ResponseBlocks, UpstreamStream
from proxy.fronts.listener import Listener
from proxy.upstream import Access, NotServed, Upstream

log = logging.getLogger(__name__)

# A bool field 1 that is true, an enum field 1 of SERVING and NOT_SERVING: whole messages.
_TRUE, _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x01", b"\x08\x02"
_WATCH = f"/{HEALTH}/Watch"


class GrpcFront:
    """Serves gRPC clients. What all its connections share."""

    def __init__(
        self,
        upstream: Upstream,
        breaker: Breaker,
        traffic: Traffic,
        *,
        timeout_seconds: float,
        inflate_limit: int,
        not_ready: Callable[[], str | None],
    ) -> None:
        self.upstream, self.breaker, self.traffic = upstream, breaker, traffic
        self.timeout_seconds, self.inflate_limit, self.not_ready = timeout_seconds, inflate_limit, not_ready
        self.own = protobuf.OwnModel(upstream.model.encode())
        # What was decided about a block of headers, good for one way of reaching Triton.
        self.heads: Lookup[CallHead] = Lookup(entries=1024, key_bytes=4096)
        self.heads_for: Access | None = None
        self._reader: HeadReader | None = None
        self.response_blocks = ResponseBlocks(entries=256, key_bytes=1024)
        self.watchers: set[Call] = set()
        # Bytes of requests that have come and not gone on, of all clients.
        self.held_bytes = 0
        # Calls whose clients have given up while Triton works on them.
        self.given_up: set[UpstreamStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: Listener[ClientConnection] = Listener(
            lambda: ClientConnection(self), traffic, what="--grpc-listen"
        )

    async def stop_accepting(self) -> None:
        """Close the port and tell every client; connections end with their last call."""
        await self.clients.stop()
        for connection in self.clients:
            connection.go_away()

    async def close(self) -> None:
        await self.clients.stop()
        for connection in self.clients:
            connection.close("the proxy ends")
        for stream in list(self.given_up):
            stream.connection.abort("the proxy ends")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tick(self, now: float) -> None:
        """Called every second."""
        for connection in self.clients:
            connection.tick(now)
        for stream in [stream for stream in self.given_up if now > stream.call.deadline]:
            stream.connection.out_of_time(stream)

    def tell_watchers(self) -> None:
        """Readiness has changed."""
        status = self._serving()
        for call in list(self.watchers):
            call.connection.tell_health(call, status)

    @property
    def reader(self) -> HeadReader:
        """For the way to Triton as it is now."""
        access = self.upstream.access
        if self._reader is None or access is not self.heads_for:
            self.heads.clear()
            self.heads_for = access
            if access is not None:
                for connection in self.clients:
                    connection.triton_is_at(access.grpc)
            self._reader = HeadReader(
                self.own,
                lambda: self.upstream.facts,
                authority="triton" if access is None else str(access.grpc),
                keys={} if access is None else access.grpc_metadata,
            )
        return self._reader

    def answer(self, call: Call, message: bytes) -> None:
        """Answer a call that Triton has no part in."""
        method = call.head.method
        if method == f"/{SERVICE}/ServerLive":
            call.connection.respond(call, _TRUE)
        elif method == f"/{SERVICE}/ServerReady":
            call.connection.respond(call, _TRUE if self.not_ready() is None else b"")
        elif method.startswith(f"/{HEALTH}/"):
            self._answer_health(call, message)
        else:
            task = asyncio.create_task(self._answer_later(call, method, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _answer_health(self, call: Call, message: bytes) -> None:
        """grpc.health.v1: the server as a whole, or Triton's service by name."""
        try:
            service = protobuf.model_name(message)
        except protobuf.BadMessage as error:
            call.connection.refuse(call, Refused(Status.INVALID_ARGUMENT, f"unreadable request: {error}"))
            return
        if service not in (b"", SERVICE.encode()):
            call.connection.refuse(call, Refused(Status.NOT_FOUND, "unknown service"))
        elif call.head.method == _WATCH:
            call.watches = True
            self.watchers.add(call)
            call.connection.tell_health(call, self._serving())
        else:
            call.connection.respond(call, self._serving())

    def _serving(self) -> bytes:
        return _SERVING if self.not_ready() is None else _NOT_SERVING

    async def _answer_later(self, call: Call, method: str, message: bytes) -> None:
        connection = call.connection
        try:
            if method == f"/{SERVICE}/RepositoryIndex":
                answer = await self._index(message)
            else:
                answer = await self._server_metadata()
        except NotServed as error:
            connection.refuse(call, try_again(str(error)))
        except protobuf.BadMessage as error:
            connection.refuse(call, Refused(Status.INVALID_ARGUMENT, f"unreadable request: {error}"))
        except Exception as error:
            log.error("a call broke", exc_info=error, extra=fields(method=method))
            connection.refuse(call, Refused(Status.INTERNAL, "the proxy failed"))
        else:
            connection.respond(call, answer)
        connection.flush()

    async def _index(self, request: bytes) -> bytes:
        """The own model's rows of RepositoryIndexResponse: models=1; name=1, version=2, state=3."""
        if self.upstream.is_ready:
            rows = [(self.own.name, v.encode(), b"READY") for v in await self.upstream.versions()]
        else:
            only_ready = any(entry.number == 2 for entry in protobuf.fields(request))
            rows = [] if only_ready else [(self.own.name, b"", b"UNAVAILABLE")]
        return b"".join(
            protobuf.encode_bytes(
                1, b"".join(protobuf.encode_bytes(n, part) for n, part in enumerate(row, 1))
            )
            for row in rows
        )

    async def _server_metadata(self) -> bytes:
        """ServerMetadataResponse without what clients cannot use here: name=1, version=2, extensions=3."""
        answer = await self.upstream.fetch("/v2")
        data = json.loads(answer.body)
        extensions = [e for e in data["extensions"] if e not in HIDDEN_EXTENSIONS]
        parts = [(1, data["name"]), (2, data["version"]), *((3, e) for e in extensions)]
        return b"".join(protobuf.encode_bytes(number, text.encode()) for number, text in parts)
