"""What a quiet model waits while another one of the same gateway is flooded.

    python -m bench.proxy.fairness [--seconds N] [--rounds N] [--rate N] [FLOOD ...]

One copy at 10 requests a second, alone and beside another copy's flood, in turn, several rounds; of each the
99th percentile, and the median of those: of the time that passed, and of the processor's time that the gateway has
used meanwhile, for itself and whomever, which does not depend on what else the machine does. The gateway has a core for itself; the flood and what answers in
Triton's place share another, and what answers and the quiet client go before whatever else runs there (root
alone may say so).
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvloop

from bench.proxy.flooding import FLOODS, GrpcCaller, RestCaller, flooded, message_of, request_of
from bench.proxy.node import told
from bench.proxy.processes import cpu_seconds, started

HOST = "127.0.0.1"
PORT, ADMIN_PORT, UPSTREAM_PORT = 18020, 18021, 18022
QUIET_PER_SECOND = 10.0


def _first(command: Sequence[str]) -> list[str]:
    """Whatever else wants the same core."""
    return ["nice", "-n", "-19", *command] if os.geteuid() == 0 else list(command)


async def quiet(seconds: float, rate: float, gateway: int, *, grpc: bool) -> tuple[list[float], list[float]]:
    """What its requests took, and what the gateway worked meanwhile, in order of size."""
    caller = GrpcCaller("quiet") if grpc else RestCaller("quiet")
    sent = message_of("quiet") if grpc else request_of()
    await caller.connected(HOST, PORT)
    took, worked = [], []
    clock = ~gateway << 3 | 2  # clock_getcpuclockid(3)
    for _ in range(max(1, int(seconds * rate))):
        began, had_worked = time.perf_counter(), time.clock_gettime(clock)
        async with asyncio.timeout(30):
            await caller.call(sent)
        worked.append(time.clock_gettime(clock) - had_worked)
        took.append(time.perf_counter() - began)
        await asyncio.sleep(1 / rate)
    caller.close()
    return sorted(took), sorted(worked)


def p99(took: Sequence[float]) -> float:
    return took[min(len(took) - 1, int(len(took) * 0.99))]


async def measured(name: str, options: argparse.Namespace, gateway: int, directory: Path) -> str:
    """One line of the table."""
    is_grpc = name.startswith("grpc") if options.quiet == "same" else options.quiet == "grpc"
    alone: list[tuple[list[float], list[float]]] = []
    beside: list[tuple[list[float], list[float]]] = []
    busy = []
    for _ in range(options.rounds):
        alone.append(await quiet(options.seconds, options.rate, gateway, grpc=is_grpc))
        command = ["taskset", "-c", "1", sys.executable, "-m", "bench.proxy.fairness", "--flood", name]
        with started(command, log=directory / "flood", ports=[]):
            await asyncio.sleep(1.5)
            began, cpu = time.perf_counter(), cpu_seconds(gateway)
            beside.append(await quiet(options.seconds, options.rate, gateway, grpc=is_grpc))
            busy.append((cpu_seconds(gateway) - cpu) / (time.perf_counter() - began))
    text = (directory / "flood").read_text().splitlines()
    shown = []
    for place, what in enumerate(("took", "worked")):
        before, after = (statistics.median(p99(one[place]) for one in rounds) for rounds in (alone, beside))
        middle = statistics.median(statistics.median(one[place]) for one in beside)
        shown.append(
            f"{what} p99 {1000 * before:6.2f} p50 {1000 * middle:6.2f} p99 {1000 * after:6.2f} ms {after / before:5.2f} x"
        )
    return f"{name:18} {'   '.join(shown)}   gateway {100 * statistics.mean(busy):3.0f} %   {text[-1:]}"


@asynccontextmanager
async def gateway_at(directory: Path) -> AsyncIterator[int]:
    """Its pid."""
    address = f"{HOST}:{UPSTREAM_PORT}"
    socket_path = directory / "triton"
    upstream = ["taskset", "-c", "1", sys.executable, "-m", "bench.proxy.constant", address, str(socket_path)]
    gateway = [
        *(
            "nice",
            "-n",
            "-19",
            "taskset",
            "-c",
            "0",
            sys.executable,
            "-m",
            "berth.cli",
            "gateway",
            f"--triton-http={address}",
        ),
        *(
            f"--triton-grpc=unix:{socket_path}",
            f"--listen={HOST}:{PORT}",
            f"--control=unix:{directory / 'control'}",
        ),
        f"--admin-listen={HOST}:{ADMIN_PORT}",
    ]
    with (
        started(_first(upstream), log=directory / "upstream", ports=[(HOST, UPSTREAM_PORT)]),
        started(gateway, log=directory / "log", ports=[(HOST, ADMIN_PORT)]) as running,
    ):
        async with told(directory / "control"):
            yield running.pids[0]


async def main(options: argparse.Namespace) -> None:
    if os.geteuid() == 0:
        os.sched_setaffinity(0, {1})
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    with tempfile.TemporaryDirectory() as name:
        async with gateway_at(Path(name)) as pid:
            for flood in options.floods or FLOODS:
                print(await measured(flood, options, pid, Path(name)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.proxy.fairness", description=__doc__)
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help=f"of {', '.join(FLOODS)}; all without one")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=QUIET_PER_SECOND)
    parser.add_argument("--quiet", choices=("rest", "grpc", "same"), default="same")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    # Who is told to end takes the gateway and the flood along, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    uvloop.run(flooded(FLOODS[chosen.flood], HOST, PORT) if chosen.flood else main(chosen))
