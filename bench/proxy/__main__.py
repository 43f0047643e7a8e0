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
    GATEWAY,
    GATEWAY_50,
    GRPC,
    HOST,
    HTTP,
    NODE,
    SIDECAR,
    Missing,
    Peer,
    gateway_of,
    running,
    server_names,
)
from bench.proxy.processes import Running
from bench.proxy.scenarios import Scenario
from bench.proxy.table import Table, Targets, render
from bench.proxy.upstreams import MODEL
from localcluster.building import say
from localcluster.triton import GRPC_PORT

MIB = 1024**2
_MANY_REPLICAS = 200


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
        self.targets: dict[str, Targets] = dict(scenarios.PROCESS)

    async def measure(self, directory: Path) -> None:
        rest, grpc = (
            [one for one in all if self._wants(one.name)] for all in (scenarios.REST, scenarios.GRPC)
        )
        of_process = any(map(self._wants, scenarios.PROCESS))
        if rest or of_process:
            with upstreams.constant(directory):
                upstream = f"{HOST}:{upstreams.NGINX_PORT}"
                self._compare(directory, rest, rest_upstream=upstream, grpc_upstream=upstream)
                if of_process:
                    self.table |= _of_process(directory, upstream)
        if grpc:
            names = [MODEL, *server_names(ASKED)]
            async with upstreams.triton_with(directory, dict.fromkeys(names, upstreams.ECHO)):
                upstream = f"{HOST}:{GRPC_PORT}"
                self._compare(directory, grpc, rest_upstream=f"{HOST}:8000", grpc_upstream=upstream)

    def _wants(self, name: str) -> bool:
        return name.startswith(self._only)

    def _compare(
        self, directory: Path, chosen: Sequence[Scenario], *, rest_upstream: str, grpc_upstream: str
    ) -> None:
        """Every scenario at every peer, in turn; the median of the rounds."""
        found: dict[str, dict[str, list[float]]] = {one.name: {} for one in chosen}
        for turn in range(self._rounds):
            for peer in _in_order(chosen):
                say(f"round {turn + 1}: {peer.name}")
                try:
                    with running(peer, directory, rest=rest_upstream, grpc=grpc_upstream) as one:
                        for scenario in chosen:
                            if peer.name in {other.name for other in scenario.peers}:
                                self._measure_one(scenario, peer, one, found)
                except (Missing, RuntimeError) as error:
                    say(f"{peer.name} is not measured: {error}")
        for scenario in chosen:
            figures = found[scenario.name].items()
            self.table[scenario.name] = {name: statistics.median(each) for name, each in figures if each}
            self.targets[scenario.name] = scenario.targets

    def _measure_one(
        self, scenario: Scenario, peer: Peer, one: Running, found: dict[str, dict[str, list[float]]]
    ) -> None:
        say(f"  {scenario.name}")
        try:
            figure = scenario.measure(one, seconds=self._seconds)
        except (RuntimeError, AssertionError, OSError) as error:
            say(f"  not measured: {str(error)[-200:]}")
        else:
            found[scenario.name].setdefault(peer.name, []).append(figure)


def _in_order(chosen: Iterable[Scenario]) -> list[Peer]:
    """Each peer once."""
    return list({peer.name: peer for scenario in chosen for peer in scenario.peers}.values())


def _of_process(directory: Path, upstream: str) -> Table:
    """Resident memory of each part, after it has served a little; what it took to start; and what idle clients take."""
    table: Table = {name: {} for name in scenarios.PROCESS}
    for peer in (BERTH, GATEWAY, SIDECAR):
        with running(peer, directory, rest=upstream, grpc=upstream) as one:
            table[scenarios.START][peer.name] = one.cpu_seconds()
            loads.rest(one, connections=16, seconds=1)
            table[scenarios.RESIDENT][peer.name] = one.rss_bytes() / MIB
    for peer in (BERTH, GATEWAY_50, NODE):
        with running(peer, directory, rest=upstream, grpc=upstream) as one:
            table[scenarios.IDLE][peer.name] = _with_idle_connections(one)
    few, many = (_resident_with(directory, upstream, replicas) for replicas in (2, _MANY_REPLICAS))
    table[scenarios.EACH_REPLICA] = {GATEWAY.name: (many - few) / (_MANY_REPLICAS - 2)}
    return table


def _resident_with(directory: Path, upstream: str, replicas: int) -> float:
    """MiB of a gateway, each of whose replicas has answered."""
    with running(gateway_of(replicas), directory, rest=upstream, grpc=upstream) as one:
        for _ in range(2):
            loads.rest(one, connections=replicas, seconds=2)
        return one.rss_bytes() / MIB


def _with_idle_connections(one: Running) -> float:
    with ExitStack() as open_sockets:
        for number in range(1000):
            open_sockets.enter_context(socket.create_connection((HOST, HTTP if number % 2 else GRPC)))
        time.sleep(2)
        return one.peak_rss_bytes() / MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
