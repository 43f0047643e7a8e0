"""One client of a replica in either protocol, before either plane, in words that both have in common."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from berth.contract.endpoint import Endpoint
from proxy.gateway.fair_reader import FairReader, FairReadScheduler, ReplicaShare
from proxy.policy.refusal import Form
from proxy.request.endpoint import UpstreamCluster
from proxy.request.messages import INFER, STREAM_INFER, framed
from proxy.request.replica import Replica
from proxy.wire.http1 import HEADER_LENGTH
from proxy.wire.protobuf import encode_varint
from tests.fakes.data_plane import GrpcPair, RestPair, settle
from tests.fakes.grpc_peers import Both, Triton, request

STAND_ALONE, GATEWAY = "stand-alone", "gateway"
PLANES: Final = (STAND_ALONE, GATEWAY)
# Frames that fit in every window.
PIECE_BYTES: Final = 16_000
# Of a response that has begun; no protocol reads more of it before its client has taken some.
BEGUN_BYTES: Final = 48_000


class Side(Protocol):
    """One client."""

    replica: Replica

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        """Request inference on a tensor of so many values, with parameters of it."""
        ...

    async def begin(self, values: int, sent: int) -> None:
        """The same of the own model, but only so many bytes are sent; below 0: all but so many."""
        ...

    async def send(self, size: int | None = None) -> None:
        """So much more of what has begun, or the rest."""
        ...

    async def answer(self) -> None:
        """Triton responds to all requests that it has received."""
        ...

    async def begin_answer(self, size: int) -> None:
        """Triton begins responses of so many bytes to all requests that it has received."""
        ...

    def stall(self) -> None:
        """The client reads nothing from now on."""
        ...

    async def break_off(self) -> None:
        """Triton closes its connections."""
        ...

    async def leave(self) -> None:
        """The client disconnects."""
        ...

    async def cancel(self) -> None:
        """The client cancels its request, as its protocol allows."""
        ...

    async def late(self, seconds: float) -> None:
        """So much time has passed since the client came."""
        ...

    @property
    def cluster(self) -> UpstreamCluster: ...

    @property
    def outcome(self) -> object:
        """OK, or the form of the refusal; None: nothing yet."""
        ...

    @property
    def message(self) -> str:
        """Of a refusal."""
        ...

    @property
    def retries(self) -> bool:
        """Whether the response says that the client may try again."""
        ...

    @property
    def in_triton(self) -> int:
        """Requests that have reached it whole."""
        ...

    @property
    def upstreams(self) -> list[Any]:
        """Connections to Triton that were made."""
        ...

    @property
    def codes(self) -> Mapping[str, int]:
        """Requests that were counted, by their codes."""
        ...


def behind(plane: str, protocol: asyncio.Protocol, replica: Replica, wire: Any) -> asyncio.Protocol:
    """A client's connection as the plane has it."""
    if plane == STAND_ALONE:
        return protocol
    reader = FairReader(protocol, ReplicaShare(replica), FairReadScheduler(), lambda: None)
    reader.connection_made(wire)
    return reader


def move(cluster: UpstreamCluster) -> Endpoint:
    """Triton is somewhere else from now on."""
    moved = Endpoint("127.0.0.9", 7)
    cluster.move(replace(cluster.require(), http=moved, grpc=moved))
    return moved


