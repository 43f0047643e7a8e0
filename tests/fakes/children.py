"""A test that leaves a child behind fails itself: otherwise the garbage collector tells it of any later one.

A directory whose tests share no children but by fixtures of a wider scope has `no_child_is_left` in its conftest.
A test that starts what such a fixture ends is marked `keeps_child`.
"""

import subprocess
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest

# Also asyncio's: what it starts is one of these, whose `returncode` is known as soon as the event loop knows it.
_started: WeakSet[subprocess.Popen[Any]] = WeakSet()
_start = subprocess.Popen.__init__
# It begins with the first long body that some data plane gets, and ends with that plane.
_CHECKER = "proxy.downstream.rest.checking"


def _start_and_note(self: subprocess.Popen[Any], *arguments: Any, **more: Any) -> None:
    _start(self, *arguments, **more)
    _started.add(self)


def _running() -> set[subprocess.Popen[Any]]:
    return {child for child in _started if child.returncode is None}


@pytest.fixture(scope="session")
def _noting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess.Popen, "__init__", _start_and_note)
        yield


@pytest.fixture(autouse=True)
def no_child_is_left(_noting: None, request: pytest.FixtureRequest) -> Iterator[None]:
    before = _running()
    yield
    left = [child.args for child in _running() - before if _CHECKER not in str(child.args)]
    assert left == [] or request.node.get_closest_marker("keeps_child"), left
