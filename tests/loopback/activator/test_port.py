"""Who is let in at a model's port, and who waits at it unread until its address is told."""

import asyncio
import errno
import math
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import uvloop

from proxy.activator.port import PendingClients, Port
from tests.fakes.eventually import until
from tests.loopback.activator.conftest import free_port

HERE = "127.0.0.1"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Gate:
    """A port, and who is known."""

    def __init__(self, pending_clients: PendingClients) -> None:
        self.known: set[str] = set()
        self.pending_clients = pending_clients
        self.clients: list[asyncio.StreamWriter] = []
        self.made = 0
        self.port = Port(self._make, self.known.__contains__, pending_clients)

    def _make(self) -> Echo:
        self.made += 1
        return Echo()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HERE, self.port.number)
        self.clients.append(writer)
        return reader, writer


@asynccontextmanager
async def gate(pending_clients: PendingClients | None = None) -> AsyncIterator[Gate]:
    one = Gate(PendingClients() if pending_clients is None else pending_clients)
    await one.port.open(HERE, free_port())
    try:
        yield one
    finally:
        one.port.close()
        # Also those of a test that has failed: what is left open is blamed on a later one.
        for client in one.clients:
            client.close()


def run(factory: Callable[[], Any], main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


async def ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(20):
        with suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize("factory", LOOPS)
def test_who_is_known_a_moment_later_has_lost_nothing(factory: Any) -> None:
    async def main() -> None:
        async with gate() as one:
            reader, writer = await one.connect()
            writer.write(b"first")
            await until(lambda: len(one.pending_clients) == 1)
            await asyncio.sleep(0.1)
            assert (one.made, len(one.pending_clients)) == (0, 1)
            writer.write(b" words")
            one.known.add(HERE)
            async with asyncio.timeout(20):
                assert await reader.readexactly(11) == b"first words"
            assert (one.made, one.port.refused, len(one.pending_clients)) == (1, 0, 0)

    run(factory, main())


@pytest.mark.parametrize("factory", LOOPS)
def test_words_that_came_with_the_connection_are_not_lost(factory: Any) -> None:
    """On a busy machine they are there before the connection is looked at."""

    async def main() -> None:
        async with gate() as one:
            with socket.create_connection((HERE, one.port.number)) as client:
                client.sendall(b"first words")
                await until(lambda: len(one.pending_clients) > 0)
                await asyncio.sleep(0.1)
                one.known.add(HERE)
                client.setblocking(False)
                async with asyncio.timeout(20):
                    assert await asyncio.get_running_loop().sock_recv(client, 100) == b"first words"

    run(factory, main())


@pytest.mark.parametrize("factory", LOOPS)
def test_who_stays_a_stranger_is_refused_unread(factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.activator.port._UNKNOWN_SECONDS", 0.5)

    async def main() -> None:
        async with gate() as one:
            began = time.monotonic()
            reader, writer = await one.connect()
            writer.write(b"x" * 1000)
            await ended(reader)
            # uvloop's clock counts whole milliseconds.
            assert time.monotonic() - began >= 0.499
            assert (one.made, one.port.refused, len(one.pending_clients)) == (0, 1, 0)

    run(factory, main())


async def test_while_nobody_tells_whose_an_address_is_strangers_wait_for_who_will(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.activator.port._UNKNOWN_SECONDS", 0.3)
    announced_at: float | None = None

    def connected_for() -> float | None:
        return None if announced_at is None else time.monotonic() - announced_at

    async with gate(PendingClients(connected_for=connected_for)) as one:
        reader, _ = await one.connect()
        await until(lambda: len(one.pending_clients) == 1)
        await asyncio.sleep(0.8)
        assert len(one.pending_clients) == 1
        # Who tells from now on has as long for it as ever.
        announced_at = time.monotonic()
        await ended(reader)
        assert time.monotonic() - announced_at >= 0.3


async def test_nobody_waits_for_ever_for_who_might_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.activator.port._DISCONNECTED_SECONDS", 0.5)
    async with gate(PendingClients(connected_for=lambda: None)) as one:
        began = time.monotonic()
        reader, _ = await one.connect()
        await ended(reader)
        assert time.monotonic() - began >= 0.5
        assert (one.port.refused, len(one.pending_clients)) == (1, 0)


@pytest.mark.parametrize(
    ("announced", "seconds", "is_enough"),
    [
        (math.inf, 4.9, False),
        (math.inf, 5.0, True),
        (4.9, 30.0, False),
        (5.0, 30.0, True),
        (None, 44.9, False),
        (None, 45.0, True),
        (0.0, 45.0, True),
    ],
)
def test_how_long_a_stranger_waits(announced: float | None, seconds: float, is_enough: bool) -> None:
    assert PendingClients(connected_for=lambda: announced).is_overdue(seconds) is is_enough


@pytest.mark.parametrize("factory", LOOPS)
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_strangers_that_have_gone_keep_no_place_and_ask_for_nothing(factory: Any, how: str) -> None:
    """Whoever tries again and again has one request, not as many as it has given up."""

    async def main() -> None:
        async with gate() as one:
            clients = [socket.create_connection((HERE, one.port.number)) for _ in range(20)]
            await until(lambda: len(one.pending_clients) == 20)
            for client in clients:
                client.sendall(b"x")
                if how == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if how == "half-close":
                    client.shutdown(socket.SHUT_WR)
                else:
                    client.close()
            await until(lambda: len(one.pending_clients) == 0)
            one.known.add(HERE)
            await asyncio.sleep(0.1)
            assert (one.made, one.port.refused, len(one.port.pending)) == (0, 0, 0)
            for client in clients:
                client.close()

    run(factory, main())


async def test_who_is_let_in_as_the_port_closes_is_not() -> None:
    one = Gate(PendingClients())
    one.known.add(HERE)
    with (
        socket.create_server((HERE, 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        one.port.let_in(accepted)
        client.setblocking(False)
        async with asyncio.timeout(20):
            assert await asyncio.get_running_loop().sock_recv(client, 100) == b""
    assert (one.made, one.port.refused) == (0, 1)


async def test_who_has_gone_as_it_is_let_in_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*announced: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fails)
    one, (here, there) = Gate(PendingClients()), socket.socketpair()
    one.port.let_in(here)
    await until(lambda: here.fileno() == -1 and not one.port._let_in)
    there.close()


async def test_without_a_descriptor_for_a_stranger_it_is_refused() -> None:
    class Sock:
        def dup(self) -> None:
            raise OSError(errno.EMFILE, "too many")

    one, sock = Gate(PendingClients()), cast(Any, Sock())
    one.port.add_pending(HERE, sock)
    assert (one.port.refused, len(one.pending_clients), len(one.port.pending)) == (1, 0, 0)


@pytest.mark.parametrize("factory", LOOPS)
def test_strangers_that_leave_and_ports_that_close_leave_nobody_waiting(factory: Any) -> None:
    async def main() -> None:
        async with gate() as one:
            for _ in range(20):
                _, writer = await one.connect()
                writer.close()
            buffered, _ = await one.connect()
            await until(lambda: len(one.pending_clients) > 0)
            one.known.add(HERE)  # too late: the port's model is not here any more
            one.port.close()
            assert len(one.pending_clients) == len(one.port.pending) == 0
            await ended(buffered)
            assert one.made == 0

    run(factory, main())


@pytest.mark.parametrize(("most", "most_each"), [(3, 64), (64, 3)])
async def test_strangers_have_no_more_room_than_their_own(most: int, most_each: int) -> None:
    async with gate(PendingClients(most, most_each)) as one:
        for _ in range(10):
            await one.connect()
        await until(lambda: (one.port.refused, len(one.pending_clients)) == (7, 3))
        one.known.add(HERE)
        reader, writer = await one.connect()
        writer.write(b"hi")
        async with asyncio.timeout(20):
            assert await reader.readexactly(2) == b"hi"
        # A stranger that is let in has left the pending_clients before its protocol is made.
        await until(lambda: one.made == 4)
        assert (one.port.refused, len(one.pending_clients)) == (7, 0)


def test_an_address_has_its_own_part_of_the_handshakes() -> None:
    pending_clients = PendingClients(most=4, most_each=2)
    assert [pending_clients.enter("10.0.0.1") for _ in range(3)] == [True, True, False]
    assert [pending_clients.enter("10.0.0.2") for _ in range(2)] == [True, True]
    assert not pending_clients.enter("10.0.0.3")
    pending_clients.leave("10.0.0.1")
    assert pending_clients.enter("10.0.0.3")
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"):
        pending_clients.leave(address)
    assert len(pending_clients) == 0
    assert pending_clients.enter("10.0.0.1")


def test_how_many_strangers_there_may_be() -> None:
    pending_clients = PendingClients()
    assert [pending_clients.enter("10.0.0.0") for _ in range(65)] == [True] * 64 + [False]
    others = [pending_clients.enter(f"10.0.1.{n % 64}") for n in range(961)]
    assert others == [True] * 960 + [False]


async def test_of_two_words_at_once_the_last_counts() -> None:
    """Every second the ports are looked at, beside what is told."""
    one = Gate(PendingClients())
    first, second = free_port(), free_port()
    await asyncio.gather(one.port.open(HERE, first), one.port.open(HERE, second))
    assert one.port.number == second
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HERE, first)
    await asyncio.gather(one.port.open(HERE, first), one.port.open(HERE, first))
    assert one.port.number == first
    await asyncio.gather(one.port.open(HERE, second), one.port.open(HERE, 0))
    assert one.port.number == 0
    for number in (first, second):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HERE, number)
