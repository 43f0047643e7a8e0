"""What a client of a model is promised, whichever protocol it speaks and whatever plane serves it: each behaviour of the
table is asked through each of them, with the refusals of `proxy.policy.refusal.FORMS`."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from proxy.policy.refusal import FORMS, Why
from proxy.request.admission import GIVEN_UP_SECONDS
from proxy.request.replica import Replica
from tests.fakes.data_plane import RestPair, own_replica, triton_at_hand
from tests.unit.proxy.conformance.sides import PLANES, SIDES

MIB = 1024**2


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with triton_at_hand(), RestPair.triton_at_hand():
        yield


class Place:
    """A replica, and its clients in one protocol before one plane."""

    def __init__(self, protocol: str, plane: str) -> None:
        self._side, self._plane = SIDES[protocol], plane
        self.form = self._side.form
        self._clients: list[Any] = []
        self.replica: Replica = own_replica()

    def client(self, **limits: Any) -> Any:
        """One more. `limits`: of the replica, by the first."""
        if not self._clients:
            self.replica = own_replica(limits.pop("slots", 0), limits.pop("queue", 0), **limits)
        one = self._side(self._plane, self.replica, *self._clients[:1])
        self._clients.append(one)
        return one

    def refused(self, client: Any, why: Why) -> bool:
        return bool(client.outcome == self.form(FORMS[why]) and client.retries is FORMS[why].retries)

    @property
    def is_empty(self) -> bool:
        """Nothing of any request is left."""
        budgets = (self.replica.budget.used_bytes, self.replica.admissions.bytes.used_bytes)
        return (self.replica.admissions.running, self.replica.admissions.waiting, *budgets) == (0, 0, 0, 0)


@pytest.fixture(params=[*product(SIDES, PLANES)], ids=lambda pair: "-".join(pair))
def place(request: pytest.FixtureRequest) -> Place:
    return Place(*request.param)


async def test_its_own_model_is_served(place: Place) -> None:
    client = place.client()
    await client.ask()
    assert (client.in_triton, client.outcome) == (1, None)
    await client.answer()
    assert client.outcome == client.ok
    assert place.is_empty


# What is refused before Triton hears of it: limits of the replica, what is asked, and why not.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Why, str]] = {
    "a foreign model": ({}, {"model": "other"}, Why.FOREIGN_MODEL, "unknown model: 'other'"),
    "a name that only begins like the own": ({}, {"model": "own2"}, Why.FOREIGN_MODEL, "'own2'"),
    "shared memory": (
        {},
        {"shared_memory_region": "r"},
        Why.INVALID,
        "shared memory is not available",
    ),
    "a request too large": ({"max_request_bytes": 50}, {"values": 60}, Why.TOO_LARGE, "--max-request-bytes"),
    "one dearer than all may be": (
        {"max_inflight_bytes": 4096},
        {"values": 1000},
        Why.TOO_LARGE,
        "--max-inflight-bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_it_is_refused_before_triton_hears_of_it(place: Place, case: str) -> None:
    limits, asked, why, words = REFUSED[case]
    client = place.client(**limits)
    await client.ask(**asked)
    assert place.refused(client, why), client.outcome
    assert words in client.message
    assert client.in_triton == 0
    assert place.is_empty


async def test_it_waits_for_its_slot_and_gets_the_next_that_is_free(place: Place) -> None:
    first, second = place.client(slots=1, queue=1), place.client()
    await first.ask()
    await second.ask()
    assert (first.in_triton, place.replica.admissions.waiting) == (1, 1)
    await first.answer()
    assert (first.outcome, second.outcome, place.replica.admissions.waiting) == (first.ok, None, 0)
    await first.answer()
    assert second.outcome == second.ok or (await second.answer(), second.outcome)[1] == second.ok
    assert place.is_empty


async def test_a_full_queue_takes_no_more(place: Place) -> None:
    clients = [place.client(slots=1, queue=1), place.client(), place.client()]
    for client in clients:
        await client.ask()
    assert place.refused(clients[2], Why.QUEUE_FULL)
    assert [client.outcome for client in clients[:2]] == [None, None]


async def test_a_replica_that_is_closed_says_why(place: Place) -> None:
    client = place.client()
    place.replica.closed = "it has ended Triton twice"
    await client.ask()
    assert place.refused(client, Why.NOT_SERVED)
    assert "ended Triton twice" in client.message
    assert place.is_empty


async def test_a_client_that_leaves_the_queue_leaves_nothing(place: Place) -> None:
    first, second = place.client(slots=1, queue=1), place.client()
    await first.ask()
    await second.ask()
    await second.leave()
    assert place.replica.admissions.waiting == 0
    await first.answer()
    assert first.outcome == first.ok
    assert place.is_empty


async def test_what_triton_works_on_keeps_its_slot_though_its_client_has_left(place: Place) -> None:
    first, second = place.client(slots=1), place.client()
    await first.ask()
    await first.leave()
    assert place.replica.admissions.running == 1
    await second.ask()
    assert place.refused(second, Why.QUEUE_FULL)
    await second.answer()
    assert place.is_empty


async def test_who_waits_for_too_long_is_told_so(place: Place) -> None:
    first, second = place.client(slots=1, queue=1, request_timeout_seconds=10.0), place.client()
    await first.ask()
    await second.ask()
    await second.late(20.0)
    assert second.outcome in (504, 4)
    assert place.replica.admissions.waiting == 0


async def test_a_triton_that_breaks_off_is_told_as_what_may_be_asked_again(place: Place) -> None:
    client = place.client()
    await client.ask()
    await client.break_off()
    assert place.refused(client, Why.NOT_SERVED)
    assert place.is_empty


async def test_a_request_that_nobody_waits_for_ends_when_its_time_is_up(place: Place) -> None:
    client = place.client(slots=1)
    await client.ask()
    await client.leave()
    downstream = client._pair.downstream
    assert len(downstream.given_up) == 1
    (given_up,) = downstream.given_up
    downstream.given_up.tick(given_up.given_up_until - 1)
    assert place.replica.admissions.running == 1
    downstream.given_up.tick(given_up.given_up_until + GIVEN_UP_SECONDS)
    assert place.is_empty
