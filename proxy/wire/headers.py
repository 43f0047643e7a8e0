"""Which headers and metadata go on, in either direction. Pure."""

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
# What Triton treats as control: keys of restricted APIs, ORCA (server-wide metrics in an answer),
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
