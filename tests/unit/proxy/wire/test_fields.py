"""What header blocks say, and that what is remembered of them says the same."""

import random

import hpack as reference
import pytest

from proxy.wire.h2 import hpack
from proxy.wire.h2.fields import HEADER_LIST_BYTES, FieldReader, Fields, Malformed, Template
from proxy.wire.h2.hpack import HeaderListTooLarge, HpackError, encode
from tests.fakes.h2_codecs import HEAD, Kind, decoded, head, request_reader, said, trailer_reader

TRACE = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def test_what_a_block_says() -> None:
    fields = request_reader().read(
        head((b"grpc-timeout", b"3S"), (b"a", b"b"), (b"berth-key", b"x"), (b"content-length", b"12"), TRACE)
    )
    assert fields.kind == tuple(field for field in HEAD if field[0] != b"te")
    assert fields.forwarded == encode([(b"a", b"b"), TRACE])
    assert fields.list_bytes == 2 + 32 + sum(map(len, TRACE)) + 32
    assert fields.values == ((b"grpc-timeout", b"3S"),)
    assert fields.length == 12


def test_a_field_that_nobody_on_the_way_may_index_stays_so() -> None:
    block = head() + encode([(b"authorization", b"secret")], secret={b"authorization"})
    assert request_reader().read(block).forwarded == block[len(head()) :]
    assert block[len(head())] & 0xF0 == 0x10


