"""Objects that an API server takes and nobody expects: whatever stands in them, no decision breaks, and
the pods beside them are placed."""

import json
import logging
import math
import random
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.decision import Placement, Refusal
from binder.engine.explain import verdicts
from binder.engine.score import STRATEGIES, Strategy, make_strategy
from binder.loop.metrics import BinderMetrics
from binder.loop.queue import INITIAL_SECONDS
from binder.pod.demand import Shape, parse_demand
from tests.fakes.binder import scheduler_of
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report
from tests.unit.binder.test_scheduler import Api, Events

Json = dict[str, Any]


class Bench:
    """A scheduler that is stepped by hand, with a node that is in order."""

    def __init__(self, strategy: str = "least-fragmentation", *, own: Strategy | None = None) -> None:
        self.now, self.events, self.registry = 0.0, Events(), CollectorRegistry()
        self.scheduler = scheduler_of(
            Api(),
            strategy=own or strategy,
            events=self.events,
            metrics=BinderMetrics(self.registry),
            monotonic=lambda: self.now,
        )
        self.hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        self.node(node("good", says=report(gpu("GPU-good", total=10**6 * GIB)), allocatable=PLENTY))

    def node(self, one: Json) -> None:
        self.tell("nodes", one)
        self.scheduler.cluster.decider.table.beat(NodeName(one["metadata"]["name"]), math.inf)

    def tell(self, source: str, one: Json, kind: ChangeKind = ChangeKind.SET) -> None:
        self.hear[source](Change(kind, json.loads(json.dumps(one))))

    def attempts(self, result: str) -> float:
        return self.registry.get_sample_value("berth_binder_attempts_total", {"result": result}) or 0.0

    def decides(self, one: Json) -> Placement | Refusal:
        return self.scheduler.cluster.decider.decide(parse_demand(one, KEYS))

    async def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    async def end(self) -> None:
        await self.scheduler.abandon()


PLENTY = {"cpu": "1000", "memory": "100Ti", "pods": "100000"}


def two_containers(uid: str, mem: str, **more: Any) -> Json:
    one = pod(uid, mem=mem, **more)
    one["spec"]["containers"].append({**one["spec"]["containers"][0], "name": "second"})
    return one


AMOUNTS = ("5E", "9E", "7Ei", "1e400", "1e9999999999", "9223372036854775807", "1e-400", "0")
GREEDY: dict[str, Json] = {
    **{f"cpu {a}": pod("p", requests={"cpu": a}) for a in AMOUNTS},
    **{f"memory {a}": pod("p", requests={"memory": a}) for a in AMOUNTS},
    **{f"fpga {a}": pod("p", requests={"example.com/fpga": a}) for a in AMOUNTS},
    **{f"GPU memory {a} twice": two_containers("p", a) for a in AMOUNTS if a != "1e-400"},
    "overhead": pod("p", requests={"cpu": "9E"}, overhead={"cpu": "9E"}),
    "pod level": pod("p", resources={"requests": {"cpu": "9E"}}),
    "many GPUs": two_containers("p", "5E", annotations={KEYS.gpu_count: "64"}),
}


@pytest.mark.parametrize("case", sorted(GREEDY))
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_pod_that_requests_more_than_there_is_breaks_nothing(strategy: str, case: str) -> None:
    bench, greedy = Bench(strategy), GREEDY[case]
    bench.tell("pods", greedy)
    bench.tell("pods", pod("next", requests={"cpu": "1"}))
    await bench.steps(4)
    assert bench.attempts("broken") == 0
    assert bench.scheduler.state.has_place("next")  # type: ignore[arg-type]
    fits = case.endswith((" 0", " 0 twice")) or case in ("cpu 1e-400", "memory 1e-400")
    assert bench.scheduler.state.has_place("p") is fits  # type: ignore[arg-type]
    assert len(verdicts(bench.scheduler.cluster.decider, parse_demand(greedy, KEYS))) == 1
    await bench.end()


@pytest.mark.parametrize("case", sorted(GREEDY))
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_bound_pod_that_holds_more_than_there_is_blocks_its_node_and_nothing_else(
    strategy: str, case: str
) -> None:
    bench = Bench(strategy)
    bench.node(node("taken", says=report(gpu("GPU-taken", total=10**7 * GIB)), allocatable=PLENTY))
    assert isinstance(bench.decides(pod("x", requests={"cpu": "1"})), Placement)  # the columns are there
    one, choice = GREEDY[case], GpuChoice(GpuUuid("GPU-taken"), 0, 1)
    one = {**one, "metadata": {**one["metadata"]}, "spec": {**one["spec"], "nodeName": "taken"}}
    one["metadata"]["annotations"] = {**one["metadata"]["annotations"], KEYS.gpu: choice.encode()}
    for uid in ("a", "b", "c"):  # together more than 64 bits
        bench.tell("pods", {**one, "metadata": {**one["metadata"], "uid": uid, "name": uid}})
    for uid in ("x", "y"):
        bench.tell("pods", pod(uid, requests={"cpu": "1", "memory": "1Gi", "example.com/fpga": "0"}))
    await bench.steps(3)
    assert bench.attempts("broken") == 0
    assert bench.scheduler.state.has_place("x")
    assert bench.scheduler.state.has_place("y")
    await bench.end()


