"""gRPC messages cut out of whatever they came in, and what is found out about answers."""

import gzip
import itertools
import random
import zlib

import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.model_facts import ModelFacts
from proxy.policy.names import Names
from proxy.policy.refusal import Flags
from proxy.policy.routes import SERVICE
from proxy.request.messages import (
    HOLD_BYTES,
    INFER,
    STREAM_INFER,
    AnswerReader,
    InferGuard,
    MessageReader,
    ModelFields,
    NameGuard,
    Piece,
    Unfinished,
    framed,
    stream_error,
)
from proxy.request.minimum_rate import BEGUN_BYTES
from proxy.wire import protobuf
from proxy.wire.grpc_status import GrpcError, Status
from proxy.wire.h2.sending import MAX_FRAME
from tests.fakes.grpc_peers import request

OWN = ModelFields(Names(b"own", b"own"))
RENAMED = ModelFields(Names(b"own", b"own-0123456789ab"))
FIXED = ModelFacts(fixed_outputs=frozenset({"A"}))


def reader(encoding: str = "identity", *, ask_final: bool = False, limit: int = 5000) -> MessageReader:
    guard = InferGuard(OWN, lambda: FIXED)
    return MessageReader(
        guard, encoding=encoding, inflate_limit=limit, message_limit=2**32, ask_final=ask_final
    )


def fed(one: MessageReader, data: bytes) -> list[Piece | GrpcError]:
    one.push(data)
    items: list[Piece | GrpcError] = []
    while (item := one.pull()) is not None:
        if not isinstance(item, Unfinished):
            items.append(item)
    return items


