"""Whatever one call of a client comes to, the other calls of that client go on."""

import gzip
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from h2.settings import SettingCodes
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.request.messages import INFER, STREAM_INFER, AnswerReader, ModelFields, framed
from proxy.transport.write_batch import WriteBatch
from proxy.wire import protobuf
from proxy.wire.h2 import frames, hpack
from proxy.wire.h2.frames import ErrorCode, Setting
from tests.fakes.grpc_peers import Both, Connect, request

_DEADLINE = hpack.encode(
    [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-status", b"4")]
)


def end_as_triton_does(stream: int, order: str) -> bytes:
    """After a deadline: T is trailers, R is RST_STREAM with NO_ERROR, each several times (C-core, 1.54)."""
    said = {
        "T": frames.headers(stream, _DEADLINE, end_stream=True),
        "R": frames.reset(stream, ErrorCode.NO_ERROR),
    }
    return b"".join(said[letter] for letter in order)


def begin(both: Both, count: int, method: str = INFER, **metadata: str) -> list[int]:
    streams = [both.client.call(method, **metadata) for _ in range(count)]
    for stream in streams:
        both.client.send(stream, framed(request()), end=method == INFER)
    both.exchange()
    return streams


def require_served(both: Both, streams: Iterable[int]) -> None:
    """Each of them is in Triton, or comes to it, and is answered to its client."""
    left = set(streams)
    both.exchange()
    while left:
        ready = left & both.triton.ended
        assert ready, "the rest has been lost"
        for stream in ready:
            both.triton.answer(stream, b"fine")
        both.exchange()
        for stream in ready:
            assert (both.client.status(stream), both.client.data[stream]) == (0, framed(b"fine"))
        left -= ready


@pytest.mark.parametrize("heads_first", [False, True])
async def test_calls_that_come_at_once_are_taken_few_at_a_time(connect: Connect, heads_first: bool) -> None:
    """Others, of other replicas, are served in between."""
    both = connect()
    begin(both, 1)  # from now on there is a connection to Triton
    later: list[Callable[[], None]] = []
    both.pair.downstream.later = later.append
    streams = []
    for _ in range(100):
        streams.append(both.client.call())
        if not heads_first:
            both.client.send(streams[-1], framed(request()), end=True)
    for stream in streams if heads_first else ():
        both.client.send(stream, framed(request()), end=True)
    both.client.exchange()
    running = [both.pair.running]
    while later:
        assert both.pair.to_client.paused
        assert len(later) == 1
        later.pop()()
        running.append(both.pair.running)
    assert not both.pair.to_client.paused
    assert running[0] <= 1 + 16
    assert all(more - less <= 16 for less, more in pairwise(running))
    both.exchange()
    require_served(both, streams)


async def test_answers_that_come_at_once_are_taken_some_at_a_time(connect: Connect) -> None:
    both = connect()
    streams, (triton,) = begin(both, 500), both.pair.tritons
    for stream in streams:
        both.triton.answer(stream, b"fine")
    triton.data_received(both.triton.h2.data_to_send())
    running, turn = [500, both.pair.running], both.pair.downstream.batch
    while both.pair.running:
        WriteBatch.end(turn)
        running.append(both.pair.running)
    steps = [less - more for less, more in pairwise(running)]
    assert max(steps) <= 64
    assert not both.pair.to_triton[0].paused
    both.exchange()
    assert all(both.client.status(stream) == 0 for stream in streams)


@pytest.mark.parametrize("order", ["TRTRTRTR", "RRRRTRTR", "TTTTRRRR", "RTRTRTRT", "RRRRRRRT", "TR"])
async def test_frames_of_triton_at_a_deadline_end_that_call_alone(connect: Connect, order: str) -> None:
    both = connect()
    first, late, last = begin(both, 1) + begin(both, 1, grpc_timeout="200m") + begin(both, 1)
    both.pair.tritons[0].data_received(end_as_triton_does(both.triton.own(late), order))
    both.client.exchange()
    assert both.client.status(late) == (4 if order[0] == "T" else 14)
    require_served(both, [first, last])
    assert len(both.pair.tritons) == 1


async def test_a_deadline_that_passes_for_many_ends_none_of_the_others(connect: Connect) -> None:
    both = connect()
    late, others = begin(both, 900, grpc_timeout="200m"), begin(both, 50)
    for stream in late:
        both.pair.tritons[0].data_received(end_as_triton_does(both.triton.own(stream), "TRTRTRTR"))
    both.client.exchange()
    assert {both.client.status(stream) for stream in late} == {4}
    require_served(both, others)


async def test_triton_may_still_speak_of_a_call_that_its_client_gave_up(connect: Connect) -> None:
    both = connect()
    gone, other = begin(both, 1, STREAM_INFER) + begin(both, 1)
    both.client.h2.reset_stream(gone, 8)
    both.exchange()
    assert not both.triton.resets  # it works on a message of it
    both.pair.tritons[0].data_received(end_as_triton_does(both.triton.own(gone), "TRTR"))
    require_served(both, [other])


@pytest.mark.parametrize("where", ["in Triton", "in the queue", "before their message"])
async def test_many_calls_given_up_at_once_end_none_of_the_others(connect: Connect, where: str) -> None:
    both = connect(limit=0 if where == "in Triton" else 1, depth=1000)
    others = begin(both, 1)
    gone = (
        begin(both, 900)
        if where != "before their message"
        else [both.client.call(STREAM_INFER) for _ in range(900)]
    )
    others += begin(both, 49)
    patience = both.pair.client.codec.patience
    patience.calm_down()  # what has piled up does not last
    before = patience.left
    for stream in gone:
        both.client.h2.reset_stream(stream, 8)
    both.exchange()
    # Streams that were opened for nothing are one thing, calls another.
    assert patience.left == before or where == "before their message"
    assert both.pair.to_client.open
    require_served(both, others)
    if where == "in Triton":
        assert both.pair.running == 900
        for stream in gone:
            both.triton.answer(stream, b"")
        both.exchange()
    assert (both.pair.running, both.pair.waiting) == (0, 0)


async def test_what_is_on_its_way_for_a_refused_call_is_no_flood(connect: Connect) -> None:
    both = connect(limit=1, depth=0)
    (running,) = begin(both, 1)
    late = both.client.call()
    data = framed(request(size=600_000))
    for at in range(0, 70_000, 10_000):  # is refused, which the client does not know yet
        both.client.h2.send_data(late, data[at : at + 10_000])
    for at in range(70_000, 120_000, 10):
        both.client.h2.send_data(late, data[at : at + 10])
    both.pair.client.codec.patience.left = 10
    both.exchange()
    assert both.client.status(late) == 14
    both.pair.receive(frames.reset(late, ErrorCode.CANCEL))  # nor if it gives it up just now
    require_served(both, [running])


async def test_data_without_end_on_a_refused_stream_is_a_flood(connect: Connect) -> None:
    both = connect()
    (stream,) = begin(both, 1, "/inference.GRPCInferenceService/RepositoryModelUnload")
    for _ in range(200):
        if both.pair.to_client.open:
            both.pair.receive((frames.head(900, frames.DATA, 0, stream) + bytes(900)) * 50)
    assert not both.pair.to_client.open


FRAMES_ON_A_CLOSED_STREAM: dict[str, Callable[[int], bytes]] = {
    "data": lambda id: frames.head(3, frames.DATA, 0, id) + b"abc",
    "the last data": lambda id: frames.head(0, frames.DATA, frames.END_STREAM, id),
    "trailers": lambda id: frames.headers(id, hpack.encode([(b"x", b"y")]), end_stream=True),
    "headers": lambda id: frames.headers(id, hpack.encode([(b"x", b"y")]), end_stream=False),
    "a window": lambda id: frames.window_update(id, 1),
    "another reset": lambda id: frames.reset(id, ErrorCode.CANCEL),
    "priority": lambda id: frames.head(5, frames.PRIORITY, 0, id) + b"\x00\x00\x00\x00\x10",
}


@pytest.mark.parametrize("kind", sorted(FRAMES_ON_A_CLOSED_STREAM))
async def test_frames_on_a_stream_that_the_client_has_reset_are_ignored(connect: Connect, kind: str) -> None:
    both = connect()
    gone, other = begin(both, 2)
    both.client.h2.reset_stream(gone, 8)
    both.exchange()
    both.pair.receive(FRAMES_ON_A_CLOSED_STREAM[kind](gone))
    assert both.pair.to_client.open
    require_served(both, [other])


@pytest.mark.parametrize("size", [8_000, 12_000, 17_000, 60_000])
@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
async def test_metadata_that_triton_does_not_take_ends_its_call_alone(
    connect: Connect, size: int, method: str
) -> None:
    both = connect(limit=2, depth=10)
    neighbours = begin(both, 1)
    (large,) = begin(both, 1, method, x_large="a" * size)
    assert both.client.status(large) == 8
    assert b"8192" in dict(both.client.headers[large])[b"grpc-message"]
    assert large not in both.triton.calls
    require_served(both, neighbours)
    assert (both.pair.running, both.pair.waiting) == (0, 0)


async def test_metadata_is_measured_by_what_triton_tells(connect: Connect) -> None:
    both = connect()
    require_served(both, begin(both, 1))
    both.pair.tritons[0].data_received(frames.settings({Setting.MAX_HEADER_LIST_SIZE: 1000}))
    small, large, short = begin(both, 1) + begin(both, 1, x_large="a" * 900) + begin(both, 1, x_large="a")
    assert both.client.status(large) == 8
    require_served(both, [small, short])


async def test_a_stream_too_many_for_triton_gives_its_slot_back(connect: Connect) -> None:
    both = connect(limit=3, depth=5)
    first = begin(both, 1)
    both.pair.tritons[0].data_received(frames.settings({Setting.MAX_CONCURRENT_STREAMS: 1}))
    for method in (INFER, STREAM_INFER):
        (lost,) = begin(both, 1, method)
        assert both.client.status(lost) == 14
        assert both.pair.running == 1
    require_served(both, first)


async def test_a_client_that_goes_has_none_of_its_waiting_calls_run(connect: Connect) -> None:
    both = connect(limit=1, depth=5)
    begin(both, 3)
    both.pair.client.connection_lost(None)
    both.triton.exchange()
    assert len(both.triton.calls) == 1
    assert (both.pair.running, both.pair.waiting) == (1, 0)
    both.triton.answer(*both.triton.calls, b"")
    both.triton.exchange()
    assert (both.pair.running, both.pair.waiting) == (0, 0)


# How a client may tell of what it has read: bytes in all, its window for a stream, and after how many bytes
# at most it tells that it has room again, for the stream and for the connection; of frames how large.
READERS = {
    "each frame at once": (96 << 20, 65_535, 2**20, 16_384),
    "each 4 KiB, as Go's x/net": (32 << 20, 65_535, 4096, 16_384),
    "each 4 KiB of large frames": (64 << 20, 2**20, 4096, 2**17),
    "a quarter of a wide window, as grpc-go": (64 << 20, 2**20, 2**18, 16_384),
    "windows of one byte": (20_000, 1, 1, 16_384),
    "windows of 100 bytes": (1 << 20, 100, 100, 16_384),
    "windows of 5000 bytes": (16 << 20, 5000, 5000, 16_384),
}


@pytest.mark.parametrize("reader", sorted(READERS))
async def test_a_download_of_any_length_may_be_read_in_any_way(connect: Connect, reader: str) -> None:
    total, window, often, frame = READERS[reader]
    both = connect()
    both.client.h2.update_settings(
        {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame}
    )
    both.client.h2.increment_flow_control_window(2**20)
    both.exchange()
    (stream,) = begin(both, 1)
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    both.exchange()
    # By hand from here: the reference is slow.
    triton, wire_of = both.pair.tritons[0], both.pair.to_client
    sent, got, unread = 0, 0, 0
    for _ in range(200_000):
        if got >= total or not wire_of.open:
            break
        if sent == got:
            triton.data_received(frames.head(frame, frames.DATA, 0, both.triton.own(stream)) + bytes(frame))
            both.pair.end_turn()
            sent += frame
        out, answer = wire_of.take(), []
        assert out, "the download has stopped"
        for kind, size in kinds_and_sizes(out):
            if kind == frames.DATA:
                got, unread = got + size, unread + size
            while unread >= min(often, window, 16_384):
                piece = min(often, unread)
                answer += [frames.window_update(0, piece), frames.window_update(stream, piece)]
                unread -= piece
        both.pair.receive(b"".join(answer))
    assert got >= total


def kinds_and_sizes(data: bytes) -> Iterable[tuple[int, int]]:
    at = 0
    while at < len(data):
        high, low, kind, _, _ = frames.read_head(data, at)
        yield kind, high << 8 | low
        at += frames.HEAD_BYTES + (high << 8 | low)


async def test_windows_that_answer_nothing_are_a_flood_after_a_download_too(connect: Connect) -> None:
    both = connect()
    (stream,) = begin(both, 1)
    both.triton.answer(stream, bytes(15_000))
    both.exchange()
    for _ in range(100):
        if both.pair.to_client.open:
            both.pair.receive(frames.window_update(0, 1) * 100)
    assert not both.pair.to_client.open


def settings_frame(entries: Iterable[tuple[int, int]]) -> bytes:
    payload = b"".join(struct.pack(">HI", *entry) for entry in entries)
    return frames.head(len(payload), frames.SETTINGS, 0, 0) + payload


@pytest.mark.parametrize("each", [21_000, 1])
async def test_settings_with_many_streams_cost_little(connect: Connect, each: int) -> None:
    """One frame with very many windows, and very many frames with one each."""
    both = connect()
    for _ in range(999):
        both.client.call()
    both.exchange(2)
    windows = [(Setting.INITIAL_WINDOW_SIZE, 65_535 - (index & 1)) for index in range(21_000)]
    data = b"".join(settings_frame(windows[at : at + each]) for at in range(0, len(windows), each))
    began = time.process_time()
    both.pair.receive(data)
    assert time.process_time() - began < 0.15
    assert not both.pair.to_client.open


async def test_the_last_window_of_a_settings_frame_counts(connect: Connect) -> None:
    both = connect()
    (stream,) = begin(both, 1)
    both.pair.receive(settings_frame([(Setting.INITIAL_WINDOW_SIZE, size) for size in (7, 100_000, 70_000)]))
    assert both.pair.client.codec.streams[stream].send_window == 70_000
    both.pair.receive(settings_frame([(Setting.INITIAL_WINDOW_SIZE, 10)]))
    assert both.pair.client.codec.streams[stream].send_window == 10


async def test_a_window_for_all_looks_only_at_streams_that_wait_for_it(connect: Connect) -> None:
    """Slow readers of many streams do not make each WINDOW_UPDATE dear."""
    both = connect()
    both.client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1})
    both.exchange()
    for stream in begin(both, 900):
        both.triton.h2.send_headers(
            both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
        )
        both.triton.h2.send_data(both.triton.own(stream), bytes(50))
        both.triton.exchange()
    began = time.process_time()
    both.pair.receive(frames.window_update(0, 1) * 3000)
    assert time.process_time() - began < 0.15
    assert both.pair.to_client.open


