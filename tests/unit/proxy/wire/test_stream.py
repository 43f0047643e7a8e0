"""Any history of two hops: windows are conserved, each piece is released once, whatever moves ends."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from proxy.wire.h2 import frames
from proxy.wire.h2.client import ClientCodec
from proxy.wire.h2.codec import H2Codec
from proxy.wire.h2.events import Data, Ended, Event, Headers, Reset, Trailers, WholeAnswer, WholeRequest
from proxy.wire.h2.frames import DATA, ErrorCode, read_head
from proxy.wire.h2.receiving import CONNECTION_WINDOW, WIDER_BYTES
from proxy.wire.h2.sending import OUTPUT_BYTES
from proxy.wire.h2.server import ServerCodec
from proxy.wire.h2.stream import FIRST_WINDOW, WIDEST_WINDOW, Stream
from tests.fakes.h2_codecs import DONE, OK, client, head, introduced, output, server


class Link:
    """What one codec says on its way to another, which gets it in pieces of any size, or late."""

    def __init__(self, speaker: H2Codec[Any, Any], hearer: H2Codec[Any, Any]) -> None:
        self.speaker, self.hearer, self.wire = speaker, hearer, b""
        self.is_cut = False

    def move(self, rng: random.Random | None, take: Callable[[Event], None]) -> bool:
        """Some bytes, or all there are without `rng`. False if there were none."""
        if self.is_cut:
            return False
        while self.speaker.has_output and (rng is None or len(self.wire) < OUTPUT_BYTES):
            self.wire += b"".join(self.speaker.take_output())
        if not self.wire:
            return False
        size = (
            len(self.wire) if rng is None else min(len(self.wire), rng.choice([1, 9, 300, 20_000, 262_144]))
        )
        piece, self.wire = self.wire[:size], self.wire[size:]
        for event in self.hearer.receive(piece):
            take(event)
        return True


class Once:
    """A piece that is passed on: it counts its releases."""

    def __init__(self, data: Data) -> None:
        self.data, self.releases = data, 0

    def release(self) -> None:
        self.releases += 1
        self.data.release()


class History:
    """A client, a front and its upstream, and a server at the end: four codecs, four wires."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.near, self.downstream, self.back, self.far = client(), server(), client(), server()
        self.links = [
            Link(self.near, self.downstream),
            Link(self.downstream, self.near),
            Link(self.back, self.far),
            Link(self.far, self.back),
        ]
        self.takes = [self.on_request, self.at_client, self.at_server, self.on_answer]
        self.passed: list[Once] = []
        # What the two ends hold and have not read yet.
        self.unread: list[Data] = []
        self.all: dict[int, Stream] = {}
        self.to_send: dict[Stream, int] = {}
        self.answers: dict[Stream, int] = {}
        self.ended: set[int] = set()

    def note(self, stream: Stream) -> None:
        self.all[id(stream)] = stream

    # The front: what comes in at one end goes out at the other.

    def on_request(self, event: Event) -> None:
        match event:
            case WholeRequest(stream=stream) | Headers(stream=stream):
                self.note(stream)
                if not self.back.can_open:
                    self.downstream.send_headers(stream, OK + DONE, end=True)
                    return
                if isinstance(event, WholeRequest):
                    up = self.back.send_call(head(), event.data)
                else:
                    up = self.back.open(head(), end=event.end)
                self.note(up)
                up.owner, stream.owner = stream, up
            case Data(stream=stream):
                self.pass_on(self.back, stream.owner, event)
            case Trailers(stream=stream):
                if stream.owner is not None:
                    self.back.send_data(stream.owner, b"", end=True)
            case Reset(stream=stream):
                if stream.owner is not None:
                    self.back.reset(stream.owner, ErrorCode.CANCEL)
            case Ended():
                raise AssertionError(event.message)

    def on_answer(self, event: Event) -> None:
        match event:
            case WholeAnswer(stream=stream):
                self.downstream.send_answer(stream.owner, OK, event.data, DONE)
            case Headers(stream=stream):
                self.downstream.send_headers(stream.owner, OK, end=event.end)
            case Data(stream=stream):
                self.pass_on(self.downstream, stream.owner, event)
            case Trailers(stream=stream):
                self.downstream.send_headers(stream.owner, DONE, end=True)
            case Reset(stream=stream):
                self.downstream.reset(stream.owner, ErrorCode.INTERNAL_ERROR)
            case Ended():
                raise AssertionError(event.message)

    def pass_on(self, to: H2Codec[Any, Any], stream: Stream | None, data: Data) -> None:
        if stream is None:
            data.release()
            return
        once = Once(data)
        self.passed.append(once)
        to.send_data(stream, data.data, end=data.end, owned=once)

    # The two ends.

    def at_server(self, event: Event) -> None:
        match event:
            case WholeRequest(stream=stream) | Headers(stream=stream):
                self.note(stream)
                if self.rng.random() < 0.3:
                    self.far.send_answer(stream, OK, b"x" * 100, DONE)
                else:
                    self.far.send_headers(stream, OK)
                    self.answers[stream] = self.rng.choice([0, 10, 70_000, 600_000])
            case Data():
                self.unread.append(event)
            case Ended():
                raise AssertionError(event.message)

    def at_client(self, event: Event) -> None:
        match event:
            case Data():
                self.unread.append(event)
            case Ended():
                raise AssertionError(event.message)

    # What may happen.

    def step(self) -> None:
        rng = self.rng
        match rng.randrange(16):
            case 0 | 1:
                if self.near.can_open:
                    if rng.random() < 0.4:
                        self.note(self.near.send_call(head(), b"x" * rng.choice([0, 5, 20_000])))
                    else:
                        stream = self.near.open(head())
                        self.note(stream)
                        self.to_send[stream] = rng.choice([0, 10, 70_000, 600_000])
            case 2 | 3:
                self.send(self.near, self.to_send, lambda s: self.near.send_data(s, b"", end=True))
            case 4 | 5:
                self.send(self.far, self.answers, lambda s: self.far.send_headers(s, DONE, end=True))
            case 6:
                if self.near.streams:
                    self.near.reset(rng.choice(list(self.near.streams.values())), ErrorCode.CANCEL)
            case 7:
                if self.far.streams and rng.random() < 0.3:
                    self.far.reset(rng.choice(list(self.far.streams.values())), ErrorCode.INTERNAL_ERROR)
            case 8:  # a deadline: the front gives the call up at both its ends
                if self.downstream.streams and rng.random() < 0.3:
                    stream = rng.choice(list(self.downstream.streams.values()))
                    self.downstream.reset(stream, ErrorCode.CANCEL)
                    if stream.owner is not None:
                        self.back.reset(stream.owner, ErrorCode.CANCEL)
            case 9 | 10:
                rng.shuffle(self.unread)
                for _ in range(rng.randrange(1 + len(self.unread))):
                    self.unread.pop().release()
            case 11 if rng.random() < 0.02:
                self.lose_back()
            case _:
                link = rng.randrange(4)
                self.links[link].move(rng, self.takes[link])
        self.require_balance()

    def send(
        self, codec: H2Codec[Any, Any], todo: dict[Stream, int], finish: Callable[[Stream], None]
    ) -> None:
        if not todo:
            return
        stream = self.rng.choice(list(todo))
        size = min(todo[stream], self.rng.choice([1, 500, 70_000, 200_000]))
        if size:
            codec.send_data(stream, b"x" * size)
        todo[stream] -= size
        if not todo[stream]:
            del todo[stream]
            finish(stream)

    def lose_back(self) -> None:
        for stream in self.back.lost():
            self.downstream.reset(stream.owner, ErrorCode.INTERNAL_ERROR)
        self.far.lost()
        self.links[2].is_cut = self.links[3].is_cut = True
        self.answers.clear()

    def settle(self) -> None:
        """Nobody begins anything; what is there is read and delivered."""
        for _ in range(10_000):
            while self.to_send:
                self.send(self.near, self.to_send, lambda s: self.near.send_data(s, b"", end=True))
            while self.answers:
                self.send(self.far, self.answers, lambda s: self.far.send_headers(s, DONE, end=True))
            while self.unread:
                self.unread.pop().release()
            moved = [link.move(None, take) for link, take in zip(self.links, self.takes, strict=True)]
            if not any(moved):
                return
        raise AssertionError("it never ends")

    def require_balance(self) -> None:
        for stream in self.all.values():
            assert stream.receive_left + stream.owed + stream.held == stream.window, vars(stream)
            assert min(stream.receive_left, stream.owed, stream.held) >= 0, vars(stream)
        assert all(once.releases <= 1 for once in self.passed)

    def require_end(self) -> None:
        for codec in (self.near, self.downstream, self.back, self.far):
            assert not codec.streams
            assert codec._window.wider_left == WIDER_BYTES
        assert all(once.releases == 1 for once in self.passed)
        assert all(stream.held == 0 for stream in self.all.values())
        assert self.near._send_window == self.downstream.receive_left > CONNECTION_WINDOW // 2
        assert self.downstream._send_window == self.near.receive_left > CONNECTION_WINDOW // 2
        if not self.back.is_closed:
            assert self.back._send_window == self.far.receive_left > CONNECTION_WINDOW // 2
            assert self.far._send_window == self.back.receive_left > CONNECTION_WINDOW // 2