def read(one: MessageReader, data: bytes, sizes: list[int]) -> tuple[bytes, list[str], list[bool]]:
    """What goes on, the refusals' texts, and which pieces begin a message."""
    out, refusals, begins, at, turn = b"", [], [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        for item in fed(one, data[at : at + size]):
            if isinstance(item, Piece):
                out += item.data
                begins.append(item.begins_bytes > 0)
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
    assert fed(reader(), b"\0" + (2**31 - 1).to_bytes(4) + request(size=BEGUN_BYTES))
    with pytest.raises(GrpcError, match="are taken"):
        fed(reader(), b"\0" + (2**31).to_bytes(4) + OWN.public)


def test_a_refusal_names_its_message() -> None:
    for message in (request("other", id="7"), request(id="7", shared_memory_region="r")):
        (refusal,) = fed(reader(), framed(message))
        assert isinstance(refusal, GrpcError)
        assert refusal.request_id == b"7"


def test_what_is_refused_only_at_its_end_ends_the_call() -> None:
    """A part of it is with Triton already, which must never have the rest."""
    message = request(size=LONG) + protobuf.encode_bytes(1, b"other")
    one, data = reader(), framed(message)
    assert all(isinstance(item, Piece) for item in fed(one, data[: HOLD_BYTES + 10]))
    with pytest.raises(GrpcError, match="'other'"):
        fed(one, data[HOLD_BYTES + 10 :])


def test_a_dropped_message_is_dropped_to_its_end() -> None:
    one, data = reader(), framed(request(size=LONG))
    assert fed(one, data[:HOLD_BYTES])
    one.drop()
    (piece,) = fed(one, data[HOLD_BYTES:] + framed(request()))
    assert isinstance(piece, Piece)
    assert piece[:2] == (framed(request()), len(framed(request())))
    one.drop()  # between messages there is nothing to drop
    assert fed(one, framed(request())) == [piece]


def test_the_middle_of_a_long_tensor_is_passed_unread() -> None:
    one, data = reader(), framed(request(size=LONG))
    assert not one.skim(10)
    assert not fed(one, data[: BEGUN_BYTES - 1])
    assert not one.skim(1000)  # nothing of it has gone on yet
    fed(one, data[BEGUN_BYTES - 1 : BEGUN_BYTES])
    assert one.skim(1000)
    assert not one.skim(len(data) - BEGUN_BYTES - 1000)  # its end is to be looked at
    assert one.skim(len(data) - BEGUN_BYTES - 1001)
    assert not one.is_between_messages
    assert fed(one, data[-1:]) == [Piece(data[-1:], begins_bytes=0, cost_bytes=0)]
    assert one.is_between_messages


def test_a_packed_message_is_opened_step_by_step_and_counted_meanwhile() -> None:
    """However much there is in few bytes, the loop has its turns."""
    message = request(size=4_000_000)
    one = reader("gzip", limit=5_000_000)
    packed = gzip.compress(message)
    one.push(b"\x01" + len(packed).to_bytes(4) + packed)
    counted = []
    while isinstance(item := one.pull(), Unfinished):
        counted.append(one.gathered)
        assert not one.is_between_messages
    assert len(counted) > 10
    assert max(after - before for before, after in itertools.pairwise(counted)) <= 256 * 1024
    assert isinstance(item, Piece)
    assert (item.data, item.begins_bytes, one.gathered) == (framed(message), len(framed(message)), 0)
    assert one.is_between_messages


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("sizes", SIZES)
def test_packed_messages_go_on_unpacked(encoding: str, sizes: list[int]) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    packed = pack(request())
    data = b"\x01" + len(packed).to_bytes(4) + packed
    out, refusals, _ = read(reader(encoding), data + framed(request()) + data, sizes)
    assert (out, refusals) == (framed(request()) * 3, [])


def unpacked(packed: bytes) -> Piece | GrpcError:
    (item,) = fed(reader("gzip"), b"\x01" + len(packed).to_bytes(4) + packed)
    return item


def test_packed_messages_are_bounded_packed_and_unpacked() -> None:
    fits, large = request(size=4900), request(size=5000)
    assert len(fits) <= 5000 < len(large)
    taken = unpacked(gzip.compress(fits))
    assert isinstance(taken, Piece)
    assert (taken.data, taken.begins_bytes) == (framed(fits), len(framed(fits)))
    for packed, status, text in (
        (gzip.compress(large), Status.RESOURCE_EXHAUSTED, "5000 bytes (--max-json-bytes)"),
        (gzip.compress(fits)[:-1], Status.INVALID_ARGUMENT, "not one whole gzip"),
        (gzip.compress(fits) + b"x", Status.INVALID_ARGUMENT, "not one whole gzip"),
        (b"", Status.INVALID_ARGUMENT, "not one whole gzip"),
    ):
        refused = unpacked(packed)
        assert isinstance(refused, GrpcError)
        assert refused.status is status
        assert text in str(refused)
    with pytest.raises(GrpcError, match=r"5001 bytes; 5000 are taken \(--max-json-bytes\)"):
        fed(reader("gzip"), b"\x01" + (5001).to_bytes(4))
    assert fed(reader("gzip"), b"\x01" + (5000).to_bytes(4)) == []
    (refusal,) = fed(reader("gzip"), b"\x01\0\0\0\x01x")
    assert isinstance(refusal, GrpcError)


@pytest.mark.parametrize("size", [3, LONG])
@pytest.mark.parametrize("asks", [False, True])
def test_every_request_of_a_decoupled_model_requests_the_mark(size: int, asks: bool) -> None:
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
        (item,) = fed(reader(), framed(message.SerializeToString()))
        assert isinstance(item, Piece) is taken


def test_a_name_is_filled_in_only_where_it_means_all() -> None:
    hidden = lambda name: GrpcError(Status.NOT_FOUND, name.decode())  # noqa: E731
    fills, plain = NameGuard(OWN, hidden, fill=True), NameGuard(OWN, hidden)
    assert (fills.whole(b""), fills.whole(OWN.public)) == (OWN.public, OWN.public)
    assert plain.whole(OWN.public) == OWN.public
    for guard, message in (
        (plain, b""),
        (plain, protobuf.encode_bytes(1, b"x")),
        (fills, protobuf.encode_bytes(1, b"x")),
    ):
        with pytest.raises(GrpcError):
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
    data, one = framed(message) * 2, AnswerReader(STREAM_INFER, OWN, is_decoupled=True)
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
        out, count = AnswerReader(STREAM_INFER, OWN, is_decoupled=True).feed(data, show_marks=False)
        assert (count, out) == (finals, data if is_shown else b""), case
    garbage = b"\x01\0\0\0\x04abcd"
    one = AnswerReader(STREAM_INFER, OWN, is_decoupled=True)
    assert one.feed(garbage, show_marks=False) == (garbage, 0)


@pytest.mark.parametrize("seed", range(30))
def test_messages_are_counted_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, 300]) for _ in range(rng.randrange(1, 8))]
    data = b"".join(framed(b"x" * size) for size in sizes)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randrange(12)))})
    reader, counted, out = AnswerReader(STREAM_INFER, OWN), 0, b""
    ends = [sum(5 + size for size in sizes[: number + 1]) for number in range(len(sizes))]
    for start, end in itertools.pairwise(cuts):
        shown, finals = reader.feed(data[start:end])
        out, counted = out + shown, counted + finals
        assert counted == sum(one <= end for one in ends)
    assert out == data