@pytest.mark.parametrize("cut", ["frames", "bytes"])
async def test_a_header_block_without_its_end_is_not_waited_for(connect: Connect, cut: str) -> None:
    """Not even if a little more of it comes now and then."""
    both = connect()
    begin(both, 1)  # a call does not keep it alive
    now = time.monotonic()
    block = hpack.encode([(b"x-a", b"y" * 50)])
    if cut == "frames":
        both.pair.receive(frames.head(len(block), frames.HEADERS, 0, 3) + block)
        more = frames.head(1, frames.CONTINUATION, 0, 3) + b"\x82"
    else:
        both.pair.receive(frames.head(5000, frames.HEADERS, frames.END_HEADERS, 3) + block)
        more = b"\x82"
    for second in range(10):
        both.pair.client.tick(now + second)
        both.pair.receive(more)
    assert both.pair.to_client.open
    both.pair.client.tick(now + 11)
    assert not both.pair.to_client.open


async def test_a_large_message_that_comes_slowly_is_waited_for(connect: Connect) -> None:
    both = connect()
    now = time.monotonic()
    stream = both.client.call()
    both.client.send(stream, framed(request(size=1000)), end=True)
    data = both.client.h2.data_to_send()
    both.pair.receive(data[:-500])
    for second in range(60):
        both.pair.client.tick(now + second)
    both.pair.receive(data[-500:])
    assert both.pair.to_client.open
    require_served(both, [stream])


