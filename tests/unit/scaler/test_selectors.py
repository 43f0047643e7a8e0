"""Label selectors: what they select, and what is none."""

import pytest

from berth.contract.errors import InvalidValue
from scaler.export.selectors import parse_selector

HERE = {"model": "resnet", "namespace": "a"}


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", True),
        ("  ", True),
        ("model=resnet", True),
        ("model==resnet", True),
        (" model = resnet , namespace = a ", True),
        ("model=resnet,namespace=b", False),
        ("model=bert", False),
        ("model=", False),
        ("model!=bert", True),
        ("model!=resnet", False),
        ("tier!=gold", True),
        ("model in (resnet,bert)", True),
        ("model in (resnet, bert),namespace=a", True),
        ("model in (bert)", False),
        ("model notin (bert)", True),
        ("model notin (resnet)", False),
        ("tier notin (gold)", True),
        ("tier in ()", False),
        ("model", True),
        ("tier", False),
        ("!tier", True),
        ("!model", False),
        ("in", False),
        ("in in (in)", False),
    ],
)
def test_selected_or_not(text: str, selected: bool) -> None:
    assert parse_selector(text)(HERE) is selected


@pytest.mark.parametrize(
    "text",
    [
        "=a",
        "model=resnet,",
        ",model=resnet",
        "model=a=b",
        "model in resnet",
        "model in (a",
        "model in (a,b c)",
        "model=../x",
        "model>3",
        "model=a;b",
        "mödel=a",
        "a" * 5000,
        "!",
        "model=" + "-" * 4000 + "!",
    ],
)
def test_what_is_no_selector_selects_nothing(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_selector(text)
