"""Fetches one file over HTTP: resumed where the server can, checked, with progress on the log."""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from berth.contract.quantity import format_bytes
from berth.contract.text import one_line
from berth.runtime.backoff import Backoff
from berth.runtime.errors import Failed
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

MAX_TRIES = 6
_MAX_REDIRECTS = 5
_PROGRESS_SECONDS = 5.0
_CHUNK_BYTES = 1024 * 1024
# What another try may mend; every other error status is final.
_RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


# `bytes FIRST-LAST/LENGTH` (RFC 9110, 14.4); no file has more digits than these.
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)


class _TryAgain(Exception):
    """The download broke off, or the server fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a download may take: from one byte to the next, in all, and how much of the disk."""

    idle_seconds: float
    total_seconds: float
    most_bytes: int


class Download:
    """One file. What has arrived is kept between tries if the server vouches that it is the same file.

    `has_digest`: the caller knows the file by its digest, so it may come without a length.
    """

    def __init__(self, url: str, target: Path, *, bounds: Bounds, has_digest: bool = False) -> None:
        self._url, self._target, self._bounds, self._has_digest = url, target, bounds, has_digest
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=bounds.idle_seconds, sock_read=bounds.idle_seconds
        )
        self._validator: str | None = None
        self._told = 0.0

    async def run(self) -> None:
        """Raises Failed with the reason."""
        seconds = self._bounds.total_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._try_until_whole()
        except TimeoutError as error:
            raise self._failed(f"not whole within --download-timeout, {seconds:g} s") from error

    async def _try_until_whole(self) -> None:
        backoff = Backoff(initial_seconds=0.5, cap_seconds=15.0)
        async with aiohttp.ClientSession(
            timeout=self._timeout, trust_env=True, auto_decompress=False
        ) as session:
            while True:
                try:
                    await self._attempt(session)
                    return
                except _TryAgain as error:
                    if backoff.failures + 1 >= MAX_TRIES:
                        raise self._failed(f"{error}; gave up after {MAX_TRIES} tries") from error
                    delay = backoff.next()
                    log.warning(
                        "download broke off", extra=fields(reason=error, retry_seconds=round(delay, 1))
                    )
                    await asyncio.sleep(delay)

    async def _attempt(self, session: aiohttp.ClientSession) -> None:
        asked = self._headers()
        try:
            async with session.get(self._url, headers=asked, max_redirects=_MAX_REDIRECTS) as response:
                await self._take(response, resumed=self._is_rest(response, asked))
        except aiohttp.NonHttpUrlRedirectClientError as error:
            raise self._failed(f"redirects to {error}; only http and https are followed") from error
        except (aiohttp.InvalidURL, aiohttp.TooManyRedirects) as error:
            raise self._failed(repr(error)) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _TryAgain(str(error) or type(error).__name__) from error

    def _is_rest(self, response: aiohttp.ClientResponse, asked: Mapping[str, str]) -> bool:
        """Whether the file comes from its beginning (False) or from where we are. Raises Failed, or _TryAgain."""
        said = f"the server answered {response.status} {response.reason}"
        if response.status == 416:
            raise self._begin_anew("the server has another file now")
        if response.status in _RETRY_STATUSES:
            raise _TryAgain(said)
        if response.status not in {200, 206}:
            raise self._failed(said if response.status >= 400 else f"{said}; a file comes with 200")
        self._require_plain(response)
        if response.status == 200:
            return False
        if "Range" not in asked:
            raise self._failed(f"{said}, a part that was not requested")
        if response.headers.get("ETag") != asked["If-Range"] or not self._goes_on(response):
            raise self._begin_anew("the server sent another part than the rest of this file")
        return True

    def _require_plain(self, response: aiohttp.ClientResponse) -> None:
        """The bytes are those of the file, and their end can be recognised. Raises Failed."""
        plain = {"Content-Encoding": "identity", "Transfer-Encoding": "chunked"}
        for header, usual in plain.items():
            coding = ", ".join(response.headers.getall(header, ()))
            if coding.lower() not in {"", usual}:
                raise self._failed(
                    f"the server sends it with {header} {one_line(coding, limit=100)}, though it was requested "
                    "the file as it is; serve it without"
                )
        has_end = response.content_length is not None or "Transfer-Encoding" in response.headers
        if not has_end and not self._has_digest:
            raise self._failed(
                "the server sends neither a length nor chunks, so a file that is cut would look whole; "
                "give --sha256, or serve it with Content-Length"
            )

    def _goes_on(self, response: aiohttp.ClientResponse) -> bool:
        """A 206 carries what is missing, to the end of the file, and nothing else."""
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found is None:
            return False
        first, last, length = int(found[1]), int(found[2]), found[3]
        comes = response.content_length
        return (
            first == self._have()
            and (length == "*" or last + 1 == int(length))
            and (comes is None or comes == last + 1 - first)
        )

    def _begin_anew(self, reason: str) -> _TryAgain:
        self._validator = None  # what is here is no part of it any more
        return _TryAgain(reason)

    async def _take(self, response: aiohttp.ClientResponse, *, resumed: bool) -> None:
        self._validator = _strong_validator(response)
        have = self._have() if resumed else 0
        expected = None if response.content_length is None else have + response.content_length
        self._require_room(expected or 0)
        with self._target.open("ab" if resumed else "wb") as file:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                have += len(chunk)
                self._require_room(have)
                await asyncio.to_thread(file.write, chunk)
                self._tell(have, expected)
        if expected is not None and have != expected:
            raise _TryAgain(f"{have} of {expected} bytes came")

    def _require_room(self, count: int) -> None:
        most = self._bounds.most_bytes
        if count > most:
            raise self._failed(f"it has more than --max-download-bytes, {format_bytes(most)}")

    def _failed(self, reason: str) -> Failed:
        return Failed(f"{self._url}: {reason}")

    def _headers(self) -> dict[str, str]:
        """Ask for the file as it is, and for the rest of it, if the server gave something to recognise it by
        (RFC 9110, 13.1.5)."""
        have, plain = self._have(), {"Accept-Encoding": "identity"}
        if self._validator is None or not have:
            return plain
        return {**plain, "Range": f"bytes={have}-", "If-Range": self._validator}

    def _have(self) -> int:
        return self._target.stat().st_size if self._target.exists() else 0

    def _tell(self, have: int, expected: int | None) -> None:
        if time.monotonic() - self._told < _PROGRESS_SECONDS:
            return
        self._told = time.monotonic()
        of = "?" if expected is None else format_bytes(expected)
        log.info("downloading", extra=fields(have=format_bytes(have), of=of))


def check_digest(path: Path, expected: str, *, source: str) -> None:
    """Raises Failed if the file is not the one that was meant. Blocks."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise Failed(f"{source}: SHA-256 is {actual}, but --sha256 says {expected}")


def _strong_validator(response: aiohttp.ClientResponse) -> str | None:
    tag = response.headers.get("ETag")
    if tag is None or tag.startswith("W/") or response.headers.get("Accept-Ranges") == "none":
        return None
    return tag