def stream_response(*, final: bool, size: int = 3) -> bytes:
    response = pb.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = final
    if size:
        response.infer_response.raw_output_contents.append(b"o" * size)
    encoded: bytes = response.SerializeToString()
    return encoded


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda message: message,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("size", [0, 3, 3_000_000])
@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_a_final_response_is_recognised_packed_or_not(packing: str, size: int) -> None:
    for final in (False, True):
        body = PACKINGS[packing](stream_response(final=final, size=size))
        data = bytes([packing != "as it is"]) + len(body).to_bytes(4) + body
        reader = AnswerReader(STREAM_INFER, ModelFields(Names(b"own", b"own")), is_decoupled=True)
        shown, finals = b"", 0
        for at in range(0, len(data), 10_000):
            piece, count = reader.feed(data[at : at + 10_000], show_marks=False)
            shown, finals = shown + piece, finals + count
        assert finals == final
        assert shown == (b"" if final and not size else data)  # the mark alone was not asked for


async def test_a_packed_final_response_gives_its_slot_back(connect: Connect) -> None:
    both = connect(limit=1, depth=5, facts=ModelFacts(is_decoupled=True))
    (stream,) = begin(both, 1, STREAM_INFER)
    body = gzip.compress(stream_response(final=True))
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    both.triton.h2.send_data(both.triton.own(stream), b"\x01" + len(body).to_bytes(4) + body)
    both.exchange()
    assert both.pair.running == 0


