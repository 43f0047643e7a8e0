"""Header blocks (RFC 7541): a decoder with the peer's dynamic table, and an encoder that uses none.

The proxy asks every peer for a table of size 0 and keeps none itself, so a block means the same
wherever it stands and what was decided about it once can be looked up by its bytes. Until a peer has
received that, it may use the 4096 bytes of the protocol's default.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

Header = tuple[bytes, bytes]

DEFAULT_TABLE_BYTES: Final = 4096
# RFC 7541, 4.1: what an entry counts beside its characters.
ENTRY_OVERHEAD: Final = 32
_MAX_INTEGER_BYTES = 5
# A size update to 0: tells the peer's decoder that the table is not used.
NO_TABLE: Final = b"\x20"

# RFC 7541, appendix A; the first entry has index 1.
STATIC_TABLE: Final[tuple[Header, ...]] = tuple(
    (name.encode(), value.encode())
    for name, value in (
        (":authority", ""),
        (":method", "GET"),
        (":method", "POST"),
        (":path", "/"),
        (":path", "/index.html"),
        (":scheme", "http"),
        (":scheme", "https"),
        (":status", "200"),
        (":status", "204"),
        (":status", "206"),
        (":status", "304"),
        (":status", "400"),
        (":status", "404"),
        (":status", "500"),
        ("accept-charset", ""),
        ("accept-encoding", "gzip, deflate"),
        ("accept-language", ""),
        ("accept-ranges", ""),
        ("accept", ""),
        ("access-control-allow-origin", ""),
        ("age", ""),
        ("allow", ""),
        ("authorization", ""),
        ("cache-control", ""),
        ("content-disposition", ""),
        ("content-encoding", ""),
        ("content-language", ""),
        ("content-length", ""),
        ("content-location", ""),
        ("content-range", ""),
        ("content-type", ""),
        ("cookie", ""),
        ("date", ""),
        ("etag", ""),
        ("expect", ""),
        ("expires", ""),
        ("from", ""),
        ("host", ""),
        ("if-match", ""),
        ("if-modified-since", ""),
        ("if-none-match", ""),
        ("if-range", ""),
        ("if-unmodified-since", ""),
        ("last-modified", ""),
        ("link", ""),
        ("location", ""),
        ("max-forwards", ""),
        ("proxy-authenticate", ""),
        ("proxy-authorization", ""),
        ("range", ""),
        ("referer", ""),
        ("refresh", ""),
        ("retry-after", ""),
        ("server", ""),
        ("set-cookie", ""),
        ("strict-transport-security", ""),
        ("transfer-encoding", ""),
        ("user-agent", ""),
        ("vary", ""),
        ("via", ""),
        ("www-authenticate", ""),
    )
)
_STATIC_COUNT = len(STATIC_TABLE)
_STATIC_INDEX = {header: index for index, header in reversed(list(enumerate(STATIC_TABLE, 1)))}
_STATIC_NAME = {name: index for index, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))}


class HpackError(Exception):
    """The block cannot be decoded; the connection's tables are lost (COMPRESSION_ERROR)."""


class HeaderListTooLarge(Exception):
    """The block decodes to more than is taken; the tables are still in step."""


class Decoder:
    """One direction of one connection. `allowed`: the table size that our SETTINGS name."""

    def __init__(self, *, allowed: int, list_limit: int) -> None:
        # What we allow counts once the peer has acknowledged it; it may say less at any time.
        self._ceiling, self._allowed = DEFAULT_TABLE_BYTES, allowed
        self._list_limit = list_limit
        self._limit = DEFAULT_TABLE_BYTES
        self._size = 0
        self._entries: deque[Header] = deque()

    @property
    def is_stateless(self) -> bool:
        """No table: a block's bytes alone say what it means."""
        return self._limit == 0

    def acknowledged(self) -> None:
        """The peer has taken our SETTINGS: from now on it may not use more than they allow."""
        self._ceiling = self._allowed

    def plain(self, block: bytes) -> bytes:
        """The block as one that stands for itself: without entries of the table, nor changes of its size.

        What needs no table is not looked at: its reader finds what is wrong with it.
        Raises HpackError, or HeaderListTooLarge with the table in step.
        """
        if self._limit == 0 and (not block or block[0] & 0xE0 != 0x20):
            return block
        out = bytearray()
        at, end, size = 0, len(block), 0
        while at < end:
            start, first = at, block[at]
            if first & 0x80:
                index, at = integer(block, at, 7)
                name, value = self._entry(index)
            elif first & 0xE0 == 0x20:
                if size:
                    raise HpackError("a table size update after a header")
                limit, at = integer(block, at, 5)
                self._resize(limit)
                continue
            else:
                indexed = first & 0x40 != 0
                index, at = integer(block, at, 6 if indexed else 4)
                name, at = (self._entry(index)[0], at) if index else string(block, at)
                value, at = string(block, at)
                if indexed:
                    self._add((name, value))
            size += len(name) + len(value) + ENTRY_OVERHEAD
            if size > self._list_limit:  # go on beyond it, to keep the table in step
                continue
            is_secret = first & 0xF0 == 0x10
            is_own = index <= _STATIC_COUNT
            out += block[start:at] if is_own else encode([(name, value)], secret={name} if is_secret else ())
        if size > self._list_limit:
            raise HeaderListTooLarge(f"a header list of more than {self._list_limit} bytes")
        return bytes(out)

    def decode(self, block: bytes) -> list[Header]:
        """Raises HpackError, or HeaderListTooLarge with the table in step."""
        headers: list[Header] = []
        at, end, size = 0, len(block), 0
        while at < end:
            first = block[at]
            if first & 0x80:
                index, at = integer(block, at, 7)
                header = self._entry(index)
            elif first & 0xE0 == 0x20:
                if headers or size:
                    raise HpackError("a table size update after a header")
                limit, at = integer(block, at, 5)
                self._resize(limit)
                continue
            else:
                indexed = first & 0x40 != 0
                index, at = integer(block, at, 6 if indexed else 4)
                name, at = (self._entry(index)[0], at) if index else string(block, at)
                value, at = string(block, at)
                header = (name, value)
                if indexed:
                    self._add(header)
            size += len(header[0]) + len(header[1]) + ENTRY_OVERHEAD
            if size <= self._list_limit:  # go on beyond it, to keep the table in step
                headers.append(header)
        if size > self._list_limit:
            raise HeaderListTooLarge(f"a header list of more than {self._list_limit} bytes")
        return headers

    def _entry(self, index: int) -> Header:
        if 1 <= index <= _STATIC_COUNT:
            return STATIC_TABLE[index - 1]
        # The newest has the first place.
        place = index - _STATIC_COUNT - 1
        if 0 <= place < len(self._entries):
            return self._entries[place]
        raise HpackError(f"there is no header with index {index}")

    def _resize(self, limit: int) -> None:
        if limit > self._ceiling:
            raise HpackError(f"a table of {limit} bytes, where {self._ceiling} are allowed")
        self._limit = limit
        self._evict()

    def _add(self, header: Header) -> None:
        self._entries.appendleft(header)
        self._size += len(header[0]) + len(header[1]) + ENTRY_OVERHEAD
        self._evict()

    def _evict(self) -> None:
        while self._size > self._limit:
            name, value = self._entries.pop()
            self._size -= len(name) + len(value) + ENTRY_OVERHEAD