MALFORMED = {
    "upper case": head((b"Trace", b"x")),
    "no token": head((b"a b", b"x")),
    "an empty name": head((b"", b"x")),
    "a line feed": head((b"a", b"x\ny")),
    "a carriage return": head((b"a", b"x\ry")),
    "a NUL": head((b"a", b"x\0y")),
    "space before": head((b"a", b" x")),
    "space behind": head((b"a", b"x\t")),
    "connection": head((b"connection", b"close")),
    "upgrade": head((b"upgrade", b"h2c")),
    "te": head((b"te", b"gzip")),
    "pseudo behind": head((b":authority", b"x")),
    "pseudo twice": encode([HEAD[0], *HEAD]),
    "pseudo of answers": encode([(b":status", b"200"), *HEAD]),
    "no path": encode(HEAD[:2]),
    "an empty path": encode([*HEAD[:2], (b":path", b"")]),
    "two lengths": head((b"content-length", b"1"), (b"content-length", b"1")),
    "a length that is none": head((b"content-length", b"+1")),
    "nothing": b"",
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
def test_a_malformed_block_is_refused_each_time(what: str) -> None:
    reader, templates = request_reader(), list[Template[Kind]]()
    for _ in range(12):
        with pytest.raises(Malformed):
            reader.read(MALFORMED[what], templates)


@pytest.mark.parametrize("value", [b"x\ny", b" x", b"x ", b"\0"])
@pytest.mark.parametrize("name", [b"traceparent", b"grpc-timeout", b"berth-key", b"content-length"])
def test_a_bad_value_does_not_fit_a_mould(name: bytes, value: bytes) -> None:
    reader, templates = request_reader(), list[Template[Kind]]()
    for number in range(20):
        reader.read(head((name, b"%d" % number)), templates)
    assert templates
    with pytest.raises(Malformed):
        reader.read(head((name, value)), templates)


@pytest.mark.parametrize(
    "block",
    [
        b"\xbe",  # the table's first entry
        b"\x80",
        head() + b"\x20",
        head() + b"\x00\x01a\x7f",
        head() + b"\x00\x01a\x81\x00",  # Huffman code that is no character's
        head() + b"\x00\x01a",
    ],
)
def test_what_cannot_be_read_is_distinguished(block: bytes) -> None:
    with pytest.raises(HpackError):
        request_reader().read(block)


def test_a_list_that_is_too_long_is_refused_by_every_way() -> None:
    reader, templates = request_reader(), list[Template[Kind]]()
    for number in range(20):
        reader.read(head((b"a", b"%d" % number)), templates)
    with pytest.raises(HeaderListTooLarge):
        reader.read(head((b"a", b"x" * HEADER_LIST_BYTES)), templates)
    with pytest.raises(HeaderListTooLarge):
        reader.read(head(*[(b"a%d" % n, b"") for n in range(3000)]), templates)


def test_trailers_have_no_pseudo_header_fields() -> None:
    assert trailer_reader().read(encode([(b"grpc-status", b"0")])).kind == ((b"grpc-status", b"0"),)
    with pytest.raises(Malformed):
        trailer_reader().read(encode([(b":status", b"200")]))


NAMES = [b"traceparent", b"grpc-timeout", b"x-request-id", b"berth-key", b"cookie", b"user-agent", b"baggage"]


def blocks(rng: random.Random) -> list[bytes]:
    """As one client sends them: some fields that stay, some that are new each time, perhaps packed."""
    encoder = reference.Encoder()
    encoder.header_table_size = 0
    huffman = rng.random() < 0.5
    names = rng.sample(NAMES, rng.randrange(len(NAMES)))
    constant = {name: rng.random() < 0.3 for name in names}
    made = []
    for number in range(60):
        fields = list(HEAD)
        for name in names:
            if rng.random() < 0.95:
                size = 0 if constant[name] else rng.choice([0, 1, 55, 126, 127, 128, 300])
                value = b"%d" % (0 if constant[name] else number) + bytes(rng.choices(range(33, 127), k=size))
                fields.insert(rng.randrange(6, len(fields) + 1) if not number else len(fields), (name, value))
        if rng.random() < 0.3:
            fields.append((b"content-length", b"%d" % rng.randrange(10**6)))
        encoded = encoder.encode(fields, huffman=huffman)
        made.append(bytes(encoded).removeprefix(hpack.NO_TABLE))
    return made


@pytest.mark.parametrize("seed", range(100))
def test_a_mould_says_what_reading_field_by_field_says(seed: int) -> None:
    rng = random.Random(seed)
    reader, templates = request_reader(), list[Template[Kind]]()
    for block in blocks(rng):
        assert said(reader.read(block, templates)) == said(request_reader().read(block))
        damaged = bytearray(block)
        damaged[rng.randrange(len(block))] ^= 1 << rng.randrange(8)
        cut = rng.choice([bytes(damaged), block[: rng.randrange(len(block))], block + block[-1:]])
        assert outcome(reader, cut, templates) == outcome(request_reader(), cut, None)


def outcome(reader: FieldReader[Kind], block: bytes, templates: list[Template[Kind]] | None) -> object:
    try:
        return said(reader.read(block, templates))
    except (Malformed, HpackError, HeaderListTooLarge) as error:
        return type(error)


@pytest.mark.parametrize("huffman", [False, True])
def test_a_field_that_is_new_each_time_is_not_read_anew(
    huffman: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = reference.Encoder()
    encoder.header_table_size = 0

    def block(number: int) -> bytes:
        new = [
            (b"traceparent", b"00-%032x-%016x-01" % (number * 7919, number)),
            (b"grpc-timeout", b"%dm" % number),
        ]
        return bytes(encoder.encode([*HEAD, *new], huffman=huffman)).removeprefix(hpack.NO_TABLE)

    reader, templates = request_reader(), list[Template[Kind]]()
    for number in range(20):
        reader.read(block(number), templates)
    monkeypatch.setattr(FieldReader, "_read", None)
    for number in range(20, 2000):
        fields = reader.read(block(number), templates)
        assert fields.values == ((b"grpc-timeout", b"%dm" % number),)
    assert len(reader.known) < 20


def test_what_is_always_the_same_is_the_same_object() -> None:
    reader, templates = request_reader(), list[Template[Kind]]()
    first: Fields[Kind] = reader.read(head((b"a", b"b")), templates)
    assert reader.read(head((b"a", b"b")), templates) is first


@pytest.mark.parametrize("seed", range(60))
def test_a_block_with_a_table_is_reported_as_one_without(seed: int) -> None:
    rng = random.Random(seed)
    encoder = reference.Encoder()
    decoder, other = (hpack.Decoder(allowed=0, list_limit=10_000) for _ in range(2))
    for number in range(30):
        fields = [(rng.choice(NAMES), b"%d" % rng.randrange(6)) for _ in range(rng.randrange(8))]
        if number == 20:
            encoder.header_table_size = 0
        block = bytes(encoder.encode(fields, huffman=rng.random() < 0.5))
        plain = decoder.plain(block)
        assert decoded(hpack.Decoder(allowed=0, list_limit=10_000), hpack.NO_TABLE + plain) == fields
        assert decoded(other, block) == fields
    assert decoder.plain(plain) is plain


def test_a_repeated_entry_of_the_table_counts_each_time() -> None:
    decoder = hpack.Decoder(allowed=0, list_limit=10_000)
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000
    decoder.plain(entry)
    with pytest.raises(HeaderListTooLarge):
        decoder.plain(b"\xbe" * 5000)
    assert decoder.plain(b"\xbe")[:3] == b"\x00\x01a"
