from pathlib import Path

import pytest

from tests.fakes.children import _noting, no_child_is_left

__all__ = ["_noting", "no_child_is_left"]

# Long after the slowest on a busy machine. What no longer ends, since a rule is broken, is to hold up nobody.
_SECONDS = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SECONDS))