class Fussy:
    """A strategy that cannot bear one size."""

    def __init__(self) -> None:
        self.version, self._other = 0, make_strategy("binpack", np.random.default_rng(1))

    def gains(self, table: Any, shape: Shape, rows: Any, after: Any) -> Any:
        if shape.request_bytes == 3 * GIB:
            raise ZeroDivisionError("three")
        return self._other.gains(table, shape, rows, after)

    def load_cost(self, *, awaited: bool) -> float:
        return self._other.load_cost(awaited=awaited)

    def score(self, table: Any, shape: Shape, rows: Any, gain: Any, left: Any) -> Any:
        return self._other.score(table, shape, rows, gain, left)


async def test_what_breaks_over_one_pod_is_reported_to_its_owner_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(own=Fussy())
    bench.tell("pods", pod("bad", mem="3Gi", created="2026-01-01T00:00:00Z"))
    bench.tell("pods", pod("good", mem="4Gi", created="2026-01-02T00:00:00Z"))
    await bench.steps(6)
    assert bench.scheduler.state.has_place("good")  # type: ignore[arg-type]
    assert bench.attempts("broken") == 1  # it has a backoff like any other
    ((name, reason, message),) = bench.events.said
    assert (name, reason) == ("bad", "FailedScheduling")
    assert "ZeroDivisionError('three')" in message
    assert "decision broke" in caplog.text
    bench.now += 2 * INITIAL_SECONDS
    bench.node(node("news", says=report(gpu("GPU-news"))))  # news wake it, too
    await bench.steps(3)
    assert bench.attempts("broken") == 2
    await bench.end()


QUANTITIES = (*AMOUNTS, "1", "100m", "1Gi", "500Mi", "0.1", "3e3", "1.5Gi", "250500u", "4611686018427387904")
TEXTS = (
    "",
    " ",
    "a",
    "a,b",
    ",",
    "null",
    "{}",
    "[]",
    "0",
    "-1",
    "1e3",
    "\u0000",
    "ü" * 60,
    "x" * 300,
    "٣",
    "64",
    "2",
)
INTEGERS = (
    0,
    1,
    -1,
    16 * GIB,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    10**30,
    10**400,
    True,
    None,
    1.5,
    "7",
)


def any_json(chance: random.Random, depth: int = 3) -> Any:
    """Any value; in all the sizes that an annotation can have."""
    kind = chance.randrange(8 if depth else 5)
    if kind >= 6:
        return {chance.choice(FIELDS): any_json(chance, depth - 1) for _ in range(chance.randrange(6))}
    if kind == 5:
        return [any_json(chance, depth - 1) for _ in range(chance.randrange(4))]
    return chance.choice((*INTEGERS, *TEXTS))


FIELDS = (
    *("v", "uuid", "index", "bytes", "others", "server", "capabilities", "triton", "gpus", "models"),
    *("generation", "observedAt", "totalBytes", "otherUseBytes", "headroomBytes", "healthy", "product", ""),
)


