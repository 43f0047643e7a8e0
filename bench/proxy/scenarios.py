"""What is measured, of whom, and what the project asks of itself: Berth's figure over the peer's."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.proxy import loads
from bench.proxy.peers import BERTH, DOOR, GRPC_OTHERS, NODE, OWN, REST_OTHERS, STREAM, Peer
from bench.proxy.processes import Running
from bench.proxy.table import Targets

MIB = 1024**2
_SMALL_REST: Targets = {
    "berth": {"envoy": 0.4, "queue-proxy": 0.3, "nginx": 1.3},
    "door": {"nginx stream": 1.2},
    "door + gateway": {"envoy": 0.75},
}
_SMALL_GRPC: Targets = {
    "berth": {"envoy": 0.6, "queue-proxy": 0.4, "nginx": 1.0},
    "door + gateway": {"envoy": 0.75},
}
_NO_MORE_THAN_ENVOY: Targets = {"berth": {"envoy": 1.0}}
# At once: connections and, on each of them, calls.
_CROWDS = ((1, 1), (4, 4), (1, 32))


@dataclass(frozen=True)
class Scenario:
    """`measure`: the figure of one load."""

    name: str
    measure: Callable[[Running], float]
    peers: Sequence[Peer]
    targets: Targets = field(default_factory=dict)


# By how many seconds a load lasts.
Made = Callable[[float], Iterator[Scenario]]


def small_rest(seconds: float) -> Iterator[Scenario]:
    def measure(one: Running) -> float:
        return loads.rest(one, tensor_bytes=3, connections=16, seconds=seconds).micros

    yield Scenario("REST 100 B, µs/request", measure, (*OWN, STREAM, *REST_OTHERS), _SMALL_REST)


def large_rest(seconds: float) -> Iterator[Scenario]:
    def micros(one: Running, size: int, connections: int) -> float:
        return loads.rest(one, tensor_bytes=size, connections=connections, seconds=seconds).micros

    peers = (BERTH, NODE, *REST_OTHERS)
    yield Scenario("REST 256 KiB, µs/request", lambda one: micros(one, 256 * 1024, 8), peers)
    yield Scenario(
        "REST 8 MiB tensors, CPU ms/GiB",
        lambda one: micros(one, 8 * MIB, 4) / 1000 * 128,
        peers,
        _NO_MORE_THAN_ENVOY,
    )


def events() -> Iterator[Scenario]:
    yield Scenario(
        "SSE, µs/event",
        lambda one: loads.events(one, streams=40).micros,
        (BERTH, NODE, *REST_OTHERS),
        _NO_MORE_THAN_ENVOY,
    )


def grpc(seconds: float) -> Iterator[Scenario]:
    peers = (BERTH, NODE, *GRPC_OTHERS)
    for crowd in _CROWDS:
        measure = functools.partial(_unary, size=3, crowd=crowd, seconds=seconds)
        everyone = (*OWN, *GRPC_OTHERS) if crowd == (4, 4) else peers
        yield Scenario(f"gRPC 36 B {_at(crowd)}, µs/request", measure, everyone, _SMALL_GRPC)
    for crowd in _CROWDS:
        measure = functools.partial(_by_go, crowd=crowd, seconds=seconds)
        yield Scenario(f"– by grpc-go, unique headers, {_at(crowd)}", measure, peers, _SMALL_GRPC)
    yield Scenario(
        "gRPC 256 KiB 4 × 1, µs/request",
        functools.partial(_unary, size=256 * 1024, crowd=(4, 1), seconds=seconds),
        peers,
    )
    yield Scenario(
        "gRPC 8 MiB tensors, CPU ms/GiB",
        # Both ways: the identity sends as much back.
        lambda one: _unary(one, 8 * MIB, (2, 1), seconds) / 1000 * 64,
        peers,
        _NO_MORE_THAN_ENVOY,
    )
    yield Scenario(
        "gRPC answers of 100 MiB to grpc-go, CPU ms/GiB",
        lambda one: (
            loads.by_go(
                one, connections=1, streams=1, seconds=seconds, answer_bytes=100 * MIB, calls=5
            ).micros
            / 1000
        ),
        peers,
        _NO_MORE_THAN_ENVOY,
    )
    yield Scenario(
        "gRPC stream, µs/message",
        lambda one: loads.stream(one, messages=1000, streams=5).micros,
        peers,
        _NO_MORE_THAN_ENVOY,
    )


def _unary(one: Running, size: int, crowd: tuple[int, int], seconds: float) -> float:
    connections, streams = crowd
    return loads.unary(
        one, tensor_bytes=size, connections=connections, streams=streams, seconds=seconds
    ).micros


def _by_go(one: Running, crowd: tuple[int, int], seconds: float) -> float:
    return loads.by_go(one, connections=crowd[0], streams=crowd[1], seconds=seconds).micros


def _at(crowd: tuple[int, int]) -> str:
    return f"{crowd[0]} × {crowd[1]}"


# Of what is not measured by a load on all peers.
LATENCY = "{} p99 at 500/s, µs added"
SLOW_READER = "peak RSS, MiB, a slow reader of 1 GiB"
IDLE = "peak RSS, MiB, 1000 idle connections"
RESIDENT = "RSS after small requests, MiB"
EACH_COPY = "RSS of each further copy, MiB"
START = "start to listening, s of CPU"
FURTHER: dict[str, Targets] = {
    LATENCY.format("REST"): {NODE.name: {"envoy": 1.0}},
    LATENCY.format("gRPC"): {NODE.name: {"envoy": 1.0}},
    IDLE: {"gateway, 50 copies": {"": 96}},
    RESIDENT: {"door": {"": 25}, "gateway": {"": 64}},
    EACH_COPY: {"gateway": {"": 0.3}},
    START: {DOOR.name: {"": 0.3}},
}
