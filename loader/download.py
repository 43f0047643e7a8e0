"""Fetches one file over HTTP: resumed where the server can, checked, with progress on the log."""

import asyncio
import hashlib
import logging
import time
from pathlib import Path

import aiohttp

from berth.contract.quantity import format_bytes
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


class _TryAgain(Exception):
    """The download broke off, or the server is in trouble."""


class Download:
    """One file. What has arrived is kept between tries if the server vouches that it is the same file."""

    def __init__(self, url: str, target: Path, *, idle_timeout_seconds: float) -> None:
        self._url, self._target = url, target
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=idle_timeout_seconds, sock_read=idle_timeout_seconds
        )
        self._validator: str | None = None
        self._told = 0.0

    async def run(self) -> None:
        """Raises Failed with the reason."""
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
                        raise Failed(f"{self._url}: {error}; gave up after {MAX_TRIES} tries") from error
                    delay = backoff.next()
                    log.warning(
                        "download broke off", extra=fields(reason=error, retry_seconds=round(delay, 1))
                    )
                    await asyncio.sleep(delay)

    async def _attempt(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(
                self._url, headers=self._range(), max_redirects=_MAX_REDIRECTS
            ) as response:
                await self._take(response)
        except (aiohttp.InvalidURL, aiohttp.TooManyRedirects) as error:
            raise Failed(f"{self._url}: {error!r}") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _TryAgain(str(error) or type(error).__name__) from error

    async def _take(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 416:
            self._validator = None  # what is here is no part of it any more
            raise _TryAgain("the server has another file now")
        if response.status >= 400:
            said = f"the server answered {response.status} {response.reason}"
            raise _TryAgain(said) if response.status in _RETRY_STATUSES else Failed(f"{self._url}: {said}")
        resumed = response.status == 206
        self._validator = _strong_validator(response)
        have = self._have() if resumed else 0
        expected = None if response.content_length is None else have + response.content_length
        with self._target.open("ab" if resumed else "wb") as file:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                await asyncio.to_thread(file.write, chunk)
                have += len(chunk)
                self._tell(have, expected)
        if expected is not None and have != expected:
            raise _TryAgain(f"{have} of {expected} bytes came")

    def _range(self) -> dict[str, str]:
        """Ask for the rest, if the server gave something to recognise the file by (RFC 9110, 13.1.5)."""
        have = self._have()
        if self._validator is None or not have:
            return {}
        return {"Range": f"bytes={have}-", "If-Range": self._validator}

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
