"""What the data plane costs, side by side with its peers in one run.

    python -m bench.proxy [--quick] [--json FILE]

Every peer stands in turn between the same clients and the same upstreams. The figure is the CPU time
of the proxy's own processes for each unit of work, which survives a noisy machine better than rates.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.proxy import loads, upstreams
from bench.proxy.peers import (
    BERTH,
    DOOR,
    DOOR_PEERS,
    GRPC,
    GRPC_PEERS,
    HOST,
    HTTP,
    REST_PEERS,
    Missing,
    Peer,
    running,
)
from bench.proxy.processes import Running
from localcluster.triton import GRPC_PORT

MIB = 1024**2
# What the project asks of itself: Berth's figure over the peer's.
TARGETS = {
    "REST 100 B, µs/request": {"envoy": 0.45, "queue-proxy": 0.3, "nginx": 1.5},
    "gRPC unary 36 B 1x1, µs/request": {"envoy": 0.6, "queue-proxy": 0.4, "nginx": 1.5},
    "gRPC unary 36 B 4x4, µs/request": {"envoy": 0.6, "queue-proxy": 0.4, "nginx": 1.5},
    "gRPC unary 36 B 1x32, µs/request": {"envoy": 0.6, "queue-proxy": 0.4, "nginx": 1.5},
    "gRPC stream, µs/message": {"envoy": 1.0},
    "door alone, REST 100 B, µs/request": {"nginx": 1.2},
    "REST 8 MiB tensors, CPU ms/GiB": {"envoy": 1.0},
    "gRPC 8 MiB tensors, CPU ms/GiB": {"envoy": 1.0},
}
Table = dict[str, dict[str, float]]
Scenario = tuple[str, Callable[[Running], float]]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures for programs")
    options = parser.parse_args(argv)
    loads.require_tools()
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        table = asyncio.run(_measure(Path(directory), seconds=1.0 if options.quick else 5.0))
    print(render(table))
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    return 0


async def _measure(directory: Path, *, seconds: float) -> Table:
    table: Table = {}
    rounds = 3 if seconds > 1 else 1
    with upstreams.constant(directory):
        upstream = f"{HOST}:{upstreams.NGINX_PORT}"
        small, *tensors = _rest_scenarios(seconds)
        _compare(table, directory, REST_PEERS, [small], upstream, upstream, rounds)
        reading = f"{HOST}:{upstreams.READING_PORT}"
        _compare(table, directory, REST_PEERS, tensors, reading, reading, rounds)
        table["REST p99 at 500/s, µs added"] = _added_latency(directory, upstream, False, seconds)
    with upstreams.around_a_door(directory):
        upstream = f"{HOST}:{upstreams.GATEWAY_PORT}"
        _compare(
            table,
            directory,
            DOOR_PEERS,
            [("door alone, REST 100 B, µs/request", small[1])],
            upstream,
            upstream,
            rounds,
        )
        table["door alone, RSS, MiB"] = _door_size(directory, upstream)
    with upstreams.streams(directory):
        upstream = f"{HOST}:{upstreams.STREAMS_PORT}"
        scenarios: list[Scenario] = [("SSE, µs/event", lambda one: loads.events(one, streams=40).micros)]
        _compare(table, directory, REST_PEERS, scenarios, upstream, upstream, rounds)
        table["peak RSS, MiB, a slow reader of 1 GiB"] = _slow_reader(directory, upstream)
    async with upstreams.identity_on_triton(directory):
        upstream = f"{HOST}:{GRPC_PORT}"
        _compare(table, directory, GRPC_PEERS, _grpc_scenarios(seconds), upstream, upstream, rounds)
        table["gRPC p99 at 500/s, µs added"] = _added_latency(directory, upstream, True, seconds)
        table["peak RSS, MiB, 1000 idle connections"] = _idle_connections(directory, upstream)
    return table


def _rest_scenarios(seconds: float) -> list[Scenario]:
    def small(one: Running) -> float:
        return loads.rest(one, tensor_bytes=3, connections=16, seconds=seconds).micros

    def medium(one: Running) -> float:
        return loads.rest(one, tensor_bytes=256 * 1024, connections=8, seconds=seconds).micros

    def large(one: Running) -> float:
        cost = loads.rest(one, tensor_bytes=8 * MIB, connections=4, seconds=seconds)
        return cost.micros / 1000 * 128

    return [
        ("REST 100 B, µs/request", small),
        ("REST 256 KiB, µs/request", medium),
        ("REST 8 MiB tensors, CPU ms/GiB", large),
    ]


def _grpc_scenarios(seconds: float) -> list[Scenario]:
    def unary(connections: int, streams: int, size: int = 3) -> Callable[[Running], float]:
        return lambda one: (
            loads.unary(
                one, tensor_bytes=size, connections=connections, streams=streams, seconds=seconds
            ).micros
        )

    large = unary(2, 1, 8 * MIB)
    return [
        *((f"gRPC unary 36 B {c}x{m}, µs/request", unary(c, m)) for c, m in ((1, 1), (4, 4), (1, 32))),
        ("gRPC unary 256 KiB 4x1, µs/request", unary(4, 1, 256 * 1024)),
        # Both ways: the identity sends as much back.
        ("gRPC 8 MiB tensors, CPU ms/GiB", lambda one: large(one) / 1000 * 64),
        ("gRPC stream, µs/message", lambda one: loads.stream(one, messages=1000, streams=5).micros),
    ]


def _compare(
    table: Table,
    directory: Path,
    peers: Sequence[Peer],
    scenarios: Sequence[Scenario],
    rest: str,
    grpc: str,
    rounds: int,
) -> None:
    """Every scenario at every peer, in turn; the median of the rounds."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name, _ in scenarios}
    for turn in range(rounds):
        for peer in peers:
            try:
                with running(peer, directory, rest=rest, grpc=grpc) as one:
                    for name, measure in scenarios:
                        _say(f"round {turn + 1}: {peer.name}: {name}")
                        try:
                            found[name].setdefault(peer.name, []).append(measure(one))
                        except (RuntimeError, AssertionError, OSError) as error:
                            _say(f"  not measured: {str(error)[-200:]}")
            except (Missing, RuntimeError) as error:
                _say(f"{peer.name} is not measured: {error}")
    for name, by_peer in found.items():
        table[name] = {peer: statistics.median(figures) for peer, figures in by_peer.items() if figures}


