"""Header blocks against the reference implementation (python-hyper/hpack)."""

import random

import hpack as reference
import pytest
from hpack.hpack import encode_integer

from proxy.wire.h2.hpack import STATIC_TABLE, Decoder, HeaderListTooLarge, HpackError, encode
from tests.fakes.h2_codecs import decoded

NAMES = [b":path", b":method", b"content-type", b"te", b"x-request-id", b"grpc-timeout", b"cookie", b"a"]


def random_headers(rng: random.Random) -> list[tuple[bytes, bytes]]:
    return [
        (rng.choice(NAMES), rng.choice([b"", b"POST", b"trailers", bytes(rng.choices(range(32, 127), k=20))]))
        for _ in range(rng.randrange(12))
    ]


@pytest.mark.parametrize("seed", range(100))
def test_what_a_client_encodes_is_decoded_block_after_block(seed: int) -> None:
    rng = random.Random(seed)
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=10_000)
    for _ in range(20):
        headers = random_headers(rng)
        if rng.random() < 0.1:
            encoder.header_table_size = rng.choice([0, 100, 4096])
        block = encoder.encode(headers, huffman=rng.random() < 0.7)
        assert decoded(decoder, block) == headers
        assert decoder.is_stateless is (encoder.header_table_size == 0)


@pytest.mark.parametrize("seed", range(50))
def test_what_we_encode_any_decoder_reads_and_no_table_changes(seed: int) -> None:
    headers = [*random_headers(random.Random(seed)), (b"key", b"v" * 300)]
    decoder = reference.Decoder()
    decoded = decoder.decode(encode(headers, secret=frozenset({b"key"})), raw=True)
    assert [(bytes(name), bytes(value)) for name, value in decoded] == headers
    assert not decoder.header_table.dynamic_entries


def test_the_static_table_is_the_standards() -> None:
    assert STATIC_TABLE == reference.table.HeaderTable.STATIC_TABLE


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xff\xff\xff\xff\xff\xff\xff",  # a number without an end
        b"\xc0",  # beyond an empty table
        b"\x00\x05a",  # a string beyond its block
        b"\x00\x81\xff\x00",  # Huffman padding that is none
        b"\x3f\xff\xff\xff\xff\x0f",  # a table larger than allowed
        b"\x82\x20",  # a size update after a header
        b"\x00",
    ],
)
def test_blocks_that_cannot_be_read_are_refused(block: bytes) -> None:
    with pytest.raises(HpackError):
        decoded(Decoder(allowed=0, list_limit=1000), block)


def test_after_our_settings_are_acknowledged_no_table_is_allowed() -> None:
    decoder = Decoder(allowed=0, list_limit=1000)
    decoded(decoder, b"\x3f\xe1\x1f")  # 4096: the protocol's default
    decoder.acknowledged()
    with pytest.raises(HpackError):
        decoded(decoder, b"\x3f\xe1\x1f")


def test_a_list_that_is_too_large_leaves_the_table_in_step() -> None:
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=200)
    with pytest.raises(HeaderListTooLarge):
        decoded(decoder, encoder.encode([(b"x-one", b"1" * 150), (b"x-two", b"2" * 150)]))
    assert decoded(decoder, encoder.encode([(b"x-two", b"2" * 150)])) == [(b"x-two", b"2" * 150)]


def test_a_bomb_of_indexed_headers_is_bounded() -> None:
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=10_000)
    decoded(decoder, encoder.encode([(b"x", b"v" * 3000)]))
    with pytest.raises(HeaderListTooLarge):
        decoded(decoder, b"\xbe" * 60_000)


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 127 + 2**14])
def test_sizes_around_each_step_are_written_and_read(size: int) -> None:
    headers = [(b"n" * max(1, size), b"v" * size)]
    block = encode(headers)
    assert [
        (bytes(n), bytes(v)) for n, v in reference.Decoder(max_header_list_size=2**20).decode(block, raw=True)
    ] == headers
    assert decoded(Decoder(allowed=0, list_limit=2**20), block) == headers


def test_what_nobody_on_the_way_may_keep_is_marked_so() -> None:
    headers = [(b"key", b"secret"), (b"other", b"open"), (b"authorization", b"secret"), (b":method", b"POST")]
    block = encode(headers, secret=frozenset({b"key", b"authorization"}))
    decoded = reference.Decoder().decode(block, raw=True)
    assert [one.indexable for one in decoded] == [False, True, False, True]
    assert block.endswith(b"\x83")  # what the static table has whole takes one byte


@pytest.mark.parametrize("size", [0, 40, 100, 4096])
def test_the_table_holds_what_the_peers_does(size: int) -> None:
    """At every size that the peer says, to the byte: an entry too many here would be read for another there."""
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=100_000)
    encoder.header_table_size = size
    rng = random.Random(size)
    for _ in range(200):
        headers = [(b"x-%d" % rng.randrange(12), b"v" * rng.randrange(40)) for _ in range(3)]
        assert decoded(decoder, encoder.encode(headers, huffman=False)) == headers
    held = encoder.header_table.dynamic_entries
    for place in range(len(held)):
        assert decoded(decoder, indexed(62 + place)) == [tuple(held[place])]
    with pytest.raises(HpackError, match="index"):
        decoded(decoder, indexed(62 + len(held)))


def indexed(index: int) -> bytes:
    first, *more = encode_integer(index, 7)
    return bytes([first | 0x80, *more])


def test_a_list_is_taken_up_to_its_limit_as_the_standard_counts() -> None:
    """RFC 9113, 6.5.2: 32 for each header beside its characters."""
    header = (b"abc", b"defg")
    assert decoded(Decoder(allowed=0, list_limit=2 * 39), encode([header] * 2)) == [header] * 2
    with pytest.raises(HeaderListTooLarge, match="77 bytes"):
        decoded(Decoder(allowed=0, list_limit=2 * 39 - 1), encode([header] * 2))


@pytest.mark.parametrize(
    "block", [b"\x7f\x80", b"\x0f", b"\x40\x01a", b"\x40\x00\x03ab", b"\x82\x82\x3f\x00"]
)
def test_a_block_that_ends_too_early_is_refused(block: bytes) -> None:
    with pytest.raises(HpackError):
        decoded(Decoder(allowed=0, list_limit=1000), block)
