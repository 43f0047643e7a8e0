"""Who is loaded next, beside what, and when Triton is restarted."""

from dataclasses import replace

import pytest

from agent.serving.load_queue import (
    MOST_HANGING,
    MOST_ON_A_GPU,
    SUSPECT_TURN_SECONDS,
    TOO_MANY_HANG,
    TURN_SECONDS,
    ActiveOperation,
    QueuedLoad,
    next_load,
)
from berth.contract.ids import GpuUuid, ServerName

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
ON_A, ON_B, ON_BOTH = frozenset({A}), frozenset({B}), frozenset({A, B})


LOAD, KNOWN, UNLOAD = (
    ActiveOperation(ON_A, True),
    ActiveOperation(ON_A, True, is_known=True),
    ActiveOperation(ON_A, False),
)


def waits(name: str, order: int = 0, on: frozenset[GpuUuid] = ON_A, **more: bool) -> QueuedLoad:
    return QueuedLoad(ServerName(name), on, order, **more)


def test_first_come_first_served_but_those_that_served_before_all_others() -> None:
    fresh, served = waits("fresh", 1), waits("served", 2, has_served=True)
    suspect = waits("suspect", 0, is_suspect=True, has_served=True)
    assert next_load([fresh, served, suspect], []).next == "served"
    assert next_load([fresh, suspect], []).next == "suspect"
    assert next_load([], []).next is None


def test_namespaces_take_turns_on_a_gpu_and_within_one_the_first_that_came_goes_first() -> None:
    """node D4: the one whose last turn on the GPU is longest ago goes before one that had the GPU just now."""
    first, second = replace(waits("first", 1), last_turn=8), replace(waits("second", 2), last_turn=8)
    other, served = (
        replace(waits("other", 3), last_turn=7),
        replace(waits("served", 4, has_served=True), last_turn=9),
    )
    assert next_load([first, second, other], []).next == "other"
    assert next_load([second, first], []).next == "first"
    assert next_load([first, other, served], []).next == "served"


def test_who_comes_after_a_suspect_waits_for_it() -> None:
    """It would never be alone otherwise."""
    before, suspect = waits("before", 1, on=ON_B), waits("suspect", 2, is_suspect=True)
    after, served = waits("after", 3, on=ON_B), waits("served", 4, on=ON_B, has_served=True)
    turns = next_load([before, suspect, after], [LOAD])
    assert (turns.next, set(turns.waits)) == ("before", {"suspect", "after"})
    assert next_load([suspect, after], [LOAD]).next is None
    assert next_load([suspect, after, served], [LOAD]).next == "served"


@pytest.mark.parametrize(
    ("one", "busy", "may"),
    [
        (waits("measured"), [LOAD], False),
        (waits("measured"), [KNOWN], False),
        (waits("measured"), [UNLOAD], False),
        (waits("measured", on=ON_B), [LOAD, KNOWN, UNLOAD], True),
        (waits("measured", on=ON_BOTH), [LOAD], False),
        (waits("known", is_known=True), [LOAD], False),
        (waits("known", is_known=True), [KNOWN], True),
        (waits("known", is_known=True), [UNLOAD], True),
        (waits("known", is_known=True), [KNOWN] * MOST_ON_A_GPU, False),
        (waits("known", on=ON_B, is_known=True), [KNOWN] * MOST_ON_A_GPU, True),
        (waits("suspect", is_suspect=True), [UNLOAD], True),
        (waits("suspect", is_suspect=True), [KNOWN], False),
        (waits("suspect", on=ON_B, is_suspect=True), [LOAD], False),
        (waits("other", on=ON_B), [ActiveOperation(ON_A, True, is_suspect=True)], False),
    ],
)
def test_beside_what_is_under_way(one: QueuedLoad, busy: list[ActiveOperation], may: bool) -> None:
    turns = next_load([one], busy)
    assert (turns.next == one.name) is may
    assert bool(turns.waits.get(one.name)) is not may


