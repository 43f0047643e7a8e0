"""Whatever happens, no client's request is lost: the real core, switch and registry, with clients that know the way of some
seconds ago, replicas that take their time to come and to go, an API server that is away and scalers that are killed."""

from collections import deque
from random import Random

import pytest

from scaler.go import SECOND_NS
from tests.unit.scaler.test_route_controller import World

ACTIVATOR = "the activator"
# How long a client, or a kube-proxy, goes by what it has read.
STALE = 5
DRAIN = 10
# A request that is held while the API server answers: until the decision, the replica's own time, and the way to it.
MOST_HELD = 15
LEFT_OVER = 60


class Clients:
    """A history of one seed, second by second."""

    def __init__(self, seed: int) -> None:
        self.chance, self.world = Random(f"clients {seed}"), World()
        self.load, self.count, self.buffered_for = 1, 0, 0
        self.waiting: int = 0
        self.ready_at: dict[str, int] = {}
        self.drains: dict[str, int] = {}
        # What a new scaler does not name is passed on for a while.
        self.passes_on_until = 0
        self.known: deque[frozenset[str]] = deque([self.endpoints()] * (STALE + 1), maxlen=STALE + 1)
        self.zeros = 0

    @property
    def now(self) -> int:
        return self.world.now // SECOND_NS

    def is_ready(self, name: str) -> bool:
        pod = self.world.pods.get(name)
        return pod is not None and pod["status"]["conditions"][0]["status"] == "True"

    def ready(self) -> list[str]:
        return [name for name in self.world.pods if self.is_ready(name)]

    def endpoints(self) -> frozenset[str]:
        """As slices tell, all of them together."""
        return frozenset(self.ready() + ([ACTIVATOR] if self.world.slice is not None else []))

    def happen(self) -> None:
        world, chance = self.world, self.chance
        if chance.random() < 0.04:
            self.load = chance.choice([0, 0, 0, 1, 2])
        if chance.random() < 0.02:
            world.api_answers = not world.api_answers
        if chance.random() < 0.02:
            if world.state():
                self.passes_on_until = self.now + LEFT_OVER
            world.anew()

    def follow(self) -> None:
        """The Deployment's controllers."""
        world = self.world
        while len(world.pods) < world.replicas:
            self.count += 1
            name = f"q{self.count}"
            self.ready_at[name] = self.now + self.chance.randint(1, 4)
            world.pod(name, ready=False)
        for name in sorted(world.pods, key=self.is_ready)[: len(world.pods) - world.replicas]:
            world.no_pod(name)
            self.drains[name] = self.now + DRAIN
            self.zeros += not world.pods
        for name in list(world.pods):
            if not self.is_ready(name) and self.now >= self.ready_at[name]:
                world.pod(name, ready=True)

    def ask(self) -> int:
        """One second's requests; how many came to the activator."""
        came, at_replicas = 0, 0
        for _ in range(self.load):
            known = self.known[-1 - self.chance.randint(0, STALE)]
            assert known, "no client finds anybody"
            where = self.chance.choice(sorted(known))
            if where == ACTIVATOR:
                assert self.world.state() in ("proxy", "serve") or self.now < self.passes_on_until, (
                    "the activator's port is closed"
                )
                came += 1
            else:
                assert self.is_ready(where) or self.now < self.drains.get(where, 0), "its replica has gone"
                at_replicas += self.is_ready(where)
        self.world.requests = float(at_replicas)
        return came

    async def second(self) -> None:
        self.happen()
        self.follow()
        self.known.append(self.endpoints())
        came = self.ask()
        self.waiting += came
        forwarded = self.waiting if self.ready() else 0
        self.waiting -= forwarded
        self.buffered_for = self.buffered_for + 1 if self.waiting and self.world.api_answers else 0
        assert self.buffered_for < MOST_HELD, "nobody is woken for those who are held"
        await self.world.second(
            buffered=self.waiting, arrived=came, forwarded=forwarded, cold_start=self.waiting > 0
        )


@pytest.mark.parametrize("seed", range(4))
async def test_no_request_is_lost(seed: int) -> None:
    clients = Clients(seed)
    for _ in range(500):
        await clients.second()
    assert clients.zeros > 0
    # All is well again: to zero, and to rest.
    clients.happen = lambda: None  # type: ignore[method-assign]
    clients.load, clients.world.api_answers = 0, True
    for _ in range(100):
        await clients.second()
    assert (clients.world.replicas, clients.waiting, clients.endpoints()) == (0, 0, frozenset({ACTIVATOR}))
    clients.world.written.clear()
    for _ in range(20):
        await clients.second()
    assert clients.world.written == []
