"""Which two ports the activators open for a model: they are the model, no header says whose a request is. Pure.

The even one is for REST, the next for gRPC. Nothing is stored but in the EndpointSlices that name them: a model without
one finds its ports again by the hash of its name, where nobody else has them.
"""

import hashlib
from collections import Counter
from typing import Final, NamedTuple

from berth.contract.scaling import ACTIVATOR_PORTS, ModelKey
from scaler.go import SECOND_NS

# A kube-proxy, or a client that resolves names by itself, may know an old port for as long.
FREED_AFTER_NS: Final = 300 * SECOND_NS
# How many times what is left for all others a namespace may have: none can take them all.
_NAMESPACE_SHARE: Final = 2


class PortPair(NamedTuple):
    """One model's, on every activator that holds for it."""

    rest: int
    grpc: int


class Ports:
    """Who has which. A pair has one model at a time."""

    def __init__(self, span: range = ACTIVATOR_PORTS) -> None:
        self._first, self._pairs = span.start, len(span) // 2
        self._of: dict[ModelKey, int] = {}
        self._taken: dict[int, ModelKey] = {}
        self._gone: dict[ModelKey, int] = {}
        self._of_namespace: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._of)

    def known(self, model: ModelKey) -> PortPair | None:
        place = self._of.get(model)
        return None if place is None else self._pair(place)

    def pair_of(self, port: int) -> PortPair | None:
        """That this port is of; None where it is none of ours."""
        place = (port - self._first) // 2
        return self._pair(place) if 0 <= place < self._pairs else None

    def adopt(self, model: ModelKey, port: int) -> PortPair | None:
        """The pair that this port is of, as a slice that stands has it; None where it is another model's, or none of
        ours. Adopt all slices before anything is allotted."""
        pair = self.pair_of(port)
        if pair is None or self._taken.get(place := self._place(pair), model) != model:
            return None
        if self._of.get(model, place) != place:
            return None
        self._take(model, place)
        self._gone.pop(model, None)
        return pair

    def set_aside(self, pair: PortPair, now_ns: int) -> None:
        """One that nobody has is nobody's for a while."""
        nobody = ModelKey("", str(pair.rest))
        self._take(nobody, self._place(pair))
        self.gone(nobody, now_ns)

    def of(self, model: ModelKey) -> PortPair | None:
        """A model's ports, from now on if it had none; None where all are taken, or too
        many by its namespace."""
        self._gone.pop(model, None)
        place = self._of.get(model)
        if place is None:
            free = self._pairs - len(self._taken)
            if self._of_namespace[model.namespace] >= _NAMESPACE_SHARE * free:
                return None
            place = self._free_place(model)
            self._take(model, place)
        return self._pair(place)

    def gone(self, model: ModelKey, now_ns: int) -> None:
        """It is no model any more; its ports are another's after a while."""
        if model in self._of:
            self._gone.setdefault(model, now_ns)

    def expire(self, now_ns: int) -> None:
        for model in [one for one, at_ns in self._gone.items() if now_ns - at_ns >= FREED_AFTER_NS]:
            del self._gone[model]
            del self._taken[self._of.pop(model)]
            self._of_namespace[model.namespace] -= 1
            if not self._of_namespace[model.namespace]:
                del self._of_namespace[model.namespace]

    def _take(self, model: ModelKey, place: int) -> None:
        self._of_namespace[model.namespace] += model not in self._of
        self._of[model], self._taken[place] = place, model

    def _free_place(self, model: ModelKey) -> int:
        digest = hashlib.blake2b(str(model).encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") % self._pairs
        while place in self._taken:
            place = (place + 1) % self._pairs
        return place

    def _place(self, pair: PortPair) -> int:
        return (pair.rest - self._first) // 2

    def _pair(self, place: int) -> PortPair:
        rest = self._first + 2 * place
        return PortPair(rest, rest + 1)
