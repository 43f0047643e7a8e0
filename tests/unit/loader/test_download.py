"""Downloads from a server that breaks off, changes its mind, or is in trouble."""

import asyncio
import gzip
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

import loader.download
from berth.runtime.errors import Failed
from loader.download import Download, check_digest
from loader.sources import Request, fetched
from tests.fakes import leaping, pauses
from tests.fakes.web import serving

BODY = bytes(range(256)) * 1000


class Server:
    """Plays one behaviour after another; the last one stays."""

    def __init__(self) -> None:
        self.script: list[Any] = ["whole"]
        self.ranges: list[str | None] = []
        self.etag: str | None = '"v1"'
        self.headers: dict[str, str] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, int):
            return web.Response(status=step)
        if callable(step):
            answer: web.StreamResponse = await step(request)
            return answer
        start = self._start(request)
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(BODY) - start
        response.headers.update(self.headers)
        if self.etag:
            response.headers["ETag"] = self.etag
        await response.prepare(request)
        await response.write(BODY[start:] if step == "whole" else BODY[start : start + 100_000])
        if step == "stall":
            await asyncio.sleep(3600)
        if step == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    def _start(self, request: web.Request) -> int:
        asked = request.headers.get("Range")
        if asked is None or request.headers.get("If-Range") != self.etag:
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return pauses.noted(monkeypatch, loader.download)


@pytest_asyncio.fixture
async def server(waited: list[float]) -> AsyncIterator[Server]:
    server = Server()
    async with serving(server.answer) as url:
        server.url = f"{url}/model.onnx"
        yield server


async def download(server: Server, path: Path) -> bytes:
    await Download(server.url, path, idle_timeout_seconds=30).run()
    return path.read_bytes()


async def test_the_whole_file(server: Server, tmp_path: Path) -> None:
    assert await download(server, tmp_path / "f") == BODY


async def test_a_broken_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.script = ["cut", "cut", "whole"]
    assert await download(server, tmp_path / "f") == BODY
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-"]


async def test_without_a_strong_validator_it_begins_again(server: Server, tmp_path: Path) -> None:
    server.etag, server.script = 'W/"weak"', ["cut", "whole"]
    assert await download(server, tmp_path / "f") == BODY
    assert server.ranges == [None, None]


async def test_a_file_that_has_changed_meanwhile_is_not_glued_to_the_old(
    server: Server, tmp_path: Path
) -> None:
    server.script = ["cut", "whole"]
    original: Callable[..., Any] = server._start

    def changed(request: web.Request) -> int:
        if server.ranges[-1]:
            server.etag = '"v2"'
        return int(original(request))

    server._start = changed  # type: ignore[method-assign]
    assert await download(server, tmp_path / "f") == BODY


async def test_trouble_passes(server: Server, tmp_path: Path) -> None:
    server.script = [408, 425, 429, 500, 502, "whole"]
    assert await download(server, tmp_path / "f") == BODY
    server.script = [503, 504, "whole"]
    assert await download(server, tmp_path / "g") == BODY


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 501])
async def test_a_refusal_is_final(server: Server, tmp_path: Path, status: int, waited: list[float]) -> None:
    server.script = [status]
    with pytest.raises(Failed, match=f"{server.url}: the server answered {status} "):
        await download(server, tmp_path / "g")
    assert (len(server.ranges), waited) == (1, [])


async def test_trouble_that_lasts_is_given_up_after_growing_pauses(
    server: Server, tmp_path: Path, waited: list[float]
) -> None:
    server.script = [500]
    with pytest.raises(Failed, match=f"{server.url}: .* 500 .*; gave up after 6 tries"):
        await download(server, tmp_path / "h")
    assert len(server.ranges) == 6
    assert waited == sorted(waited)
    assert 0.1 < waited[0] < 1.0  # one that breaks off once costs hardly any time
    assert 5 < sum(waited) < 60  # a server that restarts is waited for


async def test_nobody_there_is_bounded_too(tmp_path: Path, server: Server) -> None:
    with pytest.raises(Failed, match=r"127.0.0.1:1/x: Cannot connect .*; gave up after 6 tries"):
        await Download("http://127.0.0.1:1/x", tmp_path / "f", idle_timeout_seconds=30).run()


