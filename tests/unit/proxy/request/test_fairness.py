"""Deficit round robin among replicas, without a clock: what is served in which turn."""

import random
from collections import Counter

import pytest

from proxy.request.fairness import CALL_COST, QUANTUM, DeficitRoundRobin, Share

Item = tuple[str, int]
IN_A_TURN = QUANTUM // CALL_COST


class Came:
    """One that is served once. Counts how often any is compared with another."""

    compared = 0

    def __init__(self, item: Item) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        Came.compared += 1
        return self is other

    __hash__ = object.__hash__


class Loop:
    """A process: what comes is served at once or waits, as in the gateway."""

    def __init__(self, *names: str) -> None:
        self.turns: DeficitRoundRobin[Came] = DeficitRoundRobin()
        self.shares: dict[str, Share[Came]] = {name: Share() for name in names}
        self.served: list[Item] = []

    def comes(self, name: str, cost: int = CALL_COST) -> Came:
        share, came = self.shares[name], Came((name, cost))
        if share.may_go_on:
            self.turns.spend(share, self.serve(came))
        else:
            self.turns.wait(share, came)
        return came

    def serve(self, came: Came) -> int:
        self.served.append(came.item)
        return came.item[1]

    def turn(self) -> Counter[str]:
        self.served.clear()
        self.turns.next_turn(self.serve)
        return self.counted()

    def counted(self) -> Counter[str]:
        return Counter(name for name, _ in self.served)


def test_who_stays_within_its_quantum_never_waits() -> None:
    loop = Loop("a", "b")
    for _ in range(5):
        loop.served.clear()
        for _ in range(IN_A_TURN):
            loop.comes("a")
            loop.comes("b")
        assert loop.counted() == {"a": IN_A_TURN, "b": IN_A_TURN}
        assert loop.turn() == {}
    assert not loop.turns.has_waiting


def test_who_floods_gets_its_quantum_and_a_quiet_one_is_served_at_once() -> None:
    loop = Loop("flood", "quiet")
    for _ in range(1000):
        loop.comes("flood")
    loop.comes("quiet")
    assert loop.counted() == {"flood": IN_A_TURN, "quiet": 1}
    for _ in range(10):
        assert loop.turn() == {"flood": IN_A_TURN}
        loop.served.clear()
        loop.comes("quiet")
        assert loop.counted() == {"quiet": 1}


def test_those_who_all_flood_get_the_same_whoever_sends_more() -> None:
    loop = Loop("a", "b", "c")
    for _ in range(300):
        loop.comes("a")
    for _ in range(100):
        loop.comes("b")
        loop.comes("c")
    for _ in range(5):
        assert loop.turn() == dict.fromkeys("abc", IN_A_TURN)


def test_bytes_count_as_calls_do() -> None:
    """Who moves large tensors gets fewer pieces, and the same bytes."""
    loop = Loop("large", "small")
    for _ in range(200):
        loop.comes("large", 4 * CALL_COST)
        loop.comes("small")
    total: Counter[str] = Counter()
    for _ in range(8):
        total += loop.turn()
    assert total == {"large": 8 * IN_A_TURN // 4, "small": 8 * IN_A_TURN}


def test_who_has_taken_too_much_at_once_pays_for_it_while_others_want_something() -> None:
    loop = Loop("greedy", "other")
    loop.comes("greedy", 3 * QUANTUM)  # known only once it has been served
    for _ in range(2 * IN_A_TURN):
        loop.comes("greedy")
        loop.comes("other")
    assert loop.turn() == {"other": IN_A_TURN}
    loop.comes("other")
    assert loop.turn() == {"other": 1}


def test_alone_it_waits_for_nobody() -> None:
    """No turn goes by without work while there is some."""
    loop = Loop("alone")
    loop.comes("alone", 100 * QUANTUM)
    for _ in range(3 * IN_A_TURN + 2):
        loop.comes("alone")
    assert sum(bool(loop.turn()) for _ in range(4)) == 4
    assert not loop.shares["alone"].waiting


def test_order_is_kept_and_what_is_dropped_is_not_served() -> None:
    loop = Loop("a")
    for number in range(IN_A_TURN + 3):
        loop.comes("a", CALL_COST + number)
    share = loop.shares["a"]
    loop.turns.drop(share, next(iter(share.waiting)))
    loop.turns.drop(share, Came(("a", -1)))  # was never there
    left = [came.item for came in share.waiting]
    loop.turn()
    assert loop.served == left
    loop.comes("a", 10 * QUANTUM)
    loop.turns.drop(share, loop.comes("a", 1))
    assert loop.turn() == {}
    for _ in range(20):
        loop.turn()
    assert not loop.turns.has_waiting


def test_whoever_leaves_is_not_looked_for_among_all_that_wait() -> None:
    """data-plane D5: thousands that leave at once cost their neighbours nothing."""
    loop = Loop("a")
    loop.comes("a", QUANTUM)
    waiting = [loop.comes("a") for _ in range(2000)]
    Came.compared = 0
    for came in reversed(waiting):
        loop.turns.drop(loop.shares["a"], came)
    assert not loop.shares["a"].waiting
    assert Came.compared <= len(waiting)


def test_what_is_served_bit_by_bit_waits_again_behind_the_others() -> None:
    turns: DeficitRoundRobin[str] = DeficitRoundRobin()
    share: Share[str] = Share()
    left, served = {"long": 3, "short": 1}, []

    def serve(name: str) -> int:
        served.append(name)
        left[name] -= 1
        if left[name]:
            turns.wait(share, name)
        return QUANTUM

    turns.wait(share, "long")
    turns.wait(share, "short")
    while turns.has_waiting:
        turns.next_turn(serve)
    assert served == ["long", "short", "long", "long"]


def test_credit_is_not_saved_up() -> None:
    loop = Loop("a", "b")
    for _ in range(100):
        loop.turn()
    for _ in range(3 * IN_A_TURN):
        loop.comes("a")
    assert loop.counted() == {"a": IN_A_TURN}


@pytest.mark.parametrize("seed", range(20))
def test_any_history(seed: int) -> None:
    """All is served, each replica's in its order; no turn is longer than the quanta of all and one piece each; over
    any time in which two always have something waiting they get the same but for a quantum and a piece."""
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(2, 4)]
    loop, largest = Loop(*names), 2 * QUANTUM
    sent: dict[str, list[Item]] = {name: [] for name in names}
    got: dict[str, list[Item]] = {name: [] for name in names}
    for _ in range(200):
        loop.served.clear()
        for _ in range(draw.randint(0, 30)):
            name, cost = draw.choice(names), draw.choice([1, CALL_COST, draw.randint(1, largest)])
            sent[name].append((name, cost))
            loop.comes(name, cost)
        arrived = list(loop.served)
        loop.turn()
        for item in arrived + loop.served:
            got[item[0]].append(item)
        for items in (arrived, loop.served):
            for name in names:
                assert sum(cost for who, cost in items if who == name) <= QUANTUM + largest
    for _ in range(10_000):
        if not loop.turns.has_waiting:
            break
        loop.turn()
        for item in loop.served:
            got[item[0]].append(item)
    assert got == sent
