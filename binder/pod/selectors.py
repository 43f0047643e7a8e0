"""Label selectors, as the API's LabelSelector means them. Pure.

Source: k8s.io/apimachinery/pkg/labels (selector.go). A selector that is null matches nothing, one
that is empty matches everything; NotIn and DoesNotExist also match where the label is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JsonObject = Mapping[str, Any]
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One test of one label. An operator that is not known matches nothing."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    def matches(self, labels: Labels) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
        return False


@dataclass(frozen=True, slots=True)
class Selector:
    """All of its requirements must match."""

    requirements: tuple[Requirement, ...]

    def matches(self, labels: Labels) -> bool:
        return all(requirement.matches(labels) for requirement in self.requirements)

    @property
    def lists(self) -> tuple[Requirement, ...]:
        """The In requirements: what an index can look up."""
        return tuple(r for r in self.requirements if r.operator == "In")

    def and_also(self, *more: Requirement) -> "Selector":
        return Selector((*self.requirements, *(r for r in more if r not in self.requirements)))


def parse_selector(selector: JsonObject | None) -> Selector | None:
    """None for a selector that matches nothing."""
    if selector is None:
        return None
    equal = [Requirement(k, "In", frozenset({v})) for k, v in (selector.get("matchLabels") or {}).items()]
    tests = [
        Requirement(e["key"], e["operator"], frozenset(e.get("values") or ()))
        for e in selector.get("matchExpressions") or ()
    ]
    return Selector(tuple(sorted({*equal, *tests}, key=lambda r: (r.key, r.operator, sorted(r.values)))))