@pytest.mark.parametrize("seed", range(60))
def test_windows_are_conserved_and_every_piece_is_released_once(seed: int) -> None:
    history = History(seed)
    for _ in range(400):
        history.step()
    history.settle()
    history.require_balance()
    history.require_end()


def pair() -> tuple[ClientCodec[Any, Any], ServerCodec[Any, Any]]:
    near, far = client(), server()
    for _ in range(3):
        far.receive(output(near))
        near.receive(output(far))
    return near, far


def data_of(events: list[Event]) -> list[Data]:
    return [event for event in events if isinstance(event, Data)]


def test_a_streams_window_is_held_until_its_data_is_released_and_the_connections_is_not() -> None:
    near, far = pair()
    streams = [near.open(head()) for _ in range(20)]
    for stream in streams:
        near.send_data(stream, b"x" * 10**6)
    held: list[Data] = []
    for _ in range(10):
        held += data_of(far.receive(output(near)))
        near.receive(output(far))
    assert sum(len(data.data) for data in held) == 20 * FIRST_WINDOW > CONNECTION_WINDOW
    for data in held:
        data.release()
        data.release()
    near.receive(output(far))
    assert {stream.send_window for stream in streams} <= set(range(FIRST_WINDOW, WIDEST_WINDOW + 1))


