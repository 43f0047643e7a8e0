"""What an answer to the scaler costs: 256 models on clusters of several sizes.

No sockets: the question as its JSON on the one side, the answer as a value on the other.
"""

import argparse
import gc
import json
import random
import statistics
import time
from typing import Any

from prometheus_client import CollectorRegistry

from bench.binder import objects
from bench.binder.core import _bound_pods, _demands, _kind, _nodes
from berth.contract.scaling import SchedulableAnswer, SchedulableModel, SchedulableRequest
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import slim
from binder.engine.decision import Placement
from binder.engine.schedulable import SchedulableAnswers
from binder.engine.score import LeastFragmentation
from binder.loop.fenced import FencedClient
from binder.loop.metrics import BinderMetrics
from binder.loop.scheduler import Clocks, Scheduler

SIZES = (100, 1000, 5000)
_MODELS, _ROUNDS = 256, 6
# Replicas that each model wants.
_CASES = {"one replica each": 1, "four replicas each": 4, "none fits": 1, "one idle pod goes for each": 1}


def run(options: argparse.Namespace) -> int:
    sizes = [options.nodes] if options.nodes else list(SIZES)
    print(
        "| nodes | 256 models, all different | CPU ms, least | median | longest step ms | one plain decision µs |"
    )
    print("|---|---|---|---|---|---|")
    found = []
    for size in sizes:
        bench = _Bench(size)
        decision = bench.decision_us()
        for case, wanted in _CASES.items():
            row = {"nodes": size, "case": case, **bench.measure(case, wanted), "decision_us": decision}
            found.append(row)
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"answers": found}, indent=2))
    return 0


class _Api:
    """Takes every write."""

    async def create(self, path: str, body: Any) -> Any:
        return {}

    async def patch(self, *_: Any, **__: Any) -> Any:
        return {}


class _Events:
    def record(self, *_: object) -> None:
        pass


class _Bench:
    def __init__(self, size: int) -> None:
        self.scheduler = Scheduler(
            FencedClient(_Api(), lambda: True),  # type: ignore[arg-type]
            keys=objects.KEYS,
            scheduler_name="trtis-scheduler",
            strategy=LeastFragmentation(),
            events=_Events(),  # type: ignore[arg-type]
            metrics=BinderMetrics(CollectorRegistry()),
            clocks=Clocks(),
        )
        for node in _nodes(size):
            self.scheduler.on_node(Change(ChangeKind.SET, node))
        for index in range(size):
            self.scheduler.cluster.on_lease(Change(ChangeKind.SET, objects.lease(index)))
        for pod in _bound_pods(size):
            self.scheduler.cluster.on_pod(Change(ChangeKind.SET, slim(pod)))
        self.answers = SchedulableAnswers(
            self.scheduler.cluster,
            objects.KEYS,
            pending=self.scheduler.about_to_be_placed,
            aside=self.scheduler.nominator.aside,
        )
        self.scheduler.cluster.decider.refresh()
        gc.collect()
        gc.freeze()  # as the binder does

    def measure(self, case: str, wanted: int) -> dict[str, float]:
        text = _question(wanted, too_much=case in ("none fits",), idle=self._idle() if "idle" in case else ())
        used, longest = [], []
        for _ in range(_ROUNDS):
            began = time.process_time()
            answer, step = _finished(self.answers, SchedulableRequest.decode(text))
            used.append((time.process_time() - began) * 1e3)
            longest.append(step * 1e3)
            _require(case, wanted, answer)
        return {
            "cpu_ms": round(min(used), 1),
            "median_ms": round(statistics.median(used), 1),
            "longest_step_ms": round(statistics.median(longest), 1),
        }

    def decision_us(self) -> float:
        """Of as many pods of the same kinds, each assumed and forgotten again."""
        decider, state = self.scheduler.cluster.decider, self.scheduler.state
        times = []
        for demand in _demands("usual mix", 2 * _MODELS):
            began = time.process_time()
            outcome = decider.decide(demand)
            if isinstance(outcome, Placement):
                state.assume(demand, outcome.node, outcome.gpu)
                state.forget(demand.model.ref.uid)
            times.append((time.process_time() - began) * 1e6)
        return round(statistics.fmean(times[_MODELS:]), 1)

    def _idle(self) -> tuple[str, ...]:
        state = self.scheduler.state
        nodes = list(self.scheduler.cluster.decider.table.row_of)
        names = [f"{h.ref.namespace}/{h.ref.name}" for node in nodes for h in state.living_on(node)]
        return tuple(random.Random(1).sample(names, min(1024, len(names))))


def _question(wanted: int, *, too_much: bool, idle: tuple[str, ...]) -> bytes:
    """Each model requests a size of its own."""
    chance, models = random.Random(1), []
    for number in range(_MODELS):
        pod = json.loads(_kind(number, chance))
        size = (
            (objects.GPU_GIB + 1) * 1024
            if too_much
            else objects.GPU_GIB * 1024 - number
            if idle
            else 2048 + number
        )
        objects.set_gpu_mem(pod, mib_each=size)
        models.append(
            SchedulableModel(
                name=f"{pod['metadata']['namespace']}/m{number}",
                desired=wanted,
                running=0,
                starting=0,
                priority=0,
                template={"metadata": pod["metadata"], "spec": pod["spec"]},
                template_hash=f"{number} {size}",
            )
        )
    return SchedulableRequest(models=tuple(models), idle=idle).encode()


def _require(case: str, wanted: int, answer: SchedulableAnswer) -> None:
    given = sum(one.now for one in answer.models.values())
    if case in ("one replica each", "four replicas each") and given != wanted * _MODELS:
        raise SystemExit(f"bench.binder schedulable: {case}: {given} replicas were given")
    if case == "none fits" and given:
        raise SystemExit(f"bench.binder schedulable: {case}: {given} replicas were given")


def _finished(answers: SchedulableAnswers, request: SchedulableRequest) -> tuple[SchedulableAnswer, float]:
    """The answer, and how long its longest step took."""
    steps, longest = answers.answer(request), 0.0
    while True:
        began = time.perf_counter()
        try:
            next(steps)
        except StopIteration as done:
            answer: SchedulableAnswer = done.value
            return answer, longest
        longest = max(longest, time.perf_counter() - began)