# Under the public name.


def of_server(message: bytes) -> bytes:
    """As Triton says it: under its own name."""
    answer = pb.ModelStreamInferResponse.FromString(message)
    if answer.HasField("infer_response"):
        answer.infer_response.model_name = "own-0123456789ab"
    answer.error_message = (
        answer.error_message and f"{answer.error_message} in own-0123456789ab, own-0123456789ab"
    )
    encoded: bytes = answer.SerializeToString()
    return encoded


@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("sizes", [[1000, 1, 7], [3], [10**9]])
@pytest.mark.parametrize("case", [case for case in ANSWERS if "long" not in case])
def test_answers_of_a_stream_come_under_the_public_name(
    case: str, sizes: list[int], is_decoupled: bool
) -> None:
    message = of_server(ANSWERS[case][0])
    one, data, out, turn = (
        AnswerReader(STREAM_INFER, RENAMED, is_decoupled=is_decoupled),
        framed(message) * 3,
        b"",
        0,
    )
    while data:
        size = sizes[turn % len(sizes)]
        out, data, turn = out + one.feed(data[:size])[0], data[size:], turn + 1
    expected = pb.ModelStreamInferResponse.FromString(message)
    if expected.HasField("infer_response"):
        expected.infer_response.model_name = "own"
    expected.error_message = expected.error_message.replace("own-0123456789ab", "own")
    for _ in range(3):
        size = int.from_bytes(out[1:5])
        assert pb.ModelStreamInferResponse.FromString(out[5 : 5 + size]) == expected
        out = out[5 + size :]
    assert not out


