"""Header blocks read field by field, each of which is decided once.

All blocks here stand for themselves (`hpack.Decoder` sees to it), so a field's bytes alone say what it
means: that it is dropped, that these bytes go on as they are, that it tells what kind of request this is,
or that its value is wanted. What a block says is then joined from what its fields say, and a block with a
field that is new each time (`traceparent`, `grpc-timeout`) costs little more than one that is always the
same.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from proxy.codecs.h2.hpack import Header

K = TypeVar("K")
K_co = TypeVar("K_co", covariant=True)


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
    """Its value is handed to whoever reads the block (`Fields.values`), anew for each."""


class Policy(Protocol[K_co]):
    """What a use of HTTP/2 makes of its fields. Pure: what it says is remembered."""

    def rule(self, name: bytes) -> Rule:
        """Of a regular field. RFC 9113's own rules (8.2: characters, no connection-specific fields) are
        kept already; content-length is read and dropped."""

    def kind(self, told: Sequence[Header]) -> K_co:
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


class FieldReader(Generic[K]):
    """Reads blocks by one policy; shared by all connections whose blocks mean the same."""

    def __init__(self, policy: Policy[K], *, is_trailers: bool = False, is_answer: bool = False) -> None:
        """`is_trailers`: of blocks without pseudo-header fields; `is_answer`: of those with :status."""

    def read(self, block: bytes) -> Fields[K]:
        """Raises HpackError (the connection is lost), HeaderListTooLarge or Malformed (the stream is)."""
        raise NotImplementedError

    def forget(self) -> None:
        """The policy says something else from now on."""
        raise NotImplementedError
