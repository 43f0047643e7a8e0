"""One call of each protocol, with what came back as a digest: the same whoever has passed it on, or held it."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient as GrpcClient
from tritonclient.grpc.aio import InferInput as GrpcInput
from tritonclient.http.aio import InferenceServerClient as HttpClient
from tritonclient.http.aio import InferInput as HttpInput

ECHO, COUNT = "echo", "count"
HTTP_PORT, GRPC_PORT = 9000, 9001
# As much as a request may have, 64 MiB, less what stands before the tensor.
_BIG_BYTES: Final = 64 * 1024**2 - 4096
_SMALL = np.arange(200, dtype=np.uint8)
_STREAMED = (3, 50, 7)
_SECONDS = 120.0


async def unary(address: str) -> str:
    """A gRPC call with one tensor."""
    async with GrpcClient(f"{address}:{GRPC_PORT}") as client:
        answer = await client.infer(ECHO, _filled(GrpcInput, _SMALL), client_timeout=_SECONDS)
    return _digest(answer.as_numpy("OUT").tobytes())


async def binary(address: str) -> str:
    """REST with 64 MiB as Triton's binary extension has them, both ways."""
    data = np.random.default_rng(7).integers(0, 256, _BIG_BYTES, np.uint8)
    async with HttpClient(f"{address}:{HTTP_PORT}", conn_timeout=_SECONDS) as client:
        answer = await client.infer(ECHO, _filled(HttpInput, data))
    found = answer.as_numpy("OUT").tobytes()
    assert found == data.tobytes()
    return _digest(found)


async def bidirectional(address: str) -> str:
    """A gRPC stream of requests, each of which has a stream of answers."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for count in _STREAMED:
            tensors = _filled(GrpcInput, np.array([count], np.uint8))
            yield {"model_name": COUNT, "inputs": tensors, "request_id": str(count)}

    found: dict[str, bytes] = {str(count): b"" for count in _STREAMED}
    async with GrpcClient(f"{address}:{GRPC_PORT}") as client:
        async for result, error in client.stream_infer(requests(), stream_timeout=_SECONDS):
            assert error is None, error
            found[result.get_response().id] += result.as_numpy("OUT").tobytes()
            if sum(map(len, found.values())) == sum(n * (n + 1) // 2 for n in _STREAMED):
                break
    return _digest(b"".join(found.values()))


async def events(address: str) -> str:
    """Server-sent events, as clients of language models have them."""
    url = f"http://{address}:{HTTP_PORT}/v2/models/{COUNT}/generate_stream"
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json={"IN": [40]}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        text = await answer.read()
    assert text.count(b"data: ") == 40, text[-500:]
    return _digest(text)


CALLS: dict[str, tuple[str, Callable[[str], Awaitable[str]]]] = {
    "gRPC unary": (ECHO, unary),
    "64 MiB binary": (ECHO, binary),
    "gRPC stream": (COUNT, bidirectional),
    "SSE": (COUNT, events),
}
"""Which model each is for."""


def _filled(tensor: Any, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> list[Any]:
    found = tensor("IN", [len(data)], "UINT8")
    found.set_data_from_numpy(data)
    return [found]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
