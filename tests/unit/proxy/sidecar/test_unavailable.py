"""What the sidecar says by itself: refusals, figures, health. No sockets."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.admin.prometheus import plain_text
from proxy.gateway.metrics import figures_metrics
from proxy.request.traffic import Figures
from proxy.sidecar.gateway import STALE_SECONDS, GatewayAccess, NodeGateway
from proxy.sidecar.metrics import exposition
from proxy.sidecar.unavailable import GrpcRefusal, Refusing, RestRefusal
from proxy.wire.h2.frames import MAX_STREAM_ID, ErrorCode, goaway
from proxy.wire.report import DRAIN, DRAINED, LEAVING, Report, read_report, says
from tests.fakes.data_plane import Wire


def busy_figures() -> Figures:
    figures = Figures(
        running=2, waiting=3, average_concurrency=2.5, requests_per_second=1e-9, model_ready=True
    )
    draw = random.Random(3)
    for code in ("200", "503", 'odd"\\\n'):
        for _ in range(20):
            figures.rest.answered(code, draw.expovariate(1))
    figures.grpc.answered("OK", 1000.0)
    figures.rest.received_bytes, figures.grpc.sent_bytes, figures.grpc.connections = 10**16, 7, 4
    return figures


@pytest.mark.parametrize("figures", [Figures(), busy_figures()])
def test_metrics_are_written_as_prometheus_own_library_writes_them(figures: Figures) -> None:
    written = exposition(figures, is_fresh=True).encode()
    assert sorted(written.splitlines()) == sorted(
        b"".join(plain_text(figures_metrics([({}, figures)]))).splitlines()
    )


def test_old_figures_are_reported_as_far_as_they_only_grow() -> None:
    text = exposition(busy_figures(), is_fresh=False)
    assert "berth_proxy_model_ready 0.0" in text
    assert 'berth_proxy_requests_total{code="200",protocol="rest"} 20.0' in text
    for gauge in ("running", "waiting", "connections", "queue_"):
        assert gauge not in text


def test_readiness_is_what_agent_and_gateway_say() -> None:
    now = [100.0]
    gateway = NodeGateway(clock=lambda: now[0])
    assert "has not named the node's gateway yet" in str(gateway.not_ready())
    gateway.access = GatewayAccess(Endpoint("h", 1), bytes(32))
    gateway.failure = "it cannot be reached"
    assert gateway.not_ready() == "no gateway: it cannot be reached"
    assert not gateway.record(b"nonsense\n")
    assert not gateway.record(DRAINED)
    assert not gateway.record(b'{"notReady":null,"figures":{"rest":1}}\n')
    assert gateway.not_ready() == "no gateway: it cannot be reached"
    assert gateway.record(Report("Triton is away", Figures().to_json()).to_line())
    assert gateway.not_ready() == "Triton is away"
    assert gateway.record(Report(None, Figures().to_json()).to_line())
    assert gateway.not_ready() is None
    gateway.withheld = "XID"
    assert gateway.not_ready() == "XID"
    gateway.withheld = None
    assert STALE_SECONDS == 3.0
    now[0] += STALE_SECONDS
    assert gateway.not_ready() is None
    now[0] += 0.001
    assert gateway.not_ready() == "no gateway: it cannot be reached"
    assert gateway.fresh_status() is None
    assert gateway.status is not None  # what it counted holds


def test_lines_are_read_as_they_were_written() -> None:
    told = Report("why", busy_figures().to_json())
    assert read_report(told.to_line()) == told
    assert (says(LEAVING, "leaving"), says(DRAIN, "drain"), says(DRAINED, "drained")) == (True, True, True)
    for line in (b"", b"[]\n", b'{"drain":1}\n', b'{"notReady":1,"figures":{}}', b"{" * 10_000, b"\xff"):
        assert read_report(line) is None
        assert not says(line, "drain")


HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"


def test_a_request_is_answered_once_its_head_is_whole() -> None:
    for cut in (*range(1, len(HEAD)), len(HEAD)):
        refusal = RestRefusal("no gateway")
        said = refusal.receive(HEAD[:cut])
        if cut < len(HEAD):
            assert said == b""
            said = refusal.receive(HEAD[cut:] + b"hello")
        assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert said.endswith(b'\r\n\r\n{"error": "no gateway"}')
        assert refusal.receive(HEAD) == b""
    assert RestRefusal("no").receive(b"HEAD / HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")


def test_a_head_without_end_is_not_kept() -> None:
    refusal, said = RestRefusal("no"), b""
    for _ in range(100):
        said += refusal.receive(b"x" * 1000)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert said.count(b"HTTP/1.1") == 1


def client(calls: int, *, body: bytes = b"") -> h2.connection.H2Connection:
    one = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    one.initiate_connection()
    for index in range(calls):
        stream = 2 * index + 1
        fields = [(":method", "POST"), (":path", "/s/M"), (":scheme", "http"), (":authority", "h")]
        one.send_headers(stream, [*fields, ("te", "trailers"), ("x", "y" * 20_000)], end_stream=not body)
        if body:
            one.send_data(stream, body)
    return one


LEAVES_NONE_OUT = goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR, "no gateway")


def hears(one: h2.connection.H2Connection, said: bytes) -> list[Any]:
    """By h2, which reads nothing more once it is told to go."""
    assert said.count(LEAVES_NONE_OUT) <= 1
    return list(one.receive_data(said.replace(LEAVES_NONE_OUT, b"")))


@pytest.mark.parametrize("body", [b"", b"abc"])
@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_every_call_gets_its_status_however_late_it_comes(size: int, body: bytes) -> None:
    one, refusal = client(3, body=body), GrpcRefusal("nö gateway")
    sent, said = one.data_to_send(), b""
    events: list[Any] = []
    for at in range(0, len(sent), size):
        answer = refusal.receive(sent[at : at + size])
        events += hears(one, answer)
        said += answer
        assert not refusal.is_complete
        answered = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
        assert refusal.is_leaving is bool(answered)
    assert said.count(LEAVES_NONE_OUT) == 1
    assert len(answered) == 3
    for event in answered:
        assert event.stream_ended is not None
        fields: dict[Any, Any] = dict(event.headers)
        assert (fields[":status"], fields["grpc-status"]) == ("200", "14")
        assert fields["grpc-message"] == "n%C3%B6 gateway"
    resets = [event for event in events if isinstance(event, h2.events.StreamReset)]
    assert len(resets) == (3 if body else 0)
    assert all(event.error_code == 0 for event in resets)
    (last,) = one.receive_data(refusal.end())
    assert refusal.is_complete
    assert isinstance(last, h2.events.ConnectionTerminated)
    assert (last.error_code, last.last_stream_id) == (0, 5)
    assert refusal.end() == refusal.receive(sent) == b""


def test_whoever_goes_on_asking_is_cut_off() -> None:
    """What is answered while a client hears that it is to go is bounded, too."""
    one, refusal = client(1), GrpcRefusal("no")
    said, asked = refusal.receive(one.data_to_send()), 0
    while not refusal.is_complete:
        asked += 1
        stream = 2 * asked + 1
        block = b"\0\0\0\1\5" + stream.to_bytes(4, "big")
        said = refusal.receive(block)
        assert asked < 100_000
    assert asked * len(block) < 256 * 1024
    assert said.endswith(
        goaway(stream, ErrorCode.ENHANCE_YOUR_CALM, "too much for a connection that is to end")
    )


async def test_a_client_has_time_to_hear_that_it_is_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Callable[[], object]]] = []
    loop = asyncio.get_running_loop()

    def call_later(seconds: float, do: Callable[[], object]) -> asyncio.TimerHandle:
        timers.append((seconds, do))
        return asyncio.TimerHandle(0, do, (), loop)

    monkeypatch.setattr(loop, "call_later", call_later)
    wire, one = Wire(), client(2)
    sent, second = one.data_to_send(), client(3).data_to_send()
    refusing = Refusing(wire, GrpcRefusal("no"), None)  # type: ignore[arg-type]
    refusing.data_received(sent)
    assert LEAVES_NONE_OUT in wire.sent
    assert not wire.ended
    began = len(timers)
    refusing.data_received(second[len(sent) :])  # it was on its way
    assert len(timers) == began  # and gives itself no more time
    seconds, end = timers[-1]
    assert seconds == 1
    end()
    assert wire.sent.endswith(goaway(5, ErrorCode.NO_ERROR, "no gateway"))
    assert (wire.ended, wire.aborted) == (True, False)
    refusing.data_received(second)
    timers[-1][1]()
    assert wire.aborted


def test_before_its_first_call_a_client_is_served_as_by_anybody() -> None:
    one, refusal = client(0), GrpcRefusal("no")
    one.ping(b"12345678")
    events = one.receive_data(refusal.receive(one.data_to_send()))
    kinds = {type(event) for event in events}
    assert {
        h2.events.RemoteSettingsChanged,
        h2.events.SettingsAcknowledged,
        h2.events.PingAckReceived,
    } <= kinds
    assert not refusal.is_complete


def http1() -> bytes:
    return HEAD


def large_frame() -> bytes:
    return client(0).data_to_send() + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"


def cut_block() -> bytes:
    return client(0).data_to_send() + b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\0\0\0\1\0\0\0\1"


def endless_block() -> bytes:
    more = b"\0\x40\0\x09\0\0\0\0\1" + bytes(0x4000)
    return client(0).data_to_send() + b"\0\0\1\1\0\0\0\0\1\x82" + more * 100


@pytest.mark.parametrize("make", [http1, large_frame, cut_block])
def test_what_is_no_http2_is_ended(make: Callable[[], bytes]) -> None:
    refusal = GrpcRefusal("no")
    said = refusal.receive(make())
    assert refusal.is_complete
    assert b"\x07\0\0\0\0\0" in said  # GOAWAY
    assert refusal.receive(b"more") == b""


def test_a_block_without_end_is_not_kept() -> None:
    refusal, sent = GrpcRefusal("no"), endless_block()
    for at in range(0, len(sent), 5000):
        refusal.receive(sent[at : at + 5000])
    assert refusal.is_complete
