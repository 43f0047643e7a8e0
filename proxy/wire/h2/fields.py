"""Header blocks read field by field, each of which is decided once.

All blocks here stand for themselves (`hpack.Decoder.plain` sees to it), so a field's bytes alone say what
it means: that it is dropped, that these bytes go on as they are, that it tells what kind of request this
is, or that its value is wanted. What a block says is joined from what its fields say.

A block that is the same each time is found by its bytes. One that has fields which are new each time
(`traceparent`, `grpc-timeout`) fits a template: the bytes of the last such block, with slots for their values.
A connection keeps its own templates, because its blocks are its client's.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from proxy.wire.h2 import hpack
from proxy.wire.h2.hpack import ENTRY_OVERHEAD, Header
from proxy.wire.lookup import Lookup

K = TypeVar("K")
K_co = TypeVar("K_co", covariant=True)

HEADER_LIST_BYTES: Final = 64 * 1024
TEMPLATES: Final = 4
# A name that has had so many values will have more: from then on its value is a slot.
_FEW_VALUES = 8

# RFC 9113, 8.2: no upper case, nothing but tokens.
_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CONNECTION = (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
_REQUEST = (b":method", b":scheme", b":path", b":authority")


class Malformed(Exception):
    """Not a block that HTTP/2 allows: the stream ends with PROTOCOL_ERROR."""


class Rule(Enum):
    """What becomes of a field, by its name. Pseudo-header fields always TELL."""

    DROP = auto()
    """It goes no further and means nothing here."""
    FORWARD = auto()
    """Its bytes go on as they came."""
    TELL = auto()
    """It is handed to `Policy.kind`, with its value; it has few values, so that the kinds are few."""
    VALUE = auto()
    """Its value is handed to the reader of the block (`Fields.values`), anew for each."""


class Policy(Protocol[K_co]):
    """What a use of HTTP/2 makes of its fields. Pure: what it says is remembered."""

    def rule(self, name: bytes) -> Rule:
        """Of a regular field. RFC 9113's own rules (8.2: characters, no connection-specific fields) are
        kept already; content-length is read and dropped."""

    def kind(self, headers: Sequence[Header]) -> K_co:
        """What a block is, by its fields that TELL, in their order. Raises Malformed.

        RFC 9113, 8.3 is kept already: pseudo-header fields come first, once, and those that must be are.
        """


class Fields(Generic[K]):
    """What one block says. One object may stand for many blocks that are alike: not to be changed.

    `forwarded`: the fields that go on, to be joined with others to a block (it touches no table);
    `list_bytes`: what a receiver counts them for (RFC 9113, 6.5.2);
    `values`: names and values of the fields whose rule is VALUE, in their order;
    `length`: content-length, which the codec compares with what comes.
    """

    __slots__ = ("forwarded", "kind", "length", "list_bytes", "values")

    def __init__(
        self, kind: K, forwarded: bytes, list_bytes: int, values: tuple[Header, ...], length: int | None
    ) -> None:
        self.kind, self.forwarded, self.list_bytes = kind, forwarded, list_bytes
        self.values, self.length = values, length


class _Name:
    """What is known of a name."""

    __slots__ = ("is_length", "rule", "values")

    def __init__(self, rule: Rule, *, is_length: bool) -> None:
        self.rule, self.is_length = rule, is_length
        # None when it has had many.
        self.values: set[bytes] | None = None if is_length or rule is Rule.VALUE else set()

    def varies(self, value: bytes) -> bool:
        """Whether this name's values are expected to be new each time."""
        if self.values is None:
            return True
        if self.rule is not Rule.TELL and value not in self.values:
            self.values.add(value)
            if len(self.values) > _FEW_VALUES:
                self.values = None
                return True
        return False


class Field(NamedTuple):
    """Where a field stands in its block, and what it is. `value_at`: its value's string, 0 if indexed."""

    start: int
    value_at: int
    stop: int
    name: bytes
    value: bytes


class _Slot(NamedTuple):
    """`before`: what goes on before its value, `after`: what stands behind it, up to the next slot."""

    rule: Rule
    is_length: bool
    name: bytes
    before: bytes
    after: bytes


