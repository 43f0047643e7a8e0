"""Protobuf's wire format as the proxy reads it, against protobuf's own reading; and the bounds of that."""

import random
import struct

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from proxy.policy.model_facts import ModelFacts
from proxy.request.load import LoadReport, encode_stat
from proxy.wire import protobuf
from proxy.wire.grpc_status import GrpcError, Status, trailers, try_again
from proxy.wire.lookup import Lookup

KEY = protobuf.encode_bytes


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def walked(message: bytes, pieces: int = 1) -> protobuf.InferReader:
    walker = protobuf.InferReader()
    for start in range(0, len(message), size := max(1, -(-len(message) // pieces))):
        walker.feed(message[start : start + size])
    walker.finish()
    return walker


def random_request(rng: random.Random) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=rng.choice(["own", "other"]), id="7", model_version="1")
    request.parameters["priority"].int64_param = 1
    for _ in range(rng.randrange(4)):
        shape = [rng.choice([0, 1, 2, 300, 2**40]) for _ in range(rng.randrange(4))]
        tensor = request.inputs.add(name="I", datatype="INT32", shape=shape)
        if rng.random() < 0.3:
            tensor.parameters["classification"].int64_param = 1  # of an input: of no meaning
        tensor.contents.int_contents.extend(range(rng.randrange(300)))
    for number in range(rng.randrange(4)):
        output = request.outputs.add(name=f"O{number}")
        if rng.random() < 0.5:
            output.parameters[
                rng.choice(["classification", "binary_data", "classifications"])
            ].int64_param = 1
    request.raw_input_contents.append(rng.randbytes(rng.choice([0, 20, 2000])))
    return request


@pytest.mark.parametrize("seed", range(60))
def test_what_decides_is_read_as_protobuf_reads_it_in_pieces_of_any_size(seed: int) -> None:
    rng = random.Random(seed)
    request = random_request(rng)
    message = request.SerializeToString()
    for pieces in (1, 2, 7, len(message)):
        walker = walked(message, pieces)
        assert walker.name == request.model_name.encode()
        assert walker.classified == [o.name for o in request.outputs if "classification" in o.parameters]
        assert walker.has_empty_input is any(0 in tensor.shape for tensor in request.inputs)
    assert protobuf.request_id(message) == b"7"
    assert next((f.number, f.content is None) for f in protobuf.fields(message)) == (1, False)


def test_a_size_that_stands_alone_is_one_of_the_shape() -> None:
    """As in messages of writers that do not pack numbers."""
    for size, empty in ((0, True), (5, False)):
        tensor = KEY(1, b"I") + b"\x18" + varint(size)
        assert walked(KEY(1, b"own") + KEY(5, tensor)).has_empty_input is empty
        # Only in an input: an output has no shape, and its field 3 is unknown.
        assert not walked(KEY(1, b"own") + KEY(6, tensor)).has_empty_input


def test_an_unknown_field_of_any_kind_is_passed_over() -> None:
    unknown = [b"\x98\x06\x05", b"\x99\x06" + bytes(8), b"\x9d\x06" + bytes(4), KEY(99, b"x" * 300)]
    for field in unknown:
        message = field + KEY(1, b"own") + KEY(5, KEY(1, b"I") + field) + field
        assert walked(message, 3).name == b"own"
        assert protobuf.model_name(message) == b"own"
        pb.ModelInferRequest.FromString(message)


@pytest.mark.parametrize(
    "message",
    [
        KEY(5, KEY(1, b"I")[:-1]),  # a field of a tensor that is longer than it
        KEY(5, b"\x18"),  # a tensor that ends inside a number
        KEY(5, b"\x10\x05")[:-1],
        KEY(5, KEY(4, KEY(1, b"k"))[:3]),
        b"\x08\x01",  # a name that is a number
        b"\x28\x01",  # an input that is a number
        KEY(5, b"\x20\x01"),  # parameters that are a number
        KEY(6, b"\x08\x01"),  # an output's name that is a number
        KEY(5, b"\x1b"),  # a group
        b"\x82\x80\x80\x80\x10x",  # a field's number that is too large
        KEY(5, KEY(3, b"\x80")),  # a shape that ends inside a number
        KEY(5, KEY(4, b"\x08\x01")),  # a key that is a number
    ],
)
def test_what_could_be_read_otherwise_is_refused(message: bytes) -> None:
    for pieces in (1, len(message)):
        with pytest.raises(protobuf.BadMessage):
            walked(message, pieces)


def test_a_message_has_so_many_fields_and_no_more() -> None:
    """Those of its tensors and the sizes of its shapes counted."""
    most = protobuf.MAX_FIELDS
    many = KEY(1, b"own") + b"\x98\x06\x05" * (most - 1)
    assert walked(many).name == protobuf.model_name(many) == b"own"
    inner = KEY(5, b"\x98\x06\x05" * (most - 2))
    assert walked(KEY(1, b"own") + inner)
    shape = KEY(5, KEY(3, b"\x01" * (most - 3)))
    assert walked(KEY(1, b"own") + shape)
    for more in (many, KEY(1, b"own") + inner, KEY(1, b"own") + shape):
        with pytest.raises(protobuf.BadMessage, match="more than"):
            walked(more + b"\x98\x06\x05")
    with pytest.raises(protobuf.BadMessage, match="more than"):
        list(protobuf.fields(many + b"\x98\x06\x05"))
    with pytest.raises(protobuf.BadMessage, match="more than"):
        protobuf.model_name(KEY(1, b"own") + KEY(2, b"") * most)


def test_names_and_parameters_are_kept_up_to_a_size() -> None:
    most = protobuf.COLLECT_BYTES
    fits = KEY(1, b"n" * most)
    assert walked(fits, 3).name == b"n" * most
    with pytest.raises(protobuf.BadMessage, match="bytes"):
        walked(KEY(1, b"n" * (most + 1)))
    assert walked(KEY(7, b"x" * (most * 4)), 9).name == b""  # what is not kept may be as large as it likes


def test_the_middle_of_a_tensor_needs_no_look() -> None:
    walker = protobuf.InferReader()
    walker.feed(KEY(1, b"own") + KEY(7, b"x" * 1000)[:100])
    left = len(KEY(1, b"own") + KEY(7, b"x" * 1000)) - len(KEY(1, b"own")) - 100
    assert walker.skim(left - 1)
    assert not walker.skim(1)  # the last byte is the beginning of something else
    with pytest.raises(protobuf.BadMessage):
        walker.finish()
    walker.feed(b"x")
    walker.finish()
    assert not protobuf.InferReader().skim(0)


def test_the_quick_look_at_a_name_never_says_what_the_long_one_does_not() -> None:
    chance, own = random.Random(3), KEY(1, b"own")
    usual = pb.ModelInferRequest(model_name="own", id="7", raw_input_contents=[b"x" * 300, b""])
    usual.inputs.add(name="I", datatype="UINT8", shape=[300])
    assert protobuf.names_just(usual.SerializeToString(), own)
    parts = [own, KEY(1, b"other"), b"\x08\x01", KEY(5, KEY(1, b"I")), KEY(7, b"x" * 200), b"\x98\x06\x05"]
    parts += [b"\x8a\x00\x05other", b"\x0b", b"\xff", KEY(7, b"xx")[:-1], b"\x99\x06" + bytes(8)]
    verdicts = set()
    for _ in range(3000):
        message = b"".join(chance.choices(parts, k=chance.randrange(4)))
        message = own + message if chance.random() < 0.7 else message
        try:
            name = protobuf.model_name(message)
        except protobuf.BadMessage:
            name = b""
        quick = protobuf.names_just(message, own)
        assert not quick or name == b"own", message
        verdicts.add((quick, name))
    assert verdicts == {(True, b"own"), (False, b"own"), (False, b"other"), (False, b"")}


@pytest.mark.parametrize("size", [0, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**21 + 2**14])
def test_sizes_are_read_quickly_and_written_as_protobuf_does(size: int) -> None:
    message = KEY(1, b"own") + KEY(7, b"x" * size)
    request = pb.ModelInferRequest(model_name="own")
    request.raw_input_contents.append(b"x" * size)
    assert message == request.SerializeToString()
    assert protobuf.model_name(message) == b"own"
    for wrong in (message + b"x", message[:-1]):
        with pytest.raises(protobuf.BadMessage):
            protobuf.model_name(wrong)


def test_an_entry_of_parameters_is_protobufs() -> None:
    request = pb.ModelInferRequest.FromString(
        protobuf.bool_parameter(b"k", True) + protobuf.bool_parameter(b"l", False)
    )
    assert {key: value.bool_param for key, value in request.parameters.items()} == {"k": True, "l": False}
    assert [value.WhichOneof("parameter_choice") for value in request.parameters.values()] == [
        "bool_param"
    ] * 2


def test_numbers_have_64_bits() -> None:
    assert [f.number for f in protobuf.fields(b"\x08" + varint(2**64 - 1))] == [1]
    for number in (varint(2**64), b"\xff" * 10 + b"\x01", b"\x80" * 10 + b"\x00"):
        with pytest.raises(protobuf.BadMessage, match="64 bits"):
            list(protobuf.fields(b"\x08" + number))
    for number in (1, 2**29 - 1):
        assert [f.number for f in protobuf.fields(varint(number << 3) + b"\x01")] == [number]
    for number in (0, 2**29):
        with pytest.raises(protobuf.BadMessage, match="field number"):
            list(protobuf.fields(varint(number << 3) + b"\x01"))


# Other small things.


def test_a_stat_of_any_time_and_pod() -> None:
    for timestamp in (0, 127, 128, 2**35):
        encoded = encode_stat(LoadReport(0.0, 0.0, 0.0, timestamp + 0.9), pod_name="")
        assert encoded.startswith(b"\x11" + struct.pack("<d", 0.0))
        assert encoded.endswith(b"\x38" + varint(timestamp))


def test_a_lookup_stays_small() -> None:
    known: Lookup[int] = Lookup(entries=3, key_bytes=2)
    for number in range(3):
        known.remember(b"%d" % number, number)
    known.remember(b"abc", 9)  # too long to be kept
    assert known == {b"0": 0, b"1": 1, b"2": 2}
    known.remember(b"ab", 3)  # begins anew
    assert known == {b"ab": 3}


@pytest.mark.parametrize(
    ("config", "decoupled", "fixed"),
    [
        ({}, False, set()),
        ({"model_transaction_policy": {"decoupled": True}}, True, set()),
        ({"model_transaction_policy": {"decoupled": "true"}}, False, set()),
        ({"model_transaction_policy": {"decoupled": 1}}, False, set()),
        ({"model_transaction_policy": True}, False, set()),
        ({"output": [{"name": "A", "dims": ["1", 2]}]}, False, {"A"}),
        ({"output": [{"name": "A", "dims": ["-1"]}, {"name": "B", "dims": ["1", "-1"]}]}, False, set()),
        (
            {"output": [{"name": "A", "dims": ["0"]}, {"name": "B", "dims": []}, {"name": "C"}, 7]},
            False,
            set(),
        ),
        ({"output": {"name": "A", "dims": ["1"]}}, False, set()),
        ({"output": [{"name": "A", "dims": "12"}]}, False, set()),
    ],
)
def test_what_a_configuration_tells(config: dict[str, object], decoupled: bool, fixed: set[str]) -> None:
    facts = ModelFacts.of_config(config)
    assert (facts.is_decoupled, facts.fixed_outputs) == (decoupled, fixed)
    assert {name for name in ("A", "B", "C") if facts.has_classes(name)} == fixed


def test_a_message_of_a_status_is_any_text_and_not_too_long() -> None:
    """grpc/doc/PROTOCOL-HTTP2.md: printable ASCII but for %, the rest percent-encoded."""
    by_stream = dict(trailers(GrpcError(Status.INTERNAL, "50 % of ü\n~", x_y="z")))
    assert by_stream == {b"grpc-status": b"13", b"grpc-message": b"50 %25 of %C3%BC%0A~", b"x-y": b"z"}
    printable = bytes(byte for byte in range(32, 127) if byte != ord("%")).decode()
    assert dict(trailers(GrpcError(Status.OK, printable)))[b"grpc-message"] == printable.encode()
    long = dict(trailers(GrpcError(Status.UNKNOWN, "x" * 100_000)))[b"grpc-message"]
    assert 1000 < len(long) < 8000  # clients take 8 KiB of trailers
    assert dict(trailers(try_again("later")))[b"retry-after"] == b"1"


def test_the_codes_are_grpcs() -> None:
    assert {status.name: status.value for status in Status} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }
