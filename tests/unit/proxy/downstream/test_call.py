"""gRPC at the level of bytes: between a reference client and a reference server (python-hyper/h2).

Both raise on anything that HTTP/2 does not allow, so every test here also holds our frames against them.
"""

import asyncio
import gzip
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.model_facts import ModelFacts
from proxy.request import admission
from proxy.request.messages import INFER, STREAM_INFER, framed
from proxy.wire import protobuf
from proxy.wire.h2 import frames
from proxy.wire.h2.frames import ErrorCode
from tests.fakes.data_plane import KEY
from tests.fakes.grpc_peers import Connect, request


async def test_a_call_goes_through_with_its_metadata_and_the_nodes_key(connect: Connect) -> None:
    both = connect()
    stream = both.client.call(x_request_id="7", triton_grpc_protocol_x="stolen", grpc_timeout="5S")
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    head = both.triton.calls[stream]
    assert (head[b":path"], head[b"x-request-id"], head[KEY.encode()]) == (INFER.encode(), b"7", b"k")
    assert b"triton-grpc-protocol-x" not in head
    assert both.triton.messages(stream) == [request()]
    assert stream in both.triton.ended
    both.triton.answer(stream, b"answer")
    both.exchange()
    assert both.client.data[stream] == framed(b"answer")
    assert both.client.status(stream) == 0
    assert both.pair.replica.grpc.codes == {"OK": 1}
    assert not both.pair.client.codec.streams
    assert not both.pair.tritons[0].codec.streams


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
@pytest.mark.parametrize("seed", range(30))
async def test_however_it_is_cut_triton_gets_the_same(connect: Connect, seed: int, method: str) -> None:
    """Messages over frames of any size, padded or not, and the bytes in pieces of any size."""
    rng, both = random.Random(seed), connect()
    count = rng.randrange(1, 4) if method == STREAM_INFER else 1
    messages = [request(size=rng.choice([0, 3, 5000, 400_000])) for _ in range(count)]
    stream, data = both.client.call(method), b"".join(map(framed, messages))
    for _ in range(100_000):
        sizes = [1, 2, 7, 500, 16_000] if len(data) < 6000 else [500, 3000, 16_000, 16_000]
        size = min(rng.choice(sizes), both.client.h2.local_flow_control_window(stream) - 300)
        pad = rng.choice([None, 0, 1, 200])
        both.client.h2.send_data(stream, data[:size], pad_length=pad)
        data = data[size:]
        out = both.client.h2.data_to_send()
        cut = rng.randrange(len(out))
        for piece in (out[:cut], out[cut:]):
            if piece:
                both.pair.receive(piece)
        both.exchange(1)
        if not data:
            break
    both.client.h2.end_stream(stream)
    both.exchange()
    assert both.triton.messages(stream) == messages
    assert stream in both.triton.ended


async def test_split_at_every_byte(connect: Connect) -> None:
    recorder = connect()
    for index in range(3):
        stream = recorder.client.call(x_index=str(index))
        recorder.client.send(stream, framed(request(id=str(index))), end=True)
    stream_of_bytes = recorder.client.h2.data_to_send()
    expected = None
    for cut in range(1, len(stream_of_bytes)):
        both = connect()
        for piece in (stream_of_bytes[:cut], stream_of_bytes[cut:]):
            both.pair.receive(piece)
        sent = both.pair.to_triton[0].sent
        expected = expected or sent
        assert sent == expected, cut


