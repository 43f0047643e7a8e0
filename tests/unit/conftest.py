from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fakes.children import _noting, no_child_is_left

__all__ = ["_noting", "no_child_is_left"]

# Long after the slowest on a busy machine. What no longer ends, since a rule is broken, is to hold up nobody.
_SECONDS = 120
# A change is tried with the first third of the seeds of a test, and with so many at least; the others are nightly.
_OF_SEEDS, _FEWEST_SEEDS = 3, 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS))
    for seeded in _by_function(here, items):
        for item in seeded[max(_FEWEST_SEEDS, len(seeded) // _OF_SEEDS) :]:
            item.add_marker(pytest.mark.nightly)


def _by_function(here: Path, items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The items of each test that runs one random history for each `seed`, in their order."""
    found: dict[object, list[pytest.Item]] = {}
    for item in items:
        if here in item.path.parents and "seed" in getattr(getattr(item, "callspec", None), "params", ()):
            assert isinstance(item, pytest.Function)
            found.setdefault((item.path, item.cls, item.originalname), []).append(item)
    return found.values()