def encode(headers: Iterable[Header], *, secret: Collection[bytes] = ()) -> bytes:
    """A block that touches no table. `secret`: names whose values no proxy may index."""
    out = bytearray()
    for name, value in headers:
        index = _STATIC_INDEX.get((name, value))
        if index is not None:
            out += _encode_integer(index, 7, 0x80)
            continue
        pattern = 0x10 if name in secret else 0x00
        name_index = _STATIC_NAME.get(name, 0)
        out += _encode_integer(name_index, 4, pattern)
        if not name_index:
            out += _encode_integer(len(name), 7, 0) + name
        out += _encode_integer(len(value), 7, 0) + value
    return bytes(out)


def static_entry(index: int) -> Header:
    """Raises HpackError: where no table is used, there is no other."""
    if 1 <= index <= _STATIC_COUNT:
        return STATIC_TABLE[index - 1]
    raise HpackError(f"there is no header with index {index}")


def integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    mask = (1 << bits) - 1
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for count in range(_MAX_INTEGER_BYTES):
        if at >= len(block):
            raise HpackError("the block ends inside a number")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at
    raise HpackError("a number is too long")


def string(block: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(block):
        raise HpackError("the block ends where a string should begin")
    is_huffman = block[at] & 0x80
    size, at = integer(block, at, 7)
    end = at + size
    if end > len(block):
        raise HpackError("a string is longer than its block")
    text = block[at:end]
    return unpacked(text) if is_huffman else text, end


def unpacked(text: bytes) -> bytes:
    """A string in Huffman code (RFC 7541, 5.2). Raises HpackError."""
    step = _BEGIN
    unpacked = b"".join([(step := step[0][byte])[1] for byte in text])
    if not step[0].may_end:
        raise HpackError("a Huffman string with more than padding at its end")
    return unpacked


class _State(dict[int, "_Step"]):
    """Where a string may stand in the code: the step from there by each byte, found once for each, as a whole
    table of 65536 is more than is ever used."""

    def __init__(self, number: int, *, may_end: bool) -> None:
        super().__init__()
        self.number, self.may_end = number, may_end

    def __missing__(self, byte: int) -> "_Step":
        step = _huffman_step(self.number, byte)
        if next(_found) < _MOST_STEPS:
            self[byte] = step
        return step


_MOST_STEPS = 8192
_found = itertools.count()
# The state behind a byte, and what is emitted on the way.
_Step = tuple[_State, bytes]
_BEGIN: Final[_Step] = (_State(0, may_end=True), b"")
_states: Final[dict[tuple[int, bool], _State]] = {(0, True): _BEGIN[0]}


def _huffman_step(state: int, byte: int) -> _Step:
    # Imported with the first: its table is larger than the rest of a sidecar, whose agent packs nothing.
    from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE

    symbols = b""
    flags = 0
    for nibble in (byte >> 4, byte & 0x0F):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + nibble]
        if flags & HUFFMAN_FAIL:
            raise HpackError("a Huffman string with a code that does not exist")
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols += bytes([symbol])
    place = state, flags & HUFFMAN_COMPLETE != 0
    if place not in _states:
        _states[place] = _State(state, may_end=place[1])
    return _states[place], symbols


def _encode_integer(value: int, bits: int, pattern: int) -> bytes:
    mask = (1 << bits) - 1
    if value < mask:
        return bytes([pattern | value])
    out = bytearray([pattern | mask])
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
