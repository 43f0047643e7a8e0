"""Socket options of both ends: small writes at once, and a peer that is gone noticed within a minute."""

import asyncio
import socket

_IDLE_SECONDS, _INTERVAL_SECONDS, _PROBES = 30, 10, 3
# Nothing taken of what was sent for this long: the peer is gone, or as good as.
_UNTAKEN_MS = 300_000


def keep_alive(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _IDLE_SECONDS),
        (socket.TCP_KEEPINTVL, _INTERVAL_SECONDS),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, _UNTAKEN_MS),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
