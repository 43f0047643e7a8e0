import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.upstream import health as module
from proxy.upstream import queries as questions
from proxy.upstream.health import Upstream
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.queries import Answer, Silent, fetch
from tests.fakes.data_plane import own_replica


class Asked(Upstream):
    """A Triton that serves the model, with the outputs that it has at the moment."""

    def __init__(self) -> None:
        where = UpstreamCluster()
        super().__init__(own_replica(), where, UpstreamPool(where))
        self.replica.triton_says("the model has not been requested yet")
        self.output = "A"
        self.configs = 0
        self.has_config = True
        self.fails: NotServed | None = None

    async def fetch(self, path: str) -> Answer:
        if self.fails is not None:
            raise self.fails
        if not path.endswith("/config"):
            return Answer(200, b"")
        if not self.has_config:
            raise NotServed("Triton does not answer")
        self.configs += 1
        return Answer(200, json.dumps({"output": [{"name": self.output, "dims": ["2"]}]}).encode())


async def until(upstream: Asked, output: str) -> None:
    async with asyncio.timeout(5):
        while not upstream.replica.facts.has_classes(output):
            await asyncio.sleep(0)


@pytest.mark.parametrize("told", [True, False])
async def test_what_is_known_of_the_model_is_read_again_when_it_may_be_another(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """A model that was replaced by another of its name is ready before and after."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 60.0 if told else 0.0)
    monkeypatch.setattr(module, "_FACTS_SECONDS", 60.0 if told else 0.01)
    upstream = Asked()
    polling = asyncio.create_task(upstream.poll())
    await until(upstream, "A")
    upstream.output = "B"
    if told:
        upstream.nudge()
    await until(upstream, "B")
    assert not upstream.replica.facts.has_classes("A")
    assert upstream.replica.is_served
    polling.cancel()


async def test_a_model_that_is_ready_stays_so_while_its_configuration_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 60.0)
    upstream = Asked()
    upstream.has_config = False
    polling = asyncio.create_task(upstream.poll())
    await asyncio.sleep(0.01)
    assert not upstream.replica.is_served  # nobody knows yet what it is
    upstream.has_config = True
    upstream.nudge()
    await until(upstream, "A")
    upstream.has_config = False
    for _ in range(3):
        upstream.nudge()
        await asyncio.sleep(0.01)
    assert upstream.replica.is_served
    assert upstream.replica.facts.has_classes("A")
    polling.cancel()


@pytest.mark.parametrize(
    ("fails", "silence_seconds", "stays"),
    [(Silent("busy"), 60.0, True), (Silent("hangs"), 0.0, False), (NotServed("refused"), 60.0, False)],
)
async def test_a_model_that_was_ready_is_so_while_triton_is_busy_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, fails: NotServed, silence_seconds: float, stays: bool
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SILENCE_SECONDS", silence_seconds)
    upstream = Asked()
    upstream.fails = Silent("busy")
    polling = asyncio.create_task(upstream.poll())
    await asyncio.sleep(0.01)
    assert not upstream.replica.is_served  # it never was
    upstream.fails = None
    await until(upstream, "A")
    upstream.fails = fails
    await asyncio.sleep(0.01)
    assert upstream.replica.is_served is stays
    upstream.fails = None
    await asyncio.sleep(0.01)
    assert upstream.replica.is_served
    polling.cancel()


@asynccontextmanager
async def triton(*pieces: bytes | None) -> AsyncIterator[tuple[UpstreamCluster, list[bytes]]]:
    """Answers each question with these pieces; None cuts the connection."""
    asked: list[bytes] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked.append(head)
                for piece in pieces:
                    if piece is None:
                        break
                    writer.write(piece)
                    await writer.drain()
                if None in pieces:
                    break

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    here = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    yield UpstreamCluster(UpstreamEndpoint(here, here, KEYS)), asked
    server.close()
    await asyncio.gather(*(one for one in serving if one is not None))


KEYS = {"berth-inference-key": "k"}


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(("listens", "expected"), [(True, Silent), (False, NotServed)])
async def test_silence_differs_from_refusal(listens: bool, expected: type[NotServed]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody accepts what the kernel has taken
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1])
        if not listens:
            silent.close()
        where = UpstreamCluster(UpstreamEndpoint(endpoint, endpoint))
        pool = UpstreamPool(where)
        with pytest.raises(NotServed) as told:
            await fetch(pool, where, "/v2", seconds=0.05)
        await pool.close()
    assert type(told.value) is expected


async def test_triton_is_asked_with_the_nodes_key_on_connections_that_are_kept() -> None:
    async with triton(answer(b"abc", "400 Bad Request")) as (where, asked):
        pool = UpstreamPool(where)
        for _ in range(3):
            assert await fetch(pool, where, "/v2") == Answer(400, b"abc")
        assert set(asked) == {
            f"GET /v2 HTTP/1.1\r\nHost: {where.require().http}\r\nberth-inference-key: k\r\n\r\n".encode()
        }
        assert len(pool._all) == 1
        await pool.close()
    nowhere = UpstreamCluster()
    with pytest.raises(NotServed, match="the agent has not reported yet"):
        await fetch(UpstreamPool(nowhere), nowhere, "/v2")
    assert 0.5 <= questions.ANSWER_SECONDS <= 5  # readiness is asked for twice a second


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    async with triton(answer(b"abc")[:-1], None) as (where, _):
        pool = UpstreamPool(where)
        with pytest.raises(NotServed, match="Triton does not answer: Triton broke off"):
            await fetch(pool, where, "/v2")
        await pool.close()


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    for size in (4 * 1024**2, 4 * 1024**2 + 1):
        async with triton(answer(bytes(size))) as (where, _):
            pool = UpstreamPool(where)
            if size == 4 * 1024**2:
                assert len((await fetch(pool, where, "/v2")).body) == size
            else:
                with pytest.raises(NotServed, match="longer than"):
                    await fetch(pool, where, "/v2")
            await pool.close()


async def test_more_questions_than_connections_wait_for_each_other() -> None:
    async with triton(answer(b"abc")) as (where, asked):
        pool = UpstreamPool(where, most=2)
        answers = await asyncio.gather(*(fetch(pool, where, "/v2") for _ in range(50)))
        assert answers == [Answer(200, b"abc")] * 50
        assert (len(asked), len(pool._all)) == (50, 2)
        await pool.close()


async def test_one_that_cannot_be_reached_leaves_its_place_to_the_next() -> None:
    nowhere = Endpoint("127.0.0.1", 1)
    where = UpstreamCluster(UpstreamEndpoint(nowhere, nowhere))
    pool = UpstreamPool(where, most=1)
    async with asyncio.timeout(5):
        asked = await asyncio.gather(*(fetch(pool, where, "/v2") for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in asked] == [NotServed] * 5
    await pool.close()


class Looked(Asked):
    """Says what it is told to say, look by look."""

    def __init__(self, *looks: int | str) -> None:
        super().__init__()
        self.looks = list(looks)
        self.said: list[str | None] = []

    async def fetch(self, path: str) -> Answer:
        if path == "/v2/models/own/config":
            return await super().fetch(path)
        assert path == "/v2/models/own/ready"
        self.said.append(self.replica.not_ready())
        if not self.looks:
            raise asyncio.CancelledError
        look = self.looks.pop(0)
        if isinstance(look, str):
            raise NotServed(look)
        return Answer(look, b"")

    async def polled(self) -> list[str | None]:
        """The reason after each look."""
        with suppress(asyncio.CancelledError):
            await self.poll()
        return self.said[1:]


async def test_only_triton_makes_a_model_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every change is announced and logged, with its reason, and nothing else is."""
    caplog.set_level(logging.INFO, logger=module.log.name)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    upstream = Looked(400, "gone", 200, 200, "gone", 400, 200)
    assert upstream.replica.not_ready() == "the model has not been requested yet"
    unserved = "Triton does not serve own (400)"
    waiting = upstream.replica.next_change()
    assert await upstream.polled() == [unserved, "gone", None, None, "gone", unserved, None]
    assert waiting.is_set()
    assert not upstream.replica.next_change().is_set()
    told = [(record.message, record.__dict__["fields"]["reason"]) for record in caplog.records]
    assert told == [("model ready", "-"), ("model not ready", "gone"), ("model ready", "-")]
    # It may be another model after each time that it was away, however short.
    assert upstream.configs == 2


async def test_what_the_agent_withholds_is_not_ready_whatever_triton_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    upstream = Looked(200, 200)
    turns = upstream.replica.next_change()
    upstream.replica.withheld = "GPU 0: XID 79"
    assert turns.is_set()
    assert await upstream.polled() == ["GPU 0: XID 79"] * 2
    assert upstream.replica.is_served
    turns = upstream.replica.next_change()
    upstream.replica.withheld = None
    assert turns.is_set()
    assert upstream.replica.not_ready() is None


async def test_what_is_known_of_a_model_is_requested_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 5 s, not with each look: it is a large answer."""
    upstream = Looked(*[200] * 100)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.5 * len(upstream.said)))
    await upstream.polled()
    assert upstream.configs == 10


class Slow:
    """A request that Triton's connection is for as long as it likes."""

    takes_chunks = False

    def __init__(self, whose: object) -> None:
        self.whose = whose
        self.upstream: Any = None
        self.wants_connection = True

    def connected(self, upstream: Any) -> None:
        self.upstream, self.wants_connection = upstream, False

    def answer_broke(self, reason: str) -> None: ...

    def upstream_writable(self) -> None: ...


async def test_a_replica_that_keeps_its_connections_leaves_room_for_the_others() -> None:
    """Answers that are read slowly, bodies that never end: half of all the connections, and one, is the most of one replica."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    where = UpstreamCluster(
        UpstreamEndpoint(Endpoint(*server.sockets[0].getsockname()[:2]), Endpoint("127.0.0.1", 1))
    )
    pool = UpstreamPool(where, most=8)
    greedy, other = [Slow("greedy") for _ in range(20)], Slow("other")
    for one in greedy:
        pool.take(one)
    await asyncio.sleep(0.1)
    assert sum(one.upstream is not None for one in greedy) == 5
    pool.take(other)
    async with asyncio.timeout(5):
        while other.upstream is None:
            await asyncio.sleep(0.01)
    # Its own go on one by one as they end.
    other.upstream.abort()
    next(one for one in greedy if one.upstream is not None).upstream.abort()
    async with asyncio.timeout(5):
        while sum(one.upstream is not None for one in greedy) < 6:
            await asyncio.sleep(0.01)
    await pool.close()
    await asyncio.sleep(0.1)
    server.close()
    await server.wait_closed()
