"""The options of Berth's gRPC servers and channels, and how a server begins to listen."""

from typing import Any

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.runtime.process import starting

Options = list[tuple[str, int]]

# Of a connection that is open and has not begun to speak HTTP/2, and of one without a call.
_HANDSHAKE_SECONDS, IDLE_SECONDS = 10, 60


def keepalive(*, every_seconds: int, within_seconds: int) -> Options:
    """When a connection whose other end is gone without a word is given up: while a call is under way a ping is sent
    as often as that, and no answer within that ends the connection.

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


def server_options(
    *,
    message_bytes: int,
    metadata_bytes: int,
    connections: int,
    every_seconds: int,
    within_seconds: int,
    idle_seconds: int | None = IDLE_SECONDS,
) -> Options:
    """Every server is bounded in what it reads and in how many connections it keeps. Pings as for `keepalive`; a client
    may send one three times as often. `idle_seconds`: None keeps a connection without calls."""
    idle = [] if idle_seconds is None else [("grpc.max_connection_idle_ms", idle_seconds * 1000)]
    return [
        ("grpc.max_receive_message_length", message_bytes),
        *metadata(metadata_bytes),
        ("grpc.max_allowed_incoming_connections", connections),
        # Connections that are not used, or not even begun, are closed; clients connect anew by themselves.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        *idle,
        # Else each stream may send megabytes that are not read yet, as on a node's own network.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),  # two processes on one port are a mistake, not a load balancer
        *keepalive(every_seconds=every_seconds, within_seconds=within_seconds),
        ("grpc.http2.min_ping_interval_without_data_ms", every_seconds * 1000 // 3),
    ]


def channel_options(*more: tuple[str, int]) -> Options:
    """Of a channel within the cluster: no web proxy of the environment stands in between."""
    return [("grpc.enable_http_proxy", 0), *more]


def metadata(most_bytes: int) -> Options:
    """The soft limit as large as the hard one: by default gRPC refuses some of what is between them by chance."""
    return [("grpc.max_metadata_size", most_bytes), ("grpc.absolute_max_metadata_size", most_bytes)]


async def listen_on(server: grpc.aio.Server, listen: Endpoint, *, flag: str, credentials: Any = None) -> int:
    """Start a server; gives its port. Raises CannotStart where the port is taken."""
    with starting(flag, listen):
        try:
            port = (
                server.add_insecure_port(str(listen))
                if credentials is None
                else server.add_secure_port(str(listen), credentials)
            )
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if not port:
            raise OSError("address in use")
    await server.start()
    return port
