"""Which request headers and metadata go on to Triton, and which answers come back. Pure."""

from collections.abc import Iterable, Mapping

# RFC 9110, 7.6.1, and what the proxy sets itself.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
    }
)
# What Triton obeys as control: keys of restricted APIs, ORCA (server-wide metrics in an answer),
# SageMaker and Vertex AI redirects.
_CONTROL = (
    "berth-",
    "triton-grpc-protocol-",
    "endpoint-load-metrics-format",
    "x-vertex-ai-",
    "x-amzn-sagemaker-",
)


def is_forwarded(name: str) -> bool:
    """Whether a client's header goes on to Triton."""
    lower = name.lower()
    return lower not in _HOP_BY_HOP and not lower.startswith(_CONTROL)


def request_headers(client: Iterable[tuple[str, str]], keys: Mapping[str, str]) -> list[tuple[str, str]]:
    """The client's headers without control, with the node's keys."""
    named = {
        token.strip().lower()
        for name, value in client
        if name.lower() == "connection"
        for token in value.split(",")
    }
    kept = [(n, v) for n, v in client if is_forwarded(n) and n.lower() not in named]
    return [*kept, *keys.items()]


def response_headers(triton: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Triton's headers without those of the connection."""
    return [(name, value) for name, value in triton if name.lower() not in _HOP_BY_HOP]


def request_metadata(
    client: Iterable[tuple[str, str | bytes]], keys: Mapping[str, str]
) -> list[tuple[str, str | bytes]]:
    """gRPC metadata without control, with the node's keys. gRPC's own headers are not in it."""
    reserved = ("grpc-", ":", "user-agent", "content-type")
    kept = [(n, v) for n, v in client if is_forwarded(n) and not n.lower().startswith(reserved)]
    return [*kept, *keys.items()]