def _added_latency(directory: Path, upstream: str, grpc_call: bool, seconds: float) -> dict[str, float]:
    def p99(port: int) -> float:
        return loads.latency(port, grpc_call=grpc_call, per_second=500, seconds=2 * seconds)[1]

    direct = p99(int(upstream.rpartition(":")[2]))
    added = {}
    for peer in (BERTH, *(p for p in REST_PEERS if p.name == "envoy")):
        _say(f"{peer.name}: p99 at 500/s")
        with running(peer, directory, rest=upstream, grpc=upstream):
            added[peer.name] = p99(GRPC if grpc_call else HTTP) - direct
    return added


def _door_size(directory: Path, upstream: str) -> dict[str, float]:
    """After it has begun to serve; and what it took to be there, on stderr."""
    with running(DOOR, directory, rest=upstream, grpc=upstream) as one:
        _say(f"door: {one.cpu_seconds():.2f} s of CPU to be ready")
        return {DOOR.name: one.peak_rss_bytes() / MIB}


def _idle_connections(directory: Path, upstream: str) -> dict[str, float]:
    with running(BERTH, directory, rest=upstream, grpc=upstream) as one:
        held = [socket.create_connection((HOST, HTTP if n % 2 else GRPC)) for n in range(1000)]
        time.sleep(2)
        peak = one.peak_rss_bytes() / MIB
        for connection in held:
            connection.close()
    return {BERTH.name: peak}


def _slow_reader(directory: Path, upstream: str) -> dict[str, float]:
    """A client that takes 64 KiB every 10 ms of an answer of 1 GiB."""
    with running(BERTH, directory, rest=upstream, grpc=upstream) as one:
        with socket.create_connection((HOST, HTTP)) as reader:
            reader.sendall(b"GET /v2/models/mine/config HTTP/1.1\r\nHost: h\r\n\r\n")
            for _ in range(300):
                assert reader.recv(65536)
                time.sleep(0.01)
        return {BERTH.name: one.peak_rss_bytes() / MIB}


def render(table: Table) -> str:
    """A Markdown table: figures, and Berth's over each peer's with the target where there is one."""
    peers = [peer.name for peer in REST_PEERS]
    lines = [f"| | {' | '.join(peers)} |", f"|---|{'---|' * len(peers)}"]
    for name, figures in table.items():
        cells = [_cell(name, peer, figures) for peer in peers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, peer: str, figures: dict[str, float]) -> str:
    if peer not in figures:
        return "–"
    text = f"{figures[peer]:.1f}" if figures[peer] < 1000 else f"{figures[peer]:.0f}"
    if peer == BERTH.name or BERTH.name not in figures or figures[peer] <= 0:
        return text
    ratio, target = figures[BERTH.name] / figures[peer], TARGETS.get(name, {}).get(peer)
    met = "" if target is None else f", target {target}" if ratio <= target else f", target {target} missed"
    return f"{text} (×{ratio:.2f}{met})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
