"""Many pods that cannot be placed, and news all the time: those who can be placed do not wait for them."""

import random
from collections.abc import Callable

import pytest

from berth.contract.ids import GpuUuid, NodeName
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, KEYS

NODES, BLOCKED, PLACEABLE, MOST_DECISIONS = 20, 500, 100, 150
Crowd = Callable[[Bench, int], None]
_HOST = "kubernetes.io/hostname"


def _with_model(bench: Bench, number: int) -> None:
    """The model is on every node already, of a pod of the same priority."""
    if number == 0:
        for i in range(NODES):
            bench.resident(f"popular{i}", f"n{i}", 1, priority=50, annotations={KEYS.model_id: "popular"})
    bench.add(f"b{number}", priority=50, annotations={KEYS.model_id: "popular"})


def _too_large(bench: Bench, number: int) -> None:
    """Every pod of a size of its own; two GPUs for every fifth."""
    count = 2 if number % 5 == 0 else 1
    annotations = {KEYS.gpu_count: f"{count}"}
    bench.add(f"b{number}", mem=f"{count * (90 * 1024 + number)}Mi", priority=50, annotations=annotations)


def _too_large_with_all_others_gone(bench: Bench, number: int) -> None:
    if number == 0:
        for i in range(NODES):
            bench.resident(f"high{i}", f"n{i}", 30, slot=1, priority=90)
            bench.resident(f"low{i}", f"n{i}", 20, slot=1)
    bench.add(
        f"b{number}", mem=f"{81 * 1024 - number}Mi", priority=50, nodeSelector={_HOST: f"n{number % NODES}"}
    )


def _kept_out_by_budgets(bench: Bench, number: int) -> None:
    if number == 0:
        bench.budget(0)
        for i in range(NODES):
            bench.resident(f"kept{i}", f"n{i}", 60, slot=0, labels={"app": "web"})
            bench.resident(f"keeps{i}", f"n{i}", 60, slot=1, labels={"app": "web"})
    bench.add(f"b{number}", mem=f"{61 * 1024 + number}Mi", priority=50)


def _kept_out_by_one_of_two(bench: Bench, number: int) -> None:
    """One of the two that would have to go may go."""
    if number == 0:
        bench.budget(1)
        for i in range(NODES):
            for j in range(2):
                bench.resident(f"kept{i}-{j}", f"n{i}", 30, slot=j, labels={"app": "web"})
    annotations = {KEYS.gpu_count: "2"}
    bench.add(f"b{number}", mem=f"{2 * (61 * 1024 + number)}Mi", priority=50, annotations=annotations)


def _without_cpu(bench: Bench, number: int) -> None:
    bench.add(f"b{number}", priority=50, requests={"cpu": f"{1000 + number}"})


def _with_port(bench: Bench, number: int) -> None:
    container = [{"name": "c", "ports": [{"hostPort": 80, "containerPort": 80}], "resources": {}}]
    if number == 0:
        for i in range(NODES):
            bench.add(f"web{i}", mem=None, on=f"n{i}", containers=container, schedulerName="other")
    bench.add(f"b{number}", priority=50, containers=container)


def _selected(bench: Bench, number: int) -> None:
    bench.add(f"b{number}", priority=50, nodeSelector={"pool": f"p{number}"})


def _with_company(bench: Bench, number: int) -> None:
    term = {"topologyKey": _HOST, "labelSelector": {"matchLabels": {"app": f"absent{number}"}}}
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    bench.add(f"b{number}", priority=50, affinity=affinity)


def _alone(bench: Bench, number: int) -> None:
    """Not beside any of those that are placed all the time."""
    term = {"topologyKey": "kubernetes.io/os", "labelSelector": {"matchLabels": {"app": "young"}}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    if number == 0:
        for i in range(NODES):
            bench.node(f"n{i}", 80, 80, labels={"kubernetes.io/os": "linux"})
        bench.resident("first", "n0", 1, labels={"app": "young"}, priority=50)
    bench.add(f"b{number}", priority=50, affinity=affinity)


def _spread(bench: Bench, number: int) -> None:
    """The emptiest domain is a node that takes none of them."""
    if number == 0:
        for i in range(NODES - 1):
            bench.resident(f"s{i}", f"n{i}", 1, labels={"app": "s"}, priority=50)
    spread = {
        "topologyKey": _HOST,
        "maxSkew": 1,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "s"}},
    }
    bench.add(f"b{number}", labels={"app": "s"}, priority=50, topologySpreadConstraints=[spread], mem="81Gi")


