"""Heads of HTTP/1.1 messages, read strictly (RFC 9112) and written anew.

A request's head is read twice, by llhttp and by the grammar below; where they differ, or where
anything could be read in two ways, it is refused. What Triton gets is built from the parsed parts.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, HttpResponseParser

from proxy.wire.headers import is_forwarded

HEAD_END: Final = b"\r\n\r\n"
HEAD_BYTES: Final = 64 * 1024
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
HEADER_LENGTH: Final = "Inference-Header-Content-Length"
# A header's name or value for Triton 2.51, which breaks off without a word at a longer one.
FIELD_BYTES: Final = 8191

_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]{1,8000}) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_LENGTHS = re.compile(rb"(?:Content-Length|Transfer-Encoding|Trailer):[^\r\n]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"(?:Transfer-Encoding|Trailer):[^\r\n]*\r\n", re.IGNORECASE)
_PATH = re.compile(rb"/[A-Za-z0-9._~:@!$&'()*+,;=/-]*")
_HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%!$&'()*+,;=-]*")
_STEPS = frozenset({b".", b".."})
# What no head can hold, whatever comes behind it: a line end that is none, and what is no text.
_NEVER = re.compile(rb"(?<!\r)\n|\r(?=[^\n])|[^\t\r\n\x20-\x7e\x80-\xff]")


class BadRequest(Exception):
    """Not a request that every server would read alike: answered, and the connection closed."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class HttpError(Exception):
    """A well-formed request that is answered with a status of our own."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class BadResponse(Exception):
    """Triton's answer cannot be read."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """One head as it was read. `fields`: what goes on to Triton, as bytes with line ends, without lengths and keys."""

    # Checked characters only; `is_head`: asked with HEAD, which is a GET without a body in its answer.
    method: str
    path: str
    is_head: bool
    is_http11: bool
    keeps_alive: bool
    length: int | None
    is_chunked: bool
    expects_continue: bool
    encoding: str
    header_length: int | None
    fields: bytes


class _Fields:
    """What llhttp makes of a head."""

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))


def require_hopeful(begun: bytes) -> None:
    """Raises BadRequest where nothing that can still come makes a head of what has come."""
    if _NEVER.search(begun):
        raise BadRequest("not the head of an HTTP/1.1 request: its lines are text and end with CR LF")


def read_request(head: bytes) -> RequestHead:
    """`head` ends with the empty line. Raises BadRequest."""
    method, target, minor, fields = _by_grammar(head)
    parsed = _Fields()
    parser = HttpRequestParser(parsed)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass  # an offer that is not taken
    except HttpParserError as error:
        raise BadRequest(f"not HTTP: {error}") from error
    if (parser.get_method(), parsed.url, parsed.fields) != (method, target, fields):
        raise BadRequest("a head that can be read in two ways")
    named = _Named(fields)
    is_http11 = minor == b"1"
    if len(named.all(b"host")) != 1 and is_http11:
        raise BadRequest("HTTP/1.1 needs one Host")
    if not all(_HOST.fullmatch(host) for host in named.all(b"host")):
        raise BadRequest("Host is not a host")
    length, is_chunked = _framing(named, is_http11=is_http11)
    connection = {token for value in named.all(b"connection") for token in _tokens(value)}
    is_head = method == b"HEAD"
    return RequestHead(
        method="GET" if is_head else method.decode(),
        path=_path(target),
        is_head=is_head,
        is_http11=is_http11,
        keeps_alive=is_http11 and b"close" not in connection,
        length=length,
        is_chunked=is_chunked,
        expects_continue=_expects(named, is_http11=is_http11),
        encoding=_encoding(named),
        header_length=_header_length(named),
        fields=_forwarded(fields, connection),
    )


class _Named:
    def __init__(self, fields: list[tuple[bytes, bytes]]) -> None:
        self._fields = [(name.lower(), value.strip(b" \t")) for name, value in fields]

    def all(self, name: bytes) -> list[bytes]:
        return [value for known, value in self._fields if known == name]

    def one(self, name: bytes) -> bytes | None:
        """Raises BadRequest where it stands twice."""
        values = self.all(name)
        if len(values) > 1:
            raise BadRequest(f"more than one {name.decode()}")
        return values[0] if values else None


def _by_grammar(head: bytes) -> tuple[bytes, bytes, bytes, list[tuple[bytes, bytes]]]:
    first, *lines = head[: -len(HEAD_END)].split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise BadRequest("the request line is not METHOD /path HTTP/1.1")
    fields = []
    for text in lines:
        match = _FIELD.fullmatch(text)
        if match is None:
            raise BadRequest("a header line is not NAME: VALUE")
        fields.append((match[1], match[2].rstrip(b" \t")))
    return line[1], line[2], line[3], fields


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


def _path(target: bytes) -> str:
    path = target.partition(b"?")[0]
    if not _PATH.fullmatch(path):
        raise BadRequest("the target must be a plain path: no scheme, no host, nothing encoded")
    if b"//" in path or not _STEPS.isdisjoint(path.split(b"/")):
        raise BadRequest("the path has empty or dotted steps")
    return path.decode()


