"""The gRPC front end: one model's door, on grpc.aio with messages as bytes."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.runtime.process import starting
from berth.runtime.tasks import wait_until_set
from proxy import wire
from proxy.breaker import Breaker, QueueFull
from proxy.headers import request_metadata
from proxy.metrics import ProxyMetrics
from proxy.policy import HEALTH, HIDDEN_EXTENSIONS, SERVICE, Verdict, decide_rpc, is_own, unknown_model
from proxy.upstream import NotServed, Upstream

log = logging.getLogger(__name__)

_MAX_MESSAGE = 2**31 - 1
# A bool field 1 that is true, an enum field 1 of SERVING and NOT_SERVING: whole messages.
_TRUE, _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x01", b"\x08\x02"
_EXTENSIONS = 3  # ServerMetadataResponse.extensions
_INDEX_MODELS = 1  # RepositoryIndexResponse.models; ModelIndex: name 1, version 2, state 3, reason 4
_STATISTICS = f"/{SERVICE}/ModelStatistics"
_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"
_WATCH = f"/{HEALTH}/Watch"
# No stream of ours is kept for longer than this without a word.
_WATCH_REPEAT_SECONDS = 30.0

Context = grpc.aio.ServicerContext[Any, Any]


class _Refused(Exception):
    """A status of our own."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class GrpcFront:
    """Serves gRPC clients."""

    def __init__(
        self,
        upstream: Upstream,
        breaker: Breaker,
        metrics: ProxyMetrics,
        *,
        timeout_seconds: float,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._upstream, self._breaker, self._metrics = upstream, breaker, metrics
        self._timeout, self._not_ready = timeout_seconds, not_ready
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", _MAX_MESSAGE),
                ("grpc.max_receive_message_length", _MAX_MESSAGE),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._server.add_generic_rpc_handlers((_Router(self),))
        self.port = 0

    async def start(self, listen: Endpoint) -> None:
        """Raises CannotStart when the port is taken."""
        with starting("--grpc-listen", listen):
            try:
                self.port = self._server.add_insecure_port(str(listen))
            except RuntimeError as error:
                raise OSError("address in use") from error
        await self._server.start()

    async def stop_accepting(self, *, grace_seconds: float) -> None:
        """Refuse new calls; those in flight get the grace."""
        await self._server.stop(grace_seconds)

    def handler(self, method: str) -> Any:
        """The handler of one RPC, or None where there is no such RPC."""
        verdict = decide_rpc(method)
        if method == _WATCH:
            return grpc.unary_stream_rpc_method_handler(self._watch)
        if method == _STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream_refused)
        if verdict is Verdict.DENY:
            return None

        async def unary(request: bytes, context: Context) -> bytes:
            return await self._unary(method, verdict, request, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _unary(self, method: str, verdict: Verdict, request: bytes, context: Context) -> bytes:
        began, code = time.monotonic(), grpc.StatusCode.CANCELLED
        try:
            answer = await self._answer(method, verdict, request, context)
            code = grpc.StatusCode.OK
            return answer
        except _Refused as refused:
            code = refused.code
            await context.abort(code, str(refused))
        except wire.BadMessage as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(code, f"unreadable request: {error}")
        except (QueueFull, NotServed) as error:
            code = grpc.StatusCode.UNAVAILABLE
            await context.abort(code, str(error), trailing_metadata=(("retry-after", "1"),))
        except TimeoutError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            await context.abort(code, "request timeout")
        except grpc.aio.AioRpcError as error:
            code = error.code()
            await context.abort(
                code, error.details() or "", trailing_metadata=_pairs(error.trailing_metadata())
            )
        finally:
            self._metrics.answered("grpc", code.name, time.monotonic() - began)
        raise AssertionError("abort always raises")

    async def _answer(self, method: str, verdict: Verdict, request: bytes, context: Context) -> bytes:
        if verdict is Verdict.BLOCK:
            raise _Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "this call reaches beyond the model; the proxy does not offer it",
            )
        if verdict is Verdict.LOCAL:
            return await self._local(method, request)
        if verdict is Verdict.FILTER:
            answer = await self._forward(method, b"", context)
            return wire.filtered(answer, _EXTENSIONS, lambda name: name.decode() not in HIDDEN_EXTENSIONS)
        return await self._allowed(method, request, context)

    async def _allowed(self, method: str, request: bytes, context: Context) -> bytes:
        name = wire.model_name(request)
        if method == _STATISTICS and not name:
            request, name = (
                wire.with_model_name(request, self._upstream.model.encode()),
                self._upstream.model.encode(),
            )
        if not is_own(name, self._upstream.model):
            return _hidden(method, name)
        if method != _INFER:
            return await self._forward(method, request, context)
        if wire.asks_for_shared_memory(request):
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "shared memory is not available")
        async with asyncio.timeout(self._timeout), self._breaker.slot():
            return await self._forward(method, request, context)

    async def _forward(self, method: str, request: bytes, context: Context) -> bytes:
        """With the client's deadline and metadata; Triton's own metadata and status come back as they are."""
        access = self._upstream.require()
        left = context.time_remaining()
        call = self._upstream.channel().unary_unary(method, None, None)(
            request,
            timeout=self._timeout if left is None else min(left, self._timeout),
            metadata=request_metadata(context.invocation_metadata() or (), access.grpc_metadata),
        )
        answer: bytes = await call
        context.set_trailing_metadata(_pairs(await call.trailing_metadata()))
        return answer

    async def _local(self, method: str, request: bytes) -> bytes:
        if method == f"/{SERVICE}/ServerLive":
            return _TRUE
        if method == f"/{SERVICE}/ServerReady":
            return _TRUE if self._not_ready() is None else b""
        if method == f"/{SERVICE}/RepositoryIndex":
            return await self._index(request)
        return self._health(wire.model_name(request))

    async def _index(self, request: bytes) -> bytes:
        """The own model's rows of RepositoryIndexResponse."""
        name = self._upstream.model.encode()
        if self._upstream.is_ready:
            rows = [(name, version.encode(), b"READY") for version in await self._upstream.versions()]
        else:
            only_ready = any(field.number == 2 for field in wire.fields(request))
            rows = [] if only_ready else [(name, b"", b"UNAVAILABLE")]
        return b"".join(
            wire.encode_bytes(
                _INDEX_MODELS, b"".join(wire.encode_bytes(n + 1, part) for n, part in enumerate(row))
            )
            for row in rows
        )

    def _health(self, service: bytes) -> bytes:
        """grpc.health.v1: the server as a whole, or Triton's service by name."""
        if service not in (b"", SERVICE.encode()):
            raise _Refused(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _SERVING if self._not_ready() is None else _NOT_SERVING

    async def _watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        told = b""
        while True:
            change = self._upstream.next_change()
            try:
                status = self._health(wire.model_name(request))
            except (_Refused, wire.BadMessage):
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
                return
            if status != told:
                yield status
                told = status
            await wait_until_set(change, timeout_seconds=_WATCH_REPEAT_SECONDS)

    async def _stream_refused(self, _: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "ModelStreamInfer is not offered yet; use ModelInfer"
        )
        yield b""


class _Router(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, front: GrpcFront) -> None:
        self._front = front

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._front.handler(handler_call_details.method)


def _pairs(metadata: Any) -> tuple[tuple[str, Any], ...]:
    """A client's metadata as a server takes it: grpc.aio's server refuses grpc.aio's own Metadata."""
    return tuple(metadata or ())


def _hidden(method: str, name: bytes) -> bytes:
    """Triton's own answer for a model that it does not have."""
    shown = name.decode(errors="replace")
    if method == f"/{SERVICE}/ModelReady":
        return b""  # ready: false
    if method == _STATISTICS:
        raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, f"requested model '{shown}' is not available")
    raise _Refused(grpc.StatusCode.NOT_FOUND, unknown_model(shown))
