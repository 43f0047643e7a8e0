"""How two joined connections end, and a client that goes while the gateway takes it, without a socket."""

import asyncio
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from proxy.sidecar import gateway as gateway_module
from proxy.sidecar.gateway import GatewayAccess, NodeGateway
from proxy.sidecar.port import Port, _Client
from proxy.transport import tunnel as splice
from proxy.transport.tunnel import Tunnel, Watermark
from proxy.wire.preamble import ACCEPTED, Kind


class Wire(asyncio.Transport):
    """One connection, which keeps what becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.ends, self.reads = b"", list[str](), True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return bool(self.ends)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def write(self, data: Any) -> None:
        self.said += data

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


def reset(wire: Wire) -> None:
    wire.ends.append("reset")


@pytest.fixture(autouse=True)
def ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "reset", reset)
    monkeypatch.setattr(gateway_module, "reset", reset)


def joined() -> tuple[Wire, Wire]:
    """A client and its gateway, whose answer has begun."""
    client, gateway = Wire(), Wire()
    Tunnel(client, gateway, Watermark(), unanswered=None, ended=lambda: None)
    gateway.protocol.data_received(b"answer")
    return client, gateway


async def test_an_answer_that_was_said_to_its_end_is_no_broken_one_whatever_comes_after() -> None:
    """The gateway resets a client that goes on talking: the answer is whole all the same."""
    client, gateway = joined()
    gateway.protocol.eof_received()
    gateway.protocol.connection_lost(ConnectionResetError())
    assert (client.said, client.ends) == (b"answer", ["closed"])
    client.protocol.connection_lost(None)


async def test_nothing_more_is_read_for_a_gateway_that_has_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client takes what there is first; for so long it could send for nothing, however fast."""
    untaken = 10
    monkeypatch.setattr(splice, "unsent_bytes", lambda _: untaken)
    client, gateway = joined()
    assert client.reads
    gateway.protocol.connection_lost(ConnectionResetError())
    assert (client.reads, client.ends) == (False, [])
    client.protocol.connection_lost(None)


@pytest.mark.parametrize("has_finished", [False, True])
async def test_the_gateway_of_a_client_that_is_gone_is_left_at_once(has_finished: bool) -> None:
    client, gateway = joined()
    if has_finished:
        gateway.protocol.eof_received()
    client.protocol.connection_lost(None)
    assert gateway.ends == ["reset"]


async def test_a_client_that_goes_just_as_the_gateway_takes_it_is_reset_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway has its first bytes, and nobody would ever end that connection."""
    target, asked = Wire(), asyncio.Event()

    async def create_connection(factory: Any, *_: object) -> None:
        target.protocol = factory()
        target.protocol.connection_made(target)
        asked.set()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    way, watermark = NodeGateway(), Watermark()
    way.access = GatewayAccess(Endpoint("127.0.0.1", 1), bytes(16))
    port = Port(Kind.REST, way, watermark, most=1, what="--http-listen")
    client, wire = _Client(port), Wire()
    wire.get_extra_info = lambda *_: None  # type: ignore[method-assign]
    client.connection_made(wire)
    client.buffer_updated(1)
    task = client._task
    assert task is not None
    await asked.wait()
    target.protocol.data_received(ACCEPTED)
    client.leave()
    await asyncio.wait([task], timeout=20)
    assert (target.ends, wire.ends, len(watermark)) == (["reset"], ["aborted"], 0)