def _framing(named: _Named, *, is_http11: bool) -> tuple[int | None, bool]:
    length, coding = named.one(b"content-length"), named.one(b"transfer-encoding")
    if coding is not None:
        if length is not None or not is_http11:
            raise BadRequest("Transfer-Encoding beside Content-Length, or before HTTP/1.1")
        if coding.lower() != b"chunked":
            raise BadRequest(f"Transfer-Encoding {coding.decode('latin-1')!r} is not chunked")
        return None, True
    if length is None:
        return None, False
    if not _LENGTH.fullmatch(length):
        raise BadRequest("Content-Length is not a number")
    return int(length), False


def _expects(named: _Named, *, is_http11: bool) -> bool:
    expect = named.one(b"expect")
    if expect is None or not is_http11:
        return False
    if expect.lower() != b"100-continue":
        raise BadRequest("only Expect: 100-continue is known", 417)
    return True


def _encoding(named: _Named) -> str:
    encodings = b",".join(named.all(b"content-encoding")).lower().decode("latin-1").strip()
    return encodings or "identity"


def _header_length(named: _Named) -> int | None:
    text = named.one(HEADER_LENGTH.lower().encode())
    if text is None:
        return None
    if not _LENGTH.fullmatch(text):
        raise BadRequest(f"{HEADER_LENGTH} is not a number")
    return int(text)


def _forwarded(fields: list[tuple[bytes, bytes]], connection: set[bytes]) -> bytes:
    lines = []
    for name, value in fields:
        lower = name.lower()
        if lower in connection or lower in _SAID_ANEW or not is_forwarded(name.decode("latin-1")):
            continue
        if max(len(name), len(value)) > FIELD_BYTES:
            shown = name[:100].decode("latin-1")
            raise BadRequest(
                f"header {shown} is longer than {FIELD_BYTES} bytes, which Triton does not take", 431
            )
        lines.append(name + b": " + value + b"\r\n")
    return b"".join(lines)


# How the body is packed and where its tensors begin is said of the body that Triton gets.
# Triton does not check what a body is, but takes one that is called a form (curl's own word for all it sends)
# for a query as well: with 4 MiB of it the stack of the thread that reads it, and so the server, is gone.
_SAID_ANEW = (b"content-encoding", b"content-type", HEADER_LENGTH.lower().encode())


def write_start(method: str, path: str, host: str, fields: bytes, keys: Mapping[str, str]) -> bytes:
    """The head for Triton up to what is said of the body."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in keys.items())
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n".encode() + fields + lines.encode()


def write_lengths(length: int, header_length: int | None) -> bytes:
    """The head's end, for a body of so many bytes; `header_length`: of its JSON, where tensors follow."""
    if header_length is None:
        return b"Content-Length: %d\r\n\r\n" % length
    return b"Content-Length: %d\r\n%s: %d\r\n\r\n" % (length, HEADER_LENGTH.encode(), header_length)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`lines`: status and headers for the client, each with its line end, without the empty line."""

    status: int
    code: str
    length: int | None
    is_chunked: bool
    keeps_alive: bool
    lines: bytes
    # As Triton wrote it, the head says the same.
    plain_is_raw: bool
    # How much of the body is JSON, where tensors follow it.
    json_bytes: int | None = None

    def anew(self, length: int, *, closes: bool) -> bytes:
        """For a body of another length, which comes whole."""
        lines = _LENGTHS.sub(b"", self.lines) + b"Content-Length: %d\r\n" % length
        return lines + (b"Connection: close\r\n\r\n" if closes else b"\r\n")

    def whole(self, *, closes: bool, chunked: bool) -> bytes:
        """For a client whose connection ends with this answer or not, and which knows chunks or not."""
        lines = self.lines
        if self.is_chunked and not chunked:
            lines = _CHUNKED.sub(b"", lines)
        return lines + (b"Connection: close\r\n\r\n" if closes else b"\r\n")


def read_response(head: bytes) -> ResponseHead:
    """`head` ends with the empty line. Raises BadResponse."""
    parsed = _Fields()
    parser = HttpResponseParser(parsed)
    try:
        parser.feed_data(head)
    except HttpParserError as error:
        raise BadResponse(str(error)) from error
    fields = [(name, value) for name, value in parsed.fields]
    lengths = {v for n, v in fields if n.lower() == b"content-length"}
    is_chunked = any(n.lower() == b"transfer-encoding" for n, _ in fields)
    is_last = any(n.lower() == b"connection" and b"close" in _tokens(v) for n, v in fields)
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise BadResponse("Content-Length")
    status = parser.get_status_code()
    has_body = status >= 200 and status not in (204, 304)
    length = int(lengths.pop()) if lengths else (None if has_body else 0)
    kept = b"".join(
        name + b": " + value + b"\r\n"
        for name, value in fields
        if name.lower() in _FRAMING or is_forwarded(name.decode("latin-1"))
    )
    first = f"HTTP/1.1 {status} {_phrase(status)}\r\n".encode()
    json_lengths = [v for n, v in fields if n.lower() == HEADER_LENGTH.lower().encode()]
    return ResponseHead(
        status,
        str(status),
        None if is_chunked else length,
        is_chunked,
        # Not as llhttp says: after an answer without a body it has forgotten the head.
        head.startswith(b"HTTP/1.1 ") and not is_last and (is_chunked or length is not None),
        first + kept,
        plain_is_raw=first + kept + b"\r\n" == head,
        json_bytes=int(json_lengths[0]) if json_lengths and _LENGTH.fullmatch(json_lengths[0]) else None,
    )


_FRAMING = (b"content-length", b"transfer-encoding", b"trailer")


def write_response(
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str],
    close: bool,
) -> tuple[bytes, bytes]:
    """Head and body of an answer of our own."""
    fields = {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}
    if close:
        fields["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {_phrase(status)}\r\n{lines}\r\n".encode(), body


def error_body(message: str) -> bytes:
    """In Triton's form of an error."""
    return json.dumps({"error": message}, separators=(",", ":")).encode() if message else b""


