"""Names that clients write, checked once."""

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.ids import MODEL_NAME_LIMIT, parse_model_name


@pytest.mark.parametrize("name", ["resnet", "a", "A.b_c-1", "0", "x" * 128])
def test_model_names_that_are_fine(name: str) -> None:
    assert parse_model_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        "a/b",
        "../a",
        "a..b",
        "a\n",
        "a\x00",
        "\x1b[31m",
        "é",
        "-a",
        "_a",
        ".a",
        "a b",
        "x" * 300,
        "stats",
        "a%2fb",
        "a\\b",
    ],
)
def test_model_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue):
        parse_model_name(name)


def test_a_name_may_be_as_long_as_a_directory_and_a_url_take() -> None:
    assert parse_model_name("x" * MODEL_NAME_LIMIT) == "x" * MODEL_NAME_LIMIT
    assert 63 <= MODEL_NAME_LIMIT <= 253
    with pytest.raises(InvalidValue, match=f"has {MODEL_NAME_LIMIT + 1} characters; at most"):
        parse_model_name("x" * (MODEL_NAME_LIMIT + 1))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is empty"), ("a..b", "must not contain '..'"), ("stats", "is reserved"), ("a/b", "may hold only")],
)
def test_a_name_that_is_refused_says_why(name: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=f"^model name.* {message}"):
        parse_model_name(name)
