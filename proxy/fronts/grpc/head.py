"""What one gRPC call asks for, decided from its headers alone. Pure, so that it can be looked up again."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.codecs import protobuf
from proxy.codecs.grpc_status import Refused, Status
from proxy.codecs.h2 import hpack
from proxy.codecs.headers import is_forwarded
from proxy.exchange.messages import AnyGuard, Guard, InferGuard, NameGuard
from proxy.exchange.model_facts import ModelFacts
from proxy.exchange.policy import SERVICE, Verdict, decide_rpc, unknown_model

INFER: Final = f"/{SERVICE}/ModelInfer"
STREAM_INFER: Final = f"/{SERVICE}/ModelStreamInfer"
STATISTICS: Final = f"/{SERVICE}/ModelStatistics"
MODEL_READY: Final = f"/{SERVICE}/ModelReady"

# RFC 9113, 8.2: no upper case, nothing but tokens; a value without NUL, CR, LF.
_NAME = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_BAD_VALUE = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_LENGTH = re.compile(rb"[0-9]{1,18}")
_PSEUDO = (b":method", b":scheme", b":path", b":authority")
# RFC 9113, 6.5.2: what a header counts in a list beside its characters; and what a deadline adds at most.
_OVERHEAD_BYTES = 32
_TIMEOUT_BYTES = len(b"grpc-timeout99999999m") + _OVERHEAD_BYTES
# A list that any server takes: C-core refuses some that are longer, and all of twice its length.
USUAL_LIST_BYTES: Final = 8192
_CONNECTION = (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")


class Malformed(Exception):
    """Not a request that HTTP/2 allows: the stream ends with PROTOCOL_ERROR."""


@dataclass(frozen=True, slots=True)
class CallHead:
    """`block`: the headers for Triton; `untimed_block`: the same without the client's deadline;
    `list_bytes`: how much a receiver counts them for."""

    method: str
    verdict: Verdict
    guard: Guard
    is_stream: bool
    is_counted: bool
    block: bytes
    untimed_block: bytes
    list_bytes: int
    timeout_seconds: float | None
    content_length: int | None
    encoding: str
    errors_as_status: bool
    refusal: Refused | None = None
    http_status: bytes | None = None
    # A ModelInfer without a deadline: what can be passed on in one go.
    is_usual: bool = False

    def block_with_timeout(self, seconds: float) -> bytes:
        """For a call that has waited: what is left of its deadline."""
        return with_timeout(self.untimed_block, seconds)


def with_timeout(block: bytes, seconds: float) -> bytes:
    """At most eight digits (grpc/doc/PROTOCOL-HTTP2.md)."""
    micros = max(1, round(seconds * 1e6))
    text = b"%du" % micros if micros < 10**8 else b"%dm" % min(micros // 1000, 10**8 - 1)
    return block + hpack.encode([(b"grpc-timeout", text)])


class HeadReader:
    """Reads heads for one model and one way of reaching Triton."""

    def __init__(
        self,
        own: protobuf.OwnModel,
        facts: Callable[[], ModelFacts],
        *,
        authority: str,
        keys: Mapping[str, str],
    ) -> None:
        self._guards: dict[str, Guard] = {
            INFER: InferGuard(own, facts),
            STREAM_INFER: InferGuard(own, facts),
            STATISTICS: NameGuard(own, _not_available, fill=True),
        }
        self._named = NameGuard(own, _not_found)
        self._authority = authority.encode()
        self._keys = [(name.lower().encode(), value.encode()) for name, value in keys.items()]
        self._secret = frozenset(name for name, _ in self._keys)

    def read(self, headers: Sequence[hpack.Header]) -> CallHead:
        """Raises Malformed."""
        pseudo, regular = _split(headers)
        length = _content_length(regular)
        http_status = _why_not_grpc(pseudo, regular)
        path = pseudo[b":path"]
        method = path.decode("latin-1")
        verdict = Verdict.DENY if http_status else decide_rpc(method)
        kept, timeout, encoding, refusal = self._metadata(regular)
        sent = self._headers(path, kept) if verdict is Verdict.ALLOW else []
        block = hpack.encode(sent, secret=self._secret)
        list_bytes = sum(len(name) + len(value) + _OVERHEAD_BYTES for name, value in sent)
        return CallHead(
            method=method,
            verdict=verdict,
            guard=self._guards.get(method, self._named) if verdict is Verdict.ALLOW else AnyGuard(),
            is_stream=method == STREAM_INFER,
            is_counted=method in (INFER, STREAM_INFER),
            block=block if timeout is None else with_timeout(block, timeout),
            untimed_block=block,
            list_bytes=list_bytes + (0 if timeout is None else _TIMEOUT_BYTES),
            timeout_seconds=timeout,
            content_length=length,
            encoding=encoding,
            errors_as_status=any(n == b"triton_grpc_error" and v == b"true" for n, v in regular),
            refusal=refusal,
            http_status=http_status,
            is_usual=method == INFER
            and timeout is None
            and refusal is None
            and http_status is None
            and list_bytes <= USUAL_LIST_BYTES,
        )

    def _metadata(
        self, regular: Sequence[hpack.Header]
    ) -> tuple[list[hpack.Header], float | None, str, Refused | None]:
        kept: list[hpack.Header] = []
        timeout: float | None = None
        encoding, refusal = "identity", None
        for name, value in regular:
            if name == b"grpc-timeout":
                match = _TIMEOUT.fullmatch(value)
                if match is None:
                    refusal = Refused(
                        Status.INTERNAL, "grpc-timeout is not a number of 1 to 8 digits with a unit"
                    )
                else:
                    timeout = int(match[1]) * _UNITS[match[2]]
            elif name == b"grpc-encoding":
                encoding = value.decode("latin-1")  # messages go on unpacked
            elif name not in (b"te", b"content-type", b"content-length") and is_forwarded(
                name.decode("latin-1")
            ):
                kept.append((name, value))
        return kept, timeout, encoding, refusal

    def _headers(self, path: bytes, kept: list[hpack.Header]) -> list[hpack.Header]:
        return [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", self._authority),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *kept,
            *self._keys,
        ]


def require_trailers(headers: Sequence[hpack.Header]) -> None:
    """A client's trailers are allowed and go no further. Raises Malformed."""
    for name, value in headers:
        if name.startswith(b":") or not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise Malformed(f"trailer {name!r}")


