"""NVIDIA's own client in all its four forms."""

import asyncio
import queue
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient as GrpcClient
from tritonclient.grpc import InferInput as GrpcInput
from tritonclient.grpc.aio import InferenceServerClient as GrpcAioClient
from tritonclient.http import InferenceServerClient as HttpClient
from tritonclient.http import InferInput as HttpInput
from tritonclient.http import InferRequestedOutput
from tritonclient.http.aio import InferenceServerClient as HttpAioClient
from tritonclient.utils import InferenceServerException

from localcluster.data_plane import GRPC_PORT, HTTP_PORT
from tests.loopback.clients.conftest import Served

pytestmark = pytest.mark.asyncio(loop_scope="session")

DATA = np.arange(200, dtype=np.uint8)
SIZES = [3, 300_000, 9_000_000]


def filled(form: Any, data: Any = DATA, **more: Any) -> list[Any]:
    tensor = form("IN", [len(data)], "UINT8")
    tensor.set_data_from_numpy(data, **more)
    return [tensor]


@pytest.mark.parametrize("size", SIZES)
async def test_http(served: Served, size: int) -> None:
    data = np.arange(size, dtype=np.uint8)

    def ask() -> Any:
        with HttpClient(served.rest, concurrency=4) as client:
            several = [client.async_infer("echo", filled(HttpInput, data)) for _ in range(6)]
            return [one.get_result() for one in several]

    for answer in await asyncio.to_thread(ask):
        assert np.array_equal(answer.as_numpy("OUT"), data)
        assert answer.get_response()["model_name"].strip() == "echo"


@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
async def test_http_packed(served: Served, packing: str | None, binary: bool) -> None:
    def ask() -> Any:
        with HttpClient(served.rest) as client:
            return client.infer(
                "echo",
                filled(HttpInput, binary_data=binary),
                outputs=[InferRequestedOutput("OUT", binary_data=binary)],
                request_compression_algorithm=packing,
                response_compression_algorithm=packing,
            )

    assert np.array_equal((await asyncio.to_thread(ask)).as_numpy("OUT"), DATA)


async def test_http_aio(served: Served) -> None:
    async with HttpAioClient(served.rest) as client:
        answers = await asyncio.gather(*(client.infer("echo", filled(HttpInput)) for _ in range(20)))
    assert all(np.array_equal(one.as_numpy("OUT"), DATA) for one in answers)


@pytest.mark.parametrize("size", SIZES)
async def test_grpc(served: Served, size: int) -> None:
    data, answers = np.arange(size, dtype=np.uint8), queue.SimpleQueue[Any]()

    def ask() -> list[Any]:
        with GrpcClient(served.grpc) as client:
            for _ in range(6):
                client.async_infer(
                    "echo", filled(GrpcInput, data), lambda result, error: answers.put((result, error))
                )
            return [answers.get(timeout=60) for _ in range(6)]

    for result, error in await asyncio.to_thread(ask):
        assert error is None
        assert np.array_equal(result.as_numpy("OUT"), data)
        assert result.get_response().model_name == "echo"


@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
async def test_grpc_aio(served: Served, packing: str | None) -> None:
    async with GrpcAioClient(served.grpc) as client:
        several = (client.infer("echo", filled(GrpcInput), compression_algorithm=packing) for _ in range(20))
        answers = await asyncio.gather(*several)
    assert all(np.array_equal(one.as_numpy("OUT"), DATA) for one in answers)


async def test_a_stream_of_many_answers(served: Served) -> None:
    answers = queue.SimpleQueue[Any]()

    def ask() -> list[Any]:
        with GrpcClient(f"{served.count}:{GRPC_PORT}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=60)
            for count in (3, 50):
                client.async_stream_infer(
                    "count", filled(GrpcInput, np.array([count], np.uint8)), request_id=str(count)
                )
            found = [answers.get(timeout=60) for _ in range(53)]
            client.stop_stream()
            return found

    found = await asyncio.to_thread(ask)
    assert [error for _, error in found] == [None] * 53
    sizes = {"3": [1, 2, 3], "50": list(range(1, 51))}
    for request, expected in sizes.items():
        own = [result for result, _ in found if result.get_response().id == request]
        assert [len(result.as_numpy("OUT")) for result in own] == expected
        assert {result.get_response().model_name for result in own} == {"count"}


async def test_what_a_client_learns_is_of_its_own_model_by_its_public_name(served: Served) -> None:
    def ask() -> tuple[Any, ...]:
        with GrpcClient(served.grpc) as one, HttpClient(served.rest) as other:
            both: tuple[Any, ...] = ()
            for client, form in ((one, {"as_json": True}), (other, {})):
                config = client.get_model_config("echo", **form)
                index = client.get_model_repository_index(**form)
                both += (
                    client.is_model_ready("echo"),
                    client.get_model_metadata("echo", **form)["name"],
                    config.get("config", config)["name"],
                    [one["name"] for one in client.get_inference_statistics(**form)["model_stats"]],
                    [one["name"] for one in (index["models"] if isinstance(index, dict) else index)],
                )
            return both

    assert await asyncio.to_thread(ask) == (True, "echo", "echo", ["echo"], ["echo"]) * 2


async def test_another_model_is_unknown_in_tritons_words(served: Served) -> None:
    async with HttpAioClient(served.rest) as http, GrpcAioClient(served.grpc) as grpc:
        for client, form in ((http, HttpInput), (grpc, GrpcInput)):
            with pytest.raises(InferenceServerException, match="'count' is not found"):
                await client.infer("count", filled(form))


async def test_a_timeout_of_a_client_ends_its_call_alone(served: Served) -> None:
    def ask() -> Any:
        with GrpcClient(served.grpc) as client:
            tensor = filled(GrpcInput)
            for _ in range(4):
                with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
                    client.infer("echo", tensor, parameters={"sleep_ms": 400}, client_timeout=0.1)
            return client.infer("echo", tensor, client_timeout=60)

    assert np.array_equal((await asyncio.to_thread(ask)).as_numpy("OUT"), DATA)


async def test_server_sent_events(served: Served) -> None:
    """generate_stream, as clients of language models use it."""
    host = served.count
    reader, writer = await asyncio.open_connection(host, HTTP_PORT)
    body = b'{"IN":[7]}'
    writer.write(
        b"POST /v2/models/count/generate_stream HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert answer.count(b"data: ") == 7, answer
    assert answer.count(b'"model_name":"count"') == 7, answer


async def test_who_leaves_streams_of_answers_takes_triton_from_nobody(served: Served) -> None:
    """Triton 2.51 dies within some tens of streams of a decoupled model that are reset under it."""
    async with GrpcAioClient(f"{served.count}:{GRPC_PORT}") as client:

        async def leave() -> None:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": "count", "inputs": filled(GrpcInput, np.array([60], np.uint8))}

            answers = client.stream_infer(requests())
            for _ in range(random.randint(1, 60)):
                _, error = await anext(answers)
                assert error is None
            answers.cancel()

        for _ in range(60):
            await asyncio.gather(*(leave() for _ in range(4)))
        whole = await client.get_model_metadata("count")
        assert whole.name == "count"
    async with GrpcAioClient(served.grpc) as client:
        answer = await client.infer("echo", filled(GrpcInput))
        assert np.array_equal(answer.as_numpy("OUT"), DATA)
