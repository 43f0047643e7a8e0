"""Header blocks against the reference implementation (python-hyper/hpack)."""

import random

import hpack as reference
import pytest

from proxy.h2.hpack import STATIC_TABLE, Decoder, HeaderListTooLarge, HpackError, encode

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
        assert decoder.decode(block) == headers
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
        Decoder(allowed=0, list_limit=1000).decode(block)


def test_after_our_settings_are_acknowledged_no_table_is_allowed() -> None:
    decoder = Decoder(allowed=0, list_limit=1000)
    decoder.decode(b"\x3f\xe1\x1f")  # 4096: the protocol's default
    decoder.acknowledged()
    with pytest.raises(HpackError):
        decoder.decode(b"\x3f\xe1\x1f")


def test_a_list_that_is_too_large_leaves_the_table_in_step() -> None:
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=200)
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(encoder.encode([(b"x-one", b"1" * 150), (b"x-two", b"2" * 150)]))
    assert decoder.decode(encoder.encode([(b"x-two", b"2" * 150)])) == [(b"x-two", b"2" * 150)]


def test_a_bomb_of_indexed_headers_is_bounded() -> None:
    encoder, decoder = reference.Encoder(), Decoder(allowed=0, list_limit=10_000)
    decoder.decode(encoder.encode([(b"x", b"v" * 3000)]))
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(b"\xbe" * 60_000)
