"""How much of the machine other processes use during a measurement."""

import os
import time
from pathlib import Path

from bench.proxy.processes import cpu_seconds

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle and iowait, of the fields of /proc/stat


class Others:
    """Counts from its making: the time of all processors that went neither idle nor to this process and
    its descendants. About 0 on a quiet machine."""

    def __init__(self) -> None:
        self._began, self._ours, self._all = time.monotonic(), cpu_seconds(os.getpid()), _busy_seconds()

    def share(self) -> float:
        """Of all processors, 0 to 1."""
        others = (_busy_seconds() - self._all) - (cpu_seconds(os.getpid()) - self._ours)
        return max(0.0, others) / (time.monotonic() - self._began) / (os.cpu_count() or 1)


def _busy_seconds() -> float:
    first = Path("/proc/stat").read_text().partition("\n")[0]
    fields = [int(word) for word in first.split()[1:9]]  # what follows, guests, is in `user` already
    return sum(ticks for index, ticks in enumerate(fields) if index not in _IDLE) / _TICKS
