"""The cluster's DNS, as far as Berth needs it: the addresses of Services, over UDP.

A name that a pod looks up comes with the domains of its resolv.conf one after the other, as kubelet writes it: only
`SERVICE.NAMESPACE.svc.cluster.local` is one that there is.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from types import TracebackType
from typing import cast

DOMAIN = "cluster.local"
PORT = 53
_HEADER = struct.Struct(">6H")
_QUESTION = struct.Struct(">2H")
_RECORD = struct.Struct(">3HIH")
_ADDRESS, _INTERNET = 1, 1
_ANSWER, _NO_SUCH_NAME = 0x8580, 3  # an answer, authoritative, recursion desired and available
_POINTER = 0xC000 | _HEADER.size
_TTL_SECONDS = 5


class Names(asyncio.DatagramProtocol):
    """Use as an async context manager on a bound UDP socket."""

    def __init__(self, bound: socket.socket, address_of: Callable[[str, str], Awaitable[str | None]]) -> None:
        """`address_of(namespace, service)`: its cluster IP; None: there is none."""
        self._socket, self._address_of = bound, address_of
        self._transport: asyncio.DatagramTransport | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Names":
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transport is not None:
            self._transport.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.create_task(self._respond(data, addr))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _respond(self, data: bytes, client: tuple[str, int]) -> None:
        name, _ = question(data)
        service = service_of(name)
        found = await self._address_of(*service) if service else None
        assert self._transport is not None
        self._transport.sendto(answer(data, found), client)


def service_of(name: str) -> tuple[str, str] | None:
    """(namespace, name) of the Service; None: the name is none's."""
    labels = name.lower().removesuffix(f".svc.{DOMAIN}").split(".")
    return (labels[1], labels[0]) if len(labels) == 2 and name.lower().endswith(f".svc.{DOMAIN}") else None


def question(data: bytes) -> tuple[str, int]:
    """A query's name and type, of RFC 1035 (4.1.2). Raises what a garbled one raises."""
    labels, at = [], _HEADER.size
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode())
        at += 1 + length
    kind, _ = _QUESTION.unpack_from(data, at + 1)
    return ".".join(labels), kind


def answer(data: bytes, address: str | None) -> bytes:
    """What a query is answered: a Service has one address, and none of another kind."""
    name, kind = question(data)
    asked = data[_HEADER.size : _HEADER.size + len(name) + 2 + _QUESTION.size]
    record = b""
    if address is not None and kind == _ADDRESS:
        packed = IPv4Address(address).packed
        record = _RECORD.pack(_POINTER, _ADDRESS, _INTERNET, _TTL_SECONDS, len(packed)) + packed
    flags = _ANSWER | (_NO_SUCH_NAME if address is None else 0)
    identity = int.from_bytes(data[:2], "big")
    return _HEADER.pack(identity, flags, 1, int(bool(record)), 0, 0) + asked + record