def write_error(status: int, message: str, *, headers: Mapping[str, str], close: bool) -> tuple[bytes, bytes]:
    """As write_response."""
    return write_response(status, error_body(message), headers=headers, close=close)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"


class BadChunks(Exception):
    """Not a chunked body that every server would read alike."""


class ChunkReader:
    """Reads a chunked body (RFC 9112, 7.1), strictly: no bare line ends, no spaces, sizes of 15 digits."""

    _SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
    _LINE_BYTES = 4096
    _TRAILER_BYTES = 16 * 1024
    # In one piece of data, of 256 KiB at most: each takes microseconds in which no other is served, and who has
    # something to say says more than 30 bytes in each of so many.
    _MOST_AT_ONCE = 8192

    def __init__(self) -> None:
        self.is_done = False
        self._line = b""
        self._left = 0
        self._in_trailers = False
        self._trailers = 0

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """What came of the body, and how many bytes of `data` belong to it. Raises BadChunks."""
        out, at = list[bytes](), 0
        while at < len(data) and not self.is_done:
            at = self._whole_chunks(data, at, out)
            if self._left > 2:  # the last two are the line end
                piece = data[at : at + self._left - 2]
                out.append(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at) + 1 or len(data)
            self._line += data[at:end]
            at = end
            if len(self._line) > self._LINE_BYTES:
                raise BadChunks("a line is too long")
            if self._line.endswith(b"\n"):
                line, self._line = self._line, b""
                self._take(line)
        return b"".join(out), at

    def _whole_chunks(self, data: bytes, at: int, out: list[bytes]) -> int:
        """Take the chunks that are here whole, as most are; returns where what is not begins."""
        if self._left or self._line or self._in_trailers:
            return at
        for _ in range(self._MOST_AT_ONCE):
            match = self._SIZE.match(data, at)
            if match is None:
                return at
            start = match.end()
            end = start + int(match[1], 16)
            if end == start or data[end : end + 2] != b"\r\n" or start - at > self._LINE_BYTES:
                return at
            out.append(data[start:end])
            at = end + 2
        raise BadChunks("its chunks are too small")

    def _take(self, line: bytes) -> None:
        if self._left:
            if line != b"\r\n":
                raise BadChunks("a chunk is longer than its size")
            self._left = 0
        elif self._in_trailers:
            self._take_trailer(line)
        else:
            match = self._SIZE.fullmatch(line)
            if match is None:
                raise BadChunks("a chunk's size is not plain hexadecimal")
            size = int(match[1], 16)
            self._left = size + 2 if size else 0
            self._in_trailers = not size

    def _take_trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if line == b"\r\n":
            self.is_done = True
        elif not _FIELD.fullmatch(line[:-2]) or not line.endswith(b"\r\n"):
            raise BadChunks("a trailer is not NAME: VALUE")
        elif self._trailers > self._TRAILER_BYTES:
            raise BadChunks("the trailers are too long")


class RequestChunks:
    """A chunked request's body, read by the grammar above and by llhttp, which must agree."""

    def __init__(self) -> None:
        self._mine, self._theirs = ChunkReader(), _Body()
        self._parser = HttpRequestParser(self._theirs)
        self._parser.feed_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")

    @property
    def is_done(self) -> bool:
        return self._mine.is_done

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """As ChunkReader.feed; raises BadRequest."""
        try:
            body, size = self._mine.feed(data)
            self._parser.feed_data(data[:size])
        except (BadChunks, HttpParserError) as error:
            raise BadRequest(f"the body is not chunked as it says: {error}") from error
        theirs, self._theirs.body = self._theirs.body, b""
        if theirs != body or self._theirs.is_done != self.is_done:
            raise BadRequest("a chunked body that can be read in two ways")
        return body, size


class _Body:
    def __init__(self) -> None:
        self.body = b""
        self.is_done = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_done = True
