"""Label selectors as they stand in a query.

Source: k8s.io/apimachinery pkg/labels/selector.go, `Parse`; without its comparisons of numbers, which have no use here.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from berth.contract.errors import InvalidValue

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

# More than any HPA sends.
_LONGEST: Final = 4096
_KEY: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE: Final = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)?"
_REQUIREMENT: Final = re.compile(
    rf"\s*(?:"
    rf"(?P<key>{_KEY})\s*(?P<operator>!=|==|=)\s*(?P<value>{_VALUE})"
    rf"|(?P<among>{_KEY})\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    rf"|(?P<absent>!\s*)?(?P<exists>{_KEY})"
    rf")\s*(?:,|$)",
    re.ASCII,
)
_SET: Final = re.compile(_VALUE, re.ASCII)


def parse_selector(text: str) -> Selector:
    """An empty one selects everything. Raises InvalidValue."""
    if len(text) > _LONGEST:
        raise InvalidValue(f"a label selector of {len(text)} characters; at most {_LONGEST} are read")
    requirements, at = [], 0
    while text[at:].strip():
        found = _REQUIREMENT.match(text, at)
        if found is None or (found.end() == len(text) and text.rstrip().endswith(",")):
            raise InvalidValue(f"{text!r} is not a label selector; write e.g. model=resnet or model in (a,b)")
        requirements.append(_requirement(found))
        at = found.end()
    return lambda labels: all(is_met(labels) for is_met in requirements)


def _requirement(found: "re.Match[str]") -> Selector:
    if key := found["key"]:
        return _among(key, {found["value"]}, wanted=found["operator"] != "!=")
    if key := found["among"]:
        values = {value.strip() for value in found["values"].split(",")}
        if not all(_SET.fullmatch(value) for value in values):
            raise InvalidValue(f"({found['values']}) are not values of a label")
        return _among(key, values, wanted=found["set"] == "in")
    key, wanted = found["exists"], found["absent"] is None
    return lambda labels: (key in labels) is wanted


def _among(key: str, values: set[str], *, wanted: bool) -> Selector:
    """Who has no such label is not among them."""
    return lambda labels: (key in labels and labels[key] in values) is wanted
