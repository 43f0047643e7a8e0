"""The own model in the node's Triton: where it is, with which keys, and whether it serves now.

Two sources: the agent's word (endpoints, keys, and a nudge when the state changes) and Triton's own
answer, asked every half second. Only the latter makes the model ready, so a pod is never ready
without its model, and an agent that restarts makes no pod unready. The agent alone can say that what Triton
serves is not to be trusted, because the GPU below it is broken.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.bodies import TooLarge, read_whole
from proxy.exchange.model_facts import ModelFacts

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# A model may be replaced by another of its name between two looks, without a word from the agent.
_FACTS_SECONDS = 5.0
_ANSWER_SECONDS = 1.0
# Triton's REST threads are few, and for seconds each is busy with any tenant's large JSON: a model that was
# ready is not gone for that.
_SILENCE_SECONDS = 10.0
_ANSWER_BYTES = 4 * 1024 * 1024


class NotServed(Exception):
    """Triton cannot be asked now; the message says why."""


class Silent(NotServed):
    """Triton is there and has not answered in time."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where Triton is and what opens it. The headers are secret: never logged."""

    http: Endpoint
    grpc: Endpoint
    http_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A small answer of Triton's."""

    status: int
    body: bytes


class Upstream:
    """What the front ends ask. Runs on the event loop alone."""

    def __init__(self, model: ModelName, session: aiohttp.ClientSession) -> None:
        self.model, self._session = model, session
        self.access: Access | None = None
        self.not_ready: str | None = "the model has not been asked for yet"
        # Why the model is not to be used whatever Triton says, in the agent's words.
        self.withheld: str | None = None
        self.facts = ModelFacts()
        self._facts_read = self._heard = -math.inf
        self._changed = asyncio.Event()
        self._nudge = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.not_ready is None

    def next_change(self) -> asyncio.Event:
        """Set when readiness changes. Take it before looking."""
        return self._changed

    def announce(self) -> None:
        """Wake who waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def nudge(self) -> None:
        """Somebody has reason to believe that the state is another: ask now."""
        self._nudge.set()

    def require(self) -> Access:
        """Raises NotServed while nobody has told where Triton is."""
        if self.access is None:
            raise NotServed("the agent has not told yet where Triton is")
        return self.access

    async def fetch(self, path: str) -> Answer:
        """Ask Triton's REST port. Raises NotServed."""
        access = self.require()
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        url = f"http://{access.http}{path}"
        try:
            async with self._session.get(url, headers=access.http_headers, timeout=timeout) as answer:
                return Answer(answer.status, await read_whole(answer.content, limit_bytes=_ANSWER_BYTES))
        except TimeoutError as error:
            raise Silent(f"Triton does not answer within {_ANSWER_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError, TooLarge) as error:
            raise NotServed(f"Triton does not answer: {type(error).__name__}") from error

    async def versions(self) -> list[str]:
        """The versions that Triton serves. Raises NotServed."""
        data = _object(await self.fetch(f"/v2/models/{self.model}"))
        found = data.get("versions")
        return [str(version) for version in found] if isinstance(found, list) else []

    async def poll(self) -> None:
        """Ask Triton for ever whether it serves the model, and which."""
        while True:
            self._nudge.clear()
            self._set(self.withheld or await self._why_not_ready(time.monotonic()))
            if await wait_until_set(self._nudge, timeout_seconds=_POLL_SECONDS):
                self._facts_read = -math.inf

    async def _why_not_ready(self, now: float) -> str | None:
        try:
            answer = await self.fetch(f"/v2/models/{self.model}/ready")
            self._heard = now
            if answer.status != 200:
                return f"Triton does not serve {self.model} ({answer.status})"
            await self._read_facts(now)
        except Silent as error:
            return None if self.is_ready and now - self._heard < _SILENCE_SECONDS else str(error)
        except NotServed as error:
            return str(error)
        return None

    async def _read_facts(self, now: float) -> None:
        """Raises NotServed while nothing is known of a model that was not ready before."""
        if self.is_ready and now - self._facts_read < _FACTS_SECONDS:
            return
        try:
            config = _object(await self.fetch(f"/v2/models/{self.model}/config"))
        except NotServed:
            if not self.is_ready:
                raise
        else:
            self.facts, self._facts_read = ModelFacts.of_config(config), now

    def _set(self, reason: str | None) -> None:
        changed = (reason is None) != self.is_ready
        self.not_ready = reason
        if changed:
            log.info(
                "model ready" if reason is None else "model not ready", extra=fields(reason=reason or "-")
            )
            self.announce()


@asynccontextmanager
async def open_upstream(model: ModelName) -> AsyncIterator[Upstream]:
    """For questions to Triton; requests go their own ways."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Upstream(model, session)


def _object(answer: Answer) -> dict[str, object]:
    """Raises NotServed."""
    try:
        data = json.loads(answer.body)
    except ValueError as error:
        raise NotServed("Triton does not answer in JSON") from error
    return data if isinstance(data, dict) else {}
