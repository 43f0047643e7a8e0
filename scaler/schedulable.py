"""The scaler's question to the binder: what may be placed. The client of `POST /schedulable`.

It finds the leader through the Service and follows it (307), asks that replica from then on, and goes back to the Service
when it does not answer. One question takes ANSWER_SECONDS at most; when to ask again is the caller's affair.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from berth.contract.scaling import SchedulableAnswer, SchedulableRequest
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

PATH: Final = "/schedulable"
# The binder answers in tenths of a second, and later when it is asked often or for thousands of replicas.
ANSWER_SECONDS: Final = 10.0
# One replica, so that there is time for another.
_TRY_SECONDS, _CONNECT_SECONDS = 6.0, 2.0
_HOPS: Final = 3
_ANSWER_BYTES: Final = 16 * 1024 * 1024
_TOLD: Final = 200  # characters of an error that was answered


class _NoAnswer(Exception):
    """Why there is none."""


class BinderClient:
    """`url`: `http://HOST:PORT` of the binders' Service. `token()`: a token of audience `berth-binder` as it is now;
    raises OSError where there is none."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: Callable[[], str]) -> None:
        self._session, self._service, self._token = session, url, token
        self._leader = ""
        self._why = ""

    async def ask(self, question: SchedulableRequest) -> SchedulableAnswer | None:
        """None where no leader answers in time: why is logged once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._ask(question.encode())
        except (_NoAnswer, ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
            self._leader = ""
            self._note(str(error) or type(error).__name__)
            return None
        self._note("")
        return answer

    async def _ask(self, body: bytes) -> SchedulableAnswer:
        if self._leader:
            try:
                return await self._follow(self._leader, body)
            except (_NoAnswer, aiohttp.ClientError, OSError, TimeoutError):
                self._leader = ""  # it may have gone, and another one lead
        return await self._follow(self._service, body)

    async def _follow(self, url: str, body: bytes) -> SchedulableAnswer:
        for _ in range(_HOPS):
            found = await self._post(url, body)
            if isinstance(found, SchedulableAnswer):
                self._leader = url
                return found
            url = found
        raise _NoAnswer(f"{_HOPS} replicas of the binder name another one as their leader")

    async def _post(self, url: str, body: bytes) -> SchedulableAnswer | str:
        """The answer, or where to ask instead."""
        headers = {"Authorization": f"Bearer {self._bearer()}", "Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=_TRY_SECONDS, sock_connect=_CONNECT_SECONDS)
        async with self._session.post(
            url + PATH, data=body, headers=headers, timeout=limit, allow_redirects=False
        ) as answer:
            if answer.status == 307:
                return _origin(answer.headers.get("Location", ""))
            text = await _bounded(answer)
            if answer.status != 200:
                said = text[:_TOLD].decode(errors="replace")
                raise _NoAnswer(f"the binder at {url} answers {answer.status}: {said}")
            return SchedulableAnswer.decode(text)

    def _bearer(self) -> str:
        """Raises _NoAnswer."""
        try:
            return self._token().strip()
        except OSError as error:
            raise _NoAnswer(f"--binder-token: {error.filename}: {error.strerror}") from error

    def _note(self, why: str) -> None:
        """On change alone."""
        if why and not self._why:
            log.warning("the binder does not say what may be placed", extra=fields(error=why))
        elif self._why and not why:
            log.info("the binder says again what may be placed")
        self._why = why


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    text = await answer.content.read(_ANSWER_BYTES + 1)
    while len(text) <= _ANSWER_BYTES and (more := await answer.content.read(_ANSWER_BYTES + 1 - len(text))):
        text += more
    if len(text) > _ANSWER_BYTES:
        raise _NoAnswer(f"an answer of more than {_ANSWER_BYTES} bytes")
    return text


def _origin(location: str) -> str:
    """Raises _NoAnswer where it leads to anything but another binder's question."""
    parts = urlsplit(location)
    if parts.scheme != "http" or not parts.netloc or parts.path != PATH or parts.username is not None:
        raise _NoAnswer(
            f"the leader is said to be at {location[:_TOLD]!r}, which is no http://HOST:PORT{PATH}"
        )
    return f"http://{parts.netloc}"
