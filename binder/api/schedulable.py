"""`POST /schedulable`: the scaler's question, over HTTP, for the leader alone knows what is promised.

Only the scaler's ServiceAccount may ask, which a TokenReview proves. Answered one at a time and in slices,
between which pods are placed; a replica that does not lead sends its caller to the one that does (307).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Final, TypeVar

from aiohttp import web

from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.contract.scaling import MOST_ASKED, SchedulableAnswer, SchedulableRequest
from berth.kube.errors import KubeError
from berth.runtime.logs import fields
from binder.api.callers import Callers, Refused
from binder.api.leader import LeaderOnly, error
from binder.engine.schedulable import SchedulableAnswers
from binder.loop.metrics import BinderMetrics
from binder.loop.scheduler import Scheduler

log = logging.getLogger(__name__)

PATH: Final = "/schedulable"
MOST_IDLE: Final = 8192
_BODY_BYTES: Final = 16 * 1024 * 1024
_BODY_SECONDS: Final = 5.0
# A slice of an answer, after which other tasks run. While pods wait that can be placed,
# for as long as the slice took; and then nothing is answered for so many times as long as the whole answer took: pods
# wait for one slice, and lose a twentieth of the time.
SLICE_SECONDS: Final = 0.005
_REST, _LONGEST_REST = 19.0, 5.0
# Questions that wait for the one before.
_MOST_WAITING: Final = 4
_T = TypeVar("_T")


class SchedulableApi:
    """Answers one question at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: BinderMetrics,
        leader: LeaderOnly,
        callers: Callers,
        *,
        keys: Keys,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._scheduler, self._metrics, self._leader, self._callers = scheduler, metrics, leader, callers
        self._clock, self._sleep = clock, sleep
        self._schedulable_answers = SchedulableAnswers(
            scheduler.cluster, keys, pending=scheduler.about_to_be_placed, aside=scheduler.nominator.aside
        )
        self._turn, self._waiting, self._rests_until = asyncio.Lock(), 0, 0.0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post(PATH, self._leader.guard(self._schedulable))
        return app

    async def _schedulable(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._callers.require_scaler(request.headers.get("Authorization", ""), request.remote or "")
            question = await _question(request)
        except Refused as refused:
            return error(refused.status, str(refused))
        except TimeoutError:
            return error(408, f"the body has not come within {_BODY_SECONDS:g} s")
        except KubeError as failed:
            log.warning("caller not known", extra=fields(error=failed))
            return error(503, "the API server does not say whose the token is")
        if self._waiting >= _MOST_WAITING:
            return error(429, "other questions wait for their answer; ask again later")
        answer = await self._answered(question)
        if answer is None:
            return self._leader.elsewhere(request)
        return web.Response(body=answer.encode(), content_type="application/json")

    async def _answered(self, question: SchedulableRequest) -> SchedulableAnswer | None:
        """None where this replica has ceased to lead meanwhile."""
        self._waiting += 1
        try:
            async with self._turn:
                if self._pods_wait():
                    await self._sleep(max(0.0, self._rests_until - self._clock()))
                return await self._in_slices(self._schedulable_answers.answer(question))
        finally:
            self._waiting -= 1

    async def _in_slices(self, steps: Generator[None, None, SchedulableAnswer]) -> SchedulableAnswer | None:
        worked = 0.0
        try:
            while self._scheduler.leads:
                began = self._clock()
                answer = self._slice(steps, until=began + SLICE_SECONDS)
                took = self._clock() - began
                worked += took
                if answer is not None:
                    return answer
                await self._sleep(took if self._pods_wait() else 0.0)
            return None
        finally:
            steps.close()
            self._metrics.schedulable_seconds.observe(worked)
            self._rests_until = self._clock() + min(_REST * worked, _LONGEST_REST)

    def _pods_wait(self) -> bool:
        return self._scheduler.queue.seconds_to_next() == 0.0

    def _slice(self, steps: Generator[None, None, _T], *, until: float) -> _T | None:
        try:
            while True:
                next(steps)
                if self._clock() >= until:
                    return None
        except StopIteration as done:
            answer: _T = done.value
            return answer


async def _question(request: web.Request) -> SchedulableRequest:
    """Raises InvalidValue, TimeoutError; HTTP's own error for a body that is too large."""
    async with asyncio.timeout(_BODY_SECONDS):
        text = await request.read()
    question = SchedulableRequest.decode(text)
    if len(question.models) > MOST_ASKED or len(question.idle) > MOST_IDLE:
        raise InvalidValue(f"more than {MOST_ASKED} models or {MOST_IDLE} idle pods")
    if len({one.model for one in question.models}) < len(question.models):
        raise InvalidValue("a model is named twice")
    return question
