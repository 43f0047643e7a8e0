"""How many connections there may be, by replica and by address."""

import random
from collections import Counter

import pytest

from proxy.gateway.connection_limits import ConnectionLimit, PendingConnections


def test_whoever_takes_all_places_it_can_get_leaves_as_many_free() -> None:
    places, has = ConnectionLimit(1000), {"greedy": 0, "also": 0, "quiet": 0}

    def take(who: str) -> bool:
        taken = places.take(has[who])
        has[who] += taken
        return taken

    for _ in range(2000):
        take("greedy")
    assert has["greedy"] == 500
    for _ in range(2000):
        take("also")
    assert has["also"] == 250
    assert all(take("quiet") for _ in range(100))
    assert not take("greedy")
    for _ in range(has["greedy"]):
        places.give_back()
    assert places.taken == 350


@pytest.mark.parametrize("seed", range(10))
def test_any_history_of_arrivals(seed: int) -> None:
    """Never more than so many; who goes is the oldest of the address that has the most."""
    draw = random.Random(seed)
    pending: PendingConnections[int] = PendingConnections(most=10)
    there: dict[int, str] = {}
    for number in range(500):
        if there and draw.random() < 0.3:
            gone = draw.choice(list(there))
            pending.remove(gone)
            pending.remove(gone)
            del there[gone]
        source = draw.choice("abcdefgh")
        out = pending.add(number, source, float(number))
        there[number] = source
        if out is not None:
            counts = Counter(there.values())
            of = there.pop(out)
            assert counts[of] == max(counts.values())
            assert all(other > out for other, its in there.items() if its == of)
        assert len(pending) == len(there) <= 10
    late = pending.late(490.0)
    assert late == sorted(one for one in there if one < 490)
    assert len(pending) == len(there) - len(late)
    assert pending._by_source.keys() == {its for one, its in there.items() if one not in late}
