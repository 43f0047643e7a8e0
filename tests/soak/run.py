"""The run itself: a node with replicas, clients at each of them, and what is looked at meanwhile and after."""

import asyncio
import functools
import re
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from bench.proxy.processes import rss_bytes
from bench.proxy.upstreams import COUNT, ECHO, triton_with
from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.data_plane import ADMIN_PORT, GRPC_PORT, Node, node, replica_of
from tests.soak.clients import (
    DEADLINE_SECONDS,
    MIB,
    Log,
    Soaked,
    faithful_client,
    go_clients,
    rest_client,
    stream_client,
)

CONCURRENCY = 2
# Of Triton's instances: more than may be asked at once.
_INSTANCES = 4
_LIMITS = ReplicaLimits(container_concurrency=CONCURRENCY, queue_depth=200)
_LOOK_SECONDS = 0.25
# What one client more or less makes, and what an allocator keeps of it.
_GROWTH_BYTES = 24 * MIB
_GAUGES = re.compile(r"^berth_proxy_(running|waiting)_requests(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class Result:
    """`faults`: empty if all is well. Memory in MiB, of the gateway and of all sidecars: at first, most, at last."""

    faults: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    most_running: int = 0
    memory: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "faults": self.faults,
            "calls": self.calls,
            "mostRunning": self.most_running,
            "memoryMiB": {name: list(map(round, sizes)) for name, sizes in self.memory.items()},
        }


async def soak(directory: Path, seconds: float) -> Result:
    """Three replicas, two of them of one public name."""
    replicas = [
        replica_of(model, f"soak-{n}", limits=_LIMITS) for n, model in enumerate(("echo", "echo", "count"))
    ]
    models = {one.server_name: COUNT if one.model == "count" else ECHO for one in replicas}
    with cluster_network() as network:
        address = f"{network}.0.1"
        http, to_grpc = Endpoint(address, triton.HTTP_PORT), Endpoint(address, triton.GRPC_PORT)
        async with (
            triton_with(directory, models, address=address, instances=_INSTANCES),
            node(network, directory, replicas, http=http, grpc=to_grpc) as running,
        ):
            addresses = [await running.sidecar(replica) for replica in replicas]
            return await _Soak(running, replicas, addresses, directory, seconds).run()


class _Soak:
    """One run on a node that stands."""

    def __init__(
        self,
        running: Node,
        replicas: Sequence[ReplicaSpec],
        addresses: Sequence[str],
        directory: Path,
        seconds: float,
    ) -> None:
        self._node, self._addresses, self._log = running, addresses, Log()
        self._soaked = []
        for replica, address in zip(replicas, addresses, strict=True):
            home = directory / replica.pod_uid
            home.mkdir()
            self._soaked.append(Soaked(replica.model, address, home, seconds, self._log))
        self._sizes: dict[str, list[float]] = {"gateway": [], "sidecars": []}
        self._most_running = 0

    async def run(self) -> Result:
        looking = asyncio.create_task(self._look())
        channels = [grpc.aio.insecure_channel(f"{one}:{GRPC_PORT}") for one in self._addresses]
        try:
            async with asyncio.TaskGroup() as clients:
                for client in self._clients(channels):
                    clients.create_task(client)
            faults = [*self._log.stalled, *await self._left_over(), *await self._narrowed(channels)]
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            for channel in channels:
                await channel.close(None)
        return self._result(faults)

    def _clients(self, channels: Sequence[grpc.aio.Channel]) -> list[Coroutine[Any, Any, None]]:
        found: list[Coroutine[Any, Any, None]] = []
        for one, channel in zip(self._soaked, channels, strict=True):
            stub = GRPCInferenceServiceStub(channel)
            stream, faithful, rest = (
                functools.partial(one.until_the_end, name, call, 0.01)
                for name, call in (
                    ("stream", functools.partial(stream_client, one, stub)),
                    ("faithful", functools.partial(faithful_client, one, stub)),
                    ("REST", functools.partial(rest_client, one)),
                )
            )
            if one.model == "count":
                found += [stream() for _ in range(3)]
            else:
                found += [*go_clients(one), *(call() for call in (faithful, rest) for _ in range(3))]
        return found

    async def _look(self) -> None:
        """At memory and at what is in Triton, again and again."""
        while True:
            self._sizes["gateway"].append(rss_bytes(self._node.process.pid) / MIB)
            self._sizes["sidecars"].append(
                sum(rss_bytes(one.pid) for one in self._node.sidecars.values()) / MIB
            )
            for running, _ in await self._gauges():
                self._most_running = max(self._most_running, running)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _gauges(self) -> list[tuple[int, int]]:
        """Running and waiting, of each replica, by its sidecar's own metrics."""
        found = []
        async with aiohttp.ClientSession() as session:
            for address in self._addresses:
                async with session.get(f"http://{address}:{ADMIN_PORT}/metrics") as answer:
                    values = dict(_GAUGES.findall(await answer.text()))
                    found.append((int(float(values["running"])), int(float(values["waiting"]))))
        return found

    async def _left_over(self) -> list[str]:
        """Slots that nobody has any more, of which the sidecars hear every second."""
        end = time.monotonic() + DEADLINE_SECONDS
        while any(map(any, await self._gauges())):
            if time.monotonic() > end:
                return [f"running and waiting after all have gone: {await self._gauges()}"]
            await asyncio.sleep(0.5)
        return []

    async def _narrowed(self, channels: Sequence[grpc.aio.Channel]) -> list[str]:
        """Whether connections that were there all the time still carry many windows at once."""
        calls = [
            GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=DEADLINE_SECONDS)
            for one, channel in zip(self._soaked, channels, strict=True)
            if one.model != "count"
            for message in [one.message(600_000)] * 8 + [one.message(bytes=3 * MIB)] * 4
        ]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return [f"after all have gone: {one}" for one in ended if isinstance(one, BaseException)]

    def _result(self, faults: list[str]) -> Result:
        memory = {}
        for name, sizes in self._sizes.items():
            third = max(1, len(sizes) // 3)
            first, last = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
            memory[name] = (first, max(sizes), last)
            if last > first + _GROWTH_BYTES / MIB:
                faults.append(f"{name}: {last:.0f} MiB at last, {first:.0f} at first")
        if self._most_running > CONCURRENCY:
            faults.append(f"{self._most_running} requests of one replica ran at once; {CONCURRENCY} may")
        for name in self._clients_without_success():
            faults.append(f"{name}: no call has succeeded")
        calls = {name: dict(ends) for name, ends in self._log.ended.items()}
        return Result(faults, calls, self._most_running, memory)

    def _clients_without_success(self) -> list[str]:
        good = {"OK", "small 200", "large 200", "left", "reset", "cancelled"}
        return [name for name, ends in self._log.ended.items() if not good & ends.keys()]