@pytest.mark.parametrize("seed", range(40))
async def test_interleaved_calls_do_not_disturb_each_other(connect: Connect, seed: int) -> None:
    """Own and foreign models, in any order of frames and answers, with a limit."""
    rng, both = random.Random(seed), connect(limit=3, depth=1000)
    todo: dict[int, bytes] = {}
    names: dict[int, str] = {}
    answered: set[int] = set()
    for step in range(400):
        if step < 200 and rng.random() < 0.4:
            stream = both.client.call()
            names[stream] = rng.choice(["own", "own", "other", "missing"])
            todo[stream] = framed(request(names[stream], size=rng.choice([3, 30_000]), id=str(stream)))
        elif todo:
            stream = rng.choice(list(todo))
            window = both.client.h2.local_flow_control_window(stream)
            size = min(rng.choice([1, 9, 2000, 16_000]), window, len(todo[stream]))
            if stream in both.client.ended:
                del todo[stream]
                continue
            end = size == len(todo[stream])
            both.client.h2.send_data(stream, todo[stream][:size], end_stream=end)
            todo[stream] = todo[stream][size:]
            if end:
                del todo[stream]
        if rng.random() < 0.5:
            both.exchange(1)
        ready = [id for id in both.triton.ended if id not in answered]
        assert len(ready) <= 3
        if ready and rng.random() < 0.5:
            id = rng.choice(ready)
            answered.add(id)
            (message,) = both.triton.messages(id)
            both.triton.answer(id, pb.ModelInferRequest.FromString(message).id.encode())
    while True:
        both.exchange(3)
        ready = [id for id in both.triton.ended if id not in answered]
        if not ready:
            break
        for id in ready:
            answered.add(id)
            (message,) = both.triton.messages(id)
            both.triton.answer(id, pb.ModelInferRequest.FromString(message).id.encode())
    for stream, name in names.items():
        if name == "own" and stream not in todo:
            assert both.client.data[stream] == framed(str(stream).encode())
        elif stream not in todo:
            assert both.client.status(stream) == 5
    assert all(
        pb.ModelInferRequest.FromString(m).model_name == "own"
        for id in both.triton.data
        for m in both.triton.messages(id)
    )
    assert both.pair.running == 0


TRICKS: dict[str, bytes] = {
    "another name": request("other"),
    "an empty name": protobuf.encode_bytes(1, b"") + request(""),
    "the last of two names counts": request("own") + protobuf.encode_bytes(1, b"other"),
    "an unknown field between": protobuf.encode_bytes(1, b"own")
    + protobuf.encode_bytes(99, b"x")
    + protobuf.encode_bytes(1, b"other"),
    "a name cut by NUL": protobuf.encode_bytes(1, b"own\x00other"),
    "a name with another wire type": b"\x08\x01" + request("own"),
    "a group": protobuf.encode_bytes(1, b"own") + b"\x0b\x0c",
    "an overlong key": b"\x8a\x00\x05other" + b"",
    "an overlong length": protobuf.encode_bytes(1, b"own") + b"\x0a\x85\x80\x00other",
    "shared memory": request("own", shared_memory_region="r"),
    "classes of what may be empty": pb.ModelInferRequest(
        model_name="own",
        outputs=[
            pb.ModelInferRequest.InferRequestedOutputTensor(
                name="OUT", parameters={"classification": pb.InferParameter(int64_param=2)}
            )
        ],
    ).SerializeToString(),
    "cut off": request("own")[:-1],
}


@pytest.mark.parametrize("trick", sorted(TRICKS))
@pytest.mark.parametrize("frames_of", [1, 7, 10**6])
@pytest.mark.parametrize("long", [False, True])
async def test_no_trick_reaches_triton(connect: Connect, trick: str, frames_of: int, long: bool) -> None:
    """Nor in a message that is too long to be held: its end never goes on."""
    both, message = connect(), TRICKS[trick]
    if long:
        message = protobuf.encode_bytes(1, b"own") + protobuf.encode_bytes(7, b"x" * 300_000) + message
        frames_of = max(frames_of, 5000)
    stream, data = both.client.call(), framed(message)
    for at in range(0, len(data), min(frames_of, 16_000)):
        if stream in both.client.ended:
            break
        both.client.send(stream, data[at : at + min(frames_of, 16_000)])
        both.exchange(2)
    if stream not in both.client.ended:
        both.client.h2.end_stream(stream)
    both.exchange()
    assert both.client.status(stream) in (3, 5)
    assert stream not in both.triton.ended
    assert len(both.triton.data.get(stream, b"")) < len(data)
    assert both.pair.running == 0
    if both.triton.calls and stream in both.triton.calls:
        assert stream in both.triton.resets
    again = both.client.call()
    both.client.send(again, framed(request()), end=True)
    both.exchange()
    assert both.triton.messages(again) == [request()]  # the connection is as good as before


