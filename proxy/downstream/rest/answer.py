"""Triton's answers with the public name in place of the server's. Pure.

Tensors' answers keep their length: the one member that names the model is filled up with blanks. Small
answers are gathered and rewritten whole. What comes in chunks is written in chunks of its own.
"""

from enum import Enum, auto
from typing import Final

from proxy.policy.names import Names
from proxy.policy.routes import Route
from proxy.wire.http1 import ResponseHead

# Small answers, which are rewritten whole.
GATHERED_BYTES: Final = 4 * 1024 * 1024


class Way(Enum):
    """How an answer's names are changed."""

    IN_PLACE = auto()
    WHOLE = auto()
    AS_IT_COMES = auto()


TENSORS = frozenset({Route.INFER, Route.GENERATE, Route.GENERATE_STREAM})


def way_of(route: Route | None, status: int, length: int | None, *, is_chunked: bool) -> Way | None:
    """None: there is nothing in it to change. `length`: of the body, None where its end tells."""
    if length == 0:
        return None
    if route is Route.GENERATE_STREAM and is_chunked:
        return Way.AS_IT_COMES  # the status is its first event's, and others follow
    if status == 200 and route in TENSORS:
        return Way.AS_IT_COMES if is_chunked or length is None else Way.IN_PLACE
    return Way.WHOLE


class PartedAnswer:
    """An answer that comes in parts, on its way to a client."""

    __slots__ = ("_chunks_anew", "_renamer", "came_bytes", "head", "is_gathered")

    def __init__(self, head: ResponseHead, names: Names, route: Route | None, is_http11: bool) -> None:
        """`is_http11`: the client reads chunks."""
        self.head = head
        # What has come after the beginning: as much as its client takes, and what there is room for here.
        self.came_bytes = 0
        # The client gets nothing of it before its end, not even its head.
        self.is_gathered = False
        self._renamer: InPlace | AsItComes | Whole | None = None
        self._chunks_anew = head.is_chunked and not names.are_same and is_http11
        if names.are_same:
            return
        way = way_of(route, head.status, head.length, is_chunked=head.is_chunked)
        if way is Way.WHOLE:
            self.is_gathered, self._renamer = True, Whole(names)
        elif way is Way.IN_PLACE:
            self._renamer = InPlace(names, head.json_bytes)
        elif way is Way.AS_IT_COMES:
            self._renamer = AsItComes(names)

    @property
    def is_renamed(self) -> bool:
        return self._renamer is not None

    @property
    def is_too_long(self) -> bool:
        """To be gathered."""
        return isinstance(self._renamer, Whole) and self._renamer.size_bytes > GATHERED_BYTES

    def feed(self, data: bytes) -> bytes:
        """What can go on; nothing of one that is gathered."""
        return data if self._renamer is None else self._renamer.feed(data)

    def rest(self) -> bytes:
        """At the end: what was kept back."""
        return b"" if self._renamer is None else self._renamer.rest()

    def chunked(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunks_anew else data

    @property
    def last_chunk(self) -> bytes:
        return b"0\r\n\r\n" if self._chunks_anew else b""


class Whole:
    """Every name, of an answer that is all here at its end."""

    def __init__(self, names: Names) -> None:
        self._names, self._pieces, self.size_bytes = names, list[bytes](), 0

    def feed(self, data: bytes) -> bytes:
        self._pieces.append(data)
        self.size_bytes += len(data)
        return b""

    def rest(self) -> bytes:
        return self._names.to_public(b"".join(self._pieces))


class InPlace:
    """The first `"model_name":"SERVER"` of an answer in another's words of the same length."""

    def __init__(self, names: Names, json_bytes: int | None) -> None:
        """`json_bytes`: the answer's first so many are JSON; None: all are."""
        self._names, self._left = names, json_bytes
        self._kept = b""
        self._done = False

    def feed(self, data: bytes) -> bytes:
        """What can go on. Of what could be the member's beginning the rest is waited for."""
        if self._done:
            return data
        data, find = self._kept + data, self._names.server_member
        self._kept = b""
        end = len(data) if self._left is None else min(self._left, len(data))
        at = data.find(find, 0, end)
        if at >= 0:
            self._done = True
            return data[:at] + self._names.public_member + data[at + len(find) :]
        if end < len(data) or end == self._left:
            self._done = True
            return data
        keep = _begun(data, find)
        self._kept = data[len(data) - keep :] if keep else b""
        data = data[: len(data) - keep] if keep else data
        if self._left is not None:
            self._left -= len(data)
        return data

    def rest(self) -> bytes:
        """At the end."""
        return self._kept


class AsItComes:
    """Every name, as the pieces come; of another length."""

    def __init__(self, names: Names) -> None:
        self._names, self._kept = names, b""

    def feed(self, data: bytes) -> bytes:
        data = self._names.to_public(self._kept + data)
        keep = _begun(data, self._names.server)
        self._kept = data[len(data) - keep :] if keep else b""
        return data[: len(data) - keep] if keep else data

    def rest(self) -> bytes:
        return self._kept


def _begun(data: bytes, word: bytes) -> int:
    """How many bytes at the end may be the word's beginning."""
    at = max(0, len(data) - len(word) + 1)
    while (at := data.find(word[:1], at)) >= 0:
        if word.startswith(data[at:]):
            return len(data) - at
        at += 1
    return 0
