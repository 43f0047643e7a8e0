"""Downloads from a server that breaks off, changes its mind, or is in trouble."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

import loader.download
from berth.runtime.errors import Failed
from loader.download import Download, check_digest
from loader.sources import Request, fetched

BODY = bytes(range(256)) * 1000


class Server:
    """Plays one behaviour after another; the last one stays."""

    def __init__(self) -> None:
        self.script: list[Any] = ["whole"]
        self.ranges: list[str | None] = []
        self.etag: str | None = '"v1"'
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, int):
            return web.Response(status=step)
        start = self._start(request)
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(BODY) - start
        if self.etag:
            response.headers["ETag"] = self.etag
        await response.prepare(request)
        await response.write(BODY[start : start + 100_000] if step == "cut" else BODY[start:])
        if step == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    def _start(self, request: web.Request) -> int:
        asked = request.headers.get("Range")
        if asked is None or request.headers.get("If-Range") != self.etag:
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    real = loader.download.Backoff

    def quick(**settings: float) -> Any:
        return real(**{**settings, "initial_seconds": 0.01, "cap_seconds": 0.02})

    monkeypatch.setattr(loader.download, "Backoff", quick)
    server, application = Server(), web.Application()
    application.router.add_get("/{name}", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/model.onnx"
    yield server
    await runner.cleanup()


async def download(server: Server, path: Path) -> bytes:
    await Download(server.url, path, idle_timeout_seconds=1).run()
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


async def test_trouble_passes_and_refusals_do_not(server: Server, tmp_path: Path) -> None:
    server.script = [503, 429, "whole"]
    assert await download(server, tmp_path / "f") == BODY
    server.script = [404]
    with pytest.raises(Failed, match="answered 404"):
        await download(server, tmp_path / "g")
    server.script = [500]
    with pytest.raises(Failed, match="gave up after 6 tries"):
        await download(server, tmp_path / "h")


async def test_nobody_there_is_bounded_too(tmp_path: Path, server: Server) -> None:
    with pytest.raises(Failed, match="gave up after 6 tries"):
        await Download("http://127.0.0.1:1/x", tmp_path / "f", idle_timeout_seconds=1).run()


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