@pytest.mark.parametrize(("encoding", "packed"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_packed_messages_are_opened_within_a_bound(
    connect: Connect, encoding: str, packed: Callable[[bytes], bytes]
) -> None:
    def flagged(message: bytes) -> bytes:
        return b"\x01" + len(body := packed(message)).to_bytes(4) + body

    both = connect()
    cases = {
        "own": (flagged(request()), None),
        "foreign": (flagged(request("other")), 5),
        "bomb": (flagged(request(size=2 * 1024**2)), 8),
        "damaged": (b"\x01\x00\x00\x00\x03abc", 3),
        "trailing": (b"\x01" + (len(packed(request())) + 1).to_bytes(4) + packed(request()) + b"x", 3),
    }
    for data, status in cases.values():
        stream = both.client.call(grpc_encoding=encoding)
        both.client.send(stream, data, end=True)
        both.exchange()
        assert both.client.status(stream) == status
        if status is None:
            assert both.triton.messages(stream) == [request()]
            assert b"grpc-encoding" not in both.triton.calls[stream]
        else:
            assert stream not in both.triton.calls
    unknown = both.client.call(grpc_encoding="snappy")
    both.client.send(unknown, flagged(request()), end=True)
    both.exchange()
    assert both.client.status(unknown) == 12
    assert dict(both.client.headers[unknown])[b"grpc-accept-encoding"] == b"identity, deflate, gzip"


async def test_refusals_are_not_calls(connect: Connect) -> None:
    both = connect()
    for method, status in (
        ("/inference.GRPCInferenceService/RepositoryModelUnload", 7),
        ("/inference.GRPCInferenceService/Unknown", 12),
        ("/other.Service/ModelInfer", 12),
        (INFER + "/", 12),
        ("*", 12),
    ):
        stream = both.client.call(method)
        both.exchange()
        assert both.client.status(stream) == status, method
    assert not both.triton.calls


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
async def test_a_deadline_is_kept_and_not_passed_on(connect: Connect, method: str) -> None:
    """Triton does not stop for a deadline: another call in its place would be one too many."""
    both, answer = connect(limit=1, depth=2), stream_response()
    first = both.client.call(method)
    late, patient = (both.client.call(method, grpc_timeout=timeout) for timeout in ("50m", "200m"))
    for stream in (first, late, patient):
        both.client.send(stream, framed(request()), end=True)
    both.exchange()
    await asyncio.sleep(0.1)
    both.exchange()
    assert both.client.status(late) == 4
    both.triton.answer(first, answer)
    both.exchange()
    assert b"grpc-timeout" not in both.triton.calls[patient]
    await asyncio.sleep(0.15)
    both.exchange()
    assert both.client.status(patient) == 4
    assert (both.triton.resets, both.pair.running) == (set(), 1)
    both.triton.answer(patient, answer)
    both.exchange()
    assert both.pair.running == 0


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("left_by", ["cancel", "half-close", "refusal"])
async def test_a_stream_that_is_left_in_the_middle_of_a_message_keeps_no_slot_for_it(
    connect: Connect, left_by: str, before: int
) -> None:
    """Triton never runs what it will not get the end of; what it has got whole it runs."""
    both = connect(limit=before + 1, depth=2)
    stream = both.client.call(STREAM_INFER)
    for _ in range(before):
        both.client.send(stream, framed(request()))
    half = framed(request(size=400_000) + bytes(200_000))  # what stands behind the tensor is no field
    for at in range(0, 300_000, 50_000):
        both.client.send(stream, half[at : at + 50_000])
        both.exchange()
    assert len(both.triton.data[stream]) > 200_000
    assert both.pair.running == before
    if left_by == "cancel":
        both.client.h2.reset_stream(stream, ErrorCode.CANCEL)
    elif left_by == "half-close":
        both.client.h2.end_stream(stream)
    else:
        for at in range(300_000, 450_000, 50_000):
            both.client.send(stream, half[at : at + 50_000])
            both.exchange()
    both.exchange()
    assert both.pair.running == before
    next = both.client.call()
    both.client.send(next, framed(request()), end=True)
    both.exchange()
    assert next in both.triton.calls
    if before:
        assert not both.triton.resets
        both.triton.begin(stream)
        both.triton.send(stream, framed(stream_response()))
        both.exchange()
    assert both.triton.resets == {stream}
    both.triton.answer(next, b"")
    both.exchange()
    replica = both.pair.replica
    assert (both.pair.running, both.pair.downstream.given_up, replica.admissions.bytes.used_bytes) == (
        0,
        set(),
        0,
    )


@pytest.mark.parametrize("how", ["reset", "gone", "answer broken off", "Triton lost", "never"])
async def test_a_call_that_was_given_up_keeps_its_slot_until_triton_is_done(
    connect: Connect, how: str
) -> None:
    """And Triton, which dies of calls that are reset while it has them, never receives a reset."""
    both = connect(limit=1, depth=2)
    stream = both.client.call()
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    downstream, upstream = both.pair.downstream, both.pair.tritons[0]
    both.client.h2.reset_stream(stream, 8)
    both.exchange()
    if how != "reset":
        both.pair.client.connection_lost(None)
    downstream.tick(time.monotonic() + admission.GIVEN_UP_SECONDS - 1)
    both.pair.end_turn()
    assert (both.pair.running, both.triton.resets, both.pair.to_triton[0].open) == (1, set(), True)
    if how in ("reset", "gone"):
        both.triton.answer(stream, framed(b"x" * 1000))
        both.triton.exchange()
    elif how == "answer broken off":
        upstream.data_received(frames.reset(both.triton.own(stream), ErrorCode.INTERNAL_ERROR))
    elif how == "Triton lost":
        upstream.connection_lost(None)
    else:
        downstream.tick(time.monotonic() + admission.GIVEN_UP_SECONDS + 1)
    both.pair.end_turn()
    assert (both.pair.running, downstream.given_up) == (0, set())
    assert both.pair.replica.grpc.codes == {"CANCELLED": 1}
    assert upstream.is_closed is (how == "Triton lost")  # others' calls are in it too


def stream_response(
    error: str = "", *, id: str = "", final: bool | None = None, output: bool = True
) -> bytes:
    response = pb.ModelStreamInferResponse(error_message=error)
    response.infer_response.id = id
    if final is not None:
        response.infer_response.parameters["triton_final_response"].bool_param = final
    if output:
        response.infer_response.raw_output_contents.append(b"out")
    encoded: bytes = response.SerializeToString()
    return encoded


def responses(data: bytes) -> Iterator[pb.ModelStreamInferResponse]:
    while data:
        size = int.from_bytes(data[1:5])
        yield pb.ModelStreamInferResponse.FromString(data[5 : 5 + size])
        data = data[5 + size :]


async def test_in_a_stream_each_message_has_its_slot_and_its_refusal(connect: Connect) -> None:
    both = connect(limit=2, depth=10)
    stream = both.client.call(STREAM_INFER)
    for index, model in enumerate(["own", "other", "own", "own"]):
        both.client.send(stream, framed(request(model, id=str(index))))
    both.exchange()
    assert len(both.triton.messages(stream)) == 2  # the third waits for a slot
    (refused,) = responses(both.client.data[stream])
    assert (refused.error_message, refused.infer_response.id) == (
        "Request for unknown model: 'other' is not found",
        "1",
    )
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    both.triton.h2.send_data(both.triton.own(stream), framed(stream_response(id="0")))
    both.exchange()
    assert len(both.triton.messages(stream)) == 3
    for id in ("2", "3"):
        both.triton.h2.send_data(both.triton.own(stream), framed(stream_response(id=id)))
    both.client.h2.end_stream(stream)
    both.exchange()
    both.triton.h2.send_headers(both.triton.own(stream), [("grpc-status", "0")], end_stream=True)
    both.exchange()
    assert [one.infer_response.id for one in responses(both.client.data[stream])] == ["1", "0", "2", "3"]
    assert both.client.status(stream) == 0
    assert both.pair.running == 0


async def test_a_long_message_that_finds_the_queue_full_is_dropped_to_its_end(connect: Connect) -> None:
    """Its tail must not be taken for messages: it was never checked as such."""
    both = connect(limit=1, depth=0)
    stream = both.client.call(STREAM_INFER)
    both.client.send(stream, framed(request(id="1")))
    both.exchange()
    hidden = framed(request("other"))
    long = pb.ModelInferRequest(model_name="own", id="2")
    long.raw_input_contents.append(b"x" * 300_000 + hidden * 1000)
    data = framed(long.SerializeToString())
    while data:
        size = min(16_000 if len(data) > 60_000 else len(hidden), len(data))
        both.client.send(stream, data[:size])
        data = data[size:]
        both.exchange(1)
    both.client.send(stream, framed(request(id="3")))
    both.exchange()
    assert both.triton.messages(stream) == [request(id="1")]
    errors = [one.error_message for one in responses(both.client.data[stream])]
    assert errors == ["pending request queue full"] * 2
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    both.triton.h2.send_data(both.triton.own(stream), framed(stream_response(id="1")))
    both.exchange()
    both.client.send(stream, framed(request(id="4")))
    both.exchange()
    assert both.triton.messages(stream) == [request(id="1"), request(id="4")]
    assert both.client.h2.local_flow_control_window(stream) > 100_000  # all of it was given back


@pytest.mark.parametrize("asks", [False, True])
async def test_a_decoupled_request_holds_its_slot_to_its_final_response(connect: Connect, asks: bool) -> None:
    both = connect(limit=1, depth=10, facts=ModelFacts(is_decoupled=True))
    stream = both.client.call(STREAM_INFER)
    message = pb.ModelInferRequest(model_name="own")
    if asks:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    for _ in range(2):
        both.client.send(stream, framed(message.SerializeToString()))
    both.exchange()
    (sent,) = both.triton.messages(stream)
    assert pb.ModelInferRequest.FromString(sent).parameters["triton_enable_empty_final_response"].bool_param
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    for _ in range(2):
        both.triton.h2.send_data(both.triton.own(stream), framed(stream_response(final=False)))
    both.exchange()
    assert len(both.triton.messages(stream)) == 1
    both.triton.h2.send_data(both.triton.own(stream), framed(stream_response(final=True, output=False)))
    both.exchange()
    assert len(both.triton.messages(stream)) == 2
    shown = list(responses(both.client.data[stream]))
    assert len(shown) == (3 if asks else 2)
    both.triton.h2.send_data(
        both.triton.own(stream), framed(stream_response("stopped before the model", output=False))
    )
    both.exchange()
    assert both.pair.running == 0


async def test_what_triton_breaks_off_is_unavailable_and_the_next_call_gets_a_new_connection(
    connect: Connect,
) -> None:
    both = connect()
    begun, waiting = both.client.call(), both.client.call()
    for stream in (begun, waiting):
        both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.triton.h2.send_headers(
        both.triton.own(begun), [(":status", "200"), ("content-type", "application/grpc")]
    )
    both.triton.h2.send_data(both.triton.own(begun), framed(b"a" * 10)[:8])
    both.exchange()
    both.pair.tritons[0].connection_lost(ConnectionResetError("reset"))
    both.client.exchange()
    assert (both.client.status(begun), both.client.status(waiting)) == (14, 14)
    again = both.client.call()
    both.client.send(again, framed(request()), end=True)
    both.client.exchange()
    assert len(both.pair.tritons) == 2


async def test_a_goaway_of_tritons_moves_new_calls_to_a_new_connection(connect: Connect) -> None:
    both = connect()
    old = both.client.call()
    both.client.send(old, framed(request()), end=True)
    both.exchange()
    both.pair.tritons[0].data_received(frames.goaway(old, frames.ErrorCode.NO_ERROR))
    new = both.client.call()
    both.client.send(new, framed(request()), end=True)
    both.client.exchange()
    assert len(both.pair.tritons) == 2
    both.triton.answer(old, b"done")
    both.exchange(2)
    assert both.client.status(old) == 0


async def test_a_slow_reader_holds_up_triton_and_nothing_grows(connect: Connect) -> None:
    """The client opens no window: what Triton may still send is what its stream's window allows."""
    both = connect()
    stream = both.client.call()
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.triton.h2.send_headers(
        both.triton.own(stream), [(":status", "200"), ("content-type", "application/grpc")]
    )
    sent = 0
    while (room := both.triton.h2.local_flow_control_window(both.triton.own(stream))) > 0:
        size = min(room, 16_000)
        both.triton.h2.send_data(both.triton.own(stream), b"x" * size)
        sent += size
        assert sent <= 2 * 512 * 1024
        both.pair.tritons[0].data_received(both.triton.h2.data_to_send())
        both.triton.h2.receive_data(both.pair.to_triton[0].take())
    assert len(both.pair.to_client.sent) < 70_000
    for _ in range(100):
        both.exchange(1)
    assert len(both.client.data[stream]) == sent


FLOODS = {
    "ping": frames.head(8, frames.PING, 0, 0) + b"12345678",
    "settings": frames.settings({}),
    "priority": frames.head(5, frames.PRIORITY, 0, 1) + b"\x00\x00\x00\x03\x10",
    "window": frames.window_update(0, 1),
    "empty data": frames.head(0, frames.DATA, 0, 1),
}


@pytest.mark.parametrize("flood", sorted(FLOODS))
async def test_floods_end_the_connection(connect: Connect, flood: str) -> None:
    both = connect()
    both.client.call(STREAM_INFER)
    both.exchange()
    for _ in range(100):
        if both.pair.to_client.open:
            both.pair.receive(FLOODS[flood] * 100)
    assert not both.pair.to_client.open


async def test_rapid_reset_ends_the_connection(connect: Connect) -> None:
    both = connect()
    for _ in range(3000):
        if not both.pair.to_client.open:
            break
        stream = both.client.call()
        both.client.h2.reset_stream(stream)
        both.client.exchange()
    assert not both.pair.to_client.open
    assert both.pair.running == 0


async def test_a_continuation_flood_is_bounded(connect: Connect) -> None:
    both = connect()
    both.pair.receive(frames.head(1, frames.HEADERS, 0, 1) + b"\x82")
    for _ in range(200):
        if both.pair.to_client.open:
            both.pair.receive(frames.head(1000, frames.CONTINUATION, 0, 1) + b"\x82" * 1000)
    assert not both.pair.to_client.open


@pytest.mark.parametrize("seed", range(300))
async def test_whatever_bytes_come_only_the_own_model_is_reached(connect: Connect, seed: int) -> None:
    """Damaged streams: either the same decision as the reference's, or a refusal; never another model."""
    rng, recorder = random.Random(seed), connect()
    for model in rng.choices(["own", "other"], k=4):
        method = rng.choice([INFER, STREAM_INFER])
        stream = recorder.client.call(method)
        recorder.client.send(stream, framed(request(model)), end=True)
    data = bytearray(recorder.client.h2.data_to_send())
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 10)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 10))
    both = connect()
    both.pair.receive(bytes(data))
    if both.pair.tritons:
        both.triton.exchange()  # raises on whatever HTTP/2 does not allow
    for id, call in both.triton.calls.items():  # ended or not: Triton acts on each whole message
        for message in both.triton.messages(id):
            with suppress(DecodeError):  # Triton's parser refuses it as well
                assert pb.ModelInferRequest.FromString(message).model_name == "own"
        assert call[b":path"] in (INFER.encode(), STREAM_INFER.encode())


