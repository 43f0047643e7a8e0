"""Packed bodies and messages, opened within a bound. Pure."""

import zlib
from collections.abc import Mapping
from typing import Final

# The codings that are taken, with zlib's window bits for each.
CODINGS: Final[Mapping[str, int]] = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


# Either of them: a stream of zlib's or gzip's tells which by its first bytes.
_ANY_CODING = 32 + zlib.MAX_WBITS


class BadPacking(Exception):
    """The data is not what its coding says; the message goes on from naming the data."""


class UnpacksTooLarge(Exception):
    """The data is larger than the bound once it is opened."""


def unpack(data: bytes, coding: str, limit_bytes: int) -> bytes:
    """Open data of one of the CODINGS. Raises BadPacking or UnpacksTooLarge."""
    unpacker = zlib.decompressobj(CODINGS[coding])
    try:
        content = unpacker.decompress(data, limit_bytes + 1)
    except zlib.error as error:
        raise BadPacking(f"is not {coding}: {error}") from error
    if len(content) > limit_bytes:
        raise UnpacksTooLarge
    if not unpacker.eof or unpacker.unused_data:
        raise BadPacking(f"is not one whole {coding} stream")
    return content


def unpack_beginning(data: bytes, limit_bytes: int) -> bytes:
    """What a stream of any of the CODINGS begins with, at most so many bytes. Raises BadPacking."""
    try:
        return zlib.decompressobj(_ANY_CODING).decompress(data, limit_bytes)
    except zlib.error as error:
        raise BadPacking(f"is in none of {', '.join(CODINGS)}: {error}") from error
