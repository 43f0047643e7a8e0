"""Bodies that are read whole, within a bound."""

import aiohttp

_CHUNK_BYTES = 256 * 1024


class TooLarge(Exception):
    """The body is longer than the bound."""


async def read_whole(stream: aiohttp.StreamReader, *, limit_bytes: int) -> bytes:
    """The body to its end: a single `read(n)` ends with what one packet brought. Raises TooLarge."""
    parts, size = [], 0
    async for chunk in stream.iter_chunked(_CHUNK_BYTES):
        size += len(chunk)
        if size > limit_bytes:
            raise TooLarge(f"more than {limit_bytes} bytes")
        parts.append(chunk)
    return b"".join(parts)
