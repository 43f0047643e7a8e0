"""When a gRPC connection whose other end is gone without a word is given up."""


def keepalive(*, every_seconds: int, within_seconds: int) -> list[tuple[str, int]]:
    """Channel arguments: while a call is under way a ping as often as that, and no answer within that ends the connection.

    gRPC's own defaults are for busy streams: after two pings without data the next waits, and a ping has 60 s for its
    answer (`GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA`, `GRPC_ARG_PING_TIMEOUT_MS`). On a quiet one a peer that was gone
    was believed in for more than a minute.
    """
    return [
        ("grpc.keepalive_time_ms", every_seconds * 1000),
        ("grpc.keepalive_timeout_ms", within_seconds * 1000),
        ("grpc.http2.ping_timeout_ms", within_seconds * 1000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
