"""Flow control between two hops: whatever is sent arrives, whatever ends gives its windows back."""

import gzip
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h2.connection
import h2.events
import h2.exceptions
import h2.stream
import pytest

from proxy.downstream.grpc.call import OPEN_BYTES, Stage
from proxy.request.messages import INFER, STREAM_INFER, framed
from proxy.wire.h2 import frames
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.receiving import CONNECTION_WINDOW
from proxy.wire.h2.sending import MAX_FRAME
from proxy.wire.h2.stream import FIRST_WINDOW
from tests.fakes.data_plane import GrpcPair, Wire
from tests.fakes.grpc_peers import Both, Connect, Triton, request


def send_what_may_be_sent(
    both: Both, todo: dict[int, bytes], *, most: int = 16_384, pad: int | None = None
) -> bool:
    """A step of every upload, as far as its windows let it; False if none could move."""
    moved, padding = False, 0 if pad is None else pad + 1  # which windows count as data
    for stream, data in list(todo.items()):
        size = min(both.client.h2.local_flow_control_window(stream) - padding, most, len(data))
        if size > 0:
            both.client.h2.send_data(stream, data[:size], end_stream=size == len(data), pad_length=pad)
            todo[stream] = data[size:]
            if size == len(data):
                del todo[stream]
            moved = True
    return moved


def answer_what_has_ended(both: Both, answered: set[int]) -> bool:
    ready = both.triton.ended - answered
    for stream in ready:
        both.triton.answer(stream, b"ok")
    answered |= ready
    return bool(ready)


def upload(both: Both, count: int, message: bytes) -> int:
    """So many calls at once with a message each; how many are answered."""
    todo = {both.client.call(): message for _ in range(count)}
    answered: set[int] = set()
    idle = arrived = 0
    while idle < 3:
        moved, before = send_what_may_be_sent(both, todo), arrived
        both.exchange(1)
        arrived = sum(map(len, both.triton.data.values()))
        idle = 0 if answer_what_has_ended(both, answered) or moved or arrived > before else idle + 1
    return sum(both.client.status(stream) == 0 for stream in both.client.headers)


@pytest.mark.parametrize(
    ("count", "size", "limit"),
    [
        (4, 600_000, 1),
        (8, 600_000, 2),
        (8, 3_000_000, 2),
        (16, 1_000_000, 4),
        (60, 70_000, 1),
        (40, 250_000, 1),
        (5, 1_500_000, 0),
        (200, 132_000, 3),
    ],
)
async def test_calls_that_wait_leave_room_for_those_that_run(
    connect: Connect, count: int, size: int, limit: int
) -> None:
    both = connect(limit=limit, depth=1000)
    assert upload(both, count, framed(request(size=size))) == count