def test_a_download_that_stands_still_is_resumed(tmp_path: Path) -> None:
    server = Server()
    server.script = ["stall", "whole"]

    async def story() -> None:
        async with serving(server.answer) as url:
            server.url = f"{url}/model.onnx"
            begun = leaping.now()
            assert await download(server, tmp_path / "f") == BODY
            assert 29 < leaping.now() - begun < 40

    leaping.run(story(), grace_seconds=0.05)
    assert server.ranges == [None, "bytes=100000-"]


def test_a_slow_download_may_take_longer_than_it_may_stand_still(tmp_path: Path) -> None:
    server = Server()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10):
            await response.write(b"x")
            await asyncio.sleep(20)
        return response

    async def story() -> None:
        async with serving(server.answer) as url:
            server.url = f"{url}/model.onnx"
            assert await download(server, tmp_path / "f") == b"x" * 10

    server.script = [slow]
    leaping.run(story(), grace_seconds=0.05)
    assert len(server.ranges) == 1


async def test_a_server_that_takes_no_ranges_is_not_asked_for_one(server: Server, tmp_path: Path) -> None:
    server.headers, server.script = {"Accept-Ranges": "none"}, ["cut", "whole"]
    assert await download(server, tmp_path / "f") == BODY
    assert server.ranges == [None, None]


async def test_a_rest_that_is_not_there_any_more_begins_anew(server: Server, tmp_path: Path) -> None:
    server.script = ["cut", 416, "whole"]
    assert await download(server, tmp_path / "f") == BODY
    assert server.ranges == [None, "bytes=100000-", None]


async def test_redirects_are_followed_but_not_for_ever(server: Server, tmp_path: Path) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": f"/{len(server.ranges)}.onnx"})

    server.script = [elsewhere] * 3 + ["whole"]
    assert await download(server, tmp_path / "f") == BODY
    server.script, server.ranges = [elsewhere], []
    with pytest.raises(Failed, match="TooManyRedirects"):
        await download(server, tmp_path / "f")
    assert len(server.ranges) < 20


async def test_a_file_comes_as_it_is_stored(server: Server, tmp_path: Path) -> None:
    """Unpacked on the way, it would be neither as long as announced nor of the SHA-256 that was meant."""

    async def encoded(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(BODY), headers={"Content-Encoding": "gzip"})

    server.script = [encoded]
    assert await download(server, tmp_path / "f") == gzip.compress(BODY)


async def test_a_proxy_of_the_environment_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/model.onnx"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.url = "http://models.example/model.onnx"
    assert await download(server, tmp_path / "f") == BODY


async def test_an_url_that_is_none_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    server.url = "http:///model.onnx"
    with pytest.raises(Failed, match=r"http:///model.onnx"):
        await download(server, tmp_path / "f")


async def test_progress_is_told_now_and_then(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An hour's download with a line for each piece, or with none, would help nobody."""
    now = [100.0]

    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 3 * 1024
        await response.prepare(request)
        for _ in range(3):
            await response.write(bytes(1024))
            await asyncio.sleep(0.02)
            now[0] += 3
        return response

    monkeypatch.setattr(loader.download, "time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level(logging.INFO, "loader.download")
    server.script = [in_pieces]
    await download(server, tmp_path / "f")
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "downloading"]
    assert told == [{"have": "1 KiB", "of": "3 KiB"}, {"have": "3 KiB", "of": "3 KiB"}]


async def test_progress_counts_what_came_before_a_break(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(loader.download, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    caplog.set_level(logging.INFO, "loader.download")
    server.script = ["cut", "whole"]
    await download(server, tmp_path / "f")
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "downloading"]
    assert {one["of"] for one in told} == {"250 KiB"}
    assert told[-1]["have"] == "250 KiB"


async def test_a_digest_is_held_against_what_came(server: Server, tmp_path: Path) -> None:
    await download(server, tmp_path / "f")
    with pytest.raises(Failed, match="SHA-256 is"):
        check_digest(tmp_path / "f", "0" * 64, source="it")


async def test_nothing_stays_in_the_work_directory(server: Server, tmp_path: Path) -> None:
    async with fetched(Request(server.url, None, 1.0), tmp_path) as directory:
        assert (directory / "1" / "model.onnx").read_bytes() == BODY
    assert list(tmp_path.iterdir()) == []
    server.script = [404]
    with pytest.raises(Failed):
        async with fetched(Request(server.url, None, 1.0), tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
