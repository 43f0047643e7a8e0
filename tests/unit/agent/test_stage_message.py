"""node D2: what a message of a stream of files may be is judged by its bytes, before two of them become fifty."""

import random
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError

from agent.stage_message import HEADER_BYTES, check_stage_message
from agent.staging import MAX_ENTRIES, TooLarge
from berth.contract.errors import InvalidValue
from berth.v1 import node_agent_pb2 as pb

MIB = 1024 * 1024


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def part(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


NAME = part(1, b"model-p1")
EMPTY_FILE = b"\x1a\x00"
# The same tag in more bytes than it needs, which every parser takes.
LONG_EMPTY_FILE = b"\x9a\x80\x00\x00"


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (part(1, NAME + EMPTY_FILE * (2 * MIB)), InvalidValue, "bytes in a part that has at most 2113536"),
        (part(1, NAME + EMPTY_FILE * (MIB - 100)), TooLarge, "more than 100000 files are announced"),
        (part(1, NAME + EMPTY_FILE * MAX_ENTRIES), None, ""),
        (part(1, NAME + EMPTY_FILE * (MAX_ENTRIES + 1)), TooLarge, "more than 100000"),
        (part(1, LONG_EMPTY_FILE * (MAX_ENTRIES + 1)), TooLarge, "more than 100000"),
        (part(1, part(4, b"c" * (HEADER_BYTES - 5))), None, ""),
        (part(1, part(4, b"c" * HEADER_BYTES)), InvalidValue, "at most 2113536"),
        (part(3, b"x" * (4 * MIB)), None, ""),
        (part(3, EMPTY_FILE * (2 * MIB)), None, ""),  # the bytes of a file are anything
        (part(2, part(1, b"p" * 16_000)), None, ""),
        (part(2, part(1, b"p" * 17_000)), InvalidValue, "at most 16384"),
        (part(4, b"d" * 17_000), InvalidValue, "at most 16384"),
        # One of several is the last, but a parser makes them all.
        (part(1, NAME) * 2, InvalidValue, "it has one part"),
        (part(1, EMPTY_FILE) + part(2, b""), InvalidValue, "it has one part"),
        (part(5, b"x"), InvalidValue, "it has one part"),
        (b"\x08\x01", InvalidValue, "it has one part"),
        (b"", None, ""),
        (b"\x0a", InvalidValue, "not a message of this API"),
        (b"\x0a\x05abc", InvalidValue, "not a message of this API"),
        (b"\x0b\x00", InvalidValue, "not a message of this API"),
        (b"\x80" * 20, InvalidValue, "not a message of this API"),
        (part(1, EMPTY_FILE * MAX_ENTRIES + b"\x1a\x7f"), InvalidValue, "not a message of this API"),
    ],
)
def test_a_message_is_one_part_of_a_bounded_size(
    message: bytes, error: type[Exception] | None, says: str
) -> None:
    if error is None:
        check_stage_message(message)
        return
    with pytest.raises(error, match=says):
        check_stage_message(message)


@pytest.mark.parametrize(
    "make",
    [
        lambda dice: pb.StageRequest(header=_header(dice)),
        lambda dice: pb.StageRequest(file=pb.StageFile(path="1/" + "x" * dice.randrange(500), size=2**63)),
        lambda dice: pb.StageRequest(chunk=dice.randbytes(dice.randrange(5000))),
        lambda dice: pb.StageRequest(commit=pb.StageCommit(digest="a" * dice.randrange(64))),
    ],
)
def test_what_a_loader_writes_is_taken(make: Callable[[random.Random], pb.StageRequest]) -> None:
    for seed in range(50):
        check_stage_message(make(random.Random(seed)).SerializeToString())


def _header(dice: random.Random) -> pb.StageHeader:
    files = [pb.StageFile(path=f"1/{at:07}", size=dice.randrange(2**40)) for at in range(dice.randrange(50))]
    return pb.StageHeader(model_name="m", digest="d" * 64, files=files, config=b"x" * dice.randrange(1000))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_taken_has_no_more_files_than_a_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parser itself, over bytes that are nearly right."""
    monkeypatch.setattr("agent.stage_message.MAX_ENTRIES", 5)
    dice, taken, refused = random.Random(seed), 0, 0
    pieces = (
        EMPTY_FILE,
        LONG_EMPTY_FILE,
        NAME,
        part(3, part(1, b"a")),
        part(9, b"\x1a\x00"),
        b"\x40\x05",
        b"\x1a",
    )
    for _ in range(2000):
        body = b"".join(dice.choice(pieces) for _ in range(dice.randrange(16)))
        message = part(1, body)
        try:
            check_stage_message(message)
        except (InvalidValue, TooLarge):
            refused += 1
            continue
        try:
            header = pb.StageRequest.FromString(message).header
        except DecodeError:  # what matters is what it takes
            continue
        taken += 1
        assert len(header.files) <= 5
    assert min(taken, refused) > 50
