"""HTTP/2 frames as bytes, and the numbers of RFC 9113."""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
DEFAULT_WINDOW: Final = 65_535
DEFAULT_MAX_FRAME: Final = 16_384
MAX_WINDOW: Final = 2**31 - 1
MAX_FRAME: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

# Length (24 bits, in two parts), type, flags, stream.
_HEAD = struct.Struct(">HBBBI")
read_head, pack_head = _HEAD.unpack_from, _HEAD.pack
read_u32 = struct.Struct(">I").unpack_from


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ConnectionFailed(Exception):
    """The peer has broken the protocol: GOAWAY with this code, and the connection ends."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFailed(Exception):
    """One stream is in error: RST_STREAM with this code; the connection goes on."""

    def __init__(self, stream: int, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.stream, self.code = stream, code


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def headers(stream: int, block: bytes, *, end_stream: bool, max_frame: int = DEFAULT_MAX_FRAME) -> bytes:
    """A header block, cut into CONTINUATION frames where it is longer than a frame may be."""
    end = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return head(len(block), HEADERS, END_HEADERS | end, stream) + block
    pieces = [block[at : at + max_frame] for at in range(0, len(block), max_frame)]
    frames = [head(len(pieces[0]), HEADERS, end, stream) + pieces[0]]
    frames += [head(len(piece), CONTINUATION, 0, stream) + piece for piece in pieces[1:-1]]
    frames.append(head(len(pieces[-1]), CONTINUATION, END_HEADERS, stream) + pieces[-1])
    return b"".join(frames)


def settings(values: Mapping[Setting, int]) -> bytes:
    payload = b"".join(struct.pack(">HI", name, value) for name, value in values.items())
    return head(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK: Final = head(0, SETTINGS, ACK, 0)


def reset(stream: int, code: ErrorCode) -> bytes:
    return head(4, RST_STREAM, 0, stream) + struct.pack(">I", code)


def ping_ack(payload: bytes) -> bytes:
    return head(8, PING, ACK, 0) + payload


def goaway(last_stream: int, code: ErrorCode, message: str = "") -> bytes:
    text = message.encode()[:256]
    return head(8 + len(text), GOAWAY, 0, 0) + struct.pack(">II", last_stream, code) + text


def window_update(stream: int, size: int) -> bytes:
    return head(4, WINDOW_UPDATE, 0, stream) + struct.pack(">I", size)
