"""The sockets of both ends."""

import socket

import pytest

from proxy.transport import tcp


class Transport:
    """With this socket, and so much in its own buffer."""

    def __init__(self, sock: socket.socket | None, buffered: int = 0) -> None:
        self._sock, self._buffered = sock, buffered

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._sock if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self._buffered


def test_a_peer_that_is_gone_is_noticed() -> None:
    with socket.socket() as sock:
        tcp.keep_alive(Transport(sock))  # type: ignore[arg-type]
        option = lambda name: sock.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option(socket.TCP_NODELAY)  # an answer waits for no other
        probed = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert 30 <= probed <= 60
        assert option(socket.TCP_KEEPCNT) > 1  # one packet may be lost
        assert 60_000 <= option(socket.TCP_USER_TIMEOUT) <= 600_000


def test_only_sockets_of_tcp_have_its_options() -> None:
    one, other = socket.socketpair()
    with one, other:
        tcp.keep_alive(Transport(one))  # type: ignore[arg-type]
    tcp.keep_alive(Transport(None))  # type: ignore[arg-type]
    if socket.has_ipv6:
        with socket.socket(socket.AF_INET6) as six:
            tcp.keep_alive(Transport(six))  # type: ignore[arg-type]
            assert six.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_has_not_reached_the_peer_is_counted_here_and_in_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sock:
        sock.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            transport = Transport(sock, 7)
            assert tcp.unsent_bytes(transport) == 7  # type: ignore[arg-type]
            sock.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while True:
                    sent += sock.send(bytes(65536))
            assert 7 < tcp.unsent_bytes(transport) <= 7 + sent  # type: ignore[arg-type]
    assert tcp.unsent_bytes(transport) == 7  # type: ignore[arg-type]
    assert tcp.unsent_bytes(Transport(None, 5)) == 5  # type: ignore[arg-type]
