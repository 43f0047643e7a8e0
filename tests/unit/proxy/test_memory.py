from types import SimpleNamespace

import pytest

from proxy import memory


def test_memory_that_was_freed_is_kept_for_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc.h: -1 is the size at the heap's end from which it is given back, -3 the one that is mapped by itself."""
    asked: dict[int, int] = {}
    frozen: list[bool] = []
    library = SimpleNamespace(mallopt=asked.__setitem__)
    monkeypatch.setattr(memory, "gc", SimpleNamespace(freeze=lambda: frozen.append(True)))
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda name: name or library))
    memory.settle()
    assert set(asked) == {-1, -3}
    assert 256 * 1024 < asked[-3] < asked[-1] < 256 * 1024**2  # one read fits, and a few of them are kept
    assert frozen == [True]
    del library.mallopt  # as in musl
    memory.settle()
    assert frozen == [True, True]
