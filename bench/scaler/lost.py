"""What becomes of every request while a model's replicas come and go: on a local cluster, with every part as `deploy/` has
it. Several models go through the same at once, each with clients of its own: REST with connections that are kept and
with new ones, and gRPC's channels.

Every cycle is one that users have:

    zero    no client sends until the last replica is to go; then, some moment later, all do. "taken back": not at
            zero yet, but when its Service leads to the activators
    many    another number of replicas, under load, and back
    roll    the Deployment is restarted, under load
    kill    as zero, many and roll, with every scaler killed at some moment of it
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from bench.proxy.upstreams import ECHO, model_files
from bench.scaler.counting import Fates, GrpcCaller, Load, RestCaller
from bench.scaler.models import scaling
from bench.scaler.traffic import Client
from berth.kube import paths
from berth.kube.informer import Informer
from berth.runtime.tasks import supervise
from localcluster.building import say
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.model_server import serving
from localcluster.parts import Part
from localcluster.samples import model_deployment, model_service, packed
from localcluster.services import ServicePort

Json = dict[str, Any]

_MANY: Final = 3
# One replica of a model is on one node.
_NODES: Final = tuple(
    NodeSpec(
        f"gpu-{number}",
        f'gpus:\n  - {{uuid: GPU-{number}-0, product: L40S, total: 48Gi}}\nmodels: {{"*": requested}}\n',
    )
    for number in range(1, _MANY + 1)
)
_DEPLOYMENTS: Final = "/apis/apps/v1/namespaces/default/deployments"
_LOOK_SECONDS: Final = 0.05
_STEP_SECONDS: Final = 180.0
# No client stops just when all is done.
_AFTER_SECONDS: Final = 1.0
# About as long as a replica takes to end.
_END_SECONDS: Final = 7.0
_REST, _GRPC = 4, 4
# Below these are the replicas' own ports, above them the activators'.
_ACTIVATORS: Final = 20_000
_chance: Final = random.SystemRandom()


class Lane:
    """One model with its clients, which goes from one number of replicas to another and tells when it is there."""

    def __init__(self, cluster: LocalCluster, mirror: "_Mirror", name: str, per_second: float) -> None:
        self.name, self._cluster, self._mirror = name, cluster, mirror
        self._port = ServicePort("default", name, "http")
        kept = [RestCaller(name, self._client(), keeps=True) for _ in range(_REST)]
        new = RestCaller(name, self._client(), keeps=False)
        at = cluster.services.ports()[ServicePort("default", name, "grpc")]
        channels = [GrpcCaller(name, at) for _ in range(_GRPC)]
        self.load = Load([*kept, new, *channels], per_second)

    def _client(self) -> Client:
        return Client(lambda: self._cluster.services.backends(self._port), "127.0.0.9")

    # The cycles.

    async def through_zero(self, down: str = "1 → 0", up: str = "0 → 1") -> None:
        await self.load.stop()
        await self._until("nothing requested", lambda: self._asked == 0)
        await asyncio.sleep(_chance.uniform(0, _END_SECONDS))
        self.load.phase = down
        before = {pod["metadata"]["uid"] for pod in self._pods}
        self.load.start()
        await self._until("old replicas gone", lambda: before.isdisjoint(self._uids))
        self.load.phase = up
        await self._serves(1)
        self._done(down, up)

    async def taken_back(self, phase: str = "1 → 0, taken back") -> None:
        await self.load.stop()
        await self._until("routed to activators", lambda: max(self._ports, default=0) >= _ACTIVATORS)
        await asyncio.sleep(_chance.uniform(0, 1))
        self.load.phase = phase
        self.load.start()
        await self._serves(1)
        self._done(phase)

    async def to_many(self, up: str = f"1 → {_MANY}", down: str = f"{_MANY} → 1") -> None:
        self.load.phase = up
        await self._want(_MANY)
        await self._serves(_MANY)
        self.load.phase = down
        await self._want(0)  # who is asked has one all the same
        await self._serves(1)
        self._done(up, down)

    async def roll(self, phase: str = "roll-over") -> None:
        self.load.phase = phase
        before = set(self._uids)
        restarted = {"metadata": {"annotations": {"restarted": f"{_chance.random()}"}}}
        await self._patch({"spec": {"template": restarted}})
        await self._until("old replicas gone", lambda: before.isdisjoint(self._uids))
        await self._serves(1)
        self._done(phase)

    async def rest(self) -> None:
        """Under load with one replica, where it was left without."""
        self.load.phase = "before"
        self.load.start()
        await self._serves(1)

    def _done(self, *phases: str) -> None:
        for phase in {*phases}:
            self.load.fates[phase].cycles += 1
        lost = sum(fates.lost.total() for fates in self.load.fates.values())
        say(f"{self.name}: {', '.join(dict.fromkeys(phases))}; {lost} lost so far")

    # How it is.

    @property
    def _pods(self) -> list[Json]:
        """Those that are ending, too."""
        return [
            pod for pod in self._mirror.pods if (pod["metadata"].get("labels") or {}).get("app") == self.name
        ]

    @property
    def _uids(self) -> list[str]:
        return [pod["metadata"]["uid"] for pod in self._pods]

    @property
    def _asked(self) -> int | None:
        found = [one for one in self._mirror.deployments if one["metadata"]["name"] == self.name]
        return found[0]["spec"]["replicas"] if found else None

    @property
    def _ports(self) -> list[int]:
        return [one.port for one in self._cluster.services.backends(self._port)]

    async def _want(self, replicas: int) -> None:
        await self._patch(
            {"metadata": {"annotations": scaling(min_scale=str(replicas), target="1000", clients="*")}}
        )

    async def _patch(self, body: Json) -> None:
        await self._cluster.client.patch(f"{_DEPLOYMENTS}/{self.name}", body)

    async def _serves(self, replicas: int) -> None:
        """By so many replicas and nothing else, for a while."""

        def is_so() -> bool:
            pods, ports = self._pods, self._ports
            return (
                self._asked == len(pods) == len(ports) == replicas
                and max(ports) < _ACTIVATORS
                and all(map(_is_ready, pods))
            )

        await self._until(f"{replicas} serve", is_so)
        await asyncio.sleep(_AFTER_SECONDS)

    async def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(_STEP_SECONDS):
                while not is_so():
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            states = [(pod["metadata"]["name"], pod.get("status", {}).get("phase")) for pod in self._pods]
            raise TimeoutError(f"{self.name}: {what}: {self._asked=} {states} {self._ports}") from None


Cycle = Callable[[Lane], Coroutine[Any, Any, None]]
_KILLED: Final = "kill -9 of scalers"


async def _zero(lane: Lane) -> None:
    await lane.through_zero()
    await lane.taken_back()


def _killed(number: int) -> Cycle:
    """Which of the ways it is that scalers die on."""
    ways: tuple[Cycle, ...] = (
        lambda lane: lane.to_many(_KILLED, _KILLED),
        lambda lane: lane.through_zero(_KILLED, _KILLED),
        lambda lane: lane.roll(_KILLED),
        lambda lane: lane.taken_back(_KILLED),
    )
    return ways[number % len(ways)]


CYCLES: Final[dict[str, Cycle]] = {"zero": _zero, "many": Lane.to_many, "roll": Lane.roll}


class _Mirror:
    """Deployments and pods as the API server shows them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._deployments = Informer(cluster.client, _DEPLOYMENTS, on_change=lambda _: None)
        self._pods = Informer(cluster.client, paths.pods("default"), on_change=lambda _: None)
        self.informers = (self._deployments, self._pods)

    @property
    def deployments(self) -> Iterable[Json]:
        return self._deployments.objects.values()

    @property
    def pods(self) -> Iterable[Json]:
        return self._pods.objects.values()