@pytest.mark.parametrize("seed", range(12))
async def test_any_number_of_calls_of_any_size_under_any_limit_succeeds(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    count, limit = rng.randrange(2, 80), rng.choice([0, 1, 2, 7])
    size = rng.randrange(1, 12_000_000 // count)
    both = connect(limit=limit, depth=1000)
    assert upload(both, count, framed(request(size=size))) == count, (count, size, limit)


def require_balance(both: Both) -> None:
    """What a peer may send, what it is owed, and what is here: together the window, always."""
    codecs = [both.pair.client.codec, *(upstream.codec for upstream in both.pair.tritons)]
    for codec in codecs:
        for stream in codec.streams.values():
            assert stream.receive_left + stream.owed + stream.held == stream.window
            assert min(stream.receive_left, stream.owed, stream.held) >= 0
    held = sum(stream.owner.buffered_bytes for stream in both.pair.client.codec.streams.values())
    assert both.pair.buffered_bytes >= held


def require_whole(peer: h2.connection.H2Connection, codec: H2Codec[Any, Any]) -> None:
    """By the peer's own account: all that it sent was given back, or is about to be."""
    assert peer.outbound_flow_control_window == codec.receive_left
    assert codec.receive_left > CONNECTION_WINDOW // 2 > MAX_FRAME


_MAY_SEND = (h2.stream.StreamState.OPEN, h2.stream.StreamState.HALF_CLOSED_REMOTE)


class History:
    """A client and a Triton that do anything that the protocol allows, in any order."""

    def __init__(self, both: Both, rng: random.Random) -> None:
        self.both, self.rng = both, rng
        self.todo: dict[int, bytes] = {}
        self.open: set[int] = set()
        self.begun: set[int] = set()
        self.slow: set[int] = set()
        self.calls = 0
        client = both.client
        taken = client.take

        def take(event: object) -> None:
            if isinstance(event, h2.events.DataReceived) and event.stream_id in self.slow:
                client.h2.increment_flow_control_window(event.flow_controlled_length)  # of the connection
                return
            if isinstance(event, h2.events.StreamReset | h2.events.StreamEnded):
                self.open.discard(event.stream_id)
                self.todo.pop(event.stream_id, None)
            taken(event)

        client.take = take  # type: ignore[method-assign]

    def step(self) -> None:
        often, seldom = (self.call, self.send, self.part), (self.send, self.leave, self.answer)
        rare = (self.break_off, self.tick, self.too_late, self.stall, self.lose_triton)
        act: Callable[[], None] = self.rng.choice((*often, *often, *often, *seldom, *seldom, *rare))
        act()
        if self.rng.random() < 0.7:
            self.both.exchange(1)
        require_balance(self.both)

    def call(self) -> None:
        rng = self.rng
        if len(self.open) > 12:
            return
        method = rng.choice([INFER, INFER, STREAM_INFER])
        packed = rng.random() < 0.3
        messages = b""
        for _ in range(rng.randrange(1, 5) if method == STREAM_INFER else 1):
            size = rng.choice([0, 3, 5000, 100_000, 400_000, 900_000])
            message = request(rng.choice(["own", "own", "own", "other"]), size=size)
            messages += (
                b"\x01" + len(body := gzip.compress(message)).to_bytes(4) + body
                if packed
                else framed(message)
            )
        more = {"grpc_encoding": "gzip"} if packed else {}
        if rng.random() < 0.3:
            more["grpc_timeout"] = rng.choice(["1H", "1m"])
        stream = self.both.client.call(method, **more)
        self.todo[stream] = messages
        self.calls += 1
        self.open.add(stream)
        if rng.random() < 0.3:
            self.slow.add(stream)

    def send(self) -> None:
        most, pad = self.rng.choice([1, 9, 5000, 16_000]), self.rng.choice([None, None, 0, 200])
        send_what_may_be_sent(self.both, self.todo, most=most, pad=pad)

    def leave(self) -> None:
        if self.open:
            stream = self.rng.choice(sorted(self.open))
            self.both.client.h2.reset_stream(stream, 8)
            self.open.discard(stream)
            self.todo.pop(stream, None)

    def running(self) -> int | None:
        triton = self.both.triton
        ids = [id for id in triton.calls if id not in triton.resets and triton.own(id) in triton.h2.streams]
        ids = [id for id in ids if triton.h2.streams[triton.own(id)].state_machine.state in _MAY_SEND]
        return self.rng.choice(ids) if ids else None

    def part(self) -> None:
        stream = self.running()
        if stream is None:
            return
        sender = self.both.triton.h2
        id = self.both.triton.own(stream)
        if stream not in self.begun:
            self.begun.add(stream)
            sender.send_headers(id, [(":status", "200"), ("content-type", "application/grpc")])
        for _ in range(self.rng.randrange(1, 20)):
            size = min(sender.local_flow_control_window(id), self.rng.choice([1, 16_000]))
            if size > 0:
                sender.send_data(id, b"x" * size)

    def answer(self) -> None:
        stream = self.running()
        if stream is not None:
            headers = (
                [] if stream in self.begun else [(":status", "200"), ("content-type", "application/grpc")]
            )
            triton = self.both.triton
            triton.h2.send_headers(triton.own(stream), [*headers, ("grpc-status", "0")], end_stream=True)

    def break_off(self) -> None:
        stream = self.running()
        if stream is not None and self.rng.random() < 0.5:
            self.both.triton.h2.reset_stream(self.both.triton.own(stream), 2)

    def tick(self) -> None:
        self.both.pair.client.tick(0)

    def too_late(self) -> None:
        """A minute has passed."""
        self.both.pair.downstream.deadlines.look(time.monotonic() + 60)

    def stall(self) -> None:
        """One peer stops reading, or goes on."""
        pair = self.both.pair
        peers: list[tuple[Wire, Any]] = [(pair.to_client, pair.client)]
        peers += zip(pair.to_triton[-1:], pair.tritons[-1:], strict=True)
        wire, protocol = self.rng.choice(peers)
        if self.rng.random() < 0.5:
            wire.stall(protocol)
        else:
            wire.drain()

    def lose_triton(self) -> None:
        pair = self.both.pair
        if pair.tritons and not pair.tritons[-1].is_closed and self.rng.random() < 0.3:
            self.both.triton = Triton(pair, len(pair.tritons))
            pair.tritons[-1].connection_lost(None)
            pair.end_turn()
            self.begun.clear()

    def flow(self) -> None:
        """Everybody reads again."""
        for wire in (self.both.pair.to_client, *self.both.pair.to_triton):
            wire.drain()
            wire.flow()

    def end(self) -> None:
        self.flow()
        self.both.exchange()
        for stream in sorted(self.open):
            if self.rng.random() < 0.8:
                with suppress(h2.exceptions.StreamClosedError):
                    self.both.client.h2.reset_stream(stream, 8)
        self.both.exchange()
        while self.running() is not None:
            self.answer()
            self.both.exchange()


@pytest.mark.parametrize("seed", range(100))
async def test_windows_slots_and_bytes_are_given_back_whatever_happens(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    both = connect(limit=rng.choice([1, 2, 0]), depth=4)
    history = History(both, rng)
    for _ in range(150):
        history.step()
    history.end()
    require_balance(both)
    require_whole(both.client.h2, both.pair.client.codec)
    for upstream in both.pair.tritons[-1:]:
        if not upstream.is_closed:
            require_whole(both.triton.h2, upstream.codec)
    both.pair.client.connection_lost(None)
    both.pair.end_turn()
    history.end()
    for upstream in both.pair.tritons:
        upstream.connection_lost(None)
    replica = both.pair.replica
    assert (replica.admissions.running, replica.admissions.waiting, replica.admissions.given_up) == (0, 0, 0)
    assert (replica.budget.used_bytes, replica.admissions.bytes.used_bytes) == (0, 0)
    assert (both.pair.downstream.given_up, both.pair.downstream.watchers) == (set(), set())
    assert sum(replica.grpc.codes.values()) == history.calls


async def test_a_buffered_call_has_its_first_window_and_no_more(connect: Connect) -> None:
    both = connect(limit=1, depth=10)
    first, second = both.client.call(), both.client.call()
    both.client.send(first, framed(request()), end=True)
    todo = {second: framed(request(size=900_000))}
    while send_what_may_be_sent(both, todo):
        both.exchange(1)
    assert both.pair.buffered_bytes == FIRST_WINDOW + 2 * OPEN_BYTES
    both.triton.answer(first, b"")
    both.exchange()
    while send_what_may_be_sent(both, todo):
        both.exchange(2)
    assert second in both.triton.ended
    assert both.pair.buffered_bytes == OPEN_BYTES


async def test_what_all_clients_have_waiting_here_is_bounded(connect: Connect) -> None:
    both = connect(limit=1, depth=100, max_inflight_bytes=200_000)
    bomb = gzip.compress(request(size=60_000))
    streams = [both.client.call(grpc_encoding="gzip") for _ in range(6)]
    for stream in streams:
        both.client.send(stream, b"\x01" + len(bomb).to_bytes(4) + bomb, end=True)
        both.exchange()
    # The first runs; three wait; what comes then is too much.
    assert [both.client.status(stream) for stream in streams] == [None, None, None, None, 8, 8]
    assert b"--max-inflight-bytes" in dict(both.client.headers[streams[4]])[b"grpc-message"]
    for stream in streams[:4]:
        both.triton.answer(stream, b"")
        both.exchange()
    assert [both.client.status(stream) for stream in streams[:4]] == [0, 0, 0, 0]
    assert both.pair.buffered_bytes == 0


async def test_a_stream_may_rest_for_hours_but_not_in_the_middle_of_a_message(connect: Connect) -> None:
    both = connect()
    resting, half = both.client.call(STREAM_INFER), both.client.call(STREAM_INFER)
    both.client.send(half, framed(request(size=5000))[:3000])
    both.exchange()
    now = time.monotonic()
    both.pair.client.tick(now + 299)
    both.exchange()
    assert both.client.status(half) is None
    both.pair.client.tick(now + 301)
    both.exchange()
    assert both.client.status(half) == 4
    assert both.pair.buffered_bytes == OPEN_BYTES
    both.pair.client.tick(now + 100_000)
    both.exchange()
    assert both.client.status(resting) is None


async def test_a_client_that_reads_nothing_is_read_no_more_and_holds_up_no_other(connect: Connect) -> None:
    """Its transport is full: not its windows, which are wide, but TCP holds it up."""
    both = connect()
    both.client.h2.increment_flow_control_window(2**24)
    stream = both.client.call()
    both.client.h2.increment_flow_control_window(2**24, stream)
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.triton.begin(stream)
    both.pair.to_client.stall(both.pair.client)
    sent = 0
    while (size := min(16_000, both.triton.h2.local_flow_control_window(both.triton.own(stream)))) > 0:
        both.triton.send(stream, b"x" * size)
        sent += size
        assert sent < 2**20 + 2**17
        both.triton.exchange()
        both.triton.exchange()
    assert both.pair.to_client.paused
    assert not both.pair.to_triton[0].paused  # others' answers come there too
    both.pair.to_client.flow()
    assert not both.pair.to_client.paused
    both.exchange()
    assert len(both.client.data[stream]) == sent


@pytest.mark.parametrize(
    "kind", ["a header block", "its second part", "padded content", "a frame of no kind"]
)
async def test_what_is_not_whole_is_bounded_for_all_connections(connect: Connect, kind: str) -> None:
    """It counts as what is on its way does; a client that sends whole frames is not affected."""
    first = connect(max_inflight_bytes=300_000)
    begun = {
        "a header block": frames.head(60_000, frames.HEADERS, 0, 1) + bytes(50_000),
        "its second part": frames.head(20_000, frames.HEADERS, 0, 1)
        + bytes(20_000)
        + frames.head(40_000, frames.CONTINUATION, 0, 1)
        + bytes(30_000),
        "padded content": frames.head(60_000, frames.DATA, frames.PADDED, 1) + bytes(50_000),
        "a frame of no kind": frames.head(60_000, 77, 0, 1) + bytes(50_000),
    }[kind]
    pairs = [GrpcPair(downstream=first.pair.downstream) for _ in range(20)]
    for pair in pairs:
        pair.receive(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames.head(0, frames.SETTINGS, 0, 0))
        for at in range(0, len(begun), 7000):
            pair.receive(begun[at : at + 7000])
    assert [pair.to_client.open for pair in pairs] == [True] * 8 + [False] * 12
    assert 250_000 < first.pair.buffered_bytes <= 300_000
    assert upload(first, 1, framed(request())) == 1
    for pair in pairs[:8]:
        pair.client.connection_lost(None)
    assert first.pair.buffered_bytes == 0


async def test_what_slow_readers_do_not_take_is_bounded(connect: Connect) -> None:
    both = connect(max_inflight_bytes=1_000_000)
    streams = [both.client.call() for _ in range(20)]
    for stream in streams:
        both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.pair.to_client.stall(both.pair.client)
    for stream in streams:
        both.triton.begin(stream)
        for _ in range(8):
            both.triton.send(stream, b"x" * 16_000)
            both.triton.exchange()
    assert both.pair.buffered_bytes < 1_100_000
    both.pair.to_client.drain()
    both.pair.to_client.flow()
    both.exchange()
    assert 0 < len(both.client.resets) < 20  # those that were one too many


async def test_a_call_begins_with_the_window_of_the_settings(connect: Connect) -> None:
    both = connect()
    stream = both.client.call()
    both.exchange()
    call = both.pair.client.codec.streams[stream]
    assert call.receive_left == call.window == FIRST_WINDOW
    assert call.owner.stage is Stage.RECEIVING