async def test_a_drain_sends_two_goaways_and_serves_what_came_between(connect: Connect) -> None:
    """RFC 9113, 6.8: what a client has sent before the notice reached it is served, and its calls end."""
    both = connect()
    last_of_all, no_error = frames.MAX_STREAM_ID, frames.ErrorCode.NO_ERROR

    def asked() -> int:
        stream = both.client.call()
        both.client.send(stream, framed(request()), end=True)
        both.exchange()
        return stream

    def said() -> bytes:  # by hand: h2 reads nothing after a GOAWAY
        both.pair.end_turn()
        return both.pair.to_client.take()

    begun = asked()
    both.pair.downstream.stop_accepting()
    assert said() == frames.goaway(last_of_all, no_error, "draining")
    both.pair.downstream.stop_accepting()
    assert said() == b""
    on_its_way = asked()
    both.triton.answer(begun, b"first")
    both.exchange()
    assert both.client.status(begun) == 0
    both.pair.client.tick(time.monotonic())  # it has had no time to hear
    assert said() == b""
    both.pair.client.tick(time.monotonic() + 1.1)
    assert said() == frames.goaway(on_its_way, no_error, "draining")
    assert both.client.resets[asked()] == frames.ErrorCode.REFUSED_STREAM
    both.triton.answer(on_its_way, b"last")
    both.exchange()
    assert both.client.data[on_its_way] == framed(b"last")
    assert not both.pair.client.codec.streams
    both.pair.client.tick(time.monotonic() + 2.1)
    assert not both.pair.to_client.open


