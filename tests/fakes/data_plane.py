"""The front ends without sockets: bytes in, bytes out, on both sides, in the order of the calls."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from proxy.exchange.breaker import Breaker
from proxy.exchange.load import LoadMeter
from proxy.exchange.model_facts import ModelFacts
from proxy.exchange.traffic import Traffic
from proxy.fronts.grpc.client import ClientConnection
from proxy.fronts.grpc.front import GrpcFront
from proxy.fronts.grpc.upstream import UpstreamConnection
from proxy.fronts.rest.client import RestConnection
from proxy.fronts.rest.front import RestFront
from proxy.fronts.rest.upstream import UpstreamHttp, UpstreamPool
from proxy.upstream import Access, Upstream

KEY = "triton-grpc-protocol-berth-inference-key"


class Wire:
    """A transport that keeps what its peer has taken. From `stall` on the peer takes nothing but by `drain`."""

    def __init__(self) -> None:
        self.sent = b""
        self.open = True
        self.paused = False
        self.ended = False
        self._stalled: asyncio.BaseProtocol | None = None
        self._untaken, self._high, self._full = b"", 64 * 1024, False

    def stall(self, protocol: asyncio.BaseProtocol) -> None:
        """`protocol` writes here, and is told when too much has piled up."""
        self._stalled = protocol

    def drain(self, size: int | None = None) -> None:
        """The peer takes so much, or all."""
        size = len(self._untaken) if size is None else size
        self.sent, self._untaken = self.sent + self._untaken[:size], self._untaken[size:]
        if self._full and len(self._untaken) <= self._high // 4 and self._stalled is not None:
            self._full = False
            self._stalled.resume_writing()  # type: ignore[attr-defined]

    def write(self, data: Any) -> None:
        assert self.open, "written after the end"
        assert not self.ended, "written after the end of writing"
        if self._stalled is None:
            self.sent += bytes(data)
            return
        self._untaken += bytes(data)
        if len(self._untaken) > self._high and not self._full:
            self._full = True
            self._stalled.pause_writing()  # type: ignore[attr-defined]

    def writelines(self, pieces: list[Any]) -> None:
        self.write(b"".join(pieces))

    def take(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent

    def close(self) -> None:
        """What was written is still delivered."""
        self.open = bool(self._untaken)
        self.ended = True

    def abort(self) -> None:
        self.open, self._untaken = False, b""

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_write_buffer_limits(self, *, high: int, **_: int) -> None:
        self._high = high

    def get_write_buffer_size(self) -> int:
        return len(self._untaken)

    def get_extra_info(self, _: str) -> None:
        return None


def own_upstream(facts: ModelFacts | None = None) -> Upstream:
    upstream = Upstream(ModelName("own"), None)  # type: ignore[arg-type]
    here = Endpoint("127.0.0.1", 1)
    upstream.access = Access(here, here, {"berth-inference-key": "k"}, {KEY: "k"})
    upstream.not_ready = None
    upstream.facts = facts or ModelFacts()
    return upstream


def make_breaker(limit: int = 0, depth: int = 0) -> Breaker:
    return Breaker(LoadMeter(time.monotonic(), time.time), limit=limit, queue_depth=depth)


_PAIRS: "WeakKeyDictionary[ClientConnection, GrpcPair]" = WeakKeyDictionary()


class GrpcPair:
    """One client's connection and Triton's, once there is one. Needs a running loop and `triton_at_hand`."""

    def __init__(
        self,
        *,
        breaker: Breaker | None = None,
        facts: ModelFacts | None = None,
        front: GrpcFront | None = None,
    ) -> None:
        self.front = front or GrpcFront(
            own_upstream(facts),
            breaker or make_breaker(),
            Traffic(),
            timeout_seconds=300,
            inflate_limit=1024**2,
            not_ready=lambda: None,
        )
        self.client, self.to_client = ClientConnection(self.front), Wire()
        self.client.connection_made(self.to_client)  # type: ignore[arg-type]
        self.to_triton: list[Wire] = []
        self.tritons: list[UpstreamConnection] = []
        _PAIRS[self.client] = self


@contextmanager
def triton_at_hand() -> Iterator[None]:
    """Connections to Triton are made at once, each with its own client's pair."""

    async def nothing(_: UpstreamConnection) -> None:
        """The transport is there already."""

    def wired(upstream: UpstreamConnection, client: ClientConnection, *args: Any) -> None:
        original(upstream, client, *args)
        pair = _PAIRS[client]
        pair.tritons.append(upstream)
        pair.to_triton.append(Wire())
        upstream.connection_made(pair.to_triton[-1])  # type: ignore[arg-type]

    original = UpstreamConnection.__init__
    with (
        patch.object(UpstreamConnection, "_connect", nothing),
        patch.object(UpstreamConnection, "__init__", wired),
    ):
        yield


_POOLS: "WeakKeyDictionary[UpstreamPool, RestPair]" = WeakKeyDictionary()


class RestPair:
    """One client's connection and the pool's connections to Triton. Needs `triton_at_hand`."""

    def __init__(
        self,
        *,
        breaker: Breaker | None = None,
        facts: ModelFacts | None = None,
        front: RestFront | None = None,
    ) -> None:
        """Of several clients of one `front` the first one's pair has the connections to Triton."""
        self.front = front or RestFront(
            own_upstream(facts),
            breaker or make_breaker(),
            Traffic(),
            max_json_bytes=64 * 1024,
            timeout_seconds=300,
            not_ready=lambda: None,
        )
        self.client, self.to_client = RestConnection(self.front), Wire()
        self.client.connection_made(self.to_client)  # type: ignore[arg-type]
        self.tritons: list[UpstreamHttp] = []
        self.to_triton: list[Wire] = []
        _POOLS.setdefault(self.front.pool, self)

    @staticmethod
    @contextmanager
    def triton_at_hand() -> Iterator[None]:
        """Connections to Triton are made in the loop's next step, each with its own front end's pair."""

        async def connect(pool: UpstreamPool, endpoint: Endpoint, asker: Any) -> None:
            pair, upstream = _POOLS[pool], UpstreamHttp(pool, endpoint, asker)
            pair.tritons.append(upstream)
            pair.to_triton.append(Wire())
            upstream.connection_made(pair.to_triton[-1])  # type: ignore[arg-type]
            asker.connected(upstream)

        with patch.object(UpstreamPool, "_connect", connect):
            yield


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)
