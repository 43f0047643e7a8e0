"""Clients of a model that may sleep."""

import asyncio
import io
import json
from typing import Any

import aiohttp
import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.loopback.activator.conftest import Place

BODY = b'{"inputs":[{"name":"IN","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'
MIB = 1024**2


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def request(*, size: int = 3, id: str = "", model: str = "own") -> Any:
    message = pb.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="IN", datatype="UINT8", shape=[size])
    message.raw_input_contents.append(pattern(size))
    return message


def tensor(size: int) -> tuple[bytes, dict[str, str]]:
    """A body with a binary tensor, and its headers."""
    head = {
        "inputs": [
            {"name": "IN", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
        ]
    }
    text = json.dumps(head, separators=(",", ":")).encode()  # as the guard would write it
    return text + pattern(size), {"Inference-Header-Content-Length": str(len(text))}


async def post(
    session: aiohttp.ClientSession,
    place: Place,
    body: bytes = BODY,
    path: str = "/v2/models/own/infer",
    **headers: str,
) -> tuple[int, Any, Any]:
    async with session.post(
        place.url + path,
        data=io.BytesIO(body),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    ) as answer:
        return answer.status, await answer.json(content_type=None), answer.headers


async def get(place: Place, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(place.url + path) as answer:
        return answer.status, await answer.read()


def channel(place: Place) -> grpc.aio.Channel:
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(place.target, options=options)


def stub(over: grpc.aio.Channel) -> Any:
    return GRPCInferenceServiceStub(over)


def asking(call: Any) -> "asyncio.Future[Any]":
    """A call, begun."""

    async def whole() -> Any:
        return await call

    return asyncio.ensure_future(whole())


async def raw(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", place.assignment.rest_port)


def infer(body: bytes = BODY, *, model: str = "own", more: str = "") -> bytes:
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body
