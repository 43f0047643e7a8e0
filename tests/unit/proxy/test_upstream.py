import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import aiohttp
import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from proxy import upstream as module
from proxy.upstream import Access, Answer, NotServed, Silent, Upstream, open_upstream


class Asked(Upstream):
    """A Triton that serves the model, with the outputs that it has at the moment."""

    def __init__(self) -> None:
        super().__init__(ModelName("own"), None)  # type: ignore[arg-type]
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
        while not upstream.facts.has_classes(output):
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
    assert not upstream.facts.has_classes("A")
    assert upstream.is_ready
    polling.cancel()


async def test_a_model_that_is_ready_stays_so_while_its_configuration_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 60.0)
    upstream = Asked()
    upstream.has_config = False
    polling = asyncio.create_task(upstream.poll())
    await asyncio.sleep(0.01)
    assert not upstream.is_ready  # nobody knows yet what it is
    upstream.has_config = True
    upstream.nudge()
    await until(upstream, "A")
    upstream.has_config = False
    for _ in range(3):
        upstream.nudge()
        await asyncio.sleep(0.01)
    assert upstream.is_ready
    assert upstream.facts.has_classes("A")
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
    assert not upstream.is_ready  # it never was
    upstream.fails = None
    await until(upstream, "A")
    upstream.fails = fails
    await asyncio.sleep(0.01)
    assert upstream.is_ready is stays
    upstream.fails = None
    await asyncio.sleep(0.01)
    assert upstream.is_ready
    polling.cancel()


@pytest.mark.parametrize(("listens", "expected"), [(True, Silent), (False, NotServed)])
async def test_silence_is_told_from_refusal(
    monkeypatch: pytest.MonkeyPatch, listens: bool, expected: type[NotServed]
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody accepts what the kernel has taken
        endpoint = Endpoint("127.0.0.1", silent.getsockname()[1])
        if not listens:
            silent.close()
        async with open_upstream(ModelName("own")) as upstream:
            upstream.access = Access(endpoint, endpoint)
            with pytest.raises(NotServed) as told:
                await upstream.fetch("/v2")
    assert type(told.value) is expected


KEYS = {"berth-inference-key": "k"}
HERE = Access(Endpoint("127.0.0.1", 8000), Endpoint("127.0.0.1", 8001), KEYS)


class Content:
    """A body in pieces, as the network brings them."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self._pieces = pieces

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        assert size > 0
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class Session:
    """Triton's REST port as aiohttp shows it, and what it was asked."""

    def __init__(self, *pieces: bytes | Exception, status: int = 200) -> None:
        self.pieces, self.status = pieces, status
        self.asked: list[tuple[str, object, aiohttp.ClientTimeout]] = []

    @asynccontextmanager
    async def get(
        self, url: str, *, headers: object, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked.append((url, headers, timeout))
        yield SimpleNamespace(status=self.status, content=Content(*self.pieces))

    def upstream(self) -> Upstream:
        upstream = Upstream(ModelName("own"), self)  # type: ignore[arg-type]
        upstream.access = HERE
        return upstream


async def test_triton_is_asked_with_the_nodes_key_and_not_for_long() -> None:
    session = Session(b"ab", b"", b"c", status=400)
    assert await session.upstream().fetch("/v2") == Answer(400, b"abc")
    ((url, headers, timeout),) = session.asked
    assert (url, headers) == ("http://127.0.0.1:8000/v2", KEYS)
    assert timeout.total is not None
    assert 0.5 <= timeout.total <= 5  # readiness is asked for twice a second
    with pytest.raises(NotServed, match="the agent has not told yet"):
        await Upstream(ModelName("own"), session).fetch("/v2")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [aiohttp.ClientConnectionError(), aiohttp.ClientPayloadError(), OSError()])
async def test_an_answer_that_does_not_come_is_told_with_its_kind(error: Exception) -> None:
    with pytest.raises(NotServed, match=f"Triton does not answer: {type(error).__name__}"):
        await Session(b"a", error).upstream().fetch("/v2")


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    piece = bytes(1024**2)
    assert len((await Session(*[piece] * 4).upstream().fetch("/v2")).body) == 4 * 1024**2
    with pytest.raises(NotServed, match="TooLarge"):
        await Session(*[piece] * 4, b"x", AssertionError("read on")).upstream().fetch("/v2")


@pytest.mark.parametrize(
    ("body", "versions"),
    [
        (b'{"versions": ["1", 2]}', ["1", "2"]),
        (b'{"versions": "12"}', []),
        (b'{"error": "no such model"}', []),
        (b'["1"]', []),
    ],
)
async def test_the_versions_that_triton_tells(body: bytes, versions: list[str]) -> None:
    session = Session(body)
    assert await session.upstream().versions() == versions
    assert session.asked[0][0].endswith("/v2/models/own")


async def test_an_answer_that_is_no_json_is_no_answer() -> None:
    with pytest.raises(NotServed, match="JSON"):
        await Session(b"<html>").upstream().versions()


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
        self.said.append(self.not_ready)
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
    assert upstream.not_ready == "the model has not been asked for yet"
    unserved = "Triton does not serve own (400)"
    waiting = upstream.next_change()
    assert await upstream.polled() == [unserved, "gone", None, None, "gone", unserved, None]
    assert waiting.is_set()
    assert not upstream.next_change().is_set()
    told = [(record.message, record.__dict__["fields"]["reason"]) for record in caplog.records]
    assert told == [("model ready", "-"), ("model not ready", "gone"), ("model ready", "-")]
    # It may be another model after each time that it was away, however short.
    assert upstream.configs == 2


async def test_what_the_agent_withholds_is_not_ready_whatever_triton_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    upstream = Looked(200, 200)
    assert await upstream.polled() == [None, None]
    upstream.withheld = "GPU 0: XID 79"
    turns = upstream.next_change()
    polling = asyncio.ensure_future(upstream.poll())
    async with asyncio.timeout(5):
        await turns.wait()
    assert upstream.not_ready == "GPU 0: XID 79"
    upstream.withheld, upstream.looks, turns = None, [200], upstream.next_change()
    async with asyncio.timeout(5):
        await turns.wait()
    assert upstream.is_ready
    await asyncio.gather(polling, return_exceptions=True)


async def test_what_is_known_of_a_model_is_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 5 s, not with each look: it is a large answer."""
    upstream = Looked(*[200] * 100)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.5 * len(upstream.said)))
    await upstream.polled()
    assert upstream.configs == 10


async def test_the_session_ends_with_the_proxy() -> None:
    async with open_upstream(ModelName("own")) as upstream:
        assert (upstream.model, upstream.is_ready) == ("own", False)
        session = upstream._session
        assert not session.closed
        assert not session.auto_decompress  # a small answer must not unpack to a large one
    assert session.closed
