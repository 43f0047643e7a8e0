"""Fields of a JSON object from outside, one by one."""

from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.fields import Fields

FIELDS = Fields.parse(
    '{"n": 0, "negative": -1, "text": "x", "texts": ["a"], "mixed": ["a", 1], "yes": true, "none": null, '
    '"object": {"n": 1.5}, "objects": [{"n": 1}, 2]}',
    what="it",
)


def test_what_is_there_is_read() -> None:
    assert (FIELDS.integer("n"), FIELDS.string("text"), FIELDS.boolean("yes")) == (0, "x", True)
    assert (FIELDS.strings("texts"), FIELDS.optional_strings("none")) == (("a",), ())
    assert (FIELDS.optional_integer("none"), FIELDS.optional_string("absent")) == (None, None)
    assert FIELDS.string("absent", default="d") == "d"


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: FIELDS.integer("negative"), r"it.negative is -1; an integer from 0"),
        (lambda: FIELDS.integer("yes"), r"it.yes is True; an integer from 0"),
        (lambda: FIELDS.integer("text"), r"it.text is 'x'; an integer is expected"),
        (lambda: FIELDS.string("none"), r"it.none is None; a string is expected"),
        (lambda: FIELDS.strings("mixed"), r"it.mixed holds something other than strings"),
        (lambda: FIELDS.object("text"), r"it.text is not a JSON object"),
        (lambda: FIELDS.object("object").integer("n"), r"it.object.n is 1.5; an integer is expected"),
        (
            lambda: [one.integer("n") for one in FIELDS.objects("objects")],
            r"it.objects\[1\] is not a JSON object",
        ),
        (lambda: FIELDS.choice("text", int), r"it.text is 'x': invalid literal"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(read: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        read()
