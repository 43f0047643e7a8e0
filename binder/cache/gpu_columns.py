"""The GPUs of all nodes side by side: (rows, GPUs), a column for each slot of the node with the most GPUs."""

import numpy as np
from numpy.typing import NDArray

from berth.contract.quantity import MOST
from berth.contract.report import GpuReport
from binder.cache.column import Ints, grown
from binder.cache.view import NOT_KNOWN, NodeView
from binder.pod.demand import product_key

NO_MODEL = 0  # in `GpuModels.known`: there is no GPU
# Why a GPU is out of the question, whatever is asked of it.
USABLE, ABSENT, SICK, UNKNOWN = 0, 1, 2, 3
_FIRST_WIDTH = 1


class GpuModels:
    """Which GPUs are alike: (product, bytes) to a number. Before any node has reported a GPU there is one model
    already, that of the GPUs that are not there."""

    def __init__(self) -> None:
        self.known: list[tuple[str, int]] = [("", 0)]
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, gpu: GpuReport) -> int:
        usable = max(0, (gpu.total_bytes or 0) - gpu.headroom_bytes)
        key = (product_key(gpu.product), within_64_bits(usable))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.known)
            self.known.append(key)
        return number


class GpuColumns:
    """`free` bytes, `condition`, `model` (a number of `models`) and `loads` (models to be loaded there or being loaded).

    Column by column ("F"): a rule runs over all nodes' first GPUs, then over their second ones.
    """

    def __init__(self, capacity: int, models: GpuModels) -> None:
        shape = (capacity, _FIRST_WIDTH)
        self.models = models
        self.free: Ints = np.full(shape, NOT_KNOWN, np.int64, order="F")
        self.condition: NDArray[np.int8] = np.full(shape, ABSENT, np.int8, order="F")
        self.model: NDArray[np.int32] = np.zeros(shape, np.int32, order="F")
        self.loads: NDArray[np.int32] = np.zeros(shape, np.int32, order="F")

    def measure(self, row: int, view: NodeView) -> None:
        """Which GPUs the node has, whatever its pods take of them."""
        capacity, width = self.free.shape
        if len(view.gpus) > width:
            self.reshape((capacity, len(view.gpus)))
        self.forget(row)
        for slot, gpu in enumerate(view.gpus):
            self.model[row, slot] = self.models.number(gpu)

    def weigh(self, row: int, before: NodeView | None, view: NodeView) -> None:
        """What is left of them. `before`: how the node was, if it is the same: then most of its GPUs are as they were."""
        if view.loads or self.loads[row].any():
            self.loads[row, : len(view.gpus)] = [view.loads.get(gpu.uuid, 0) for gpu in view.gpus]
        for slot, gpu in enumerate(view.gpus):
            if before is not None and before.reserved_on(gpu.uuid) == view.reserved_on(gpu.uuid):
                continue
            free = view.free_on(gpu)
            self.condition[row, slot] = SICK if not gpu.healthy else UNKNOWN if free is None else USABLE
            self.free[row, slot] = NOT_KNOWN if free is None else within_64_bits(max(free, NOT_KNOWN))

    def forget(self, row: int) -> None:
        self.free[row], self.condition[row], self.model[row] = NOT_KNOWN, ABSENT, NO_MODEL
        self.loads[row] = 0

    def lengthen(self, capacity: int) -> None:
        self.reshape((capacity, self.free.shape[1]))

    def reshape(self, shape: tuple[int, int]) -> None:
        self.free = grown(self.free, shape, NOT_KNOWN)
        self.condition = grown(self.condition, shape, ABSENT)
        self.model = grown(self.model, shape, NO_MODEL)
        self.loads = grown(self.loads, shape, 0)


def within_64_bits(amount: int) -> int:
    """The amount where it is below MOST. Sums over a node's pods know no bound."""
    return max(1 - MOST, min(amount, MOST - 1))
