"""Random choices from a seed, and the few words that worlds and pods share so that they meet."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tests.cluster.differential.objects import Json

T = TypeVar("T")
# The values that a key can have.
Words = Mapping[str, Sequence[str]]

HOSTNAME, ZONE, REGION = (
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
)
RACK, PRODUCT, GENERATION, MARK = (
    "example.com/rack",
    "example.com/product",
    "example.com/generation",
    "example.com/mark",
)
ZONES, RACKS = ("z1", "z2", "z3"), ("r1", "r2", "r3", "r4")
TOPOLOGY_KEYS = (HOSTNAME, ZONE, RACK, REGION)
# What ParseInt of Go reads and what it does not: an underscore, a hexadecimal, a number beyond 64 bits.
GENERATIONS = ("3", "7", "10", "007", "1_0", "0x7", "x9", "", "9223372036854775808")
BOUNDS = ("0", "3", "5", "7", "9", "9223372036854775807", "five", "1_0", "")
NODE_LABELS = {
    ZONE: (*ZONES, "z9"),
    REGION: ("west", "east"),
    RACK: (*RACKS, "r9"),
    PRODUCT: ("T4", "A10", "L40"),
    GENERATION: GENERATIONS,
    MARK: ("", "on"),
    "example.com/nowhere": ("yes",),
}
POD_LABELS = {"app": ("web", "db", "cache"), "tier": ("front", "back"), "version": ("v1", "v2", "")}
NAMESPACE_LABELS = {"team": ("red", "blue"), "stage": ("live", "test")}
TAINT_KEYS = ("dedicated", "maintenance", "example.com/gpu")
EFFECTS = ("NoSchedule", "NoExecute", "PreferNoSchedule")
SET_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


class Draw(random.Random):
    """A generator of one seed; the same choices in the same order each time."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def some(self, items: Sequence[T], low: int, high: int) -> list[T]:
        """Between `low` and `high` distinct ones, fewer where there are not so many."""
        return self.sample(items, min(len(items), self.randint(low, high)))

    def weighted(self, weights: Mapping[T, int]) -> T:
        return self.choices(list(weights), list(weights.values()))[0]


def labels(draw: Draw, vocabulary: Words, probability: float) -> dict[str, str]:
    """Each key with this probability."""
    return {key: draw.choice(values) for key, values in vocabulary.items() if draw.chance(probability)}


def expression(draw: Draw, vocabulary: Words, operators: Sequence[str]) -> Json:
    """A requirement on a label, as both label selectors and node selectors have them."""
    key, operator = draw.choice(list(vocabulary)), draw.choice(operators)
    if operator in ("Gt", "Lt"):
        return {"key": GENERATION, "operator": operator, "values": [draw.choice(BOUNDS)]}
    if operator in ("In", "NotIn"):
        return {"key": key, "operator": operator, "values": draw.some(vocabulary[key], 1, 2)}
    return {"key": key, "operator": operator}


def label_selector(draw: Draw, vocabulary: Words, operators: Sequence[str] = SET_OPERATORS) -> Json:
    """Now and then the empty one, which matches everything."""
    if draw.chance(0.08):
        return {}
    if draw.chance(0.6):
        keys = draw.some(list(vocabulary), 1, 2)
        return {"matchLabels": {key: draw.choice(vocabulary[key]) for key in keys}}
    return {"matchExpressions": [expression(draw, vocabulary, operators) for _ in range(draw.randint(1, 2))]}


def resources(draw: Draw, amounts: Words, probability: float) -> Json:
    """Requests of each resource with this probability; extended ones need an equal limit."""
    requests: dict[str, Any] = labels(draw, amounts, probability)
    extended = {name: amount for name, amount in requests.items() if "/" in name}
    return {"requests": requests, **({"limits": extended} if extended else {})}
