"""JSON from outside, read as structs."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from berth.contract import wire
from berth.contract.errors import InvalidValue
from berth.contract.wire import TEXT_LIMIT, Count


class Item(msgspec.Struct):
    n: Count = 0


class Some(msgspec.Struct, rename="camel"):
    two_words: int
    items: list[Item] = []


READERS: dict[str, Callable[[str], Some]] = {
    "annotation": lambda text: wire.read(text, Some, what="it"),
    "body": lambda text: wire.decode(text.encode(), Some, what="it"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON: "),
        ('{"more": ' + "[" * 100_000, "it is not JSON: "),
        ("[]", "it: Expected `object`, got `array`"),
        ("{}", "it: Object missing required field `twoWords`"),
        ('{"twoWords": 1, "items": [{}, {"n": -1}]}', r"it.items\[1\].n: Expected `int` >= 0"),
        (
            '{"twoWords": 1, "items": [{"n": 9223372036854775808}]}',
            r"it.items\[0\].n: Expected `int` <= 92233720",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path(reader: Callable[[str], Some], text: str, message: str) -> None:
    assert reader('{"twoWords": 1, "more": null}') == Some(1)
    with pytest.raises(InvalidValue, match=f"^{message}"):
        reader(text)


def test_a_text_is_read_up_to_its_limit() -> None:
    text = '{"twoWords":1}'
    assert wire.read(text, Some, what="it", limit=len(text)) == Some(1)
    with pytest.raises(InvalidValue, match="it has 14 characters; at most 13 are read"):
        wire.read(text, Some, what="it", limit=len(text) - 1)
    assert 64 * 1024 <= TEXT_LIMIT <= 256 * 1024  # all annotations of an object together have no more


@pytest.mark.parametrize(
    "text",
    [
        r'{"\ud800": 1, "twoWords": 1}',
        r'{"twoWords": "\ud800"}',
        r'"\ud800"',
        r'{"twoWords": 1, "items": ["\udfff"]}',
    ],
)
def test_half_a_surrogate_pair_where_none_is_expected_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^it is not Unicode: "):
        wire.read(text, Some, what="it")


def test_half_a_surrogate_pair_in_a_text_is_kept() -> None:
    assert wire.read(r'{"text": "\ud800"}', dict[str, str], what="it") == {"text": "\ud800"}


def test_what_nests_as_deep_as_it_can_be_parsed_is_read_or_refused() -> None:
    for depth in range(800, 1100):
        text = '{"more": ' + "[" * depth + "]" * depth + "}"
        with suppress(InvalidValue):
            assert list(wire.read(text, dict[str, Any], what="it")) == ["more"]
