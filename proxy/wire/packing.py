"""Packed bodies and messages, opened within a bound. Pure."""

import zlib
from collections.abc import Mapping
from typing import Final

# The codings that are taken, with zlib's window bits for each.
CODINGS: Final[Mapping[str, int]] = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


# A step of an unpacking reads up to so much, and opens up to so much.
_STEP_BYTES: Final = 256 * 1024
# Either of them: a stream of zlib's or gzip's tells which by its first bytes.
_ANY_CODING = 32 + zlib.MAX_WBITS


class BadPacking(Exception):
    """The data is not what its coding says; the message goes on from naming the data."""


class UnpacksTooLarge(Exception):
    """The data is larger than the bound once it is opened."""


class Unpacking:
    """Data of one of the CODINGS on its way to what it was, step by step: each takes a few milliseconds."""

    def __init__(self, data: bytes, coding: str, limit_bytes: int) -> None:
        self._data, self._at, self._coding, self._limit = memoryview(data), 0, coding, limit_bytes
        self._unpacker = zlib.decompressobj(CODINGS[coding])
        self._content: list[bytes] = []
        self._opened = 0

    @property
    def size_bytes(self) -> int:
        """Of what is still packed and what is not any more."""
        return len(self._data) - self._at + self._opened

    @property
    def content(self) -> bytes:
        """All of it, once a step has been the last."""
        return b"".join(self._content)

    def step(self) -> bool:
        """Whether it was the last. Raises BadPacking or UnpacksTooLarge."""
        unpacker = self._unpacker
        piece = unpacker.unconsumed_tail
        if not piece:
            piece = bytes(self._data[self._at : self._at + _STEP_BYTES])
            self._at += len(piece)
        try:
            opened = unpacker.decompress(piece, _STEP_BYTES)
        except zlib.error as error:
            raise BadPacking(f"is not {self._coding}: {error}") from error
        self._content.append(opened)
        self._opened += len(opened)
        if self._opened > self._limit:
            raise UnpacksTooLarge
        is_whole = unpacker.eof and not unpacker.unused_data and self._at == len(self._data)
        if not is_whole and (unpacker.eof or not (opened or piece)):
            raise BadPacking(f"is not one whole {self._coding} stream")
        return is_whole


def unpack(data: bytes, coding: str, limit_bytes: int) -> bytes:
    """Open data of one of the CODINGS at once. Raises BadPacking or UnpacksTooLarge."""
    unpacking = Unpacking(data, coding, limit_bytes)
    while not unpacking.step():
        pass
    return unpacking.content


def unpack_beginning(data: bytes, limit_bytes: int) -> bytes:
    """What a stream of any of the CODINGS begins with, at most so many bytes. Raises BadPacking."""
    try:
        return zlib.decompressobj(_ANY_CODING).decompress(data, limit_bytes)
    except zlib.error as error:
        raise BadPacking(f"is in none of {', '.join(CODINGS)}: {error}") from error