HANGS = replace(LOAD, seconds=TURN_SECONDS)
TRIAL = ActiveOperation(ON_B, True, is_suspect=True)


@pytest.mark.parametrize(
    ("busy", "may", "again"),
    [
        (replace(LOAD, seconds=TURN_SECONDS - 1), False, 1.0),
        (replace(UNLOAD, seconds=TURN_SECONDS - 2), False, 2.0),
        (HANGS, True, None),
        (replace(UNLOAD, seconds=TURN_SECONDS), True, None),
        (replace(LOAD, is_wanted=False), True, None),
        (replace(LOAD, is_given_up=True), True, None),
        (replace(TRIAL, seconds=TURN_SECONDS), False, SUSPECT_TURN_SECONDS - TURN_SECONDS),
        (replace(TRIAL, seconds=SUSPECT_TURN_SECONDS), True, None),
        (replace(TRIAL, is_wanted=False), False, SUSPECT_TURN_SECONDS),
        (replace(TRIAL, is_given_up=True), True, None),
        (ActiveOperation(ON_A, False, is_suspect=True, seconds=TURN_SECONDS), True, None),
    ],
)
def test_what_takes_longer_than_its_turn_is_waited_for_by_nobody(
    busy: ActiveOperation, may: bool, again: float | None
) -> None:
    """node D4, autoscaling D1: one that is not wanted any more has no turn at all, and a suspect a longer one."""
    turns = next_load([waits("new")], [busy])
    assert (turns.next == "new", turns.again_seconds) == (may, again)


def test_a_suspect_is_tried_beside_what_hangs() -> None:
    assert next_load([waits("suspect", is_suspect=True)], [HANGS]).next == "suspect"


def test_a_namespace_has_a_share_of_what_may_hang() -> None:
    """node D4: each that hangs keeps a thread of Triton's, and others need some."""
    mine, theirs = replace(HANGS, namespace="mine"), replace(HANGS, namespace="theirs")
    one = replace(waits("one", 1), namespace="mine")
    other = replace(waits("other", 2), namespace="theirs")
    half = MOST_HANGING // 2
    assert next_load([one, other], [mine] * (half - 1)).next == "one"
    turns = next_load([one, other], [mine] * half)
    assert (turns.next, turns.waits) == ("other", {"one": TOO_MANY_HANG})
    assert next_load([one, other], [mine] * half + [theirs] * (half // 2)).waits == {
        "one": TOO_MANY_HANG,
        "other": TOO_MANY_HANG,
    }
    # Who has none that hangs is never in the way of this rule, nor kept from a GPU by who is.
    fresh = replace(waits("fresh", 3), namespace="fresh")
    assert next_load([one, other, fresh], [mine] * half + [theirs] * half).next == "fresh"
    suspect = replace(one, is_suspect=True)
    assert next_load([suspect, fresh], [mine] * half).next == "fresh"


def test_nobody_overtakes_on_a_gpu_that_somebody_waits_for() -> None:
    """One that is measured would wait for ever behind those that are not."""
    first, behind = waits("first", 1), waits("behind", 2, is_known=True)
    elsewhere = waits("elsewhere", 3, on=ON_B)
    turns = next_load([first, behind, elsewhere], [KNOWN])
    assert (turns.next, set(turns.waits)) == ("elsewhere", {"first", "behind"})


def test_a_suspect_waits_for_those_before_it_though_its_own_gpu_is_free() -> None:
    before = QueuedLoad(ServerName("a"), frozenset({GpuUuid("GPU-a")}), 0)
    suspect = QueuedLoad(ServerName("s"), frozenset({GpuUuid("GPU-b")}), 1, is_suspect=True)
    leaving = ActiveOperation(frozenset({GpuUuid("GPU-a")}), is_load=False)
    assert next_load([before, suspect], [leaving]).next is None
    assert next_load([suspect], [leaving]).next == "s"
