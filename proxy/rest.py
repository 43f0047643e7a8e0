"""The REST front end: one model's door, on aiohttp.

The path to Triton is rebuilt from checked parts; the client's own path string never goes on. JSON is
read whole within a bound and checked before a byte of it is sent; binary tensors stream through.
"""

import asyncio
import io
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from berth.contract.endpoint import Endpoint
from berth.contract.quantity import format_bytes
from berth.runtime.logs import fields
from berth.runtime.process import starting
from proxy.bodies import TooLarge, read_whole
from proxy.breaker import Breaker, QueueFull
from proxy.headers import request_headers, response_headers
from proxy.json_guard import BadJson, check_generate, check_infer, check_object
from proxy.metrics import ProxyMetrics
from proxy.policy import HIDDEN_EXTENSIONS, RestDecision, Route, Verdict, decide_rest, hidden_rest, is_own
from proxy.upstream import Access, NotServed, Upstream

log = logging.getLogger(__name__)

_HEADER_LENGTH = "Inference-Header-Content-Length"
_RETRY_AFTER_SECONDS = "1"
_CHUNK_BYTES = 256 * 1024
_SMALL_ANSWER_BYTES = 4 * 1024 * 1024
_COUNTED = frozenset({Route.INFER, Route.GENERATE, Route.GENERATE_STREAM})
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
# nginx's code for a client that did not wait for its answer.
_CLIENT_LEFT = 499