async def test_a_draining_connection_is_busy_until_its_client_can_know(connect: Connect) -> None:
    """A call may be on its way: a drain waits for that, or for the client to disconnect."""
    both = connect()
    both.exchange()
    assert both.pair.downstream.busy_connections == 0
    both.pair.downstream.stop_accepting()
    both.pair.end_turn()
    assert both.pair.downstream.busy_connections == 1
    both.pair.client.tick(time.monotonic() + 1.1)
    both.pair.end_turn()
    assert both.pair.downstream.busy_connections == 0
    gone = connect()
    gone.exchange()
    gone.pair.downstream.stop_accepting()
    gone.pair.client.connection_lost(None)
    assert gone.pair.downstream.busy_connections == 0


async def test_an_answer_is_delivered_before_a_draining_connection_ends(connect: Connect) -> None:
    """However slowly its client takes it: until then the connection is busy, and the proxy stays."""
    both = connect()
    stream = both.client.call()
    both.client.send(stream, framed(request()), end=True)
    both.exchange()
    both.pair.to_client.stall(both.pair.client)
    both.triton.answer(stream, b"x" * 1000)
    both.triton.exchange()
    assert not both.pair.client.codec.streams
    both.pair.downstream.stop_accepting()
    both.pair.end_turn()
    for second in range(3):
        assert both.pair.client.is_busy
        both.pair.client.tick(time.monotonic() + second)
        assert both.pair.to_client.open
        both.pair.to_client.drain(300)
        both.pair.end_turn()
    both.pair.to_client.drain()
    assert both.pair.to_client.take().count(b"x" * 1000) == 1
    assert not both.pair.client.is_busy
    both.pair.client.tick(time.monotonic() + 9)
    assert both.pair.to_client.ended
