"""Sockets that listen, made without the event loop: the threads in which it looks names up stay as long as it does."""

import socket

from berth.contract.endpoint import Endpoint

_BACKLOG = 4096


def listening_sockets(
    listen: Endpoint, *, backlog: int = _BACKLOG, share_port: bool = False
) -> list[socket.socket]:
    """One for each address of the host. `share_port`: with other processes' sockets. Raises OSError."""
    found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            one = socket.socket(family, socket.SOCK_STREAM)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share_port)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(backlog)
            one.setblocking(False)
    except OSError:
        for one in made:
            one.close()
        raise
    return made
