"""Downloads from a server that breaks off, changes its mind, or is in trouble."""

import asyncio
import gzip
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

import loader.download
from berth.runtime.errors import Failed
from loader.download import Bounds, Download
from tests.fakes import leaping, pauses
from tests.fakes.web import serving

BODY = bytes(range(256)) * 1000
BOUNDS = Bounds(idle_seconds=30, total_seconds=3600, most_bytes=2**40)


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
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"
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


async def download(server: Server, path: Path, bounds: Bounds = BOUNDS) -> bytes:
    await Download(server.url, path, bounds=bounds).run()
    return path.read_bytes()


def pieces(
    number: int | None, piece: bytes = b"x", *, each_seconds: float = 0
) -> Callable[[web.Request], Any]:
    """A file that comes in so many, None: without end, with a pause after each."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in itertools.count() if number is None else range(number):
            await response.write(piece)
            await asyncio.sleep(each_seconds)
        return response

    return answer


def to(target: str) -> Callable[[web.Request], Any]:
    """A redirect."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    return answer


def on_a_loop_that_leaps(server: Server, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with serving(server.answer) as url:
            server.url = f"{url}/model.onnx"
            await story()

    leaping.run(work(), grace_seconds=0.05)


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


async def test_a_failure_passes(server: Server, tmp_path: Path) -> None:
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


async def test_a_failure_that_lasts_is_given_up_after_growing_pauses(
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
        await Download("http://127.0.0.1:1/x", tmp_path / "f", bounds=BOUNDS).run()


def test_a_download_that_stands_still_is_resumed(tmp_path: Path) -> None:
    server = Server()
    server.script = ["stall", "whole"]

    async def story() -> None:
        begun = leaping.now()
        assert await download(server, tmp_path / "f") == BODY
        assert 29 < leaping.now() - begun < 40

    on_a_loop_that_leaps(server, story)
    assert server.ranges == [None, "bytes=100000-"]


def test_a_slow_download_may_take_longer_than_it_may_stand_still(tmp_path: Path) -> None:
    server = Server()

    server.script = [pieces(10, each_seconds=20)]

    async def story() -> None:
        assert await download(server, tmp_path / "f") == b"x" * 10

    on_a_loop_that_leaps(server, story)
    assert len(server.ranges) == 1


async def test_a_server_that_takes_no_ranges_is_not_sent_one(server: Server, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x-unknown"])
async def test_a_file_comes_as_it_is_stored_or_not_at_all(
    server: Server, tmp_path: Path, coding: str, waited: list[float]
) -> None:
    """node D7: what was compressed on the way is not the file."""
    asked = []

    async def encoded(request: web.Request) -> web.Response:
        asked.append(request.headers.getall("Accept-Encoding"))
        return web.Response(body=gzip.compress(BODY), headers={"Content-Encoding": coding})

    server.script = [encoded]
    with pytest.raises(Failed, match=f"{server.url}: the server sends it with Content-Encoding {coding}, "):
        await download(server, tmp_path / "f")
    assert (asked, waited) == ([["identity"]], [])


async def test_identity_is_no_encoding(server: Server, tmp_path: Path) -> None:
    server.headers = {"Content-Encoding": "Identity"}
    assert await download(server, tmp_path / "f") == BODY


def rest(start: int = 100_000, **headers: str) -> Callable[[web.Request], Any]:
    """A 206 with the file from `start` on, whatever was asked for."""

    async def answer(_: web.Request) -> web.Response:
        span = f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"
        said = {"ETag": '"v1"', "Content-Range": span, **{k.replace("_", "-"): v for k, v in headers.items()}}
        return web.Response(status=206, body=BODY[start:], headers={k: v for k, v in said.items() if v})

    return answer


WRONG_PARTS = {
    "another file's": rest(ETag='"v2"'),
    "of no file": rest(ETag=""),
    "of a file that is only like it": rest(ETag='W/"v1"'),
    "from the beginning": rest(0),
    "from further on": rest(100_001),
    "from nowhere": rest(Content_Range=""),
    "in another unit": rest(Content_Range=f"lines 100000-{len(BODY) - 1}/{len(BODY)}"),
    "not to the end": rest(Content_Range=f"bytes 100000-{len(BODY) - 1}/{len(BODY) + 1}"),
    "of another length": rest(Content_Range=f"bytes 100000-{len(BODY)}/{len(BODY) + 1}"),
    "with many digits": rest(Content_Range=f"bytes 100000-{'9' * 5000}/*"),
    "in parts": rest(Content_Range="", Content_Type="multipart/byteranges; boundary=x"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
async def test_a_part_that_is_not_the_rest_of_this_file_is_not_glued_to_it(
    server: Server, tmp_path: Path, case: str
) -> None:
    """node D7: it begins anew, with what is here forgotten."""
    server.script = ["cut", WRONG_PARTS[case], "whole"]
    assert await download(server, tmp_path / "f") == BODY
    assert server.ranges == [None, "bytes=100000-", None]


@pytest.mark.parametrize("start", [0, 100_000])
async def test_a_part_that_no_request_named_is_refused(server: Server, tmp_path: Path, start: int) -> None:
    """node D7."""
    server.script = [rest(start)]
    with pytest.raises(Failed, match=r"the server answered 206 .*, a part that was not requested"):
        await download(server, tmp_path / "f")


async def test_a_rest_may_leave_open_how_long_the_whole_is(server: Server, tmp_path: Path) -> None:
    server.script = ["cut", rest(Content_Range=f"bytes 100000-{len(BODY) - 1}/*")]
    assert await download(server, tmp_path / "f") == BODY


@pytest.mark.parametrize("status", [201, 202, 203, 204, 205, 226, 300, 304])
async def test_only_200_brings_a_file(server: Server, tmp_path: Path, status: int) -> None:
    """node D8: a 204 counted as an empty file, a 3xx without a Location as whatever it said."""
    server.script = [status]
    with pytest.raises(Failed, match=f"{server.url}: the server answered {status} .*; a file comes with 200"):
        await download(server, tmp_path / "f")
    assert len(server.ranges) == 1


def until_closed(body: bytes) -> Callable[[web.Request], Any]:
    """As HTTP/1.0 does: no length, no chunks; the end of the connection is the end of the file."""

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        request.transport.close()
        return web.StreamResponse()

    return answer


async def test_a_file_whose_end_is_unknown_is_taken_only_by_its_digest(
    server: Server, tmp_path: Path
) -> None:
    """node D8: one that is cut would count as a whole one."""
    server.script = [until_closed(BODY[:1000])]
    with pytest.raises(Failed, match=r"neither a length nor chunks.*; give --sha256"):
        await download(server, tmp_path / "f")
    known = Download(server.url, tmp_path / "f", bounds=BOUNDS, has_digest=True)
    await known.run()
    assert (tmp_path / "f").read_bytes() == BODY[:1000]


async def test_an_encoding_of_the_transfer_is_refused_too(server: Server, tmp_path: Path) -> None:
    """node D7: it would be stored as it came."""

    async def packed(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        return web.StreamResponse()

    server.script = [packed]
    with pytest.raises(Failed, match=r"with Transfer-Encoding gzip, chunked, "):
        await download(server, tmp_path / "f")


@pytest.mark.parametrize("announced", [True, False])
async def test_a_download_has_a_largest_size(server: Server, tmp_path: Path, announced: bool) -> None:
    """node D8: what was announced before its first byte, the rest when it comes."""

    if not announced:
        server.script = [pieces(None, bytes(65536))]
    largest = len(BODY) - 1
    bounds = replace(BOUNDS, most_bytes=largest)
    with pytest.raises(Failed, match=r"more than --max-download-bytes, 250 KiB"):
        await download(server, tmp_path / "f", bounds)
    assert (tmp_path / "f").exists() is not announced
    assert announced or (tmp_path / "f").stat().st_size <= largest
    server.script = ["cut", "whole"]
    with pytest.raises(Failed, match=r"more than --max-download-bytes"):
        await download(server, tmp_path / "f", bounds)
    server.script = ["cut", "whole"]
    assert await download(server, tmp_path / "f", replace(BOUNDS, most_bytes=len(BODY))) == BODY


def test_a_download_has_a_longest_time(tmp_path: Path) -> None:
    """node D8: a server that sends a byte now and then holds nobody for ever, tries and pauses counted."""
    server = Server()

    server.script = [pieces(None, each_seconds=20)]

    async def story() -> None:
        begun = leaping.now()
        with pytest.raises(Failed, match=r"/model.onnx: not whole within --download-timeout, 600 s"):
            await download(server, tmp_path / "f", replace(BOUNDS, total_seconds=600))
        assert 599 < leaping.now() - begun < 660

    on_a_loop_that_leaps(server, story)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/m", "gopher://x/"])
async def test_a_redirect_to_what_is_not_http_is_final(
    server: Server, tmp_path: Path, target: str, waited: list[float]
) -> None:
    """node D8: it was tried six times."""
    server.script = [to(target)]
    with pytest.raises(Failed, match=f"{server.url}: redirects to .*{target}.*; only http and https"):
        await download(server, tmp_path / "f")
    assert (len(server.ranges), waited) == (1, [])


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


async def test_progress_is_reported_now_and_then(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An hour's download with a line for each piece, or with none, would help nobody."""
    now, taken = [100.0], asyncio.Event()

    def clock() -> float:
        taken.set()
        return now[0]

    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 3 * 1024
        await response.prepare(request)
        for _ in range(3):
            await response.write(bytes(1024))
            await taken.wait()  # the piece has arrived, alone
            taken.clear()
            now[0] += 3
        return response

    monkeypatch.setattr(loader.download, "time", SimpleNamespace(monotonic=clock))
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
