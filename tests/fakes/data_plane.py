"""The front ends without sockets: bytes in, bytes out, on both sides, in the order of the calls."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from proxy.downstream.grpc.connection import GrpcConnection
from proxy.downstream.grpc.downstream import GrpcCommon, GrpcDownstream
from proxy.downstream.rest.connection import RestConnection
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import TritonGrpc, UpstreamConnection
from proxy.upstream.health import Upstream
from proxy.upstream.http1 import UpstreamHttp, UpstreamPool

KEY = "triton-grpc-protocol-berth-inference-key"


class Wire:
    """A transport that keeps what its peer has taken. From `stall` on the peer takes nothing but by `drain`."""

    def __init__(self, peer: str = "") -> None:
        """`peer`: the address of the other end."""
        self.sent = b""
        self.open = True
        self.aborted = False
        # The protocol that has taken the connection over.
        self.protocol: Any = None
        self._peer = peer
        self.paused = False
        self.ended = False
        self._stalled: asyncio.BaseProtocol | None = None
        self._untaken, self._high, self._full = b"", 64 * 1024, False

    def stall(self, protocol: asyncio.BaseProtocol) -> None:
        """`protocol` writes here, and is paused when too much has piled up."""
        self._stalled = protocol

    def flow(self) -> None:
        """The peer takes everything from now on."""
        while self._untaken:
            self.drain()
        self._stalled = None

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
        self.open, self.aborted, self._untaken = False, True, b""

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return not self.open or self.ended

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_write_buffer_limits(self, *, high: int, **_: int) -> None:
        self._high = high

    def get_write_buffer_size(self) -> int:
        return len(self._untaken)

    def get_extra_info(self, name: str) -> Any:
        return (self._peer, 1) if name == "peername" and self._peer else None


def here() -> UpstreamCluster:
    endpoint = Endpoint("127.0.0.1", 1)
    return UpstreamCluster(UpstreamEndpoint(endpoint, endpoint, {"berth-inference-key": "k"}, {KEY: "k"}))


def own_replica(
    limit: int = 0,
    depth: int = 0,
    *,
    facts: ModelFacts | None = None,
    names: Names | None = None,
    **limits: Any,
) -> Replica:
    """A replica that Triton serves."""
    more = {"max_json_bytes": 64 * 1024, **limits}
    replica = Replica(
        names or Names(b"own", b"own"),
        ReplicaLimits(container_concurrency=limit, queue_depth=depth, **more),
    )
    replica.triton_says(None)
    replica.facts = facts or ModelFacts()
    return replica


def own_upstream(facts: ModelFacts | None = None, replica: Replica | None = None) -> Upstream:
    where = here()
    return Upstream(replica or own_replica(facts=facts), where, UpstreamPool(where))


class HandTurn(WriteBatch):
    """Turns that a test ends."""

    def then(self, do: Callable[[], None]) -> None:
        self._todo.append(do)

    def end(self) -> None:
        while self._todo:
            super().end()


class NoQuestions:
    """Triton cannot be asked."""

    async def versions(self, replica: Replica) -> list[str]:
        raise NotServed("Triton cannot be asked")

    async def server_metadata(self) -> Any:
        raise NotServed("Triton cannot be asked")


_TRITONS: "WeakKeyDictionary[TritonGrpc, list[tuple[UpstreamConnection, Wire]]]" = WeakKeyDictionary()


def grpc_common(questions: Any = None, **more: Any) -> GrpcCommon:
    """With turns that end by hand."""
    return GrpcCommon(here(), questions or NoQuestions(), batch=HandTurn(), **more)


class GrpcPair:
    """One client's connection and Triton's, once there is one. Needs a running loop and `triton_at_hand`."""

    def __init__(
        self,
        *,
        limit: int = 0,
        depth: int = 0,
        facts: ModelFacts | None = None,
        names: Names | None = None,
        replica: Replica | None = None,
        common: GrpcCommon | None = None,
        downstream: GrpcDownstream | None = None,
        **limits: Any,
    ) -> None:
        """Of several clients of one process (`common`) or replica (`downstream`) all have the same connections to Triton."""
        more = {"max_json_bytes": 1024**2, **limits}
        self.downstream = downstream or GrpcDownstream(
            replica or own_replica(limit, depth, facts=facts, names=names, **more), common or grpc_common()
        )
        self.replica = self.downstream.replica
        self.client, self.to_client = GrpcConnection(self.downstream), Wire()
        self.client.connection_made(self.to_client)  # type: ignore[arg-type]

    def receive(self, data: bytes) -> None:
        """What the client has sent."""
        self.client.data_received(data)
        self.end_turn()

    def end_turn(self) -> None:
        self.downstream.batch.end()

    @property
    def tritons(self) -> list[UpstreamConnection]:
        return [upstream for upstream, _ in _TRITONS.get(self.downstream.triton, [])]

    @property
    def to_triton(self) -> list[Wire]:
        return [wire for _, wire in _TRITONS.get(self.downstream.triton, [])]

    @property
    def running(self) -> int:
        return self.replica.admissions.running

    @property
    def waiting(self) -> int:
        return self.replica.admissions.waiting

    @property
    def buffered_bytes(self) -> int:
        return self.replica.budget.used_bytes


@contextmanager
def triton_at_hand() -> Iterator[None]:
    """Connections to Triton are made at once."""

    async def nothing(_: UpstreamConnection) -> None:
        """The transport is there already."""

    def wired(
        upstream: UpstreamConnection, address: Any, keys: Any, readers: Any, turn: Any, watcher: Any
    ) -> None:
        original(upstream, address, keys, readers, turn, watcher)
        wire = Wire()
        _TRITONS.setdefault(watcher, []).append((upstream, wire))
        upstream.connection_made(wire)  # type: ignore[arg-type]

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
        limit: int = 0,
        depth: int = 0,
        facts: ModelFacts | None = None,
        replica: Replica | None = None,
        downstream: RestDownstream | None = None,
    ) -> None:
        """Of several clients of one `downstream` the first one's pair has the connections to Triton."""
        self.downstream = downstream or RestDownstream(
            RestShared(here()), replica or own_replica(limit, depth, facts=facts)
        )
        self.client, self.to_client = RestConnection(self.downstream), Wire()
        self.client.connection_made(self.to_client)  # type: ignore[arg-type]
        self.tritons: list[UpstreamHttp] = []
        self.to_triton: list[Wire] = []
        _POOLS.setdefault(self.downstream.shared.pool, self)

    @staticmethod
    @contextmanager
    def triton_at_hand() -> Iterator[None]:
        """Connections to Triton are made in the loop's next step, each with its own front end's pair."""

        async def connection(pool: UpstreamPool, endpoint: Endpoint) -> UpstreamHttp:
            pair, upstream = _POOLS[pool], UpstreamHttp(pool, endpoint)
            pair.tritons.append(upstream)
            pair.to_triton.append(Wire())
            upstream.connection_made(pair.to_triton[-1])  # type: ignore[arg-type]
            return upstream

        with patch.object(UpstreamPool, "_connection", connection):
            yield


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)