def damaged(chance: random.Random, value: Any) -> Any:
    """A value of the right form with something else at one place of it, or with a large number there."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        return {**value, key: damaged(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], damaged(chance, value[at]), *value[at + 1 :]]
    return chance.choice(INTEGERS) if chance.random() < 0.7 else any_json(chance)


def some_report(chance: random.Random, uids: list[str]) -> str:
    gpus = [
        gpu(f"GPU-{i}", index=i, total=chance.choice((8, 16, 80)) * GIB) for i in range(chance.randrange(4))
    ]
    models = tuple(
        listed(
            uid, on=chance.choice((None, "GPU-0", "GPU-9")), measured=chance.choice((None, 0, GIB, 2**63 - 1))
        )
        for uid in chance.sample(uids, min(3, len(uids)))
    )
    whole = json.loads(report(gpu(), models=models).encode())
    whole["gpus"] = json.loads(report(*gpus).encode())["gpus"] if gpus else []
    match chance.randrange(4):
        case 0:
            return json.dumps(whole)
        case 1:
            return json.dumps(any_json(chance))
        case 2:
            return json.dumps(whole)[: chance.randrange(40)]
    return json.dumps(damaged(chance, whole))


def some_pod(chance: random.Random, uid: str, nodes: list[str]) -> Json:
    choice = GpuChoice(GpuUuid(f"GPU-{chance.randrange(4)}"), 0, GIB)
    marks = {
        key: chance.choice(TEXTS) if chance.random() < 0.7 else json.dumps(any_json(chance))
        for key in (
            KEYS.model_id,
            KEYS.model_name,
            KEYS.requirements,
            KEYS.server,
            KEYS.gpu_count,
            KEYS.gpu_product,
        )
        if chance.random() < 0.2
    }
    if chance.random() < 0.4:
        text = choice.encode()
        marks[KEYS.gpu] = text if chance.random() < 0.5 else json.dumps(damaged(chance, json.loads(text)))
    names = ("cpu", "memory", "ephemeral-storage", "example.com/fpga", "hugepages-2Mi")
    one = pod(
        uid,
        mem=chance.choice((None, *QUANTITIES)),
        annotations=marks,
        on=chance.choice(nodes) if chance.random() < 0.5 else None,
        requests={name: chance.choice(QUANTITIES) for name in names if chance.random() < 0.3},
        phase=chance.choice(("Pending", "Running", "Failed")),
        priority=chance.choice((0, 10, -(2**31), 2**31 - 1)),
        **({"overhead": {"cpu": chance.choice(QUANTITIES)}} if chance.random() < 0.1 else {}),
    )
    for kind in ("containers", "initContainers"):
        for number in range(chance.randrange(3)):
            limits = {KEYS.gpu_mem: chance.choice(QUANTITIES)}
            more = {
                "name": f"c{number}",
                "resources": {"limits": limits, "requests": {"cpu": chance.choice(QUANTITIES)}},
            }
            one["spec"].setdefault(kind, []).append(more)
    return one


@pytest.mark.parametrize("seed", range(40))
async def test_no_objects_break_a_decision_or_keep_a_pod_from_a_node_that_is_in_order(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    chance = random.Random(seed)
    bench = Bench(STRATEGIES[seed % len(STRATEGIES)])
    nodes = [f"n{i}" for i in range(4)]
    uids = [f"p{i}" for i in range(25)]
    for round in range(60):
        if chance.random() < 0.3:
            allocatable = {
                name: chance.choice(QUANTITIES) for name in ("cpu", "memory", "pods", "example.com/fpga")
            }
            bench.node(node(chance.choice(nodes), says=some_report(chance, uids), allocatable=allocatable))
        one = some_pod(chance, chance.choice(uids), nodes)
        bench.tell("pods", one, chance.choice((ChangeKind.SET, ChangeKind.SET, ChangeKind.GONE)))
        bench.now += chance.choice((0.0, 1.0, 200.0))
        await bench.steps(3)
        honest = pod(f"honest{round}", requests={"cpu": "1m"}, priority=2**31 - 1, nodeSelector=GOOD)
        bench.tell("pods", honest)
        await bench.steps(3)
        assert bench.scheduler.state.has_place(f"honest{round}"), caplog.text  # type: ignore[arg-type]
        for demand in list(bench.scheduler.queue.demands()):
            verdicts(bench.scheduler.cluster.decider, demand)
    list(bench.registry.collect())
    assert bench.attempts("broken") == 0, caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
    await bench.end()


GOOD = {"kubernetes.io/hostname": "good"}


@pytest.mark.parametrize("value", [0, 2**62, 2**63 - 1, 2**63, 10**400])
@pytest.mark.parametrize("key", ["index", "totalBytes", "otherUseBytes", "headroomBytes", "measuredBytes"])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_report_may_hold_any_number(strategy: str, key: str, value: int) -> None:
    """One that is too large for 64 bits makes the report unreadable, and nothing else."""
    bench, choice = Bench(strategy), GpuChoice(GpuUuid("GPU-a"), 0, GIB)
    whole = json.loads(report(gpu(), gpu("GPU-b"), models=(listed("p1"),)).encode())
    (whole["models"][0] if key == "measuredBytes" else whole["gpus"][0])[key] = value
    bench.node(node("odd", says=json.dumps(whole), allocatable=PLENTY))
    bench.tell("pods", pod("p1", on="odd", choice=choice, phase="Running"))
    for uid in ("x", "y"):
        bench.tell("pods", pod(uid, mem="17Gi"))
    await bench.steps(4)
    assert bench.attempts("broken") == 0
    assert bench.scheduler.state.has_place("x")  # type: ignore[arg-type]
    view = bench.scheduler.state.find(NodeName("odd"))
    assert view is not None
    assert (view.facts.report is None) is (value >= 2**63)
    await bench.end()
