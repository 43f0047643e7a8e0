"""The whole binder beside kube-scheduler: N nodes on one real API server, the same pods for each in turn.

Throughput: all pods are there before the scheduler may look at them (it has started and mirrored the nodes
and is stopped by SIGSTOP while they are created); the time runs from SIGCONT until the last one is bound.
Latency: pods are created at a steady rate; the time runs from sending the request until this process' watch
shows the pod with its node. Every measure begins with a fresh process and no pods.

What it is not: the nodes have no kubelets and no agents, so nothing but the scheduler under test changes
anything; etcd does not sync its files; everything shares this machine's processors.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from bench.binder import objects
from bench.binder.api import Api, Bindings
from bench.binder.figures import Latency, PodChange, Table, Throughput, medians, render
from bench.binder.machine import Others
from bench.binder.schedulers import Contender, Process, Site, contenders, running
from bench.binder.testbed import NAMESPACE, testbed
from berth.contract.keys import agent_lease_namespace
from berth.kube import paths
from berth.kube.options import KubeOptions

MIB = 1024**2
_READY_SECONDS = 120.0
_SETTLE_SECONDS = 1.0  # what follows the first Binding: events, the scheduler's own watches
_LATE_SECONDS = 30.0  # after the last pod of a latency measure was created
_TOLD_SECONDS = 10.0


def run(options: argparse.Namespace) -> int:
    """`python -m bench.binder cluster`."""
    wanted = [c for c in contenders(score_all=options.score_all) if options.only in (None, c.name)]
    if not wanted:
        raise SystemExit(f"bench.binder: --only {options.only}: no such scheduler")
    objects.require_room(options.nodes, max(options.pods, options.rate * options.latency_seconds))
    turns = asyncio.run(_ended_by_sigterm(_measure(options, wanted)))
    table = medians(turns)
    print(render(table, [contender.name for contender in wanted]))
    if options.json is not None:
        options.json.write_text(json.dumps(_figures(options, table, turns), indent=2) + "\n")
    return 0


async def _measure(options: argparse.Namespace, wanted: Sequence[Contender]) -> list[PodChange]:
    async with testbed() as bed:
        bench = _Bench(bed.api, bed.bindings, replace(bed.site, profile=options.profile))
        await bench.register(options.nodes)
        turns = []
        for turn in range(options.rounds):
            # The second one finds a warmer API server.
            for contender in wanted if turn % 2 == 0 else reversed(wanted):
                _say(f"round {turn + 1}: {contender.name}")
                turns.append(await bench.turn(contender, turn, options))
        return turns


class _Bench:
    """The wired parts of one run."""

    def __init__(self, api: Api, bindings: Bindings, site: Site) -> None:
        self._api, self._bindings, self._site = api, bindings, site
        self._measures = 0

    async def register(self, nodes: int) -> None:
        began = time.monotonic()
        await self._api.create_all(paths.NODES, map(objects.node, range(nodes)))
        leases = paths.leases(agent_lease_namespace(KubeOptions.system_namespace))
        await self._api.create_all(leases, map(objects.lease, range(nodes)))
        _say(f"{nodes} nodes registered in {time.monotonic() - began:.0f} s")

    async def turn(self, contender: Contender, number: int, options: argparse.Namespace) -> PodChange:
        throughput = await self.throughput(contender, options.pods, options.limit_seconds)
        _say(f"  {throughput.pods_per_second:.0f} pods/s ({throughput.bound} of {throughput.pods})")
        latency = await self.latency(contender, options.rate, options.latency_seconds)
        _say(f"  p50 {latency.p50_ms:.1f} ms, p99 {latency.p99_ms:.1f} ms at {options.rate}/s")
        return PodChange(contender.name, number, throughput, latency)

    async def throughput(self, contender: Contender, count: int, limit_seconds: float) -> Throughput:
        async with self._started(contender, count, self._site) as (process, pods):
            process.freeze()
            await self._api.create_all(paths.pods(NAMESPACE), pods.values())
            events = await self._api.count(paths.events(NAMESPACE))
            others, before, began = Others(), process.cpu_seconds(), time.monotonic()
            process.thaw()
            await self._until_bound(process, list(pods), limit_seconds)
            ended = time.monotonic()
            cpu, others_share = process.cpu_seconds() - before, others.share()
            times = [self._bindings.at[name] - began for name in pods if name in self._bindings.at]
            if not times:
                raise RuntimeError(f"{contender.name} has bound no pod in {limit_seconds} s")
            return Throughput(
                pods=count,
                bound=len(times),
                seconds=max(times) if len(times) == count else ended - began,
                first_bound_seconds=min(times),
                cpu_seconds=cpu,
                peak_rss_mib=process.peak_rss_bytes() / MIB,
                events=await self._api.count(paths.events(NAMESPACE)) - events,
                others_share=others_share,
            )

    async def latency(self, contender: Contender, rate: int, seconds: int) -> Latency:
        unprofiled = replace(self._site, profile=None)
        async with self._started(contender, rate * seconds, unprofiled) as (process, pods):
            sent = await self._create_steadily(pods, rate)
            await self._until_bound(process, list(pods), _LATE_SECONDS)
            ended = time.monotonic()
            waits = [(self._bindings.at.get(name, ended) - sent[name]) * 1000 for name in pods]
            return Latency(
                pods=len(pods),
                not_bound=len(pods) - self._bindings.count(pods),
                p50_ms=statistics.median(waits),
                p99_ms=statistics.quantiles(waits, n=100, method="inclusive")[98],
            )

    @asynccontextmanager
    async def _started(
        self, contender: Contender, count: int, site: Site
    ) -> AsyncIterator[tuple[Process, dict[str, objects.Json]]]:
        """A scheduler that has bound a first pod, and the pods to measure it with, which are gone after."""
        self._measures += 1
        prefix = f"m{self._measures:02d}"
        names = [f"{prefix}-{index:06d}" for index in range(count)]
        pods = {name: contender.pod(name, ask) for name, ask in zip(names, objects.asks(count), strict=True)}
        first = f"{prefix}-first"
        await self._api.create(paths.pods(NAMESPACE), contender.pod(first, next(objects.asks(1))))
        async with running(contender, site) as process:
            if not await self._until_bound(process, [first], _READY_SECONDS):
                raise RuntimeError(f"{contender.name} is not ready after {_READY_SECONDS:.0f} s")
            await asyncio.sleep(_SETTLE_SECONDS)
            yield process, pods
        await self._api.delete_pods(NAMESPACE, [first, *pods])

    async def _create_steadily(self, pods: dict[str, objects.Json], rate: int) -> dict[str, float]:
        """When each request was sent. A slow answer does not hold up the next request."""
        sent: dict[str, float] = {}

        async def create(name: str, pod: objects.Json) -> None:
            sent[name] = time.monotonic()
            await self._api.create(paths.pods(NAMESPACE), pod)

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, (name, pod) in enumerate(pods.items()):
                await asyncio.sleep(began + index / rate - time.monotonic())
                group.create_task(create(name, pod))
        return sent

    async def _until_bound(self, process: Process, names: Sequence[str], limit_seconds: float) -> bool:
        """Tells now and then how far it is. Raises RuntimeError when the scheduler has died."""
        end = time.monotonic() + limit_seconds
        while (left := end - time.monotonic()) > 0:
            if await self._bindings.until_all(names, timeout_seconds=min(left, _TOLD_SECONDS)):
                return True
            process.check_alive()
            _say(f"  {self._bindings.count(names)} of {len(names)} bound")
        return False


async def _ended_by_sigterm(work: Coroutine[Any, Any, list[PodChange]]) -> list[PodChange]:
    """SIGTERM ends the run in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with suppress(asyncio.CancelledError):
        return await work
    raise SystemExit("bench.binder: broken off")


def _figures(options: argparse.Namespace, table: Table, turns: Sequence[PodChange]) -> dict[str, Any]:
    asked = {name: value for name, value in vars(options).items() if isinstance(value, int | str | None)}
    return {"options": asked, "medians": table, "turns": [asdict(turn) for turn in turns]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
