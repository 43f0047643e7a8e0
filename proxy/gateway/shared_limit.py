"""A replica's limit that several processes share, as the one that makes it sees it."""

import os
from typing import Final

from berth.contract.gateway import ReplicaLimits
from proxy.request.admission import shared_limit
from proxy.request.replica import queue_depth

# Where there is no limit: more than all processes' connections can ask for at once is not needed.
UNLIMITED: Final = 65_536


class SharedLimit:
    """Two counters in the kernel. What is taken away while it is in use is taken as it is given back."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self._sizes = _sizes(limits)
        self.descriptors = shared_limit(*self._sizes)
        self._owed = [0, 0]

    def resize(self, limits: ReplicaLimits) -> None:
        before, self._sizes = self._sizes, _sizes(limits)
        for place, (old, new) in enumerate(zip(before, self._sizes, strict=True)):
            self._owed[place] += old - new
        self.settle()

    def settle(self) -> None:
        """Call it often while something is owed: take what is free by now, or give what is too little."""
        for place, descriptor in enumerate(self.descriptors):
            if self._owed[place] < 0:
                os.eventfd_write(descriptor, -self._owed[place])
                self._owed[place] = 0
            while self._owed[place] and _take(descriptor):
                self._owed[place] -= 1

    @property
    def is_settled(self) -> bool:
        return not any(self._owed)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _sizes(limits: ReplicaLimits) -> tuple[int, int]:
    return min(limits.container_concurrency or UNLIMITED, UNLIMITED), min(queue_depth(limits), UNLIMITED)


def _take(descriptor: int) -> bool:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return False
    return True
