"""The capacity limit: how many of the desired replicas are requested."""

import pytest

from berth.contract.scaling import ModelKey, Schedulable, SchedulableModel
from scaler.core.cache import Counts
from scaler.core.capacity import FORGOTTEN_NS, NOT_ASKED, SILENT_NS, Capacity, capacity_of, limit

KEY = ModelKey("a", "m")
SECOND = 1_000_000_000
FULL = "the GPUs are full"


def counts(ready: int = 0, starting: int = 0, pending: int = 0, unschedulable: int = 0) -> Counts:
    return Counts(ready, starting, pending, unschedulable)


# Desired, pods, capacity, promised, silent for seconds, overflow; requested, and part of why.
CASES = {
    "room for all": (5, counts(2), Capacity(5), 2, 0, 0, 5, ""),
    "room for some": (5, counts(2), Capacity(3, FULL), 2, 0, 0, 3, FULL),
    "no room": (5, counts(2), Capacity(2, FULL), 2, 0, 0, 2, FULL),
    "fewer are wanted than there are": (1, counts(4), NOT_ASKED, 4, 0, 0, 1, ""),
    "as many as there are": (4, counts(3, 1), NOT_ASKED, 4, 0, 0, 4, ""),
    "nobody has been asked": (5, counts(2), NOT_ASKED, 2, 0, 0, 2, "not been asked"),
    "room that others have by now does not end what has a place": (5, counts(3, 1), Capacity(2, FULL), 4, 0, 0, 4, FULL),
    "what the binder has not looked at stays": (5, counts(1, 0, 2), Capacity(1, FULL), 3, 0, 0, 3, FULL),
    "what it has not looked at stays, though nobody has promised it": (5, counts(1, 0, 2), Capacity(1, FULL), 1, 0, 0, 3, FULL),
    "what it has refused does not": (5, counts(1, 0, 1, 2), Capacity(1, FULL), 4, 0, 0, 2, FULL),
    "what was promised and nobody has seen stays": (5, counts(1), Capacity(1, FULL), 4, 0, 0, 4, FULL),
    "some may wait": (9, counts(2), Capacity(3, FULL), 2, 0, 2, 5, FULL),
    "those that wait are not the room": (9, counts(3, 0, 0, 2), Capacity(3, FULL), 5, 0, 2, 5, FULL),
    "silent, and its last word": (5, counts(2), Capacity(3, FULL), 2, 31, 0, 3, "has not answered for 31 s; its last answer is in effect"),
    "silent for long, one at a time": (5, counts(2), Capacity(2, FULL), 2, 301, 0, 3, "one replica at a time"),
    "silent for long, that one waits": (5, counts(2, 0, 0, 1), Capacity(2, FULL), 3, 301, 0, 3, "one replica at a time"),
    "not silent yet": (5, counts(2), Capacity(3, FULL), 2, 30, 0, 3, FULL),
    "not silent for long yet": (5, counts(2), Capacity(4, FULL), 2, 300, 0, 4, "its last answer is in effect"),
    "none is wanted": (0, counts(1), NOT_ASKED, 1, 0, 0, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limit(name: str) -> None:
    wanted, there, capacity, promised, silent, overflow, copies, why = CASES[name]
    found = limit(wanted, there, capacity, promised=promised, silent_ns=silent * SECOND, overflow=overflow)
    assert (found.replicas, found.by) == (copies, wanted - copies)
    assert why in found.why
    assert bool(found.why) == bool(why)


def test_when_a_binder_is_silent() -> None:
    assert (SILENT_NS, FORGOTTEN_NS) == (30 * SECOND, 300 * SECOND)


def asked(wanted: int, running: int, starting: int) -> SchedulableModel:
    return SchedulableModel(
        name=str(KEY),
        desired=wanted,
        running=running,
        starting=starting,
        priority=0,
        template={},
        template_hash="",
    )


@pytest.mark.parametrize(
    ("question", "now", "never", "copies", "is_never"),
    [
        (asked(5, 2, 1), 1, 0, 4, False),
        (asked(5, 2, 1), 9, 0, 5, False),
        (asked(1, 2, 1), 0, 0, 3, False),
        (asked(5, 2, 1), -3, 0, 3, False),
        (asked(5, 2, 1), 0, 2, 3, False),
        (asked(2, 0, 0), 0, 2, 0, True),
        (asked(2, 0, 0), 0, 1, 0, False),
        (asked(2, 0, 0), 1, 1, 1, False),
        (asked(0, 0, 0), 0, 0, 0, False),
    ],
)
def test_an_answer_is_a_capacity(
    question: SchedulableModel, now: int, never: int, copies: int, is_never: bool
) -> None:
    found = capacity_of(question, Schedulable(name=str(KEY), now=now, never=never, reason=FULL))
    assert (found.replicas, found.never) == (copies, is_never)