def _split(headers: Sequence[hpack.Header]) -> tuple[dict[bytes, bytes], list[hpack.Header]]:
    pseudo: dict[bytes, bytes] = {}
    regular: list[hpack.Header] = []
    for name, value in headers:
        if _BAD_VALUE.search(value):
            raise Malformed(f"the value of {name!r}")
        if name.startswith(b":"):
            if regular or name in pseudo or name not in _PSEUDO:
                raise Malformed(f"pseudo-header {name!r}")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name) or name in _CONNECTION or (name == b"te" and value != b"trailers"):
            raise Malformed(f"header {name!r}")
        regular.append((name, value))
    if not pseudo.get(b":method") or not pseudo.get(b":scheme") or not pseudo.get(b":path"):
        raise Malformed("a request needs :method, :scheme and :path")
    return pseudo, regular


def _content_length(regular: Sequence[hpack.Header]) -> int | None:
    values = [value for name, value in regular if name == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not _LENGTH.fullmatch(values[0]):
        raise Malformed("content-length")
    return int(values[0])


def _why_not_grpc(pseudo: Mapping[bytes, bytes], regular: Sequence[hpack.Header]) -> bytes | None:
    """The HTTP status for what is no gRPC call (grpc/doc/PROTOCOL-HTTP2.md)."""
    if pseudo[b":method"] != b"POST":
        return b"405"
    types = [value for name, value in regular if name == b"content-type"]
    if len(types) != 1 or types[0].partition(b";")[0].strip() not in (
        b"application/grpc",
        b"application/grpc+proto",
    ):
        return b"415"
    return None


def _not_found(name: bytes) -> Refused:
    return Refused(Status.NOT_FOUND, unknown_model(name.decode(errors="replace")))


def _not_available(name: bytes) -> Refused:
    shown = name.decode(errors="replace")
    return Refused(Status.INVALID_ARGUMENT, f"requested model '{shown}' is not available")
