"""Socket options of both ends: small writes at once, and a peer that is gone noticed within a minute."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

_IDLE_SECONDS, _INTERVAL_SECONDS, _PROBES = 30, 10, 3
# Nothing taken of what was sent for this long: the peer is gone, or as good as.
_UNTAKEN_MS = 300_000
# socket(7), SO_LINGER: on, for no seconds; what is closed then is reset.
_NO_LINGER = struct.pack("ii", 1, 0)


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


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What was written and has not reached the peer: in the process, and (tcp(7), SIOCOUTQ) in the system."""
    size, sock = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return size
    return size + int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


def reset(transport: asyncio.Transport) -> None:
    """End it at once, and so that the peer takes it for broken off (RFC 9293, 3.9.1, ABORT): after an end like any other it
    could take this for a client that has said all it wants to, and still waits."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0 and sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # its peer has ended it already
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
