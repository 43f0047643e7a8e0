"""One client of a replica in either protocol, before either plane, in words that both have in common."""

import asyncio
import json
import time
from typing import Any, Final, Protocol

from proxy.gateway.fair_reader import FairReader, FairReadScheduler, ReplicaShare
from proxy.policy.refusal import Form
from proxy.request.messages import framed
from proxy.request.replica import Replica
from tests.fakes.data_plane import GrpcPair, RestPair, settle
from tests.fakes.grpc_peers import Both, request

STAND_ALONE, GATEWAY = "stand-alone", "gateway"
PLANES: Final = (STAND_ALONE, GATEWAY)


class Side(Protocol):
    """One client."""

    replica: Replica

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        """For inference on a tensor of so many values, with parameters of it."""
        ...

    async def answer(self) -> None:
        """Triton answers all that it has."""
        ...

    async def break_off(self) -> None:
        """Triton ends its connections."""
        ...

    async def leave(self) -> None:
        """The client goes."""
        ...

    async def late(self, seconds: float) -> None:
        """So much time has passed."""
        ...

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
        """Whether it is told that it may try again."""
        ...

    @property
    def in_triton(self) -> int:
        """Requests that have reached it whole."""
        ...


def behind(plane: str, protocol: asyncio.Protocol, replica: Replica, wire: Any) -> asyncio.Protocol:
    """A client's connection as the plane has it."""
    if plane == STAND_ALONE:
        return protocol
    reader = FairReader(protocol, ReplicaShare(replica), FairReadScheduler(), lambda: None)
    reader.connection_made(wire)
    return reader


class Rest:
    ok: object = 200

    def __init__(self, plane: str, replica: Replica, beside: "Rest | None" = None) -> None:
        self._pair = (
            RestPair(replica=replica) if beside is None else RestPair(downstream=beside._pair.downstream)
        )
        self.replica, self._first = replica, beside._first if beside else self._pair
        self._client = behind(plane, self._pair.client, replica, self._pair.to_client)

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        tensor = {"name": "IN", "datatype": "UINT8", "shape": [values], "data": [1] * values}
        if parameters:
            tensor["parameters"] = parameters
        body = json.dumps({"inputs": [tensor]}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        self._client.data_received(head.encode() + body)
        await settle()

    async def answer(self) -> None:
        for upstream in self._first.tritons:
            if upstream.request is not None and upstream.request_done:
                upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await settle()

    async def break_off(self) -> None:
        for upstream in self._first.tritons:
            upstream.connection_lost(None)
        await settle()

    async def leave(self) -> None:
        self._client.connection_lost(None)
        await settle()

    async def late(self, seconds: float) -> None:
        self._pair.client.tick(time.monotonic() + seconds)
        await settle()

    @staticmethod
    def form(form: Form) -> object:
        return form.http

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


class Grpc:
    ok: object = 0

    def __init__(self, plane: str, replica: Replica, beside: "Grpc | None" = None) -> None:
        pair = GrpcPair(replica=replica) if beside is None else GrpcPair(downstream=beside._pair.downstream)
        self._pair, self.replica = pair, replica
        self._both = Both(pair)
        self._first = beside._first if beside else self._both
        if (
            beside is not None
        ):  # one reference server answers all, and tells its calls apart by their streams' ids
            self._both.triton = self._first.triton
            self._both.client.h2.highest_outbound_stream_id = 2 * replica.calls + 101
        if plane == GATEWAY:
            self._reader = behind(plane, pair.client, replica, pair.to_client)
            pair.receive = self._receive  # type: ignore[method-assign]
        self._both.exchange()
        self._stream = 0

    def _receive(self, data: bytes) -> None:
        self._reader.data_received(data)
        self._pair.end_turn()

    async def _pass(self) -> None:
        for _ in range(4):
            self._both.exchange()
            self._first.exchange()
            await settle()

    async def ask(self, model: str = "own", *, values: int = 3, **parameters: str) -> None:
        self._stream = self._both.client.call()
        self._both.client.send(self._stream, framed(request(model, size=values, **parameters)), end=True)
        await self._pass()

    async def answer(self) -> None:
        triton = self._first.triton
        for stream in sorted(triton.ended):
            triton.answer(stream, b"")
        triton.ended.clear()
        await self._pass()

    async def break_off(self) -> None:
        for upstream in self._pair.tritons:
            upstream.connection_lost(None)
        await self._pass()

    async def leave(self) -> None:
        self._pair.client.connection_lost(None)
        await settle()

    async def late(self, seconds: float) -> None:
        self._pair.client.tick(time.monotonic() + seconds)
        await self._pass()

    @staticmethod
    def form(form: Form) -> object:
        return int(form.grpc)

    @property
    def _headers(self) -> dict[bytes, bytes]:
        return dict(self._both.client.headers.get(self._stream, []))  # type: ignore[arg-type]

    @property
    def outcome(self) -> object:
        return self._both.client.status(self._stream)

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


SIDES: Final = {"REST": Rest, "gRPC": Grpc}
