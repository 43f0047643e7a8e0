"""The leader's control loop: each second the load of the replicas, every two seconds a decision for all models, after it a
request to the binder, and what follows to the API server. It decides nothing itself.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Container, Iterable
from typing import Final, Protocol

from berth.contract.scaling import ModelKey, ReplicaLoad, SchedulableAnswer, SchedulableRequest
from berth.kube.events import EventRecorder, ObjectRef
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise
from scaler.core.actions import Action, ColdStarted, Event, RouteChanged, WriteScale, WriteStatus
from scaler.core.scaler import TICK_SECONDS, Scaler
from scaler.metrics import ScalerMetrics
from scaler.scrape import next_moment
from scaler.writer import DeploymentWrite, Writer

log = logging.getLogger(__name__)

_SECONDS_A_TICK: Final = math.ceil(TICK_SECONDS)
# Less than the binder believes a token for, and than HTTP keeps a connection that is not used.
_KNOWN_SECONDS: Final = 10.0


class Binder(Protocol):
    """Who knows what may be placed."""

    async def ask(self, question: SchedulableRequest) -> SchedulableAnswer | None:
        """None: there is no answer."""
        ...


class Clock:
    """Nanoseconds since 1970 that never jump: the wall's at the start, and as many more as have passed."""

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._monotonic_ns, self._offset_ns = monotonic_ns, wall_ns() - monotonic_ns()

    def __call__(self) -> int:
        return self._monotonic_ns() + self._offset_ns


class ControlLoop:
    """`act` carries out what the core decides."""

    def __init__(
        self,
        core: Scaler,
        writer: Writer,
        binder: Binder,
        events: EventRecorder,
        metrics: ScalerMetrics,
        clock_ns: Callable[[], int],
        on_route_change: Callable[[RouteChanged], None],
        on_decisions: Callable[[Iterable[ModelKey]], None],
    ) -> None:
        """`on_route_change` is called when a model's requests are to go another way, `on_decisions` with the models that may
        be shown otherwise than before."""
        self._core, self._writer, self._binder = core, writer, binder
        self._events, self._metrics, self._clock_ns = events, metrics, clock_ns
        self._on_route_change, self._on_decisions = on_route_change, on_decisions
        # Decisions go on while actions are paused, so that nothing of the load is missed.
        self._is_paused = False
        self._to_ask = asyncio.Event()

    def begin(self, lead: Callable[[int], None]) -> None:
        """Actions are carried out from now on. `lead` is called between the first decisions and their actions."""
        now_ns = self._clock_ns()
        self._is_paused = False
        self._core.resume(now_ns)
        first = self._core.step(now_ns)
        lead(now_ns)
        self.act(first)

    def pause(self) -> None:
        """No action is carried out until `begin`."""
        self._is_paused = True
        self._core.pause()

    def record_loads(self, loads: list[ReplicaLoad], replicas: Container[str]) -> None:
        """A gateway has reported its loads."""
        self._core.record_loads(loads, replicas, self._clock_ns())

    async def run(self) -> None:
        """Decide for ever."""
        async with supervise() as tasks:
            tasks.eternal("seconds", self._seconds())
            tasks.eternal("schedulable", self._questions())
            tasks.eternal("known", self._stay_known())
            await asyncio.Event().wait()

    async def _seconds(self) -> None:
        at, count = time.monotonic(), 0
        while True:
            self._core.close_second(self._clock_ns())
            if count % _SECONDS_A_TICK == 0:
                self._step()
            count += 1
            at = next_moment(at, time.monotonic())
            await asyncio.sleep(at - time.monotonic())

    def _step(self) -> None:
        with self._metrics.step_seconds.time():
            actions = self._core.step(self._clock_ns())
        models = self._core.models()
        self._metrics.decisions.inc(len(models))
        self.act(actions)
        self._on_decisions(models)

    async def _questions(self) -> None:
        """One at a time, as soon as there is one."""
        while True:
            await self._to_ask.wait()
            self._to_ask.clear()
            question = self._core.question(self._clock_ns())
            if question is not None:
                answer = await self._binder.ask(question)
                self.act(self._core.answered(question, answer, self._clock_ns()))

    async def _stay_known(self) -> None:
        """Ask for nothing now and then: when a first request waits for an answer, the binder knows this caller already, and
        the cluster as it is. Beside the questions, so that none of them waits for this one."""
        while True:
            await self._binder.ask(SchedulableRequest(models=()))
            await asyncio.sleep(_KNOWN_SECONDS)

    def act(self, actions: Iterable[Action]) -> None:
        """Never waits."""
        for action in actions:
            match action:
                case WriteScale() | WriteStatus() | RouteChanged() if self._is_paused:
                    pass  # what is still needed is given again by the first step after the pause
                case WriteScale() | WriteStatus():
                    self._write(action)
                case Event():
                    about = _deployment_ref(action.model, action.uid)
                    self._events.record(about, action.type, action.reason, action.message)
                case RouteChanged():
                    self._on_route_change(action)
                case ColdStarted():
                    self._metrics.cold_started(action.cold_start)
        self._to_ask.set()

    def _write(self, action: WriteScale | WriteStatus) -> None:
        if isinstance(action, WriteStatus):
            write = DeploymentWrite(model=action.model, uid=action.uid, scaled=action.scaled)
        else:
            log.info("scaling", extra=fields(model=action.model, replicas=action.replicas))
            write = DeploymentWrite(
                model=action.model, uid=action.uid, replicas=action.replicas, costs=action.costs
            )
        self._writer.put(write)


def _deployment_ref(model: ModelKey, uid: str) -> ObjectRef:
    return ObjectRef("apps/v1", "Deployment", model.namespace, model.name, uid)
