"""`POST /schedulable`: the scaler's question, over HTTP, for the leader alone knows what is promised.

Asked by nobody but the scaler's ServiceAccount, which a TokenReview proves. Answered one at a time and in slices,
between which pods are placed; a replica that does not lead sends its caller to the one that does (307).
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator
from typing import Final, TypeVar

from aiohttp import web

from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.contract.scaling import BINDER_AUDIENCE, MOST_ASKED, SchedulableAnswer, SchedulableRequest
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError
from berth.kube.token_review import TokenRefused, review_pod_token
from berth.runtime.logs import fields
from binder.api.metrics import BinderMetrics
from binder.engine.schedulable import SchedulableAnswers
from binder.loop.scheduler import Scheduler

log = logging.getLogger(__name__)

PATH: Final = "/schedulable"
SCALER: Final = "berth-scaler"
MOST_IDLE: Final = 8192
_BODY_BYTES: Final = 16 * 1024 * 1024
_BODY_SECONDS: Final = 5.0
# A slice of an answer, after which whoever else has something to do is let do it. While pods wait that can be placed,
# for as long as the slice took; and then nothing is answered for so many times as long as the whole answer took: pods
# wait for one slice, and lose a twentieth of the time.
SLICE_SECONDS: Final = 0.005
_REST, _LONGEST_REST = 19.0, 5.0
# Questions that wait for the one before.
_MOST_WAITING: Final = 4
_BEARER: Final = "Bearer "
_TOKEN_LIMIT: Final = 4096
_BELIEVED_SECONDS, _REFUSED_SECONDS = 30.0, 5.0
_MOST_TOKENS: Final = 256
# Reviews under way; a second in the long run, and at once, of one address.
_REVIEWS, _RATE, _BURST = 4, 0.5, 5.0
_MOST_SOURCES: Final = 1024
_T = TypeVar("_T")


class SchedulableApi:
    """`leader()` is where the leading replica answers, "" while nobody knows."""

    def __init__(
        self,
        scheduler: Scheduler,
        keys: Keys,
        client: KubeClient,
        metrics: BinderMetrics,
        *,
        system_namespace: str,
        leader: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._scheduler, self._metrics, self._leader = scheduler, metrics, leader
        self._clock, self._sleep = clock, sleep
        self._callers = _Callers(client, system_namespace, clock)
        self._schedulable_answers = SchedulableAnswers(
            scheduler.cluster, keys, pending=scheduler.about_to_be_placed, aside=scheduler.preemptor.aside
        )
        self._turn, self._waiting, self._rests_until = asyncio.Lock(), 0, 0.0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post(PATH, self._schedulable)
        return app

    async def _schedulable(self, request: web.Request) -> web.StreamResponse:
        if not self._scheduler.leads:
            return self._elsewhere(request)
        try:
            await self._callers.require_scaler(request.headers.get("Authorization", ""), request.remote or "")
            question = await _question(request)
        except _Refused as error:
            return _error(error.status, str(error))
        except InvalidValue as error:
            return _error(400, str(error))
        except TimeoutError:
            return _error(408, f"the body has not come within {_BODY_SECONDS:g} s")
        except KubeError as error:
            log.warning("caller not known", extra=fields(error=error))
            return _error(503, "the API server does not say whose the token is")
        if self._waiting >= _MOST_WAITING:
            return _error(429, "other questions wait for their answer; ask again later")
        answer = await self._answered(question)
        if answer is None:
            return self._elsewhere(request)
        return web.Response(body=answer.encode(), content_type="application/json")

    def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        if self._scheduler.leads or not (leader := self._leader()):
            return _error(503, "no replica of the binder leads")
        return web.Response(status=307, headers={"Location": f"{leader}{request.path}"})

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


class _Refused(Exception):
    """`status`: of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Callers:
    """Lets nobody in but the scaler, by TokenReview. What was said of a token is remembered for a while, by its hash."""

    def __init__(self, client: KubeClient, system_namespace: str, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._user = f"system:serviceaccount:{system_namespace}:{SCALER}"
        # Until when, and the refusal; None: it is the scaler's.
        self._known: OrderedDict[bytes, tuple[float, _Refused | None]] = OrderedDict()
        self._shares: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._reviewing = 0

    async def require_scaler(self, authorization: str, source: str) -> None:
        """Raises _Refused, or KubeError when nobody can tell."""
        token = _token_of(authorization)
        key = hashlib.sha256(token.encode()).digest()
        until, refusal = self._known.get(key, (float("-inf"), None))
        if until <= self._clock():
            refusal = await self._review(token, source)
            self._remember(key, refusal)
        if refusal is not None:  # another one: what is raised again and again keeps each traceback
            raise _Refused(refusal.status, str(refusal))

    async def _review(self, token: str, source: str) -> _Refused | None:
        if not self._has_share(source) or self._reviewing >= _REVIEWS:
            raise _Refused(429, "too many unknown tokens; try again later")
        self._reviewing += 1
        try:
            caller = await review_pod_token(self._client, token, audience=BINDER_AUDIENCE)
        except TokenRefused as error:
            return _Refused(401, str(error).replace(token, "…"))
        finally:
            self._reviewing -= 1
        if caller.user != self._user:
            return _Refused(403, f"{caller.user} may not ask; {self._user} may")
        return None

    def _remember(self, key: bytes, refusal: _Refused | None) -> None:
        seconds = _BELIEVED_SECONDS if refusal is None else _REFUSED_SECONDS
        self._known[key] = (self._clock() + seconds, refusal)
        self._known.move_to_end(key)
        if len(self._known) > _MOST_TOKENS:
            self._known.popitem(last=False)

    def _has_share(self, source: str) -> bool:
        """Each address has few reviews, so that nobody takes all of them."""
        now = self._clock()
        had, at = self._shares.pop(source, (_BURST, now))
        have = min(_BURST, had + (now - at) * _RATE)
        self._shares[source] = (have - 1 if have >= 1 else have, now)
        if len(self._shares) > _MOST_SOURCES:
            self._shares.popitem(last=False)
        return have >= 1


def _token_of(authorization: str) -> str:
    token = authorization.removeprefix(_BEARER).strip()
    if not authorization.startswith(_BEARER) or not token:
        raise _Refused(401, f"send `Authorization: Bearer TOKEN` with a token of audience {BINDER_AUDIENCE}")
    if len(token) > _TOKEN_LIMIT or not token.isascii() or not token.isprintable():
        raise _Refused(401, "that is not a token")
    return token


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


def _error(status: int, why: str) -> web.Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response({"error": why}, status=status, headers=headers)
