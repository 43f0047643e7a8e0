"""What a client of a model is promised, whichever protocol it speaks and whatever plane serves it: each behaviour of the
table is asked through each of them, with the refusals of `proxy.policy.refusal.FORMS`."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from proxy.policy.refusal import FORMS, Why
from proxy.request import admission
from proxy.request.admission import GIVEN_UP_SECONDS
from proxy.request.minimum_rate import BEGUN_BYTES
from proxy.request.replica import Replica
from tests.fakes.data_plane import RestPair, own_replica, triton_at_hand
from tests.unit.proxy.conformance.sides import PLANES, SIDES, GrpcStream, move

KIB, MIB = 1024, 1024**2
LARGE = 600_000  # more than any protocol keeps before it passes the beginning on
QUEUE_FULL = "pending request queue full"


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with triton_at_hand(), RestPair.triton_at_hand():
        yield


class Place:
    """A replica, and its clients in one protocol before one plane."""

    def __init__(self, protocol: str, plane: str) -> None:
        self.side, self._plane = SIDES[protocol], plane
        self._clients: list[Any] = []
        self.replica: Replica = own_replica()

    def client(self, **limits: Any) -> Any:
        """One more. `limits`: of the replica, by the first."""
        if not self._clients:
            self.replica = own_replica(limits.pop("slots", 0), limits.pop("queue", 0), **limits)
        one = self.side(self._plane, self.replica, *self._clients[:1])
        self._clients.append(one)
        return one

    def clients(self, count: int, **limits: Any) -> list[Any]:
        return [self.client(**({} if number else limits)) for number in range(count)]

    def refused(self, client: Any, why: Why) -> bool:
        form = FORMS[why]
        is_counted = client.codes.get(self.side.code(form), 0) > 0
        return bool(client.outcome == self.side.form(form) and client.retries is form.retries and is_counted)

    @property
    def queue(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        return self.replica.admissions.running, self.replica.admissions.waiting

    @property
    def is_empty(self) -> bool:
        """Nothing of any request is left."""
        budgets = (self.replica.budget.used_bytes, self.replica.admissions.bytes.used_bytes)
        return (*self.queue, *budgets, len(self.downstream.given_up)) == (0, 0, 0, 0, 0)

    @property
    def downstream(self) -> Any:
        return self._clients[0]._pair.downstream

    def fill_triton(self) -> None:
        """There is no room for the bytes of another request."""
        room = self.replica.admissions.bytes
        room.limit_bytes = room.used_bytes


@pytest.fixture(params=[*product(SIDES, PLANES)], ids=lambda pair: "-".join(pair))
def place(request: pytest.FixtureRequest) -> Place:
    return Place(*request.param)


async def test_its_own_model_is_served(place: Place) -> None:
    client = place.client()
    await client.ask()
    assert (client.in_triton, client.outcome) == (1, None)
    await client.answer()
    assert client.outcome == client.ok
    assert client.codes == {client.ok_code: 1}
    assert place.is_empty


# What is refused before it reaches Triton: limits of the replica, what is asked, and why not.
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
    "one that costs more than all may": (
        {"max_inflight_bytes": 4096},
        {"values": 1000},
        Why.TOO_LARGE,
        "--max-inflight-bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_it_is_refused_before_it_reaches_triton(place: Place, case: str) -> None:
    limits, asked, why, words = REFUSED[case]
    if place.side is GrpcStream and why is Why.FOREIGN_MODEL:
        return  # a stream says so in a message, and goes on
    client = place.client(**limits)
    await client.ask(**asked)
    assert place.refused(client, why), client.outcome
    assert words in client.message
    assert client.in_triton == 0
    assert client.codes == {place.side.code(FORMS[why]): 1}
    assert place.is_empty


# Slots and the queue.


async def test_the_queue_is_in_order_and_takes_no_more_than_its_depth(place: Place) -> None:
    *served, refused = clients = place.clients(4, slots=1, queue=2)
    for client in clients:
        await client.ask()
    assert place.refused(refused, Why.QUEUE_FULL)
    assert QUEUE_FULL in refused.message
    for turn, client in enumerate(served):
        assert (client.in_triton, place.queue) == (1, (1, 2 - turn))
        assert [one.outcome for one in served] == [client.ok] * turn + [None] * (3 - turn)
        await client.answer()
    assert served[-1].outcome == served[-1].ok
    assert place.is_empty


async def test_a_replica_that_is_closed_says_why(place: Place) -> None:
    client = place.client()
    place.replica.closed = "it has ended Triton twice"
    await client.ask()
    assert place.refused(client, Why.NOT_SERVED)
    assert "ended Triton twice" in client.message
    assert place.is_empty


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_a_client_that_leaves_the_queue_leaves_nothing(place: Place, how: str) -> None:
    first, second, third = place.clients(3, slots=1, queue=2)
    for client in (first, second, third):
        await client.ask()
    await getattr(second, how)()
    assert place.queue == (1, 1)
    assert first.codes == {first.left_code: 1}
    await first.answer()
    await third.answer()
    assert (first.outcome, third.outcome) == (first.ok, third.ok)
    assert place.is_empty


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_what_triton_works_on_keeps_its_slot_though_its_client_has_left(place: Place, how: str) -> None:
    first, second = place.clients(2, slots=1)
    await first.ask()
    await getattr(first, how)()
    assert place.queue == (1, 0)
    assert first.codes == {first.left_code: 1}
    await second.ask()
    assert place.refused(second, Why.QUEUE_FULL)
    await second.answer()
    assert place.is_empty


async def test_without_a_limit_too_there_is_one_on_requests_whose_clients_have_left(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_GIVEN_UP", 2)
    *gone, refused, served = place.clients(4)
    for client in gone:
        await client.ask()
        await client.leave()
    await refused.ask()
    assert place.refused(refused, Why.QUEUE_FULL)
    await refused.answer()
    await served.ask()
    await served.answer()
    assert served.outcome == served.ok


async def test_a_client_that_is_late_in_the_queue_is_refused(place: Place) -> None:
    first, second = place.clients(2, slots=1, queue=1, request_timeout_seconds=10.0)
    await first.ask()
    await second.ask()
    await second.late(9.0)
    assert second.outcome is None
    await second.late(20.0)
    assert second.outcome in (504, 4)
    assert place.queue == (1, 0)


async def test_a_request_that_is_late_in_triton_keeps_its_slot_until_triton_is_done(place: Place) -> None:
    late, patient = place.clients(2, slots=1, queue=1, request_timeout_seconds=10.0)
    await late.ask()
    await late.late(9.0)
    assert late.outcome is None
    await late.late(20.0)
    assert late.outcome in (504, 4)
    assert late.codes == {late.late_code: 1}
    await patient.ask()
    assert place.queue == (1, 1)
    await patient.answer()
    assert place.queue == (1, 0)
    await patient.answer()
    assert patient.outcome == patient.ok
    assert place.is_empty


async def test_a_request_whose_client_has_left_ends_when_its_time_is_up(place: Place) -> None:
    client = place.client(slots=1)
    await client.ask()
    await client.leave()
    downstream = place.downstream
    assert len(downstream.given_up) == 1
    (given_up,) = downstream.given_up
    downstream.given_up.tick(given_up.given_up_until - 1)
    assert place.queue == (1, 0)
    downstream.given_up.tick(given_up.given_up_until + GIVEN_UP_SECONDS)
    assert place.is_empty


# Triton's connections.


async def test_a_triton_that_breaks_off_is_reported_as_what_may_be_asked_again(place: Place) -> None:
    client, again = place.clients(2, slots=1)
    await client.ask()
    await client.break_off()
    assert place.refused(client, Why.NOT_SERVED)
    assert place.is_empty
    await again.ask()
    assert again.in_triton == 1
    assert len(again.upstreams) == 2


async def test_while_triton_is_nowhere_a_client_may_try_again(place: Place) -> None:
    early, late = place.clients(2, slots=1, queue=1)
    endpoint, early.cluster.endpoint = early.cluster.endpoint, None
    await early.ask()
    assert place.refused(early, Why.NOT_SERVED)
    assert place.is_empty
    early.cluster.endpoint = endpoint
    await late.ask()
    await late.answer()
    assert late.outcome == late.ok


async def test_requests_go_to_where_triton_is_and_those_under_way_end_where_they_began(place: Place) -> None:
    idle, running, waits, other = place.clients(4, slots=1, queue=1)
    for client in (idle, running, waits):
        if client is running:
            await idle.answer()
        await client.ask()
    assert len(idle.upstreams) == 1
    old, moved = idle.upstreams[0].address, move(idle.cluster)
    await running.answer()
    assert running.outcome == running.ok
    assert [one.address for one in idle.upstreams] == [old, moved]
    await waits.answer()
    await other.ask()
    await other.answer()
    assert (waits.outcome, other.outcome) == (waits.ok, other.ok)
    assert [one.address for one in idle.upstreams] == [old, moved]


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("before", [1, 2])
async def test_a_connection_to_triton_that_is_about_to_be_lost_gets_no_request(
    place: Place, before: int, in_pieces: bool
) -> None:
    client = place.client()
    for _ in range(before):  # from the second one on it takes the fast path
        await client.ask()
        await client.answer()
    client.upstream_wires[0].close()
    sent = client.upstream_wires[0].sent
    if in_pieces:
        await client.begin(3, 9)
        await client.send()
    else:
        await client.ask()
    assert len(client.upstreams) == 2
    assert client.upstream_wires[0].sent == sent
    client.upstreams[0].connection_lost(None)
    await client.answer()
    assert client.codes == {client.ok_code: before + 1}
    assert place.is_empty


# Slow senders.


@pytest.mark.parametrize(
    ("size", "sent"), [(3, -1), (100_000, -1), (LARGE, -1), (LARGE, 400), (LARGE, BEGUN_BYTES)]
)
async def test_a_client_that_sends_slowly_keeps_no_slot(place: Place, size: int, sent: int) -> None:
    slow, quick = place.clients(2, slots=1, queue=9)
    await slow.begin(size, sent)
    assert place.queue == (0, 0)
    await quick.ask()
    await quick.answer()
    assert quick.outcome == quick.ok
    await slow.send()
    await slow.answer()
    assert slow.outcome == slow.ok
    assert place.is_empty


@pytest.mark.parametrize("cut", [2, 50_000])
@pytest.mark.parametrize("then", ["served", "leave", "cancel", "late"])
async def test_a_long_request_needs_its_slot_at_its_end_alone(place: Place, cut: int, then: str) -> None:
    """Triton, which begins it with its last byte, runs no more at once than the limit."""
    slow, running, waiting = place.clients(3, slots=1, queue=9)
    await slow.begin(LARGE, -cut)
    await running.ask()
    await waiting.ask()
    assert (slow.in_triton, place.queue) == (1, (1, 1))
    await slow.send()
    assert (slow.in_triton, place.queue) == (1, (1, 2))
    if then == "served":
        await running.answer()
        assert (slow.in_triton, place.queue, waiting.outcome) == (1, (1, 1), None)
        await slow.answer()
        assert slow.outcome == slow.ok
    elif then == "late":
        await slow.late(301.0)
        assert slow.outcome in (504, 4)
    else:
        await getattr(slow, then)()
        assert place.queue == (1, 1)
        await running.answer()
    if then != "late":
        assert (running.outcome, place.queue) == (running.ok, (1, 0))
        await waiting.answer()
        assert waiting.outcome == waiting.ok
    else:
        await waiting.answer()
    assert place.is_empty


@pytest.mark.parametrize("how", ["leave", "cancel"])
@pytest.mark.parametrize("size", [3, LARGE])
async def test_a_client_that_leaves_in_the_middle_of_its_request_leaves_nothing(
    place: Place, size: int, how: str
) -> None:
    client = place.client(slots=1)
    await client.begin(size, -2)
    assert place.replica.budget.used_bytes or place.replica.admissions.bytes.used_bytes
    await getattr(client, how)()
    assert client.codes == {client.left_code: 1}
    assert place.is_empty


@pytest.mark.parametrize(
    ("each_second", "others_wait", "lasts"),
    [(0, False, None), (0, True, 11), (100 * KIB, True, 17), (300 * KIB, True, None)],
)
async def test_a_slow_upload_gives_its_memory_up_for_others(
    place: Place, *, each_second: int, others_wait: bool, lasts: int | None
) -> None:
    """Ten seconds below the minimum rate in all, and only those in which others wait for its memory."""
    slow, other = place.clients(2, slots=1, queue=9)
    await slow.begin(8 * MIB, BEGUN_BYTES - 1)
    assert place.replica.admissions.bytes.used_bytes == 0  # what has hardly begun keeps no memory
    await slow.send(100_000)
    assert place.replica.admissions.bytes.used_bytes > 8 * MIB
    if others_wait:
        place.fill_triton()
        await other.ask()
    until = None
    for second in range(25):
        await slow.late(second)
        if slow.outcome is not None:
            until = second
            break
        if each_second:
            await slow.send(each_second)
    if lasts is None:
        assert until is None
        return
    assert until == pytest.approx(lasts, abs=1)
    assert slow.outcome in (408, 4)
    assert "too slowly" in slow.message
    await other.answer()
    assert other.outcome == other.ok
    assert place.is_empty


# Bytes.


async def test_requests_that_would_fill_triton_are_turned_away_until_there_is_room(place: Place) -> None:
    first, late, huge, again = place.clients(4, max_inflight_bytes=7 * MIB // 2)
    await first.ask(values=MIB)
    await late.ask(values=MIB)
    assert place.refused(late, Why.NO_ROOM)
    assert "that they may take together (--max-inflight-bytes)" in late.message
    await huge.begin(2 * MIB, 100_000)
    assert place.refused(huge, Why.TOO_LARGE)
    assert "--max-inflight-bytes" in huge.message
    await first.answer()
    await again.ask(values=MIB)
    await again.answer()
    assert again.outcome == again.ok
    assert place.is_empty


# Slow readers.


async def test_a_client_that_reads_a_large_response_slowly_keeps_memory_and_no_slot(place: Place) -> None:
    slow, other = place.clients(2, slots=1, queue=5)
    await slow.ask()
    await other.ask()
    slow.stall()
    assert place.queue == (1, 1)
    before = place.replica.admissions.bytes.used_bytes
    await slow.begin_answer(MIB)
    assert place.queue == (1, 0)
    assert place.replica.admissions.bytes.used_bytes >= before + MIB
    await other.answer()
    assert other.outcome == other.ok
    assert place.queue == (0, 0)
    await slow.cancel()
    await slow.break_off()
    assert place.is_empty


@pytest.mark.parametrize("others_wait", [False, True])
async def test_responses_that_are_not_read_give_their_memory_up_for_others(
    place: Place, others_wait: bool
) -> None:
    """Ten seconds; and no more of them than the others need."""
    *slow, other = place.clients(5, queue=9)
    for client in slow:
        await client.ask()
        client.stall()
    await slow[0].begin_answer(8 * MIB)
    if others_wait:
        place.fill_triton()
        await other.ask()
    for second in range(11):
        await slow[0].late(second)
        assert not slow[0].codes
    await slow[0].late(11)
    assert sum(slow[0].codes.values()) == others_wait
    assert set(slow[0].codes) <= {"408", "RESOURCE_EXHAUSTED"}


async def test_a_response_that_triton_sends_slowly_is_not_its_clients_fault(place: Place) -> None:
    slow, other = place.clients(2, queue=9)
    await slow.ask()
    await slow.begin_answer(8 * MIB)
    place.fill_triton()
    await other.ask()
    assert place.queue == (0, 1)
    for second in range(60):
        await slow.late(second)
    assert not slow.codes
