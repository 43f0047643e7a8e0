"""What the activator's data plane costs, beside the proxy's own and Knative's activator, and what it takes to hold.

As a program it is an activator of one model: its ports are those of `bench.proxy`'s peers, its replica is the upstream.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.proxy import loads, upstreams
from bench.proxy.peers import BERTH, GRPC, HOST, HTTP, Peer, running
from bench.proxy.processes import Running, started
from bench.proxy.upstreams import MODEL
from bench.scaler.knative_activator import KNATIVE, knative_activator
from berth.contract.activation import Assignment, ReplicaEndpoint, RouteMode
from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ModelKey
from localcluster.triton import GRPC_PORT
from proxy.activator.bounds import Bounds
from proxy.activator.models import Models
from proxy.downstream.listener import allow_descriptors
from proxy.memory import settle
from proxy.request.budget import Budget

# Triton's REST port.
_TRITON_REST: Final = 8000
_SLOTS: Final = 256
_BODY_BYTES: Final = 1024
# Of the bench itself: files, pipes, the program that it starts.
_DESCRIPTORS_BESIDE: Final = 64
# So many looks, a second apart.
_STILL: Final = 5


async def serve(rest: Endpoint | None, grpc: Endpoint | None) -> None:
    """Buffer for one model and forward to one replica; without one the model stays at zero."""
    settle()
    pods = []
    if rest is not None:
        grpc_port = 0 if grpc is None else grpc.port
        pods = [
            ReplicaEndpoint(
                uid="u",
                name="p",
                address=rest.host,
                rest_port=rest.port,
                grpc_port=grpc_port,
                slots=_SLOTS,
                ready=True,
            )
        ]
    # One model may have half of what all may.
    bounds = Bounds(connections=Budget(3 * allow_descriptors()))
    models = Models(HOST, lambda model, address: True, bounds=bounds)
    assignment = Assignment(
        version=1,
        model=ModelKey("bench", MODEL),
        public_name=MODEL,
        mode=RouteMode.PROXY,
        rest_port=HTTP,
        grpc_port=GRPC,
        endpoints=tuple(pods),
    )
    await models.apply(assignment)
    while True:
        await asyncio.sleep(1)
        now = time.monotonic()
        await models.tick(now)
        for report in models.reports(now):
            print(report.buffered, flush=True)


def _start(*words: str) -> Callable[[Path, str, str], Iterator[Running]]:
    def start(directory: Path, rest: str, grpc: str) -> Iterator[Running]:
        command = [sys.executable, "-m", "bench.scaler.activator", *(words or (rest, grpc))]
        with started(command, log=directory / "activator.log", ports=[(HOST, HTTP), (HOST, GRPC)]) as one:
            time.sleep(0.5)  # its replica is found
            yield one

    return start


ACTIVATOR: Final = Peer("activator", _start())
AT_ZERO: Final = Peer("activator, at zero", _start("zero"))

_PEERS: Final = (BERTH, ACTIVATOR, KNATIVE)

# By the name of what is measured and of who is: µs of CPU a request.
Figures = dict[str, dict[str, float]]


def forwarding(seconds: float, rounds: int) -> Figures:
    """The proxy, the activator and Knative's in turn, between the same clients and the same upstreams. Raises
    BuildFailed."""
    knative_activator()
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as name:
        return asyncio.run(_forwarding(Path(name), seconds, rounds))


async def _forwarding(directory: Path, seconds: float, rounds: int) -> Figures:
    found: dict[str, dict[str, list[float]]] = {}

    def measure(name: str, rest: str, grpc: str, load: Callable[[Running], float]) -> None:
        for number in range(rounds):
            for peer in _PEERS[number % len(_PEERS) :] + _PEERS[: number % len(_PEERS)]:
                with running(peer, directory, rest=rest, grpc=grpc) as one:
                    found.setdefault(name, {}).setdefault(peer.name, []).append(load(one))

    with upstreams.constant(directory):
        nginx = f"{HOST}:{upstreams.NGINX_PORT}"
        measure(
            "REST 100 B",
            nginx,
            f"{HOST}:0",
            lambda one: loads.rest(one, connections=16, seconds=seconds),
        )
    async with upstreams.triton_with(directory, {MODEL: upstreams.ECHO}):
        rest, grpc = f"{HOST}:{_TRITON_REST}", f"{HOST}:{GRPC_PORT}"
        for connections, streams in ((4, 4), (1, 32)):
            measure(
                f"gRPC 36 B {connections} × {streams}",
                rest,
                grpc,
                lambda one, c=connections, s=streams: loads.unary(  # type: ignore[misc]
                    one, connections=c, streams=s, seconds=seconds
                ),
            )
    return {
        name: {peer: statistics.median(figures) for peer, figures in by_peer.items()}
        for name, by_peer in found.items()
    }


def buffered(requests: int) -> tuple[int, float, float]:
    """How many requests of 1 KiB, each on its own connection, a process holds, and its resident MiB before and then.
    Raises SystemExit where there are too few descriptors."""
    if (most := allow_descriptors()) < requests + _DESCRIPTORS_BESIDE:
        raise SystemExit(
            f"bench.scaler: {most} descriptors are not enough for {requests} connections (ulimit -Hn)"
        )
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as name, contextlib.ExitStack() as stack:
        one = stack.enter_context(running(AT_ZERO, Path(name), rest="", grpc=""))
        before = one.rss_bytes() / 1024**2
        data = {"name": "IN", "datatype": "UINT8", "shape": [1], "data": [1]}
        text = json.dumps({"inputs": [data]}, separators=(",", ":"))
        body = text.replace('"IN"', f'"{"I" * (_BODY_BYTES - len(text) + 2)}"').encode()
        head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(requests):
            client = stack.enter_context(socket.create_connection((HOST, HTTP)))
            client.sendall(head.encode() + body)
        count = _buffered_at_last(Path(name) / "activator.log", requests)
        return count, before, one.rss_bytes() / 1024**2


def _buffered_at_last(log: Path, requests: int) -> int:
    """What it says that it holds, once that is all of them or has been the same for a while."""
    said = [0]
    while said[-1] != requests and (len(said) < _STILL or len(set(said[-_STILL:])) > 1):
        time.sleep(1)
        said.append(int((log.read_text().split() or ["0"])[-1]))
    return said[-1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaler.activator")
    parser.add_argument("rest", help="HOST:PORT of the replica, or zero")
    parser.add_argument("grpc", nargs="?", default="")
    options = parser.parse_args()
    is_at_zero = options.rest == "zero"
    rest = None if is_at_zero else Endpoint.parse(options.rest)
    grpc = None if is_at_zero or not options.grpc else Endpoint.parse(options.grpc)
    import uvloop

    uvloop.run(serve(rest, grpc))


if __name__ == "__main__":
    main()