@pytest.mark.parametrize("method", [INFER, STREAM_INFER])
@pytest.mark.parametrize("first", [1, 5, 20, 30, 300_000])
def test_a_long_answer_streams_by_under_the_public_name(method: str, first: int) -> None:
    answer = pb.ModelInferResponse(model_name="own-0123456789ab", model_version="1")
    answer.raw_output_contents.append(b"own-0123456789ab" * (LONG // 16))  # a tensor is nobody's name
    whole = pb.ModelStreamInferResponse(infer_response=answer) if method == STREAM_INFER else answer
    data = framed(whole.SerializeToString())
    one = AnswerReader(method, RENAMED)
    out = one.feed(data[:first])[0]
    kept = min(first, len(data)) - len(out)
    out += one.feed(data[first:])[0]
    answer.model_name = "own"
    whole = pb.ModelStreamInferResponse(infer_response=answer) if method == STREAM_INFER else answer
    assert out == framed(whole.SerializeToString())
    assert kept < 40  # nothing but the beginning is waited for


def test_the_usual_answer_comes_under_the_public_name() -> None:
    answer = pb.ModelInferResponse(model_name="own-0123456789ab", id="own-0123456789ab")
    data = framed(answer.SerializeToString())
    answer.model_name = "own"
    assert RENAMED.usual_answer(data) == framed(answer.SerializeToString())
    assert OWN.usual_answer(data) is data
    for other in (data[:-1], data + b"x", b"\1" + data[1:], framed(b""), framed(b"\x0a\x01x")):
        assert RENAMED.usual_answer(other) is None


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_small_answers_name_the_model_as_its_clients_do(size: int) -> None:
    name = "own-0123456789ab"
    config = model_config_pb2.ModelConfig(name=name, platform="ensemble", max_batch_size=4)
    config.ensemble_scheduling.step.add(model_name=name, model_version=-1)
    config.instance_group.add(name=f"{name}_0")
    config.parameters["path"].string_value = f"/models/{name}/1"
    statistics = pb.ModelStatisticsResponse()
    for version in ("1", "2"):
        statistics.model_stats.add(name=name, version=version, inference_count=3).batch_stats.add(
            batch_size=1
        )
    cases = {
        "ModelConfig": pb.ModelConfigResponse(config=config),
        "ModelStatistics": statistics,
        "ModelMetadata": pb.ModelMetadataResponse(name=name, versions=["1"], platform="p"),
    }
    for method, answer in cases.items():
        one, out = AnswerReader(f"/{SERVICE}/{method}", RENAMED), b""
        data = framed(answer.SerializeToString())
        for at in range(0, len(data), size):
            out += one.feed(data[at : at + size])[0]
        assert out[:5] == b"\0" + len(out[5:]).to_bytes(4)
        expected = type(answer).FromString(answer.SerializeToString())
        text = str(expected).replace(name, "own")
        assert str(type(answer).FromString(out[5:])) == text


def test_a_request_names_the_model_as_triton_does() -> None:
    """In whatever way it comes: Triton takes the last of several names."""
    guard = InferGuard(RENAMED, lambda: FIXED)
    for message in (request(), request(size=LONG)):
        for sizes in SIZES if len(message) < LONG else [[9000]]:
            one = MessageReader(guard, encoding="identity", inflate_limit=5000, message_limit=2**32)
            out, refusals, begins = read(one, framed(message), sizes)
            assert (refusals, begins.count(True)) == ([], 1)
            sent, expected = (
                pb.ModelInferRequest.FromString(out[5:]),
                pb.ModelInferRequest.FromString(message),
            )
            expected.model_name = "own-0123456789ab"
            assert int.from_bytes(out[1:5]) == len(out) - 5
            assert sent == expected
    for name in ("own-0123456789ab", "other"):  # a replica answers to its public name alone
        one = MessageReader(guard, encoding="identity", inflate_limit=5000, message_limit=2**32)
        (refusal,) = fed(one, framed(request(name)))
        assert isinstance(refusal, GrpcError)
        assert refusal.status is Status.NOT_FOUND


def test_a_message_beyond_the_limit_is_refused_at_its_beginning() -> None:
    guard = InferGuard(OWN, lambda: FIXED)
    one = MessageReader(
        guard,
        encoding="identity",
        inflate_limit=5000,
        message_limit=64 * 1024**2,
        flags=Flags(request="the flag of here"),
    )
    one.push(b"\0" + (64 * 1024**2 + 1).to_bytes(4))
    with pytest.raises(GrpcError, match=r"64 MiB \(the flag of here\)") as refused:
        one.pull()
    assert refused.value.status is Status.RESOURCE_EXHAUSTED


def test_a_refusal_in_a_stream_is_tritons_own_message() -> None:
    for id in ("", "7"):
        data = stream_error("no", id.encode())
        assert data[:5] == b"\0" + len(data[5:]).to_bytes(4)
        answer = pb.ModelStreamInferResponse.FromString(data[5:])
        assert (answer.error_message, answer.infer_response.id) == ("no", id)


@pytest.mark.parametrize("sizes", [[1, 40], [700, 1, 9000], [10**9]])
@pytest.mark.parametrize("count", [3, 40_000, LONG])
@pytest.mark.parametrize(
    ("contents", "value", "most"),
    [
        ("bool_contents", True, 5),
        ("uint_contents", 1, 8),
        ("int64_contents", 1, 18),
        ("bytes_contents", b"", 19),
    ],
)
def test_lists_cost_what_triton_makes_of_them(
    contents: str, value: object, most: int, count: int, sizes: list[int]
) -> None:
    """Numbers of a byte each take four or eight there, and more than once; however the message comes."""
    message = pb.ModelInferRequest(model_name="own")
    tensor = message.inputs.add(name="IN", datatype="X", shape=[count])
    getattr(tensor.contents, contents).extend([value] * count)
    data = framed(message.SerializeToString())
    one, costs, at, turn = reader(), 0, 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)] if at < 9000 else MAX_FRAME
        costs += sum(item.cost_bytes for item in fed(one, data[at : at + size]) if isinstance(item, Piece))
        at, turn = at + size, turn + 1
    assert (most - 1) * count <= costs
    if count > 16 * 1024:  # else nobody looks, and it may be any
        assert costs <= 37 * len(data)
        assert contents == "bytes_contents" or costs < most * len(data)


def test_a_tensor_as_it_is_costs_a_small_multiple() -> None:
    """So 60 MiB are served where all requests may take 256."""
    (piece, *_) = fed(reader(), framed(request(size=LONG)))
    assert isinstance(piece, Piece)
    assert LONG <= piece.cost_bytes <= 4 * LONG