class _Refused(Exception):
    """An answer of our own."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


# What a client is told; anything else is a defect and answered 500.
_TOLD = (_Refused, BadJson, QueueFull, NotServed, TimeoutError, aiohttp.ClientError)


@dataclass(frozen=True, slots=True)
class _Body:
    """What goes to Triton: checked bytes, and whatever streams behind them."""

    data: Any
    length: int | None = None


class RestFront:
    """Serves REST clients."""

    def __init__(
        self,
        upstream: Upstream,
        breaker: Breaker,
        metrics: ProxyMetrics,
        *,
        max_json_bytes: int,
        timeout_seconds: float,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._upstream, self._breaker, self._metrics = upstream, breaker, metrics
        self._max_json, self._timeout, self._not_ready = max_json_bytes, timeout_seconds, not_ready
        application = web.Application(handler_args={"auto_decompress": False})
        application.router.add_route("*", "/{anything:.*}", self._serve)
        application.on_response_prepare.append(self._before_head)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            logger=_server_log(),
        )
        self._site: web.TCPSite | None = None
        self._stopping = False
        # Connections with a request in progress, each with its answer once that has begun.
        self._busy: dict[web.RequestHandler, web.StreamResponse | None] = {}

    async def start(self, listen: Endpoint) -> None:
        """Raises CannotStart when the port is taken."""
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, listen.host, listen.port)
        with starting("--http-listen", listen):
            await self._site.start()

    @property
    def port(self) -> int:
        port: int = self._runner.addresses[0][1]
        return port

    async def stop_accepting(self) -> None:
        """Close the port and the idle connections; each of the others closes after its answer."""
        self._stopping = True
        if self._site is not None:
            await self._site.stop()
        for connection in self._runner.server.connections if self._runner.server is not None else ():
            if connection not in self._busy:
                connection.force_close()

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        began, status = time.monotonic(), _CLIENT_LEFT
        self._busy[request.protocol] = None
        # The raw target: aiohttp's own path is decoded, and what is decoded is no longer what was asked.
        decision = decide_rest(request.method, request.raw_path.partition("?")[0])
        try:
            response = await self._decided(request, decision)
            status = response.status
            return response
        except _TOLD as error:
            refusal = _refusal(error)
            status = _CLIENT_LEFT if _is_gone(request) else refusal.status
            return self._broken_off(request, error) or refusal
        finally:
            del self._busy[request.protocol]
            self._metrics.answered("rest", str(status), time.monotonic() - began)

    async def _before_head(self, request: web.Request, response: web.StreamResponse) -> None:
        if request.protocol in self._busy:
            self._busy[request.protocol] = response
        if self._stopping:
            response.force_close()
            response.headers["Connection"] = "close"

    def _broken_off(self, request: web.Request, error: Exception) -> web.StreamResponse | None:
        """The answer that had begun, cut off: a second head would be read as a part of its body."""
        begun = self._busy[request.protocol]
        if begun is not None:
            log.info("answer broke off", extra=fields(reason=repr(error)))
            if request.transport is not None:
                request.transport.abort()
        return begun

    async def _decided(self, request: web.Request, decision: RestDecision) -> web.StreamResponse:
        match decision.verdict:
            case Verdict.LOCAL:
                return await self._local(request, decision)
            case Verdict.FILTER:
                return await self._filtered(decision)
            case Verdict.BLOCK:
                raise _Refused(403, "this route reaches beyond the model; the proxy does not offer it")
            case Verdict.ALLOW:
                return await self._allowed(request, decision)
        if decision.allowed_methods:
            raise _Refused(405, "Method Not Allowed", Allow=", ".join(decision.allowed_methods))
        raise _Refused(404, "Not Found")

    async def _local(self, request: web.Request, decision: RestDecision) -> web.Response:
        if decision.route is Route.LIVE:
            return web.Response()
        if decision.route is Route.READY:
            return web.Response() if self._not_ready() is None else web.Response(status=400)
        wanted = check_object(await self._read(request, self._max_json))
        return web.json_response(await self._index(only_ready=wanted.get("ready") is True))

    async def _index(self, *, only_ready: bool) -> list[dict[str, str]]:
        """The own model's rows, in the words of Triton's index."""
        name = str(self._upstream.model)
        if self._upstream.is_ready:
            versions = await self._upstream.versions()
            return [{"name": name, "version": version, "state": "READY"} for version in versions]
        return [] if only_ready else [{"name": name, "state": "UNAVAILABLE", "reason": "not ready"}]

    async def _filtered(self, decision: RestDecision) -> web.Response:
        if decision.route is Route.ALL_STATS:
            status, data = await self._fetch(f"/v2/models/{self._upstream.model}/stats")
            return web.json_response(data, status=status)
        status, data = await self._fetch("/v2")
        if isinstance(data, dict) and isinstance(data.get("extensions"), list):
            data["extensions"] = [e for e in data["extensions"] if e not in HIDDEN_EXTENSIONS]
        return web.json_response(data, status=status)

    async def _fetch(self, path: str) -> tuple[int, Any]:
        """A small JSON answer of Triton's."""
        access = self._upstream.require()
        timeout = aiohttp.ClientTimeout(total=min(self._timeout, 10.0))
        session = self._upstream.session
        async with session.get(_url(access, path), headers=access.http_headers, timeout=timeout) as answer:
            try:
                text = await read_whole(answer.content, limit_bytes=_SMALL_ANSWER_BYTES)
                return answer.status, json.loads(text)
            except (TooLarge, ValueError) as error:
                raise aiohttp.ClientPayloadError("not JSON") from error

    async def _allowed(self, request: web.Request, decision: RestDecision) -> web.StreamResponse:
        if not is_own(decision.model, self._upstream.model):
            status, message = hidden_rest(decision.route, decision.model)
            raise _Refused(status, message)
        if decision.route is Route.MODEL_READY and self._not_ready() is not None:
            status, message = hidden_rest(decision.route, decision.model)
            raise _Refused(status, message)
        async with asyncio.timeout(self._timeout):
            if decision.route not in _COUNTED:
                return await self._forward(request, decision)
            async with self._breaker.slot():
                return await self._forward(request, decision)

    async def _forward(self, request: web.Request, decision: RestDecision) -> web.StreamResponse:
        access = self._upstream.require()
        body = await self._checked_body(request, decision.route) if request.method == "POST" else _Body(None)
        headers = request_headers(list(request.headers.items()), access.http_headers)
        if body.length is not None:
            headers.append(("Content-Length", str(body.length)))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        async with self._upstream.session.request(
            request.method,
            _url(access, _path(decision, self._upstream.model)),
            headers=headers,
            data=body.data,
            timeout=timeout,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        ) as answer:
            return await _relay(request, answer)

    async def _checked_body(self, request: web.Request, route: Route | None) -> _Body:
        for encoding in request.headers.getall("Content-Encoding", []):
            if encoding.strip().lower() not in ("", "identity"):
                raise _Refused(415, f"Content-Encoding {encoding} is not accepted; send the body as it is")
        if len(request.headers.getall("Content-Length", [])) > 1:
            raise _Refused(400, "more than one Content-Length")
        lengths = request.headers.getall(_HEADER_LENGTH, [])
        if lengths:
            return await self._binary_body(request, route, lengths)
        data = await self._read(request, self._max_json)
        if route is Route.INFER:
            check_infer(data, binary_bytes=None)
        else:
            check_generate(data)
        # A file-like body: aiohttp sends large bytes in one step, which holds up everybody else.
        return _Body(io.BytesIO(data), len(data))

    async def _binary_body(self, request: web.Request, route: Route | None, lengths: list[str]) -> _Body:
        """The JSON header is checked; the tensors behind it go on unread."""
        total = request.content_length
        if route is not Route.INFER or total is None:
            raise _Refused(
                411 if total is None else 400, f"{_HEADER_LENGTH} needs infer and a Content-Length"
            )
        text = lengths[0].strip()
        if len(lengths) > 1 or not _LENGTH.fullmatch(text) or int(text) > total:
            raise _Refused(400, f"{_HEADER_LENGTH} must be one number, not above Content-Length")
        size = int(text)
        if size > self._max_json:
            raise self._too_large()
        try:
            header = await request.content.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise _Refused(400, "the body ended early") from error
        check_infer(header, binary_bytes=total - size)
        return _Body(_chunks(header, request.content), total)

    async def _read(self, request: web.Request, limit: int) -> bytes:
        if request.content_length is not None and request.content_length > limit:
            raise self._too_large()
        try:
            return await read_whole(request.content, limit_bytes=limit)
        except TooLarge as error:
            raise self._too_large() from error

    def _too_large(self) -> _Refused:
        return _Refused(
            413,
            f"JSON is taken up to {format_bytes(self._max_json)}; send large tensors with the binary extension "
            f"({_HEADER_LENGTH})",
        )