def test_a_window_grows_as_its_stream_is_drained_and_no_further() -> None:
    near, far = pair()
    stream = near.open(head())
    near.send_data(stream, b"x" * 10**7)
    most = 0
    for _ in range(200):
        pieces = data_of(far.receive(output(near)))
        most = max(most, sum(len(piece.data) for piece in pieces))
        for piece in pieces:
            piece.release()
        near.receive(output(far))
    assert WIDEST_WINDOW // 2 < most <= WIDEST_WINDOW
    assert far.streams[1].window == WIDEST_WINDOW


def test_all_wider_windows_of_a_connection_are_bounded() -> None:
    near, far = pair()
    for _ in range(100):
        near.send_data(near.open(head()), b"x" * 10**6)
    for _ in range(300):
        for piece in data_of(far.receive(output(near))):
            piece.release()
        near.receive(output(far))
    assert sum(stream.window - FIRST_WINDOW for stream in far.streams.values()) <= WIDER_BYTES


def test_those_who_wait_take_turns() -> None:
    near, far = pair()
    large = near.open(head())
    near.send_data(large, b"x" * 1_000_000, end=True)
    small = [near.send_call(head(), b"x" * 1000) for _ in range(50)]
    first = near.take_output()
    events = far.receive(b"".join(first))
    done = {event.stream.id for event in events if isinstance(event, Data) and event.end}
    done |= {event.stream.id for event in events if isinstance(event, WholeRequest)}
    assert done == {stream.id for stream in small}, "one large request must not come before the small ones"


