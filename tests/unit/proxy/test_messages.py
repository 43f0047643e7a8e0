"""gRPC messages cut out of whatever they came in, and what is found out about answers."""

import gzip
import itertools
import random
import zlib

import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.codecs import protobuf
from proxy.codecs.grpc_status import Refused, Status
from proxy.codecs.h2.connection import MAX_FRAME
from proxy.exchange.messages import (
    HOLD_BYTES,
    InferGuard,
    MessageReader,
    NameGuard,
    Piece,
    ResponseReader,
    framed,
    inflate,
    stream_error,
)
from proxy.exchange.model_facts import ModelFacts
from proxy.fronts.grpc.upstream import MessageCounter
from tests.fakes.grpc_peers import request

OWN = protobuf.OwnModel(b"own")
FIXED = ModelFacts(fixed_outputs=frozenset({"A"}))


def reader(encoding: str = "identity", *, ask_final: bool = False, limit: int = 5000) -> MessageReader:
    guard = InferGuard(OWN, lambda: FIXED)
    return MessageReader(guard, encoding=encoding, inflate_limit=limit, ask_final=ask_final)


def read(one: MessageReader, data: bytes, sizes: list[int]) -> tuple[bytes, list[str], list[bool]]:
    """What goes on, the refusals' texts, and which pieces begin a message."""
    out, refusals, begins, at, turn = b"", [], [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        for item in one.feed(data[at : at + size]):
            if isinstance(item, Piece):
                out += item.data
                begins.append(item.begins)
            else:
                refusals.append(str(item))
        at, turn = at + size, turn + 1
    return out, refusals, begins


SIZES = [[1], [7, 1, 300], [5], [10**9]]
LONG = HOLD_BYTES + 1000


@pytest.mark.parametrize("sizes", [[700, 1, 9000], [MAX_FRAME]])
def test_short_and_long_messages_go_on_as_they_are(sizes: list[int]) -> None:
    messages = [request(size=size, id=str(size)) for size in (3, LONG, 4, HOLD_BYTES - 60, 0, LONG)]
    one, data = reader(), b"".join(map(framed, messages))
    out, refusals, begins = read(one, data, sizes)
    assert (out, refusals, begins.count(True)) == (data, [], len(messages))
    assert (one.is_between_messages, one.gathered) == (True, 0)


@pytest.mark.parametrize("sizes", [[700, 1, 9000], [MAX_FRAME]])
def test_a_message_that_is_refused_is_left_out_and_the_others_go_on(sizes: list[int]) -> None:
    """However long it is, if its beginning tells."""
    good, foreign, long = request(), request("other"), request("other", size=LONG)
    shared = request(shared_memory_region="r")
    out, refusals, _ = read(reader(), b"".join(map(framed, (good, foreign, good, long, shared, good))), sizes)
    assert out == framed(good) * 3
    foreign_text = "Request for unknown model: 'other' is not found"
    assert refusals == [foreign_text, foreign_text, "shared memory is not available"]


def test_a_message_is_as_long_as_tritons_own_may_be() -> None:
    assert reader().feed(b"\0" + (2**31 - 1).to_bytes(4) + OWN.field)
    with pytest.raises(Refused, match="are taken"):
        reader().feed(b"\0" + (2**31).to_bytes(4) + OWN.field)


def test_a_refusal_names_its_message() -> None:
    for message in (request("other", id="7"), request(id="7", shared_memory_region="r")):
        (refusal,) = reader().feed(framed(message))
        assert isinstance(refusal, Refused)
        assert refusal.request_id == b"7"


def test_what_is_refused_only_at_its_end_ends_the_call() -> None:
    """A part of it is with Triton already, which must never have the rest."""
    message = request(size=LONG) + protobuf.encode_bytes(1, b"other")
    one, data = reader(), framed(message)
    assert all(isinstance(item, Piece) for item in one.feed(data[: HOLD_BYTES + 10]))
    with pytest.raises(Refused, match="'other'"):
        one.feed(data[HOLD_BYTES + 10 :])


def test_a_dropped_message_is_dropped_to_its_end() -> None:
    one, data = reader(), framed(request(size=LONG))
    assert one.feed(data[:HOLD_BYTES])
    one.drop()
    assert one.feed(data[HOLD_BYTES:] + framed(request())) == [Piece(framed(request()), begins=True)]
    one.drop()  # between messages there is nothing to drop
    assert one.feed(framed(request())) == [Piece(framed(request()), begins=True)]


def test_the_middle_of_a_long_tensor_is_passed_unread() -> None:
    one, data = reader(), framed(request(size=LONG))
    assert not one.skim(10)
    one.feed(data[:1000])
    assert one.skim(1000)
    assert not one.skim(len(data) - 2000)  # its end is to be looked at
    assert one.skim(len(data) - 2001)
    assert not one.is_between_messages
    assert one.feed(data[-1:]) == [Piece(data[-1:], begins=False)]
    assert one.is_between_messages


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("sizes", SIZES)
def test_packed_messages_go_on_unpacked(encoding: str, sizes: list[int]) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    packed = pack(request())
    data = b"\x01" + len(packed).to_bytes(4) + packed
    out, refusals, _ = read(reader(encoding), data + framed(request()) + data, sizes)
    assert (out, refusals) == (framed(request()) * 3, [])


def test_packed_messages_are_bounded_packed_and_unpacked() -> None:
    fits, large = request(size=4900), request(size=5000)
    assert len(fits) <= 5000 < len(large)
    assert inflate(gzip.compress(fits), "gzip", 5000) == fits
    with pytest.raises(Refused, match="5000 bytes") as refused:
        inflate(gzip.compress(large), "gzip", 5000)
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    with pytest.raises(Refused, match="not one whole gzip"):
        inflate(gzip.compress(fits)[:-1], "gzip", 5000)
    with pytest.raises(Refused, match="5001 bytes; 5000 are taken"):
        reader("gzip").feed(b"\x01" + (5001).to_bytes(4))
    assert reader("gzip").feed(b"\x01" + (5000).to_bytes(4)) == []
    (refusal,) = reader("gzip").feed(b"\x01\0\0\0\x01x")
    assert isinstance(refusal, Refused)


@pytest.mark.parametrize("size", [3, LONG])
@pytest.mark.parametrize("asks", [False, True])
def test_every_request_of_a_decoupled_model_asks_for_the_mark(size: int, asks: bool) -> None:
    """And it is known of each whether its client had asked for it."""
    message = pb.ModelInferRequest.FromString(request(size=size))
    if asks:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    one = reader(ask_final=True)
    out, refusals, _ = read(one, framed(message.SerializeToString()) * 2, [MAX_FRAME])
    assert not refusals
    length = int.from_bytes(out[1:5])
    assert out == out[: 5 + length] * 2
    got = pb.ModelInferRequest.FromString(out[5 : 5 + length])
    assert got.parameters["triton_enable_empty_final_response"].bool_param
    assert got.raw_input_contents == message.raw_input_contents
    if size == 3:
        assert one.wants_final is asks


def test_classes_are_taken_only_of_what_cannot_be_empty() -> None:
    for output, shape, taken in (("A", 2, True), ("B", 2, False), ("A", 0, False)):
        message = pb.ModelInferRequest(model_name="own")
        message.inputs.add(name="I", datatype="INT32", shape=[shape])
        message.outputs.add(name=output).parameters["classification"].int64_param = 1
        (item,) = reader().feed(framed(message.SerializeToString()))
        assert isinstance(item, Piece) is taken


def test_a_name_is_filled_in_only_where_it_means_all() -> None:
    hidden = lambda name: Refused(Status.NOT_FOUND, name.decode())  # noqa: E731
    fills, plain = NameGuard(OWN, hidden, fill=True), NameGuard(OWN, hidden)
    assert (fills.whole(b""), fills.whole(OWN.field)) == (OWN.field, OWN.field)
    assert plain.whole(OWN.field) == OWN.field
    for guard, message in (
        (plain, b""),
        (plain, protobuf.encode_bytes(1, b"x")),
        (fills, protobuf.encode_bytes(1, b"x")),
    ):
        with pytest.raises(Refused):
            guard.whole(message)


# Answers.


def response(*, mark: bool | None = None, error: str = "", tensors: int = 0) -> bytes:
    answer = pb.ModelStreamInferResponse(error_message=error)
    answer.infer_response.model_name = "own"
    if mark is not None:
        answer.infer_response.parameters["triton_final_response"].bool_param = mark
    if tensors:
        answer.infer_response.outputs.add(name="O", shape=[tensors])
        answer.infer_response.raw_output_contents.append(b"x" * tensors)
    encoded: bytes = answer.SerializeToString()
    return encoded


ANSWERS = {
    "the mark alone": (response(mark=True), 1, False),
    "the last with tensors": (response(mark=True, tensors=4), 1, True),
    "not the last": (response(mark=False, tensors=4), 0, True),
    "without a mark": (response(tensors=4), 0, True),
    "an error": (response(error="x"), 1, True),
    "an error that is not the last": (response(error="x", mark=False), 0, True),
    "an error that is the last": (response(error="x", mark=True), 1, True),
    "a long one that is the last": (response(mark=True, tensors=LONG), 1, True),
    "a long one that is not": (response(mark=False, tensors=LONG), 0, True),
    "nothing": (b"", 0, True),
}


@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("sizes", [[1000, 1, 7], [10**9]])
@pytest.mark.parametrize("shows", [False, True])
def test_what_an_answer_tells_of_its_request(case: str, sizes: list[int], shows: bool) -> None:
    message, finals, is_shown = ANSWERS[case]
    data, one = framed(message) * 2, ResponseReader()
    out, count, at, turn = b"", 0, 0, 0
    while at < len(data):
        shown, more = one.feed(data[at : at + sizes[turn % len(sizes)]], show_marks=shows)
        out, count = out + shown, count + more
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    assert count == 2 * finals
    assert out == (data if is_shown or shows else b"")


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_packed_answer_tells_the_same(pack: object) -> None:
    for case, (message, finals, is_shown) in ANSWERS.items():
        packed = pack(message)  # type: ignore[operator]
        data = b"\x01" + len(packed).to_bytes(4) + packed
        out, count = ResponseReader().feed(data, show_marks=False)
        assert (count, out) == (finals, data if is_shown else b""), case
    garbage = b"\x01\0\0\0\x04abcd"
    assert ResponseReader().feed(garbage, show_marks=False) == (garbage, 0)


@pytest.mark.parametrize("seed", range(30))
def test_messages_are_counted_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, 300]) for _ in range(rng.randrange(1, 8))]
    data = b"".join(framed(b"x" * size) for size in sizes)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(12)))})
    counter, counted = MessageCounter(), 0
    ends = [sum(5 + size for size in sizes[: number + 1]) for number in range(len(sizes))]
    for start, end in itertools.pairwise(cuts):
        around = b"junk" + data[start:end] + b"junk"  # a part of what was read
        counted += counter.count(around, 4, 4 + end - start)
        assert counted == sum(one <= end for one in ends)


def test_a_refusal_in_a_stream_is_tritons_own_message() -> None:
    for id in ("", "7"):
        data = stream_error("no", id.encode())
        assert data[:5] == b"\0" + len(data[5:]).to_bytes(4)
        answer = pb.ModelStreamInferResponse.FromString(data[5:])
        assert (answer.error_message, answer.infer_response.id) == ("no", id)
