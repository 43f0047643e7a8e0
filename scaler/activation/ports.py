"""Which two ports the activators open for a model: a port stands for a model, no header says whose a request is. Pure.

The even one is for REST, the next for gRPC. They are stored only in the EndpointSlices that name them: a model without
one finds its ports again by the hash of its name, unless another model has them.
"""

import hashlib
from collections import Counter
from typing import Final, NamedTuple

from berth.contract.activation import ACTIVATOR_PORTS
from berth.contract.scaling import ModelKey
from scaler.go import SECOND_NS

# A kube-proxy, or a client that resolves names by itself, may know an old port for as long.
REUSE_AFTER_NS: Final = 300 * SECOND_NS
# How many times what is left for all others a namespace may have: none can take them all.
_NAMESPACE_SHARE: Final = 2


class PortPair(NamedTuple):
    """One model's, on every activator that it is assigned to."""

    rest: int
    grpc: int


class PortAllocator:
    """Which model has which pair. A pair has one model at a time."""

    def __init__(self, span: range = ACTIVATOR_PORTS) -> None:
        self._first, self._pairs = span.start, len(span) // 2
        self._place_of: dict[ModelKey, int] = {}
        self._model_at: dict[int, ModelKey] = {}
        self._released: dict[ModelKey, int] = {}
        self._of_namespace: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._place_of)

    def get(self, model: ModelKey) -> PortPair | None:
        place = self._place_of.get(model)
        return None if place is None else self._pair(place)

    def pair_of(self, port: int) -> PortPair | None:
        """The pair that a port belongs to; None where it is none of the activators'."""
        place = (port - self._first) // 2
        return self._pair(place) if 0 <= place < self._pairs else None

    def adopt(self, model: ModelKey, port: int) -> PortPair | None:
        """The pair that this port is of, as a slice that exists has it; None where it is another model's, or none of the
        activators'. Adopt all slices before the first `allocate`."""
        pair = self.pair_of(port)
        if pair is None or self._model_at.get(place := self._place(pair), model) != model:
            return None
        if self._place_of.get(model, place) != place:
            return None
        self._take(model, place)
        self._released.pop(model, None)
        return pair

    def quarantine(self, pair: PortPair, now_ns: int) -> None:
        """No model gets a pair that several claim, for a while."""
        unassigned = ModelKey("", str(pair.rest))
        self._take(unassigned, self._place(pair))
        self.release(unassigned, now_ns)

    def allocate(self, model: ModelKey) -> PortPair | None:
        """A model's ports, from now on if it had none; None where all are taken, or too many by its namespace."""
        self._released.pop(model, None)
        place = self._place_of.get(model)
        if place is None:
            free = self._pairs - len(self._model_at)
            if self._of_namespace[model.namespace] >= _NAMESPACE_SHARE * free:
                return None
            place = self._free_place(model)
            self._take(model, place)
        return self._pair(place)

    def release(self, model: ModelKey, now_ns: int) -> None:
        """The model is gone; another may have its ports after a while."""
        if model in self._place_of:
            self._released.setdefault(model, now_ns)

    def expire(self, now_ns: int) -> None:
        for model in [one for one, at_ns in self._released.items() if now_ns - at_ns >= REUSE_AFTER_NS]:
            del self._released[model]
            del self._model_at[self._place_of.pop(model)]
            self._of_namespace[model.namespace] -= 1
            if not self._of_namespace[model.namespace]:
                del self._of_namespace[model.namespace]

    def _take(self, model: ModelKey, place: int) -> None:
        self._of_namespace[model.namespace] += model not in self._place_of
        self._place_of[model], self._model_at[place] = place, model

    def _free_place(self, model: ModelKey) -> int:
        digest = hashlib.blake2b(str(model).encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") % self._pairs
        while place in self._model_at:
            place = (place + 1) % self._pairs
        return place

    def _place(self, pair: PortPair) -> int:
        return (pair.rest - self._first) // 2

    def _pair(self, place: int) -> PortPair:
        rest = self._first + 2 * place
        return PortPair(rest, rest + 1)