def test_no_stream_has_more_than_a_small_frame_at_a_time_while_others_wait() -> None:
    near, _ = pair()
    for _ in range(3):
        near.send_data(near.open(head()), b"x" * 300_000)
    out = bytes(b"".join(near.take_output()))
    data = [(id, size) for kind, id, size in frames_of(out) if kind == DATA]
    assert [id for id, _ in data] == [1, 3, 5] * (len(data) // 3) + [1, 3, 5][: len(data) % 3]
    assert {size for _, size in data} == {16 * 1024}


def frames_of(out: bytes) -> list[tuple[int, int, int]]:
    """Kind, stream, size."""
    frames, at = [], 0
    while at < len(out):
        high, low, kind, _, id = read_head(out, at)
        frames.append((kind, id, high << 8 | low))
        at += 9 + (high << 8 | low)
    return frames


def test_what_one_turn_hands_out_is_bounded_and_the_rest_follows() -> None:
    near, _ = pair()
    near._send_window = near._peer_window = 10**8
    near.send_data(near.open(head()), b"x" * 10**7)
    sizes = []
    while near.has_output:
        sizes.append(sum(map(len, near.take_output())))
    assert sum(sizes) > 10**7
    assert max(sizes) < OUTPUT_BYTES + 200_000


def test_a_reader_that_stands_still_costs_the_others_nothing() -> None:
    near, far = pair()
    stuck, free = near.open(head(), end=True), near.open(head(), end=True)
    asked = {
        event.stream.id: event.stream for event in far.receive(output(near)) if isinstance(event, Headers)
    }
    for stream in asked.values():
        far.send_headers(stream, OK)
        far.send_data(stream, b"x" * 5_000_000)
    got = 0
    for _ in range(100):
        for piece in data_of(near.receive(output(far))):
            if piece.stream is free:
                got += len(piece.data)
                piece.release()
        far.receive(output(near))
    assert got == 5_000_000
    assert stuck.held == FIRST_WINDOW


def test_output_is_reported_once() -> None:
    codec = introduced()
    wake: Any = codec._wake
    wake.calls = 0
    codec.ping()
    codec.ping()
    assert wake.calls == 1
    output(codec)
    codec.ping()
    assert wake.calls == 2


def test_output_that_waits_for_the_connections_window_is_reported_when_it_opens() -> None:
    near, far = pair()
    near.open(head(), end=True)
    asked = next(event for event in far.receive(output(near)) if isinstance(event, Headers))
    near.receive(output(far))
    far._send_window = 0
    wake: Any = far._wake
    far.send_data(asked.stream, b"x" * 10)
    output(far)
    wake.calls = 0
    assert not far.has_output
    far.receive(frames.window_update(0, 5))
    assert (wake.calls, far.has_output) == (1, True)
    output(far)
    far.receive(frames.window_update(0, 5))
    assert wake.calls == 2


def test_the_end_releases_what_waits_and_tells_of_every_stream() -> None:
    near, far = pair()
    once = Once(Data(Stream(far, 1, 0), b"x", False))
    stream = near.open(head())
    near.send_data(stream, b"x" * 10**6, owned=once)
    other = near.open(head())
    near.send_data(other, b"y", owned=(small := Once(Data(Stream(far, 1, 0), b"y", False))))
    assert near.lost() == [stream, other]
    assert (once.releases, small.releases) == (1, 1)
    near.send_data(stream, b"x", owned=(late := Once(Data(Stream(far, 1, 0), b"x", False))))
    assert late.releases == 1
    assert not near.has_output
    assert near.receive(b"x" * 100) == []


@pytest.mark.parametrize(
    "asks", [frames.head(8, frames.PING, 0, 0) + bytes(8), frames.settings({})], ids=["pings", "settings"]
)
def test_a_server_that_requests_answers_and_reads_none_is_given_up(asks: bytes) -> None:
    """It may be a model's own: what it is owed would be kept for ever."""
    one, reads = client(), client()
    for codec in (one, reads):
        output(codec)
        codec.receive(frames.settings({}))
    events: list[Event] = []
    for _ in range(200):
        events += one.receive(asks * 100)
    (ended,) = (event for event in events if isinstance(event, Ended))
    assert ended.code is ErrorCode.ENHANCE_YOUR_CALM
    assert len(one._out) < 11_000
    for _ in range(200):
        assert not [event for event in reads.receive(asks * 100) if isinstance(event, Ended)]
        reads.take_output()