async def lost(
    only: Sequence[str], cycles: int, per_second: float, models: int, found: dict[str, Fates]
) -> None:
    """Of requests at this rate in all, by what went on, in `found`, whatever ends it. Each kind of cycle so often in
    all."""
    spec = ClusterSpec(nodes=_NODES, scalers=2, activators=2, agent_flags=("--code=any",))
    async with (
        LocalCluster(spec) as cluster,
        serving() as url,
        supervise() as tasks,
        AsyncExitStack() as ends,
    ):
        mirror = _Mirror(cluster)
        for number, informer in enumerate(mirror.informers):
            tasks.eternal(f"mirror {number}", informer.run())
        source = url("echo.tar.gz", packed(**model_files(ECHO)))
        names = [f"model-{number}" for number in range(models)]
        lanes = []
        for name in names:
            await cluster.apply(_documents(name, source))
            lane = await _lane(cluster, mirror, name, per_second / models)
            ends.push_async_callback(lane.load.close)
            lanes.append(lane)
        try:
            await _all(lanes, Lane.rest, 1)
            for what in only:
                if what == "kill":
                    await _kills(cluster, lanes, cycles)
                else:
                    await _all(lanes, CYCLES[what], -(-cycles // models))
            for lane in lanes:
                await lane.load.stop()
        finally:
            for phase, fates in (
                (phase, fates) for lane in lanes for phase, fates in lane.load.fates.items()
            ):
                found.setdefault(phase, Fates()).add(fates)


async def _lane(cluster: LocalCluster, mirror: _Mirror, name: str, per_second: float) -> Lane:
    port, services = ServicePort("default", name, "http"), cluster.services
    async with asyncio.timeout(_STEP_SECONDS):
        while not services.backends(port) or port not in services.ports():
            await asyncio.sleep(_LOOK_SECONDS)
    return Lane(cluster, mirror, name, per_second)


async def _all(lanes: Sequence[Lane], cycle: Cycle, times: int) -> None:
    async def repeated(lane: Lane) -> None:
        for _ in range(times):
            await cycle(lane)

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(repeated(lane))


async def _kills(cluster: LocalCluster, lanes: Sequence[Lane], cycles: int) -> None:
    """A cycle of each model, each of another kind, and all scalers die at some moment of it."""
    for number in range(cycles):
        async with asyncio.TaskGroup() as group:
            for place, lane in enumerate(lanes):
                group.create_task(_killed(number + place)(lane))
            await asyncio.sleep(_chance.uniform(0, _END_SECONDS))
            await asyncio.gather(*map(_kill, cluster.scalers))


async def _kill(part: Part) -> None:
    """As soon as it runs, if it does not."""
    await part.running()
    part.kill()


def _documents(name: str, source: str) -> list[Json]:
    annotations = scaling(target="1000", min_scale="0", clients="*")
    return [
        model_service(name),
        model_deployment(name, source=source, gpu_mem="1Gi", replicas=0, scaling=annotations),
    ]


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


def table(found: dict[str, Fates]) -> str:
    """For people, with the words of those that were not answered."""
    lines = [
        "| | cycles | requests | answered | refused | lost | p99 s | slowest s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for phase, fates in found.items():
        times = sorted(fates.seconds) or [0.0]
        counts = (fates.cycles, fates.sent, fates.answered, fates.refused.total(), fates.lost.total())
        slow = f"{times[int(len(times) * 0.99)]:.2f} | {times[-1]:.2f}"
        lines.append(f"| {phase} | {' | '.join(map(str, counts))} | {slow} |")
    for phase, fates in found.items():
        for what, words in (("refused", fates.refused), ("lost", fates.lost)):
            lines += [f"{phase}: {number} {what}: {said}" for said, number in words.most_common(12)]
    return "\n".join(lines)
