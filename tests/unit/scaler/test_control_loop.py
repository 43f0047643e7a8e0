"""What is done with the actions of the core, and when it is asked."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from berth.contract.scaling import ModelKey, Scaled, SchedulableAnswer, SchedulableModel, SchedulableRequest
from scaler import control_loop
from scaler.control_loop import Clock, ControlLoop
from scaler.core.actions import Action, ColdStarted, Event, RouteChanged, WriteScale, WriteStatus
from scaler.core.models_view import Averages, ColdStartView, ModelView
from scaler.decision.bounds import Activity
from scaler.metrics import ScalerMetrics
from scaler.writer import DeploymentWrite

A = ModelKey("team", "a")


class Core:
    """Wants what a test says."""

    def __init__(self) -> None:
        self.wants: list[Action] = []
        self.asks: list[SchedulableRequest] = []
        self.heard_of: list[Any] = []
        self.steps = self.seconds = 0

    def models(self) -> list[ModelKey]:
        return [A]

    def record_loads(self, *told: Any) -> bool:
        self.heard_of.append(told)
        return True

    def close_second(self, now_ns: int) -> None:
        self.seconds += 1

    def step(self, now_ns: int) -> list[Action]:
        self.steps += 1
        return self.wants

    def question(self, now_ns: int) -> SchedulableRequest | None:
        return self.asks.pop(0) if self.asks else None

    def answered(self, question: SchedulableRequest, answer: Any, now_ns: int) -> list[Action]:
        return [WriteScale(model=question.models[0].model, uid="u", replicas=9)]

    def view(self, model: ModelKey) -> ModelView:
        return ModelView(
            model=model, class_name="kpa", spec=None, ready=2, desired=5, capacity_limited=3, buffered=7, in_panic=True,
            activity=Activity.ACTIVE, concurrency=Averages(1.5, None),
        )  # fmt: skip


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def record(self, about: Any, *what: str) -> None:
        self.told.append((str(about), *what))


class Binder:
    """Answers once it is told to."""

    def __init__(self) -> None:
        self.asked: list[SchedulableRequest] = []
        self.known = 0
        self.answers = asyncio.Event()

    async def ask(self, question: SchedulableRequest) -> SchedulableAnswer | None:
        if question.models:
            self.asked.append(question)
        else:
            self.known += 1
        await self.answers.wait()
        return None


class Here:
    def __init__(self) -> None:
        self.core, self.events, self.binder = Core(), Events(), Binder()
        self.writes: list[Any] = []
        self.switched: list[RouteChanged] = []
        self.registry = CollectorRegistry()
        self.metrics = ScalerMetrics(self.registry)
        core: Any = self.core
        writer: Any = self
        events: Any = self.events
        self.loop = ControlLoop(
            core,
            writer,
            self.binder,
            events,
            self.metrics,
            lambda: 5,
            on_route_change=self.switched.append,
            on_decisions=lambda models: None,
        )

    def put(self, write: Any) -> None:
        self.writes.append(write)


def question() -> SchedulableRequest:
    one = SchedulableModel(
        name=str(A), desired=1, running=0, starting=0, priority=0, template={}, template_hash="h"
    )
    return SchedulableRequest(models=(one,))


async def test_each_action_goes_where_it_is_done() -> None:
    here = Here()
    scaled = Scaled(desired=3)
    wake = ColdStartView(at_ns=0, phases=(("decide", 0.1), ("schedule", 0.2)))
    here.loop.act(
        [
            WriteScale(model=A, uid="u", replicas=3, costs={"p": 1}),
            WriteStatus(model=A, uid="u", scaled=scaled),
            Event(model=A, uid="u", type="Warning", reason="CapacityLimited", message="no room"),
            RouteChanged(model=A),
            ColdStarted(model=A, cold_start=wake),
        ]
    )
    assert here.writes == [
        DeploymentWrite(model=A, uid="u", replicas=3, costs={"p": 1}),
        DeploymentWrite(model=A, uid="u", scaled=scaled),
    ]
    assert here.events.told == [("Deployment team/a", "Warning", "CapacityLimited", "no room")]
    assert here.switched == [RouteChanged(model=A)]
    text = generate_latest(here.registry).decode()
    assert 'berth_scaler_cold_start_seconds_sum{phase="schedule"} 0.2' in text
    assert 'berth_scaler_cold_start_seconds_count{phase="all"} 1.0' in text


async def test_a_binder_that_is_slow_holds_up_no_decision() -> None:
    here = Here()
    here.core.asks = [question(), question()]
    here.loop.act([])
    task = asyncio.create_task(here.loop.run())
    async with asyncio.timeout(10):
        while not (here.binder.asked and here.core.steps >= 2):
            await asyncio.sleep(0.01)
    assert len(here.binder.asked) == 1  # one question at a time
    assert here.core.seconds > here.core.steps
    here.binder.answers.set()
    async with asyncio.timeout(10):
        while len(here.binder.asked) < 2:
            await asyncio.sleep(0.01)
    assert here.writes[0] == DeploymentWrite(model=A, uid="u", replicas=9)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_binder_knows_who_asks_before_a_request_waits_for_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_loop, "_KNOWN_SECONDS", 0.0)
    here = Here()
    task = asyncio.create_task(here.loop.run())
    async with asyncio.timeout(10):
        while not here.binder.known:
            await asyncio.sleep(0.01)
        here.core.asks = [question()]
        here.loop.act([])
        while not here.binder.asked:  # though nothing has been answered
            await asyncio.sleep(0.01)
        assert here.binder.known == 1
        here.binder.answers.set()
        while here.binder.known < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_time_starts_at_the_walls_and_never_jumps() -> None:
    walls, ticks = iter([1_000, 5_000_000]), iter([10, 11, 15])
    clock = Clock(lambda: next(walls), lambda: next(ticks))
    assert [clock(), clock()] == [1_001, 1_005]
