"""Model pods of a test, on free ports: they count what is in them at once, and answer what they were told to.

REST answers to `infer` with the SHA-256 of the body; gRPC with the request's raw contents.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from berth.contract.activation import ReplicaEndpoint

METADATA = {
    "name": "own",
    "versions": ["3"],
    "platform": "python",
    "inputs": [{"name": "IN", "datatype": "UINT8", "shape": [-1]}],
    "outputs": [{"name": "OUT", "datatype": "UINT8", "shape": [-1, 4]}],
}
_SMALL = {
    "/v2": {"name": "triton", "version": "2.51.0", "extensions": ["classification"]},
    "/v2/models/own": METADATA,
    "/v2/models/own/config": {"name": "own"},
}


class FakePod(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """`slots` is what the activator is told; `seconds`: what a request takes."""

    def __init__(self, name: str = "p", *, slots: int = 4, seconds: float = 0.0, rest: bool = True) -> None:
        self.name, self.slots, self.seconds, self._has_rest = name, slots, seconds, rest
        self.is_ready = True
        self.inside = self.most_inside = self.served = 0
        self.hashes: list[str] = []
        self.ids: list[str] = []
        # Requests that have come are answered while it is set.
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        # Connections of REST, by number: the requests that each has had.
        self.connections: list[int] = []
        self.probes = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._grpc: grpc.aio.Server | None = None
        self.rest_port = self.grpc_port = 0

    async def start(self, ssl: Any = None) -> "FakePod":
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.rest_port, ssl=ssl, limit=2**20, backlog=1024
        )
        self.rest_port = self._server.sockets[0].getsockname()[1]
        self._grpc = grpc.aio.server(
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        )
        add_GRPCInferenceServiceServicer_to_server(self, self._grpc)
        self.grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await self._grpc.start()
        return self

    async def die(self) -> None:
        """At once, with whatever is in it. The port refuses connections from now on."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        if self._grpc is not None:
            await self._grpc.stop(None)
        self.may_answer.set()
        self._server = self._grpc = None

    def as_endpoint(self, *, ready: bool = True, nearly_ready: bool = False) -> ReplicaEndpoint:
        return ReplicaEndpoint(
            uid=f"uid-{self.name}",
            name=self.name,
            address="127.0.0.1",
            rest_port=self.rest_port if self._has_rest else 0,
            grpc_port=self.grpc_port,
            slots=self.slots,
            ready=ready,
            nearly_ready=nearly_ready,
        )

    def _enter(self) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)

    async def _work(self) -> None:
        await self.may_answer.wait()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.inside -= 1
        self.served += 1

    # REST.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.connections)
        self.connections.append(0)
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._request(reader, writer, number):
                pass
        self._writers.discard(writer)
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        size = int(lengths[0].partition(":")[2]) if lengths else 0
        if method == "GET":
            self._answer_question(writer, path)
            return True
        self.connections[number] += 1
        digest = hashlib.sha256()
        while size:
            piece = await reader.read(min(size, 2**20))
            if not piece:
                raise ConnectionResetError
            digest.update(piece)
            size -= len(piece)
        self.hashes.append(digest.hexdigest())
        self._enter()
        await self._work()
        if path.endswith("generate_stream"):
            await self._stream(writer)
        else:
            body = json.dumps({"pod": self.name, "hash": digest.hexdigest()}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        return True

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for place in range(20):
            event = b'data: {"model_name":"own","text":"%d"}\n\n' % place
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")

    def _answer_question(self, writer: asyncio.StreamWriter, path: str) -> None:
        self.probes += path.endswith("/ready")
        status, body = 200, b""
        if path.endswith("/ready"):
            status = 200 if self.is_ready else 400
        elif path in _SMALL:
            body = json.dumps(_SMALL[path]).encode()
        else:
            status = 404
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    # gRPC.

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.ids.append(request.id)
        self._enter()
        await self._work()
        return self._echo(request)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            self.ids.append(request.id)
            self._enter()
            await self._work()
            yield pb.ModelStreamInferResponse(infer_response=self._echo(request))

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ModelReadyResponse(ready=self.is_ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ModelMetadataResponse(name="own", versions=["3"], platform="python")

    def _echo(self, request: Any) -> Any:
        answer = pb.ModelInferResponse(model_name="own", model_version=self.name, id=request.id)
        answer.outputs.add(name="OUT", datatype="UINT8", shape=[len(request.raw_input_contents[0])])
        answer.raw_output_contents.append(request.raw_input_contents[0])
        return answer