class Rest:
    ok: object = 200
    ok_code, left_code, late_code = "200", "499", "504"

    def __init__(self, plane: str, replica: Replica, *siblings: "Rest") -> None:
        """`siblings`: earlier clients of the replica, with the connections to Triton."""
        self._pair = (
            RestPair(downstream=siblings[0]._pair.downstream) if siblings else RestPair(replica=replica)
        )
        self.replica, self._first = replica, siblings[0]._first if siblings else self._pair
        self._client = behind(plane, self._pair.client, replica, self._pair.to_client)
        self._rest, self._came = b"", time.monotonic()

    @staticmethod
    def _infer(model: str, values: int, parameters: dict[str, Any]) -> bytes:
        tensor: dict[str, Any] = {"name": "IN", "datatype": "UINT8", "shape": [values]}
        is_binary = values > 1000
        if is_binary:
            parameters = {**parameters, "binary_data_size": values}
        else:
            tensor["data"] = [1] * values
        if parameters:
            tensor["parameters"] = parameters
        text = json.dumps({"inputs": [tensor]}).encode()
        body = text + bytes(values) if is_binary else text
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
        if is_binary:
            head += f"{HEADER_LENGTH}: {len(text)}\r\n"
        return head.encode() + b"\r\n" + body

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        self._client.data_received(self._infer(model, values, parameters))
        await settle()

    async def begin(self, values: int, sent: int) -> None:
        self._rest = self._infer("own", values, {})
        await self.send(sent)

    async def send(self, size: int | None = None) -> None:
        now, self._rest = self._rest[:size], b"" if size is None else self._rest[size:]
        self._client.data_received(now)
        await settle()

    async def answer(self) -> None:
        for upstream in self._first.tritons:
            if upstream.request is not None and upstream.request_done and upstream.transport is not None:
                upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await settle()

    async def begin_answer(self, size: int) -> None:
        for upstream in self._first.tritons:
            if upstream.request is not None and upstream.request_done:
                upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
                upstream.data_received(bytes(BEGUN_BYTES))
        await settle()

    def stall(self) -> None:
        self._pair.to_client.stall(self._pair.client)
        self._pair.client.pause_writing()

    async def break_off(self) -> None:
        for upstream in self._first.tritons:
            upstream.connection_lost(None)
        await settle()

    async def leave(self) -> None:
        self._client.connection_lost(None)
        await settle()

    cancel = leave

    async def late(self, seconds: float) -> None:
        self._pair.downstream.tick(self._came + seconds)
        await settle()

    @property
    def cluster(self) -> UpstreamCluster:
        return self._pair.downstream.shared.cluster

    @staticmethod
    def form(form: Form) -> object:
        return form.http

    @staticmethod
    def code(form: Form) -> str:
        return str(form.http)

    @property
    def outcome(self) -> object:
        sent = self._pair.to_client.sent
        return int(sent.split(b" ", 2)[1]) if sent else None

    @property
    def message(self) -> str:
        return self._pair.to_client.sent.partition(b"\r\n\r\n")[2].decode()

    @property
    def retries(self) -> bool:
        return b"Retry-After: 1" in self._pair.to_client.sent

    @property
    def in_triton(self) -> int:
        return sum(upstream.request is not None and upstream.request_done for upstream in self._first.tritons)

    @property
    def upstreams(self) -> list[Any]:
        return self._first.tritons

    @property
    def upstream_wires(self) -> list[Any]:
        return self._first.to_triton

    @property
    def codes(self) -> Mapping[str, int]:
        return self.replica.rest.codes


