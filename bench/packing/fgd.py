"""Fragmentation gradient descent, to compare with: the published policy as a strategy of the binder.

"Beware of Fragmentation" (USENIX ATC'23), section 4: a node's fragmentation is the GPU that is left on it
and that a task drawn from the workload could not use, in expectation; a pod goes where it grows least.
The workload is known beforehand here, as in the paper's experiment.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench.packing.trace import GPU_BYTES, Task
from binder.cache.column import Ints, Rows
from binder.cache.gpu_columns import USABLE
from binder.cache.table import Floats, NodeTable
from binder.pod.demand import Shape

# The paper takes the most frequent classes of tasks that make 95 % of all.
_SHARE = 0.95
_MIB = 1024**2


class FragmentationGradient:
    """GPU products are left out: the two published traces that this is run on constrain none."""

    version = 0

    def __init__(self, tasks: Sequence[Task]) -> None:
        counts = Counter((t.cpu, t.memory_mib * _MIB, t.gpu_count, t.gpu_bytes) for t in tasks if t.gpu_count)
        kinds, seen = [], 0
        for kind, count in counts.most_common():
            kinds.append((*kind, count))
            seen += count
            if seen >= _SHARE * sum(counts.values()):
                break
        self._cpu, self._memory, self._count, self._bytes, weights = (
            np.array(column, float) for column in zip(*kinds, strict=True)
        )
        self._weights = weights / weights.sum()

    def gains(self, table: NodeTable, shape: Shape, rows: Rows, after: Ints) -> Floats:
        asked = dict(shape.amounts)
        free = np.where(table.condition[rows] == USABLE, table.free[rows], 0).astype(float)
        cpu, memory = table.left("cpu")[rows], table.left("memory")[rows]
        before = self._fragments(free, cpu, memory)
        gains = np.empty(free.shape)
        for slot in range(free.shape[1]):
            then = free.copy()
            then[:, slot] = np.maximum(after[:, slot], 0)
            gains[:, slot] = before - self._fragments(
                then, cpu - asked.get("cpu", 0), memory - asked.get("memory", 0)
            )
        return gains

    def load_cost(self, *, awaited: bool) -> float:
        return 0.0

    def score(self, table: NodeTable, shape: Shape, rows: Rows, gain: Floats, left: Floats) -> Floats:
        # A hundred steps, as kube-scheduler's scores have: the published figures owe a point to such ties.
        return np.floor(100 / (1 + np.exp(-gain / GPU_BYTES)))

    def _fragments(self, free: Floats, cpu: Floats, memory: Floats) -> Floats:
        """(rows): expected bytes that a task could not use: all of them where it does not fit."""
        usable = free[:, None, :] >= self._bytes[None, :, None]
        fits = (
            (usable.sum(axis=2) >= self._count)
            & (cpu[:, None] >= self._cpu)
            & (memory[:, None] >= self._memory)
        )
        lost = np.where(usable, 0.0, free[:, None, :]).sum(axis=2)
        whole = np.where(fits, lost, free.sum(axis=1)[:, None])
        fragments: Floats = whole @ self._weights
        return fragments
