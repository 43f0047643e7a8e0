"""Claims, volumes and storage classes, as the watches tell them. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

JsonObject = Mapping[str, Any]


@dataclass(slots=True)
class Volumes:
    """Claims by (namespace, name), volumes and storage classes by name."""

    claims: dict[tuple[str, str], JsonObject] = field(default_factory=dict)
    volumes: dict[str, JsonObject] = field(default_factory=dict)
    classes: dict[str, JsonObject] = field(default_factory=dict)

    def exclusive(self, namespace: str, names: Iterable[str]) -> Iterator[str]:
        """Those of these claims that one pod alone may use at a time (ReadWriteOncePod)."""
        for name in names:
            claim = self.claims.get((namespace, name))
            if claim is not None and "ReadWriteOncePod" in (claim["spec"].get("accessModes") or ()):
                yield name