class Template(Generic[K]):
    """A block whose bytes are known but for the values of some fields."""

    __slots__ = ("_forwarded_bytes", "_kind", "_list_bytes", "_rest", "_slots", "_start")

    def __init__(
        self, kind: K, start: bytes, slots: list[_Slot], rest: bytes, sizes: tuple[int, int]
    ) -> None:
        """`rest`: what goes on behind the last slot; `sizes`: of the list and of what goes on of it,
        without the values of the slots."""
        self._kind, self._start, self._slots, self._rest = kind, start, slots, rest
        self._list_bytes, self._forwarded_bytes = sizes

    def fill(self, block: bytes) -> Fields[K] | None:
        """What a block says that differs in its slots alone; None if this one does not, or is not right."""
        start = self._start
        if not block.startswith(start):
            return None
        at, end = len(start), len(block)
        list_bytes, forwarded_bytes = self._list_bytes, self._forwarded_bytes
        forwarded: list[bytes] = []
        values: tuple[Header, ...] = ()
        length = None
        for rule, is_length, name, before, after in self._slots:
            if at >= end:
                return None
            size, value_at = block[at] & 0x7F, at + 1
            if size == 0x7F:
                try:
                    size, value_at = hpack.integer(block, at, 7)
                except hpack.HpackError:
                    return None
            stop = value_at + size
            if not block.startswith(after, stop):
                return None
            value = block[value_at:stop]
            if block[at] & 0x80:
                try:
                    value = hpack.unpacked(value)
                except hpack.HpackError:
                    return None
            if not _is_sound(value):
                return None
            list_bytes += len(value)
            if rule is _FORWARD:
                forwarded += before, block[at:stop]
                forwarded_bytes += len(value)
            elif rule is _VALUE:
                values += ((name, value),)
            elif is_length:
                if not _LENGTH.fullmatch(value):
                    return None
                length = int(value)
            at = stop + len(after)
        if at != end or list_bytes > HEADER_LIST_BYTES:
            return None
        forwarded.append(self._rest)
        return Fields(self._kind, b"".join(forwarded), forwarded_bytes, values, length)


class FieldReader(Generic[K]):
    """Reads blocks by one policy; shared by all connections whose blocks mean the same."""

    def __init__(self, policy: Policy[K], *, is_trailers: bool = False, is_answer: bool = False) -> None:
        """`is_trailers`: of blocks without pseudo-header fields; `is_answer`: of those with :status."""
        self._policy = policy
        self._required: tuple[bytes, ...] = (
            () if is_trailers else (b":status",) if is_answer else _REQUEST[:3]
        )
        self._allowed = () if is_trailers else (b":status",) if is_answer else _REQUEST
        # What the same bytes have said before; `get` is the first thing to ask.
        self.known: Lookup[Fields[K]] = Lookup(entries=1024, key_bytes=4096)
        self._names: Lookup[_Name] = Lookup(entries=1024, key_bytes=256)
        self._kinds: Lookup[tuple[K]] = Lookup(entries=1024, key_bytes=4096)

    def read(self, block: bytes, templates: list[Template[K]] | None = None) -> Fields[K]:
        """`templates`: of earlier blocks of the same sender, the last used first; changed here.

        Raises HpackError (the connection is lost), HeaderListTooLarge or Malformed (the stream is).
        """
        fields = self.known.get(block)
        if fields is not None:
            return fields
        for place, template in enumerate(templates or ()):
            fields = template.fill(block)
            if fields is not None:
                if place and templates:
                    templates.insert(0, templates.pop(place))
                return fields
        fields, new = self._read(block)
        if new is None:
            self.known.remember(block, fields)
        elif templates is not None:
            templates.insert(0, new)
            del templates[TEMPLATES:]
        return fields

    def _read(self, block: bytes) -> tuple[Fields[K], Template[K] | None]:
        """Field by field. With a template for blocks that differ from this one in what is new each time."""
        pieces, headers, header_pieces, values = _Pieces(block), [], [], []
        length: int | None = None
        pseudo: set[bytes] = set()
        has_regular = False
        for field in split(block):
            name, value = field.name, field.value
            if not _is_sound(value):
                raise Malformed(f"the value of {name!r}")
            if name.startswith(b":"):
                is_empty = not value and name in self._required
                if has_regular or is_empty or name in pseudo or name not in self._allowed:
                    raise Malformed(f"pseudo-header {name!r}")
                pseudo.add(name)
                rule, is_length, varies = Rule.TELL, False, False
            else:
                has_regular = True
                known = self._name(name)
                if name == b"te" and value != b"trailers":
                    raise Malformed("header 'te'")
                rule, is_length, varies = known.rule, known.is_length, known.varies(value)
            if is_length:
                if length is not None or not _LENGTH.fullmatch(value):
                    raise Malformed("content-length")
                length = int(value)
            elif rule is Rule.TELL:
                headers.append((name, value))
                header_pieces.append(block[field.start : field.stop])
            elif rule is Rule.VALUE:
                values.append((name, value))
            pieces.add(field, rule, is_length=is_length, varies=varies)
        if any(name not in pseudo for name in self._required):
            raise Malformed(f"a block without one of {b', '.join(self._required)!r}")
        kind = self._kind(b"".join(header_pieces), headers)
        fields = Fields(kind, pieces.forwarded(block), pieces.forwarded_bytes, tuple(values), length)
        return fields, pieces.template(kind)

    def _name(self, name: bytes) -> _Name:
        known = self._names.get(name)
        if known is None:
            if not _NAME.fullmatch(name) or name in _CONNECTION:
                raise Malformed(f"header {name!r}")
            is_length = name == b"content-length"
            known = _Name(Rule.DROP if is_length else self._policy.rule(name), is_length=is_length)
            self._names.remember(name, known)
        return known

    def _kind(self, key: bytes, headers: list[Header]) -> K:
        known = self._kinds.get(key)
        if known is None:
            known = (self._policy.kind(headers),)
            self._kinds.remember(key, known)
        return known[0]


