"""What the data plane costs, side by side with its peers in one run.

    python -m bench.proxy [--quick] [--only WORDS] [--json FILE]

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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.proxy import loads, scenarios, upstreams
from bench.proxy.peers import (
    ASKED,
    BERTH,
    DOOR,
    ENVOY,
    GATEWAY,
    GATEWAY_50,
    GRPC,
    HOST,
    HTTP,
    NODE,
    Missing,
    Peer,
    gateway_of,
    running,
    server_names,
)
from bench.proxy.processes import Running
from bench.proxy.scenarios import FURTHER, Scenario
from bench.proxy.table import Table, Targets, render
from bench.proxy.upstreams import MODEL
from localcluster.triton import GRPC_PORT

MIB = 1024**2
_MANY_COPIES = 200


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, for a first look")
    parser.add_argument("--only", default="", metavar="WORDS", help="the lines that begin with these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to those that it has")
    options = parser.parse_args(argv)
    loads.require_tools()
    bench = Bench(options.only, seconds=1.0 if options.quick else 5.0, rounds=1 if options.quick else 3)
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        asyncio.run(bench.measure(Path(directory)))
    print(render(bench.table, bench.targets))
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        text = json.dumps(known | bench.table, indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n")
    return 0


class Bench:
    """One run."""

    def __init__(self, only: str, *, seconds: float, rounds: int) -> None:
        self._only, self._seconds, self._rounds = only, seconds, rounds
        self.table: Table = {}
        self.targets: dict[str, Targets] = dict(FURTHER)

    async def measure(self, directory: Path) -> None:
        self._measure_rest(directory)
        self._measure_events(directory)
        await self._measure_grpc(directory)

    def _measure_rest(self, directory: Path) -> None:
        small, large = self._chosen(scenarios.small_rest), self._chosen(scenarios.large_rest)
        latency = scenarios.LATENCY.format("REST")
        extra = [scenarios.RESIDENT, scenarios.EACH_COPY, scenarios.START, scenarios.IDLE]
        if not (small or large or any(map(self._wants, (latency, *extra)))):
            return
        with upstreams.constant(directory):
            upstream, reading = f"{HOST}:{upstreams.NGINX_PORT}", f"{HOST}:{upstreams.READING_PORT}"
            self._compare(directory, small, upstream)
            self._compare(directory, large, reading)
            if self._wants(latency):
                self.table[latency] = self._added_latency(directory, upstream, grpc_call=False)
            if any(map(self._wants, extra)):
                self.table |= _memory(directory, upstream)

    def _measure_events(self, directory: Path) -> None:
        chosen = self._chosen(lambda _: scenarios.events())
        if not chosen and not self._wants(scenarios.SLOW_READER):
            return
        with upstreams.streams(directory):
            upstream = f"{HOST}:{upstreams.STREAMS_PORT}"
            self._compare(directory, chosen, upstream)
            if self._wants(scenarios.SLOW_READER):
                self.table[scenarios.SLOW_READER] = _slow_reader(directory, upstream)

    async def _measure_grpc(self, directory: Path) -> None:
        chosen, latency = self._chosen(scenarios.grpc), scenarios.LATENCY.format("gRPC")
        if not chosen and not self._wants(latency):
            return
        names = [MODEL, *server_names(ASKED)]
        async with upstreams.triton_with(directory, dict.fromkeys(names, upstreams.ECHO)):
            upstream = f"{HOST}:{GRPC_PORT}"
            self._compare(directory, chosen, upstream)
            if self._wants(latency):
                self.table[latency] = self._added_latency(directory, upstream, grpc_call=True)

    def _wants(self, name: str) -> bool:
        return name.startswith(self._only)

    def _chosen(self, made: scenarios.Made) -> list[Scenario]:
        return [one for one in made(self._seconds) if self._wants(one.name)]

    def _compare(self, directory: Path, chosen: Sequence[Scenario], upstream: str) -> None:
        """Every scenario at every peer, in turn; the median of the rounds."""
        found: dict[str, dict[str, list[float]]] = {one.name: {} for one in chosen}
        for turn in range(self._rounds):
            for peer in _in_order(chosen):
                _say(f"round {turn + 1}: {peer.name}")
                try:
                    with running(peer, directory, rest=_rest_of(upstream), grpc=upstream) as one:
                        for scenario in chosen:
                            if peer.name in {other.name for other in scenario.peers}:
                                _measure_one(scenario, peer, one, found)
                except (Missing, RuntimeError) as error:
                    _say(f"{peer.name} is not measured: {error}")
        for scenario in chosen:
            by_peer = found[scenario.name]
            self.table[scenario.name] = {
                name: statistics.median(figures) for name, figures in by_peer.items() if figures
            }
            self.targets[scenario.name] = scenario.targets

    def _added_latency(self, directory: Path, upstream: str, *, grpc_call: bool) -> dict[str, float]:
        def p99(port: int) -> float:
            return loads.latency(port, grpc_call=grpc_call, per_second=500, seconds=2 * self._seconds)[1]

        found: dict[str, list[float]] = {}
        for _ in range(self._rounds):
            direct = p99(int(upstream.rpartition(":")[2]))
            for peer in (BERTH, NODE, ENVOY):
                _say(f"{peer.name}: p99 at 500/s")
                try:
                    with running(peer, directory, rest=_rest_of(upstream), grpc=upstream):
                        found.setdefault(peer.name, []).append(p99(GRPC if grpc_call else HTTP) - direct)
                except (Missing, RuntimeError) as error:
                    _say(f"  not measured: {error}")
        return {name: statistics.median(figures) for name, figures in found.items()}


def _in_order(chosen: Iterable[Scenario]) -> list[Peer]:
    """Each peer once."""
    return list({peer.name: peer for scenario in chosen for peer in scenario.peers}.values())


def _rest_of(upstream: str) -> str:
    """Where the same server speaks REST."""
    host, _, port = upstream.rpartition(":")
    return f"{host}:{8000 if int(port) == GRPC_PORT else port}"


def _measure_one(
    scenario: Scenario, peer: Peer, one: Running, found: dict[str, dict[str, list[float]]]
) -> None:
    _say(f"  {scenario.name}")
    try:
        found[scenario.name].setdefault(peer.name, []).append(scenario.measure(one))
    except (RuntimeError, AssertionError, OSError) as error:
        _say(f"  not measured: {str(error)[-200:]}")


def _memory(directory: Path, upstream: str) -> Table:
    """Resident memory of each part, after it has served a little; what it took to start; and what idle clients take."""
    table: Table = {
        name: {} for name in (scenarios.RESIDENT, scenarios.START, scenarios.IDLE, scenarios.EACH_COPY)
    }
    for peer in (BERTH, GATEWAY, DOOR):
        with running(peer, directory, rest=upstream, grpc=upstream) as one:
            table[scenarios.START][peer.name] = one.cpu_seconds()
            loads.rest(one, tensor_bytes=3, connections=16, seconds=1)
            table[scenarios.RESIDENT][peer.name] = one.rss_bytes() / MIB
    for peer in (BERTH, GATEWAY_50, NODE):
        with running(peer, directory, rest=upstream, grpc=upstream) as one:
            table[scenarios.IDLE][peer.name] = _with_idle_connections(one)
    few, many = (_served_copies(directory, upstream, copies) for copies in (2, _MANY_COPIES))
    table[scenarios.EACH_COPY] = {GATEWAY.name: (many - few) / (_MANY_COPIES - 2)}
    return table


def _served_copies(directory: Path, upstream: str, copies: int) -> float:
    """MiB of a gateway, each of whose copies has answered."""
    with running(gateway_of(copies), directory, rest=upstream, grpc=upstream) as one:
        for _ in range(2):
            loads.rest(one, tensor_bytes=3, connections=copies, seconds=2)
        return one.rss_bytes() / MIB


def _with_idle_connections(one: Running) -> float:
    with ExitStack() as held:
        for number in range(1000):
            held.enter_context(socket.create_connection((HOST, HTTP if number % 2 else GRPC)))
        time.sleep(2)
        return one.peak_rss_bytes() / MIB


def _slow_reader(directory: Path, upstream: str) -> dict[str, float]:
    """A client that takes 64 KiB every 10 ms of an answer of 1 GiB."""
    found = {}
    body, _ = loads.rest_body(3)
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    for peer in (BERTH, GATEWAY, DOOR):
        with running(peer, directory, rest=upstream, grpc=upstream) as one:
            with socket.create_connection((HOST, HTTP)) as reader:
                reader.sendall(head.encode() + body)
                for _ in range(300):
                    assert reader.recv(65536)
                    time.sleep(0.01)
            found[peer.name] = one.peak_rss_bytes() / MIB
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
