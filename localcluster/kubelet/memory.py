"""What the processes of a container take of the machine's memory, as its cgroup would count it: what cannot be dropped
and read again. A process that a container's own has left to another parent is not seen."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from berth.contract.quantity import parse_bytes

JsonObject = dict[str, Any]

_PROC = Path("/proc")
_OWN = ("Pss_Anon:", "Pss_Shmem:")


def limit_of(spec: JsonObject) -> int | None:
    """The container's limit in bytes; None: it has none."""
    limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
    return None if limit is None else parse_bytes(limit)


def used_bytes(pid: int, *, enough: int = 0) -> int:
    """Of a process and all that it and these have started; pages that several share are counted once.

    What is resident at all is looked at first, which is cheap: up to `enough` of it is not looked at more closely.
    """
    tree = list(_tree(pid))
    resident = sum(_resident_bytes(one) for one in tree)
    return resident if resident <= enough else sum(_own_bytes(one) for one in tree)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            for child in _read(thread / "children").split():
                yield from _tree(int(child))


def _resident_bytes(pid: int) -> int:
    return _kibibytes(_read(_PROC / str(pid) / "status"), ("VmRSS:",))


def _own_bytes(pid: int) -> int:
    return _kibibytes(_read(_PROC / str(pid) / "smaps_rollup"), _OWN)


def _kibibytes(text: str, keys: tuple[str, ...]) -> int:
    lines = (line.split() for line in text.splitlines() if line.startswith(keys))
    return sum(int(words[1]) for words in lines) * 1024


def _read(path: Path) -> str:
    """Nothing of a process that has ended meanwhile."""
    with suppress(OSError):
        return path.read_text(errors="replace")  # the name of a process is any bytes
    return ""