class _Pieces:
    """What a block is made of, as its fields are read."""

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._sent: list[tuple[int, int]] = []
        self._slots: list[tuple[Field, Rule, bool, bytes]] = []
        self._before: list[bytes] = []
        self._can_be_template = True
        self.list_bytes = self.forwarded_bytes = 0
        self._slot_bytes = self._slot_forwarded_bytes = 0

    def add(self, field: Field, rule: Rule, *, is_length: bool, varies: bool) -> None:
        """Raises HeaderListTooLarge."""
        size = len(field.name) + len(field.value) + ENTRY_OVERHEAD
        self.list_bytes += size
        if self.list_bytes > HEADER_LIST_BYTES:
            raise hpack.HeaderListTooLarge(f"a header list of more than {HEADER_LIST_BYTES} bytes")
        if rule is Rule.FORWARD:
            self._sent.append((field.start, field.stop))
            self.forwarded_bytes += size
        if not varies:
            if rule is Rule.FORWARD:
                self._before.append(self._block[field.start : field.stop])
            return
        if not field.value_at:  # a value of the static table cannot be another
            self._can_be_template = False
            return
        before = b""
        self._slot_bytes += len(field.value)
        if rule is Rule.FORWARD:
            before = b"".join([*self._before, self._block[field.start : field.value_at]])
            self._before = []
            self._slot_forwarded_bytes += len(field.value)
        self._slots.append((field, rule, is_length, before))

    def forwarded(self, block: bytes) -> bytes:
        return b"".join([block[start:stop] for start, stop in self._sent])

    def template(self, kind: K) -> Template[K] | None:
        """None where nothing is expected to be new."""
        if not self._slots or not self._can_be_template:
            return None
        block = self._block
        ends = [field.value_at for field, *_ in self._slots[1:]] + [len(block)]
        slots = [
            _Slot(rule, is_length, field.name, before, block[field.stop : end])
            for (field, rule, is_length, before), end in zip(self._slots, ends, strict=True)
        ]
        return Template(
            kind,
            block[: self._slots[0][0].value_at],
            slots,
            b"".join(self._before),
            (self.list_bytes - self._slot_bytes, self.forwarded_bytes - self._slot_forwarded_bytes),
        )


class PeerBlocks(Generic[K]):
    """The blocks of one sender: read as all of their kind, and by templates of its own, the last used first."""

    __slots__ = ("_reader", "_templates", "known")

    def __init__(self, reader: FieldReader[K]) -> None:
        self._reader = reader
        self._templates: list[Template[K]] = []
        # What the same bytes have said before: the first thing to ask.
        self.known = reader.known.get

    def read(self, block: bytes) -> Fields[K]:
        """Raises HpackError (the connection is lost), HeaderListTooLarge or Malformed (the stream is)."""
        return self._reader.read(block, self._templates)


# Looked up for each slot of each block.
_FORWARD, _VALUE = Rule.FORWARD, Rule.VALUE


def _is_sound(value: bytes) -> bool:
    """RFC 9113, 8.2.1: no NUL, CR, LF, no white space at the ends. Several times as quick as a pattern."""
    return value.strip(b" \t") == value == value.translate(None, b"\0\r\n")


def split(block: bytes) -> Iterator[Field]:
    """The fields of a block that touches no table. Raises HpackError."""
    at, end = 0, len(block)
    while at < end:
        start, first = at, block[at]
        if first & 0x80:
            index, at = hpack.integer(block, at, 7)
            name, value = hpack.static_entry(index)
            yield Field(start, 0, at, name, value)
            continue
        if first & 0xE0 == 0x20:
            raise hpack.HpackError("a table size update after a header")
        index, at = hpack.integer(block, at, 6 if first & 0x40 else 4)
        if index:
            name = hpack.static_entry(index)[0]
        else:
            name, at = hpack.string(block, at)
        value_at = at
        value, at = hpack.string(block, at)
        yield Field(start, value_at, at, name, value)