async def _relay(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer on as it comes, so that events of a stream are not held up."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in response_headers(answer.headers.items()):
        response.headers.add(name, value)
    response.content_length = answer.content_length
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    with suppress(ConnectionResetError):
        await response.write_eof()
    return response


async def _chunks(first: bytes, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest.iter_chunked(_CHUNK_BYTES):
        yield chunk


def _refusal(error: Exception) -> web.Response:
    """What a client is told of it, in Triton's form of an error."""
    match error:
        case _Refused():
            return _error(error.status, error.message, **error.headers)
        case BadJson():
            return _error(400, str(error))
        case QueueFull() | NotServed():
            return _try_again(str(error))
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return _try_again("Triton cannot be reached")
        case TimeoutError():
            return _error(504, "request timeout")
        case _:
            return _error(502, f"Triton broke off: {type(error).__name__}")


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _path(decision: RestDecision, model: str) -> str:
    version = f"/versions/{decision.version}" if decision.version else ""
    return f"/v2/models/{model}{version}{_SUFFIXES[decision.route]}"


_SUFFIXES: dict[Route | None, str] = {
    Route.MODEL: "",
    Route.MODEL_READY: "/ready",
    Route.INFER: "/infer",
    Route.GENERATE: "/generate",
    Route.GENERATE_STREAM: "/generate_stream",
    Route.CONFIG: "/config",
    Route.STATS: "/stats",
}


def _url(access: Access, path: str) -> str:
    return f"http://{access.http}{path}"


def _error(status: int, message: str, **headers: str) -> web.Response:
    """Triton's form of an error."""
    return web.json_response({"error": message}, status=status, headers=headers)


def _try_again(message: str) -> web.Response:
    return _error(503, message, **{"Retry-After": _RETRY_AFTER_SECONDS})


def _server_log() -> logging.Logger:
    """aiohttp's own log without what clients can fill it with: a traceback for each malformed request."""
    logger = logging.getLogger(f"{__name__}.server")
    logger.addFilter(_is_not_the_clients_fault)
    return logger


def _is_not_the_clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)
