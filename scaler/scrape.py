"""Asks the gateways of nodes for the load of their replicas: one keep-alive request per node and second.

A gateway may be slow, broken or hostile: each answer has a deadline and a bound, and speaks for its own node alone.
"""

import asyncio
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp
import msgspec

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import ReplicaLoad
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

_LOADS: Final = msgspec.json.Decoder(list[ReplicaLoad])
_ROWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_LOAD: Final = msgspec.json.Decoder(ReplicaLoad)

PERIOD_SECONDS: Final = 1.0
# Before the next period, and late enough for a node that is busy.
DEADLINE_SECONDS: Final = 0.8
AT_ONCE: Final = 64
# Some 300 bytes per replica: more replicas than a node can have.
ANSWER_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Gateway:
    """A node's. `replicas`: the pod uids that it may report."""

    address: Endpoint
    replicas: Container[str]


class ScrapeMetrics(Protocol):
    """What is counted."""

    def scraped(self, result: str, seconds: float) -> None: ...

    def rejected(self, rows: int) -> None: ...


# By node.
Gateways = Callable[[], Mapping[str, Gateway]]
# The rows of a node's gateway, and the replicas that it may report.
Take = Callable[[list[ReplicaLoad], Container[str]], None]


class BadAnswer(Exception):
    """Of a gateway; the message says how."""


@asynccontextmanager
async def scraping_session() -> AsyncIterator[aiohttp.ClientSession]:
    """One connection a node, kept open; nothing that an answer says makes it go elsewhere or remember anything."""
    connector = aiohttp.TCPConnector(limit=AT_ONCE, limit_per_host=1, keepalive_timeout=15.0)
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "berth"},
    ) as session:
        yield session


class Scraper:
    """`run()` scrapes until it is cancelled; one task a node."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        gateways: Gateways,
        take: Take,
        metrics: ScrapeMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._gateways, self._take, self._metrics = session, gateways, take, metrics
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # What is wrong with whom, so that it is said once.
        self._failures: dict[str, str] = {}

    async def run(self) -> None:
        """Ask those that there are, as they come and go."""
        try:
            while True:
                self._follow()
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()

    def _follow(self) -> None:
        nodes = self._gateways()
        for node in self._tasks.keys() - nodes.keys():
            self._tasks.pop(node).cancel()
            self._failures.pop(node, None)
        for node in nodes.keys() - self._tasks.keys():
            self._tasks[node] = asyncio.create_task(self._ask_on(node), name=f"gateway of {node}")

    async def _ask_on(self, node: str) -> None:
        """Each second, at the node's own moment of it."""
        at = self._clock() + (phase_of(node) - self._clock()) % PERIOD_SECONDS
        while True:
            await asyncio.sleep(at - self._clock())
            try:
                await self.ask(node)
            except Exception as error:  # an unforeseen error costs one second of one node
                log.error("a gateway was not asked", extra=fields(node=node), exc_info=error)
            at = next_moment(at, self._clock())

    async def ask(self, node: str) -> None:
        """Once."""
        gateway = self._gateways().get(node)
        if gateway is None:
            return
        began = self._clock()
        try:
            loads, rejected = await self._loads(gateway.address)
        except BadAnswer as error:
            self._metrics.scraped("failed", self._clock() - began)
            self._note(node, str(error))
            return
        self._metrics.scraped("ok", self._clock() - began)
        self._metrics.rejected(rejected)
        self._note(node, f"{rejected} of its rows are invalid" if rejected else "")
        self._take(loads, gateway.replicas)

    async def _loads(self, address: Endpoint) -> tuple[list[ReplicaLoad], int]:
        """Raises BadAnswer."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return read_loads(await self._body(address))
        except TimeoutError:
            raise BadAnswer(f"no answer within {DEADLINE_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BadAnswer(f"{type(error).__name__}: {error}") from error
        except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError) as error:
            raise BadAnswer(f"not a list of loads: {error}") from error

    async def _body(self, address: Endpoint) -> bytes:
        """Raises BadAnswer and what aiohttp does."""
        async with self._session.get(f"http://{address}/stat", allow_redirects=False) as answer:
            if answer.status != 200:
                raise BadAnswer(f"status {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > ANSWER_BYTES:
                    answer.close()
                    raise BadAnswer(f"more than {ANSWER_BYTES} bytes")
            return bytes(body)

    def _note(self, node: str, failure: str) -> None:
        if failure == self._failures.get(node, ""):
            return
        if failure:
            log.warning(
                "a gateway does not report loads as it should", extra=fields(node=node, error=failure)
            )
        else:
            log.info("a gateway reports loads again", extra=fields(node=node))
        self._failures[node] = failure


def next_moment(at: float, now: float) -> float:
    """A whole number of periods after `at`, and after now: what was missed is not made up for."""
    return at + PERIOD_SECONDS * max(1, math.ceil((now - at) / PERIOD_SECONDS))


def phase_of(node: str) -> float:
    """When in a second it is asked: by its name, so that all are spread over it."""
    return zlib.crc32(node.encode()) % 1000 / 1000 * PERIOD_SECONDS


def read_loads(body: bytes) -> tuple[list[ReplicaLoad], int]:
    """What a gateway tells, and how many of its rows say nothing that can be. Raises msgspec.DecodeError for what is
    no list."""
    try:
        return _LOADS.decode(body), 0
    except msgspec.ValidationError:
        rows = _ROWS.decode(body)
    loads = list(_readable(rows))
    return loads, len(rows) - len(loads)


def _readable(rows: Iterable[msgspec.Raw]) -> Iterator[ReplicaLoad]:
    for row in rows:
        try:
            yield _LOAD.decode(row)
        except msgspec.DecodeError:
            continue
