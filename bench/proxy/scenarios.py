"""What is measured, of whom, and what the project asks of itself: Berth's figure over the peer's."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.proxy import loads
from bench.proxy.peers import GRPC_OTHERS, NODE, OWN, REST_OTHERS, SIDECAR, STREAM, Peer
from bench.proxy.table import Targets

_SMALL_REST: Targets = {
    "berth": {"envoy": 0.4, "queue-proxy": 0.3, "nginx": 1.3},
    "sidecar": {"nginx stream": 1.2},
    "sidecar + gateway": {"envoy": 0.75},
}
_SMALL_GRPC: Targets = {
    "berth": {"envoy": 0.6, "queue-proxy": 0.4, "nginx": 1.0},
    "sidecar + gateway": {"envoy": 0.75},
}
# Connections, and calls at once on each of them.
_CONCURRENCY = ((1, 1), (4, 4), (1, 32))


@dataclass(frozen=True)
class Scenario:
    """`measure(target, seconds)`: CPU µs a request of one load."""

    name: str
    measure: Callable[..., float]
    peers: Sequence[Peer]
    targets: Targets = field(default_factory=dict)


REST = (
    Scenario(
        "REST 100 B, µs/request",
        functools.partial(loads.rest, connections=16),
        (*OWN, STREAM, *REST_OTHERS),
        _SMALL_REST,
    ),
)
GRPC = tuple(
    Scenario(
        name.format(f"{connections} × {streams}"),
        functools.partial(measure, connections=connections, streams=streams),
        (*(OWN if is_for_all and streams == 4 else (OWN[0], NODE)), *GRPC_OTHERS),
        _SMALL_GRPC,
    )
    for name, measure, is_for_all in (
        ("gRPC 36 B {}, µs/request", loads.unary, True),
        ("– by grpc-go, unique headers, {}", loads.by_go, False),
    )
    for connections, streams in _CONCURRENCY
)

# Of what is not a load on all peers.
IDLE = "peak RSS, MiB, 1000 idle connections"
RESIDENT = "RSS after small requests, MiB"
EACH_REPLICA = "RSS of each further replica, MiB"
START = "start to listening, s of CPU"
PROCESS: dict[str, Targets] = {
    RESIDENT: {"sidecar": {"": 25}, "gateway": {"": 64}},
    START: {SIDECAR.name: {"": 0.3}},
    IDLE: {"gateway, 50 replicas": {"": 96}},
    EACH_REPLICA: {"gateway": {"": 0.3}},
}