def _without_volume(bench: Bench, number: int) -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": f"c{number}"}}
    bench.add(f"b{number}", priority=50, volumes=[volume])


def _gated(bench: Bench, number: int) -> None:
    bench.add(f"b{number}", priority=50, schedulingGates=[{"name": "g"}])


def _on_a_stale_node(bench: Bench, number: int) -> None:
    bench.node("stale", 80, 80, beats=False, other_use=number)
    bench.add(f"b{number}", priority=50, nodeSelector={_HOST: "stale"})


CROWDS: list[Crowd] = [
    _with_model,
    _too_large,
    _too_large_with_all_others_gone,
    _kept_out_by_budgets,
    _kept_out_by_one_of_two,
    _without_cpu,
    _with_port,
    _selected,
    _with_company,
    _alone,
    _spread,
    _without_volume,
    _gated,
    _on_a_stale_node,
]


def _news(bench: Bench, number: int, chance: random.Random) -> None:
    """Something has changed, and none of the blocked pods is any better off: other processes' bytes come and go,
    claims, budgets and namespaces are written, pods of others are bound and labelled."""
    name = f"n{chance.randrange(NODES)}"
    labels = {"kubernetes.io/os": "linux"}
    bench.node(name, 80, 80, other_use=chance.randrange(1, 2**30), labels=labels)
    match number % 5:
        case 0:
            claim = {
                "metadata": {"namespace": "team", "name": f"other{number}", "uid": f"c{number}"},
                "spec": {},
            }
            bench.tell("persistentvolumeclaims", claim)
        case 1:
            bench.budget(number % 3, app="nobody", name="theirs")
        case 2:
            bench.tell("namespaces", {"metadata": {"name": "elsewhere", "labels": {"n": str(number)}}})
        case 3:
            bench.add(f"x{number}", mem=None, on=name, schedulerName="other", labels={"app": "x"})
        case 4:
            bench.tell("storageclasses", {"metadata": {"name": "fast", "uid": "fast", "generation": number}})


@pytest.mark.parametrize("crowd", CROWDS, ids=lambda crowd: crowd.__name__)
async def test_pods_that_cannot_be_placed_cost_the_others_few_decisions(crowd: Crowd) -> None:
    chance = random.Random(1)
    async with Bench() as bench:
        for i in range(NODES):
            bench.node(f"n{i}", 80, 80, labels={"kubernetes.io/os": "linux"})
        for number in range(BLOCKED):
            crowd(bench, number)
        await bench.until_quiet()
        young = [f"y{i}" for i in range(PLACEABLE)]
        for i, uid in enumerate(young):
            bench.add(uid, priority=(0, 50)[i % 2], labels={"app": "young"}, created="2026-01-02T00:00:00Z")
        began = bench.steps
        while not bench.is_placed(*young) and bench.steps < began + 5 * MOST_DECISIONS:
            _news(bench, bench.steps, chance)
            await bench.step(seconds=0.05)
        assert bench.is_placed(*young)
        assert bench.steps - began <= MOST_DECISIONS
        assert not any(bench.is_placed(f"b{number}") for number in range(BLOCKED))


async def test_many_replicas_of_what_cannot_be_placed_are_decided_once() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        for i in range(BLOCKED):
            bench.add(f"copy{i}", mem="20Gi", annotations={KEYS.model_id: "same"})
        bench.add("young", mem="1Gi", created="2026-01-02T00:00:00Z")
        await bench.step(20)
        assert bench.is_placed("young")
        await bench.until_quiet()
        told = {name for name, reason, _ in bench.events.said if reason == "FailedScheduling"}
        assert len(told) == BLOCKED
        bench.node("n2", 24)
        await bench.step(5, seconds=0.6)
        assert sum(bench.is_placed(f"copy{i}") for i in range(BLOCKED)) == 1
        assert bench.scheduler.state.view(NodeName("n2")).reserved_on(bench_gpu("n2")) == 20 * GIB


def bench_gpu(name: str) -> GpuUuid:
    return GpuUuid(f"{name}-0")