class Grpc:
    ok: object = 0
    ok_code, left_code, late_code = "OK", "CANCELLED", "DEADLINE_EXCEEDED"
    method = INFER

    def __init__(self, plane: str, replica: Replica, *siblings: "Grpc") -> None:
        """`siblings`: earlier clients of the replica. One reference server answers all on one connection to Triton,
        and tells their calls apart by their streams' ids."""
        pair = GrpcPair(downstream=siblings[0]._pair.downstream) if siblings else GrpcPair(replica=replica)
        self._pair, self.replica = pair, replica
        self._both = Both(pair)
        self._servers: list[Triton] = siblings[0]._servers if siblings else [self._both.triton]
        self._siblings: list[Grpc] = siblings[0]._siblings if siblings else []
        self._siblings.append(self)
        self._both.client.h2.highest_outbound_stream_id = 200 * len(self._siblings) + 1
        if plane == GATEWAY:
            self._reader = behind(plane, pair.client, replica, pair.to_client)
            pair.receive = self._receive  # type: ignore[method-assign]
        self._both.client.exchange()
        self._stream, self._rest, self._came = 0, b"", time.monotonic()

    def _receive(self, data: bytes) -> None:
        self._reader.data_received(data)
        self._pair.end_turn()

    async def _pass(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self._servers += [
                Triton(self._pair, at) for at in range(len(self._servers), len(self._pair.tritons))
            ]
            for one in self._siblings:
                one._both.client.exchange()
            for server in self._servers:
                server.exchange()
            await settle()

    def _call(self) -> None:
        self._stream = self._both.client.call(self.method)

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        self._call()
        self._rest = framed(request(model, size=values, **parameters))
        await self.send()

    async def begin(self, values: int, sent: int) -> None:
        self._call()
        self._rest = framed(request(size=values))
        await self.send(sent)

    async def send(self, size: int | None = None) -> None:
        now, self._rest = self._rest[:size], b"" if size is None else self._rest[size:]
        client = self._both.client
        while now and self._stream not in client.ended | set(client.resets):
            room = min(client.h2.local_flow_control_window(self._stream), PIECE_BYTES)
            assert room > 0, "the proxy takes no more of it"
            piece, now = now[:room], now[room:]
            client.send(self._stream, piece, end=not now and not self._rest)
            await self._pass(2)
        await self._pass()

    def _messages(self) -> list[bytes]:
        return [b""]

    async def answer(self) -> None:
        for server in self._servers:
            for stream in sorted(server.ended):
                server.answer(stream, *self._messages())
            server.ended.clear()
        await self._pass()

    async def begin_answer(self, size: int) -> None:
        message = framed(b"\x12" + encode_varint(size) + bytes(size))
        for server in self._servers:
            ready = sorted(server.ended)
            server.ended.clear()
            for stream in ready:
                server.begin(stream)
                for at in range(0, BEGUN_BYTES, PIECE_BYTES):
                    server.send(stream, message[at : at + PIECE_BYTES])
                    server.exchange()
        await self._pass()

    def stall(self) -> None:
        self._both.client.h2.update_settings({4: 0})
        self._both.client.exchange()

    async def break_off(self) -> None:
        for upstream in self._pair.tritons:
            upstream.connection_lost(None)
        await self._pass()

    async def leave(self) -> None:
        self._pair.to_client.open = False
        self._pair.client.connection_lost(None)
        await settle()

    async def cancel(self) -> None:
        self._both.client.h2.reset_stream(self._stream, 8)
        await self._pass()

    async def late(self, seconds: float) -> None:
        self._pair.downstream.tick(self._came + seconds)
        await self._pass()

    @property
    def cluster(self) -> UpstreamCluster:
        return self._pair.downstream.common.cluster

    @staticmethod
    def form(form: Form) -> object:
        return int(form.grpc)

    @staticmethod
    def code(form: Form) -> str:
        return form.grpc.name

    @property
    def _headers(self) -> dict[bytes, bytes]:
        return dict(self._both.client.headers.get(self._stream, []))

    @property
    def outcome(self) -> object:
        reset = self._both.client.resets.get(self._stream)
        # A response that has begun ends so: gRPC's clients take ENHANCE_YOUR_CALM for RESOURCE_EXHAUSTED.
        return 8 if reset == 11 else self._both.client.status(self._stream)

    @property
    def message(self) -> str:
        return self._headers.get(b"grpc-message", b"").decode()

    @property
    def retries(self) -> bool:
        return self._headers.get(b"retry-after") == b"1"

    @property
    def in_triton(self) -> int:
        return sum(
            stream.local_done for upstream in self._pair.tritons for stream in upstream.codec.streams.values()
        )

    @property
    def upstreams(self) -> list[Any]:
        return self._pair.tritons

    @property
    def upstream_wires(self) -> list[Any]:
        return self._pair.to_triton

    @property
    def codes(self) -> Mapping[str, int]:
        return self.replica.grpc.codes


class GrpcStream(Grpc):
    """One message of a bidirectional stream whose client asks for refusals as a status."""

    method = STREAM_INFER

    def _call(self) -> None:
        client = self._both.client
        self._stream = client.call(self.method, fields=[("triton_grpc_error", "true")])

    def _messages(self) -> list[bytes]:
        return [b"\x12\x00"]  # an empty infer_response


SIDES: Final = {"REST": Rest, "gRPC": Grpc, "gRPC-stream": GrpcStream}