_OWN = protobuf.encode_bytes(1, b"own")
_CLASSES = protobuf.encode_bytes(
    6,
    protobuf.encode_bytes(1, b"OUT") + protobuf.encode_bytes(2, protobuf.encode_bytes(1, b"classification")),
)
_INPUT = protobuf.encode_bytes(1, b"a") + protobuf.encode_bytes(2, b"INT8") + b"\x1a\x01\x01"
MANY_FIELDS = {
    "parameters": _OWN + b"\x22\x00" * 2**22,
    "inputs": _OWN + protobuf.encode_bytes(5, _INPUT) * 2**19,
    "inputs beside classes": _OWN + _CLASSES + protobuf.encode_bytes(5, _INPUT) * 2**19,
    "sizes of a shape": _OWN
    + _CLASSES
    + protobuf.encode_bytes(5, protobuf.encode_bytes(3, b"\x01" * 65_000)) * 100,
    "fields of a parameter": _OWN + _CLASSES + protobuf.encode_bytes(4, b"\x0a\x00" * 8_000) * 500,
    "numbers": _OWN + b"\x18\x01" * 2**22,
    "names": _OWN * 2**21,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", sorted(MANY_FIELDS))
async def test_a_request_of_very_many_fields_is_refused_in_little_time(
    connect: Connect, what: str, packed: bool
) -> None:
    both = connect(max_json_bytes=16 * 1024**2)
    body = MANY_FIELDS[what]
    data = framed(body)
    if packed:
        body = zlib.compress(body, 1)
        data = b"\x01" + len(body).to_bytes(4) + body
    stream = both.client.call(**({"grpc_encoding": "deflate"} if packed else {}))
    spent, at = 0.0, 0
    for _ in range(5000):
        if at == len(data) or stream in both.client.ended:
            break
        if size := min(both.client.h2.local_flow_control_window(stream), 16_384, len(data) - at):
            both.client.h2.send_data(stream, data[at : at + size])
            at += size
            out, began = both.client.h2.data_to_send(), time.process_time()
            both.pair.receive(out)
            spent += time.process_time() - began
        both.exchange(1)
    assert both.client.status(stream) == 3
    assert b"fields" in dict(both.client.headers[stream])[b"grpc-message"]
    assert spent < 0.3


async def test_a_request_of_many_inputs_is_served(connect: Connect) -> None:
    body = _OWN + protobuf.encode_bytes(5, _INPUT) * 2500 + protobuf.encode_bytes(7, b"x") * 2500
    for message in (body, body + protobuf.encode_bytes(7, bytes(300_000))):  # whole, and as it streams by
        both = connect()
        stream, data = both.client.call(), framed(message)
        for _ in range(1000):
            size = min(both.client.h2.local_flow_control_window(stream), 16_000, len(data))
            both.client.h2.send_data(stream, data[:size], end_stream=size == len(data))
            data = data[size:]
            both.exchange(1)
            if not data:
                break
        require_served(both, [stream])
