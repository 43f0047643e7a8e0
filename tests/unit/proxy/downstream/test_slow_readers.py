"""Clients that do not take their answers: they may, until others wait for what that keeps in Triton."""

import time
from typing import Any

import pytest

from proxy.policy.model_facts import ModelFacts
from proxy.request.messages import INFER, STREAM_INFER, framed
from tests.fakes.data_plane import RestPair, own_replica, settle
from tests.fakes.grpc_peers import Both, Connect, request
from tests.unit.proxy.downstream.test_connection import OK, infer

MIB = 1024**2
KIB = 1024


@pytest.fixture(autouse=True)
def _rest_at_hand() -> Any:
    with RestPair.triton_at_hand():
        yield


def head(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size


EVENTS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Reader:
    """A REST client that takes what it is let, and the answer that Triton has for it."""

    def __init__(self, first: "Reader | None" = None, *, sent: bytes = infer(), **limits: Any) -> None:
        self.pair = (
            RestPair(replica=own_replica(**limits))
            if first is None
            else RestPair(downstream=first.pair.downstream)
        )
        self._first = first or self
        self._sent = sent

    async def ask(self) -> None:
        self.pair.client.data_received(self._sent)
        await settle()
        self.at = len(self._first.pair.tritons) - 1

    def begin(self, start: bytes) -> None:
        """Triton's answer begins; the client takes nothing."""
        self.pair.to_client.stall(self.pair.client)
        self._first.pair.tritons[self.at].data_received(start)

    async def more(self, data: bytes) -> None:
        """As much of it as is read."""
        wire = self._first.pair.to_triton[self.at]
        for at in range(0, len(data), 64 * KIB):
            if wire.paused or not wire.open:
                return
            self._first.pair.tritons[self.at].data_received(data[at : at + 64 * KIB])
            await settle()  # others have their turn

    @property
    def is_cut(self) -> bool:
        return not self.pair.to_client.open


async def test_nine_unread_answers_stop_their_model_for_ten_seconds_and_no_longer() -> None:
    """Data-plane D3: nine answers of 32 MiB that are not read kept a request of three bytes waiting until its time was up."""
    first = Reader(depth=9)
    readers = [first, *(Reader(first) for _ in range(8))]
    for one in readers:
        await one.ask()
    for one in readers:
        one.begin(head(32 * MIB))
        await one.more(bytes(MIB))
    small = Reader(first)
    await small.ask()
    downstream, now = first.pair.downstream, time.monotonic()
    assert (downstream.replica.admissions.running, downstream.replica.admissions.waiting) == (0, 1)
    for second in range(11):
        downstream.tick(now + second)
        assert not any(one.is_cut for one in readers)
    downstream.tick(now + 11)
    # One is enough: the next one in turn keeps no request waiting.
    assert [one.is_cut for one in readers].count(True) == 2
    assert downstream.replica.rest.codes == {"408": 2}
    await settle()
    first.pair.tritons[-1].data_received(OK)
    assert small.pair.to_client.sent == OK
    for second in range(12, 60):
        downstream.tick(now + second)
    assert [one.is_cut for one in readers].count(True) == 2


@pytest.mark.parametrize("others_wait", [False, True])
@pytest.mark.parametrize(("each_second", "lasts"), [(0, 11), (100 * KIB, 17), (300 * KIB, 60)])
async def test_a_slow_reader_gives_its_memory_up_for_others(
    *, others_wait: bool, each_second: int, lasts: int
) -> None:
    """Data-plane D3: as with uploads, ten seconds below the rate in all, and only those in which somebody waits."""
    slow = Reader(depth=9)
    await slow.ask()
    slow.begin(head(60 * MIB))
    await slow.more(bytes(MIB))
    downstream, now = slow.pair.downstream, time.monotonic()
    if others_wait:
        downstream.replica.admissions.bytes.limit_bytes = downstream.replica.admissions.bytes.used_bytes
        other = Reader(slow)
        await other.ask()
    until = None
    for second in range(60):
        downstream.tick(now + second)
        if slow.is_cut:
            until = second
            break
        slow.pair.to_client.drain(each_second)
        await slow.more(bytes(MIB))
    assert until == (None if not others_wait or lasts == 60 else pytest.approx(lasts, abs=2))


@pytest.mark.parametrize("others_wait", [False, True])
async def test_a_stream_of_events_that_is_not_read_gives_its_slot_up_for_others(others_wait: bool) -> None:
    """Data-plane D3: its slot is its as long as Triton has events for it, and so it was until request-timeout."""
    slow = Reader(sent=infer(b'{"text":"x"}', route="generate_stream"), limit=1, depth=9)
    await slow.ask()
    slow.begin(EVENTS)
    await slow.more(b"8000\r\n%b\r\n" % bytes(0x8000) * 64)
    downstream, now = slow.pair.downstream, time.monotonic()
    if others_wait:
        await Reader(slow).ask()
    for second in range(12):
        assert not slow.is_cut
        downstream.tick(now + second)
    assert slow.is_cut is others_wait
    await settle()
    assert downstream.replica.admissions.running == 1
    assert downstream.replica.admissions.waiting == 0


async def test_a_stream_of_few_events_that_is_read_lives_on_however_many_wait() -> None:
    slow = Reader(sent=infer(b'{"text":"x"}', route="generate_stream"), limit=1, depth=9)
    await slow.ask()
    slow.begin(EVENTS)
    slow.pair.to_client.flow()
    await Reader(slow).ask()
    downstream, now = slow.pair.downstream, time.monotonic()
    for second in range(250):
        await slow.more(b"2\r\nxx\r\n")
        downstream.tick(now + second)
    assert not slow.is_cut


ANSWER = framed(b"\x12" + b"\x80\x80\x80\x10" + bytes(32 * MIB))


def unread(both: Both, method: str, count: int) -> list[int]:
    """Calls whose answers of 32 MiB have begun, and whose client opens no window."""
    streams = [both.client.call(method) for _ in range(count)]
    for stream in streams:
        both.client.send(stream, framed(request()), end=method == INFER)
    both.exchange()
    for stream in streams:
        both.triton.begin(stream)
        for at in range(0, 128 * KIB, 16_000):  # what fits in the window that the gateway has announced
            both.triton.send(stream, ANSWER[at : at + min(16_000, 128 * KIB - at)])
            both.triton.exchange()
    return streams


def shut_windows(both: Both) -> None:
    both.client.h2.update_settings({4: 0})
    both.exchange()


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
@pytest.mark.parametrize("others_wait", [False, True])
async def test_grpc_answers_that_are_not_read_stop_their_model_for_ten_seconds(
    connect: Connect, method: str, others_wait: bool
) -> None:
    """Data-plane D3: five answers of 32 MiB that are not read kept a small call waiting until its time was up."""
    both = connect(depth=9)
    shut_windows(both)
    slow = unread(both, method, 5 if others_wait else 3)
    both.client.send(both.client.call(), framed(request()), end=True)
    both.exchange()
    admissions, now = both.pair.replica.admissions, time.monotonic()
    assert admissions.waiting == others_wait
    for second in range(11):
        both.pair.downstream.tick(now + second)
        both.exchange()
        assert not both.client.resets
    both.pair.downstream.tick(now + 11)
    both.exchange()
    assert (
        len(both.client.resets) == 2 * others_wait
    )  # one more than is one too many, as others cost something too
    if not others_wait:
        return
    assert set(both.client.resets.values()) == {11}  # which gRPC calls RESOURCE_EXHAUSTED
    assert both.pair.replica.grpc.codes == {"RESOURCE_EXHAUSTED": 2}
    assert set(both.client.resets) < set(slow)
    # Triton sends its answer to its end, which is read and dropped: then there is room.
    before = admissions.bytes.used_bytes
    for one in both.client.resets:
        both.triton.h2.reset_stream(both.triton.own(one))
    both.exchange()
    assert admissions.bytes.used_bytes < before
    assert admissions.waiting == 0


@pytest.mark.parametrize("others_wait", [False, True])
async def test_a_stream_whose_answers_are_not_read_gives_its_slots_up_for_others(
    connect: Connect, others_wait: bool
) -> None:
    """Data-plane D3: a message keeps its slot until it is answered, and was answered when its client took the ones before."""
    both = connect(limit=2, depth=9, facts=ModelFacts(is_decoupled=True))
    shut_windows(both)
    stream = both.client.call(STREAM_INFER)
    for _ in range(2):
        both.client.send(stream, framed(request()))
        both.exchange()
    both.triton.begin(stream)
    for _ in range(8):
        both.triton.send(stream, framed(b"\x12\xf8\x7c" + bytes(15_992)))
        both.triton.exchange()
    other = both.client.call()
    if others_wait:
        both.client.send(other, framed(request()), end=True)
        both.exchange()
    admissions, now = both.pair.replica.admissions, time.monotonic()
    assert (admissions.running, admissions.waiting) == (2, others_wait)
    for second in range(12):
        assert not both.client.resets
        both.pair.downstream.tick(now + second)
        both.exchange()
    assert (both.client.resets == {stream: 11}) is others_wait
    assert admissions.waiting == 0


@pytest.mark.parametrize("before", [0, 17])
@pytest.mark.parametrize("others_wait", [False, True])
async def test_a_grpc_client_that_reads_nothing_at_all(
    connect: Connect, *, others_wait: bool, before: int
) -> None:
    """Data-plane D3: its windows are wide open, and what is written to it stays in the sockets and here."""
    both = connect(depth=9)
    both.client.h2.update_settings({4: 2**30})
    both.client.h2.increment_flow_control_window(2**30)
    both.exchange()
    both.pair.to_client.stall(both.pair.client)
    for _ in range(before):  # answers that are over, and fill the sockets
        over = both.client.call()
        both.client.send(over, framed(request()), end=True)
        both.exchange()
        both.triton.answer(over, bytes(16_000))
        both.exchange()
    assert both.pair.client.is_writable is (before == 0)
    slow, other = both.client.call(), both.client.call()
    both.client.send(slow, framed(request()), end=True)
    both.pair.client.data_received(both.client.h2.data_to_send())
    both.exchange()
    both.triton.begin(slow)
    sent, own = 0, both.triton.own(slow)
    while (room := min(16_000, both.triton.h2.local_flow_control_window(own))) > 0:
        both.triton.send(slow, ANSWER[sent : sent + room])
        both.triton.exchange()
        sent += room
    assert sent < MIB
    admissions, now = both.pair.replica.admissions, time.monotonic()
    if others_wait:
        admissions.bytes.limit_bytes = admissions.bytes.used_bytes
        both.client.send(other, framed(request()), end=True)
        both.exchange()
        assert admissions.waiting == 1
    codes = dict(both.pair.replica.grpc.codes)
    for second in range(12):
        assert both.pair.replica.grpc.codes == codes
        both.pair.downstream.tick(now + second)
        both.triton.exchange()
    assert both.pair.replica.grpc.codes == codes | ({"RESOURCE_EXHAUSTED": 1} if others_wait else {})
