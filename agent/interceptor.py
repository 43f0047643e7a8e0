"""The checks before every call of the agent's API: authentication, the caller's limits, the request's size.

They come before the request is read: a call without a valid token costs a look at its metadata, and a call whose
request never comes ends soon.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.auth import Authenticator
from agent.limits import CallLimiter
from berth.contract.errors import InvalidValue

# Of a call that sends one message: a name. Only the messages of a stream may be larger.
REQUEST_BYTES = 16 * 1024
_REQUEST_SECONDS = 10.0
_DRAINED_MESSAGES, _DRAIN_SECONDS = 8, 0.2
# Of the streams that are refused here so many are drained at once.
_MOST_DRAINING = 64

Context = grpc.aio.ServicerContext[Any, Any]
Parse = Callable[[bytes], Any]
Check = Callable[[bytes], None]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls in one by one. `refuse` ends a call with the status of one of the errors in `mapped`; `check` raises
    one of them for the bytes of a stream's message that is not to be parsed."""

    def __init__(
        self,
        authenticator: Authenticator,
        callers: CallLimiter,
        *,
        refuse: Callable[[str, Context, Exception], Awaitable[NoReturn]],
        mapped: tuple[type[Exception], ...],
        check: Check,
    ) -> None:
        self._authenticator, self._callers = authenticator, callers
        self._refuse, self._mapped, self._check = refuse, mapped, check
        self._drained = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Serve every call as a stream of bytes: otherwise gRPC reads its request before these checks."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]

        async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
            try:
                ref = await self._authenticator.pod_of(metadata_of(context), source_of(context))
                with self._callers.call(ref) as reading:
                    await _serve(handler, messages, context, reading, self._check)
            except self._mapped as error:
                if handler.request_streaming and self._drained < _MOST_DRAINING:
                    await self._drain_refused(messages)
                await self._refuse(method, context, error)

        return grpc.stream_stream_rpc_method_handler(handle, response_serializer=handler.response_serializer)

    async def _drain_refused(self, messages: AsyncIterator[bytes]) -> None:
        self._drained += 1
        try:
            await drain_stream(messages)
        finally:
            self._drained -= 1


async def drain_stream(messages: AsyncIterator[Any]) -> None:
    """Take what is on its way, for a moment, before a stream is ended: gRPC's asyncio clients forget the status
    of a call that ends while they are writing (grpc/grpc#36066)."""
    with suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(_DRAIN_SECONDS):
            for _ in range(_DRAINED_MESSAGES):
                await anext(messages)


async def _serve(
    handler: Any,
    messages: AsyncIterator[bytes],
    context: Context,
    reading: AbstractAsyncContextManager[None],
    check: Check,
) -> None:
    parse = handler.request_deserializer
    if handler.request_streaming:
        request: Any = _parsed(messages, parse, check)
    else:
        async with reading:
            request = await _single(messages, parse)
    behave = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if not handler.response_streaming:
        await context.write(await behave(request, context))
        return
    async with aclosing(behave(request, context)) as answers:
        async for answer in answers:
            await context.write(answer)


async def _single(messages: AsyncIterator[bytes], parse: Parse) -> Any:
    """Raises InvalidValue."""
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            message = await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidValue("the call came without a request") from None
    if len(message) > REQUEST_BYTES:
        raise InvalidValue(f"the request has {len(message)} bytes; at most {REQUEST_BYTES} are read")
    return _read(message, parse)


async def _parsed(messages: AsyncIterator[bytes], parse: Parse, check: Check) -> AsyncIterator[Any]:
    """Nothing of a message is kept here: neither its bytes, nor what was read of them."""
    while True:
        try:
            message = await anext(messages)
        except StopAsyncIteration:
            return
        if len(message) > REQUEST_BYTES:
            await asyncio.to_thread(check, message)  # counts, for some ten milliseconds at worst
        else:
            check(message)
        request = [_read(message, parse)]
        del message
        yield request.pop()


def _read(message: bytes, parse: Parse) -> Any:
    try:
        return parse(message)
    except DecodeError as error:
        raise InvalidValue("the request is not a message of this API") from error


def metadata_of(context: Context) -> dict[str, str]:
    """The call's metadata, as far as it is text."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def source_of(context: Context) -> str:
    """The address that the call comes from, without the port, which differs for each connection."""
    return unquote(context.peer()).rpartition(":")[0]
