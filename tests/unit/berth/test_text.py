"""Text of somebody else, made fit to be shown."""

import pytest

from berth.contract.text import LINE_LIMIT, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("  two\n lines\t", "two lines"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("right\u202eleft", "right left"),
        ("x" * LINE_LIMIT, "x" * LINE_LIMIT),
        ("x" * (LINE_LIMIT + 1), "x" * (LINE_LIMIT - 1) + "…"),
        ("\n" * 5 * LINE_LIMIT + "x", "…"),
    ],
)
def test_one_line_without_what_a_terminal_obeys(text: str, shown: str) -> None:
    assert one_line(text) == shown
