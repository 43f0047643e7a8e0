"""Limits of a replica that clients of REST meet: slots, bytes, questions, connections; and all given back in the end."""

import asyncio
import gzip
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from proxy.downstream.rest import checking
from proxy.downstream.rest.downstream import RestDownstream, RestShared
from proxy.policy.names import Names
from proxy.policy.refusal import Flags, Refusal
from proxy.request.budget import Budget
from proxy.request.outstanding import Outstanding
from proxy.request.replica import Replica
from proxy.upstream.http1 import UpstreamPool
from proxy.wire.http1 import HEADER_LENGTH
from tests.fakes.data_plane import RestPair, here, own_replica, settle
from tests.unit.proxy.downstream.test_connection import BODY, OK, infer, seen
from tests.unit.proxy.downstream.test_request import Connect, ask

MIB = 1024**2


@pytest.fixture
async def connect() -> Any:
    with RestPair.triton_at_hand():
        yield RestPair


def binary(size: int) -> bytes:
    head = b'{"inputs":[{"name":"I","datatype":"UINT8","shape":[%d],"parameters":{"binary_data_size":%d}}]}'
    text = head % (size, size)
    return infer(text + bytes(size), "own", f"{HEADER_LENGTH}: {len(text)}")


async def test_a_request_that_is_too_long_is_refused_by_its_length_alone(connect: Connect) -> None:
    pair = connect(replica=own_replica(max_request_bytes=MIB))
    pair.client.data_received(binary(MIB)[:2000])
    sent = pair.to_client.sent
    assert sent.startswith(b"HTTP/1.1 413 ")
    assert b"1 MiB (--max-request-bytes)" in sent
    assert not pair.tritons


async def test_each_refusal_names_the_option_that_sets_its_limit_here(connect: Connect) -> None:
    """A gateway has ceilings: what a pod's owner cannot raise is not named by the pod's own option."""
    flags = Flags(json="JSON", request="REQUEST", inflight="INFLIGHT")
    limits = ReplicaLimits(
        queue_depth=0, max_json_bytes=MIB, max_request_bytes=2 * MIB, max_inflight_bytes=3 * MIB
    )
    replica = Replica(Names(b"own", b"own"), limits, flags_of=lambda _: flags)
    replica.triton_says(None)

    async def response_to(sent: bytes) -> bytes:
        pair = connect(replica=replica)
        pair.client.data_received(sent)
        async with asyncio.timeout(10):
            while not pair.to_client.sent:  # a packed body is looked at beside the loop
                await asyncio.sleep(0.001)
        return pair.to_client.sent

    assert b"2 MiB (REQUEST)" in await response_to(binary(2 * MIB)[:2000])
    for kind in ("identity", "gzip"):
        packed = bytes(MIB + 1) if kind == "identity" else gzip.compress(bytes(MIB + 1))
        assert b"1 MiB (JSON)" in await response_to(infer(packed, "own", f"Content-Encoding: {kind}"))
    for room in (replica.budget, replica.admissions.bytes):
        room.charge(3 * MIB)
        assert b"together (INFLIGHT)" in await response_to(infer())
        room.give(3 * MIB)


async def test_an_answer_that_is_not_taken_counts_as_triton_keeps_it(connect: Connect) -> None:
    pair = connect()
    pair.client.data_received(infer())
    await settle()
    before = pair.downstream.replica.admissions.bytes.used_bytes
    pair.tritons[0].data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(10))
    assert pair.downstream.replica.admissions.bytes.used_bytes == before + 1_000_000
    pair.tritons[0].data_received(bytes(999_990))
    assert pair.downstream.replica.admissions.bytes.used_bytes == 0


async def test_slow_bodies_of_one_replica_leave_room_for_anothers(connect: Connect) -> None:
    process = Budget(100_000)
    greedy, quiet = (own_replica() for _ in range(2))
    for replica in (greedy, quiet):
        replica.budget = Budget(100_000, process)
    for _ in range(40):
        connect(replica=greedy).client.data_received(infer(BODY.ljust(20_000))[:-1])
    assert greedy.budget.used_bytes <= 50_000
    assert greedy.rest.codes["503"] >= 30
    pair = connect(replica=quiet)
    pair.client.data_received(infer(BODY.ljust(20_000)))
    await settle()
    pair.tritons[0].data_received(OK)
    assert pair.to_client.sent == OK


async def test_many_questions_are_few_connections(connect: Connect) -> None:
    first = connect(limit=1)
    pairs = [RestPair(downstream=first.downstream) for _ in range(400)]
    for pair in pairs:
        pair.client.data_received(ask("GET /v2/models/own/config"))
    await settle()
    assert len(first.tritons) == 8
    while busy := [one for one in first.tritons if one.request is not None]:
        for upstream in busy:
            upstream.data_received(OK)
        await settle()
    assert all(pair.to_client.sent == OK for pair in pairs)
    assert len(first.tritons) == 8
    assert first.downstream.replica.questions.running == 0


async def test_replicas_take_turns_at_the_connections(connect: Connect) -> None:
    shared = RestShared(here())
    shared.pool = UpstreamPool(shared.cluster, most=1)
    crowd, single = own_replica(), own_replica()
    downstream, other = RestDownstream(shared, crowd), RestDownstream(shared, single)
    first = RestPair(downstream=downstream)
    pairs = [RestPair(downstream=downstream) for _ in range(20)]
    for pair in pairs:
        pair.client.data_received(infer())
    await settle()
    late = RestPair(downstream=other)
    late.client.data_received(infer())
    await settle()
    answers = 0
    while not late.to_client.sent:
        first.tritons[0].data_received(OK)
        answers += 1
        assert answers <= 3
        await settle()
    assert len(first.tritons) == 1


async def test_a_connection_counts_once_whichever_step_its_making_is_at(connect: Connect) -> None:
    """Requests are spread over replicas by this: one too many here sends one too many elsewhere."""
    pair = connect()
    pool = pair.downstream.shared.pool
    pair.client.data_received(infer())
    seen = []
    for _ in range(6):
        seen.append(pool.in_use)
        await asyncio.sleep(0)
    assert (len(pair.tritons), seen) == (1, [1] * 6)
    pair.tritons[0].data_received(OK)
    assert pool.in_use == 0


async def test_a_request_that_waited_goes_where_triton_is_then(connect: Connect) -> None:
    first = connect(limit=1, depth=1)
    first.client.data_received(infer())
    await settle()
    waits = RestPair(downstream=first.downstream)
    waits.client.data_received(infer())
    where = first.downstream.shared.cluster
    moved = replace(
        where.require(), http=Endpoint("127.0.0.9", 7), http_headers={"berth-inference-key": "new"}
    )
    where.move(moved)
    first.tritons[0].data_received(OK)
    await settle()
    assert first.tritons[1].address == moved.http
    (_, headers, _) = seen(first)[1]
    assert (headers["host"], headers["berth-inference-key"]) == ("127.0.0.9:7", "new")


LARGE = b'{"inputs":[{"name":"I","datatype":"FP32","shape":[%d],"data":[%b]}]}'


@pytest.mark.parametrize("count", [50_000, 900_000])
@pytest.mark.parametrize("is_good", [True, False])
async def test_a_long_body_is_checked_beside_the_loop(connect: Connect, count: int, is_good: bool) -> None:
    body = LARGE % (count if is_good else count + 9, b"1," * (count - 1) + b"1")
    pair = connect(replica=own_replica(max_json_bytes=16 * MIB))
    pair.client.data_received(infer(body))
    assert not pair.to_client.sent
    async with asyncio.timeout(20):
        while not pair.to_client.sent and not seen_whole(pair, len(body)):
            await asyncio.sleep(0.005)
    assert pair.to_client.sent.startswith(b"HTTP/1.1 400 ") is not is_good
    if is_good:
        assert seen(pair)[0][2] == body
        pair.tritons[0].data_received(OK)
        assert pair.to_client.sent == OK
    assert (pair.downstream.replica.admissions.running, pair.downstream.replica.budget.used_bytes) == (0, 0)
    await pair.downstream.shared.close()


def seen_whole(pair: RestPair, size: int) -> bool:
    return bool(pair.to_triton) and len(pair.to_triton[0].sent) >= size


async def test_a_checking_process_that_dies_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, facts = checking.Checker(), own_replica().facts
    question = checking.Question(
        is_infer=True,
        encoding="identity",
        header_length=None,
        left=0,
        facts=facts,
        max_json_bytes=MIB,
        json_flag="",
    )
    body = LARGE % (900_000, b"1," * 899_999 + b"1")
    first = await checker.check(question, body, None)
    assert checker._helper is not None
    checker._helper._process.kill()
    assert await checker.check(question, body, None) == first
    assert await checker.check(question, body, None) == first
    checker.close()


async def test_where_there_is_no_limit_a_burst_of_large_requests_waits_for_room(connect: Connect) -> None:
    """What finds no room for its bytes is not turned away at once: an ordinary client sends some at a time."""
    limits = ReplicaLimits(max_inflight_bytes=3 * MIB)
    replica = Replica(Names(b"own", b"own"), limits)
    replica.triton_says(None)
    replica.budget.limit_bytes = 64 * MIB  # these clients send all at once, and no transport holds them up
    first = connect(replica=replica)
    burst = [first, *(RestPair(downstream=first.downstream) for _ in range(9))]
    for pair in burst:
        pair.client.data_received(binary(MIB))
    await settle()
    assert (replica.admissions.running, replica.admissions.waiting) == (1, 9)
    for _ in burst:
        await settle()
        first.tritons[0].data_received(OK)
    assert [pair.to_client.sent for pair in burst] == [OK] * 10


@pytest.mark.parametrize("first_is", ["waiting", "with Triton", "not whole"])
async def test_what_clients_send_ahead_is_bounded_for_all_of_them(connect: Connect, first_is: str) -> None:
    first = connect(replica=own_replica(limit=1, depth=100, max_inflight_bytes=MIB))
    if first_is != "with Triton":
        first.client.data_received(infer())
        await settle()
    pairs = [RestPair(downstream=first.downstream) for _ in range(40)]
    for pair in pairs:
        if first_is == "not whole":
            pair.client.data_received(b"GET /v2 HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 50_000)
            continue
        pair.client.data_received(infer())
        for _ in range(10):
            pair.client.data_received(infer() * 50)
    await settle()
    assert MIB * 3 // 4 < first.downstream.replica.budget.used_bytes <= MIB
    lost = [pair for pair in pairs if not pair.to_client.open or b" 503 " in pair.to_client.sent]
    assert 0 < len(lost) < len(pairs)
    for pair in pairs:
        pair.client.connection_lost(None)
    first.client.connection_lost(None)
    assert first.downstream.replica.budget.used_bytes == 0


async def test_what_is_answered_here_one_by_one_is_charged_while_it_waits(connect: Connect) -> None:
    pair = connect(replica=own_replica(limit=1, depth=1, max_inflight_bytes=MIB))
    asked = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
    pair.client.data_received(asked * 2000)
    assert 50_000 < pair.downstream.replica.budget.used_bytes < len(asked) * 2000
    pair.client.connection_lost(None)
    assert pair.downstream.replica.budget.used_bytes == 0
    full = RestPair(downstream=pair.downstream)
    pair.downstream.replica.budget.take(MIB)
    full.client.data_received(asked * 2000)
    assert not full.to_client.open


@pytest.mark.parametrize("seed", range(40))
async def test_slots_and_bytes_are_back_after_any_history(connect: Connect, seed: int) -> None:
    """Clients that come, go, wait, are late and send in pieces; a Triton that answers, breaks off and is slow."""
    rng, first = random.Random(seed), connect(replica=own_replica(2, 3, max_inflight_bytes=2 * MIB))
    requests = [
        infer(),
        binary(300_000),
        binary(1000),
        infer(b'{"a":1}', route="generate"),
        infer(b"{", "own"),
    ]
    requests += [infer(b"{}", route="generate_stream"), ask("GET /v2/models/own/config"), infer(model="x")]
    pairs: list[RestPair] = []
    left: dict[int, bytes] = {}
    for _ in range(150):
        match rng.randrange(7):
            case 0 | 1:
                pairs.append(RestPair(downstream=first.downstream))
                left[len(pairs) - 1] = rng.choice(requests) * rng.choice([1, 1, 2])
            case 2 | 3 if left:
                index = rng.choice(list(left))
                size = rng.choice([50, 5000, 10**6])
                if pairs[index].to_client.open:
                    pairs[index].client.data_received(left[index][:size])
                left[index] = left[index][size:]
                if not left[index]:
                    del left[index]
            case 4 if pairs:
                gone = rng.choice(pairs)
                gone.to_client.open = False
                gone.client.connection_lost(None)
                gone.client.connection_lost(None)
            case 5 if pairs:
                rng.choice(pairs).client.tick(asyncio.get_running_loop().time() + 1000)
            case _:
                busy = [one for one in first.tritons if one.request is not None]
                if busy:
                    one = rng.choice(busy)
                    if rng.random() < 0.3:
                        first.to_triton[first.tritons.index(one)].open = False
                        one.connection_lost(None)
                    elif one.request_done:
                        one.data_received(OK)
        await settle()
        assert first.downstream.replica.admissions.running <= 2
    for pair in pairs:
        pair.client.connection_lost(None)
    for upstream in list(first.tritons):
        if upstream.request is not None:
            upstream.connection_lost(None)
    await settle()
    replica = first.downstream.replica
    assert (replica.admissions.running, replica.admissions.waiting, replica.admissions.given_up) == (0, 0, 0)
    assert (replica.questions.running, replica.questions.waiting) == (0, 0)
    assert (replica.admissions.bytes.used_bytes, replica.budget.used_bytes) == (0, 0)
    assert not first.downstream.given_up


@pytest.mark.parametrize("seed", range(20))
async def test_the_quick_way_and_the_slow_one_are_one(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    bodies = [
        BODY,
        BODY.ljust(len(BODY) + 3),
        b'{"inputs":[]}',
        b'{"inputs":7}',
        b'{"inputs":[],"id":"\xc3\xa9"}',
    ]
    data = [infer(rng.choice(bodies)) for _ in range(12)]
    quick, slow = connect(), connect()
    slow.downstream.known_heads.remember = lambda *_: None  # type: ignore[method-assign]
    for pair in (quick, slow):
        for one in data:
            pair.client.data_received(one)
            await settle()
            for upstream in pair.tritons:
                if upstream.request is not None:
                    upstream.data_received(OK)
    assert quick.to_client.sent == slow.to_client.sent
    assert seen(quick) == seen(slow)
    assert quick.downstream.replica.rest.codes == slow.downstream.replica.rest.codes
    assert quick.downstream.replica.rest.received_bytes == slow.downstream.replica.rest.received_bytes


async def test_bodies_of_one_replica_that_take_long_to_check_do_not_keep_anothers_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker, question, order = checking.Checker(), object(), []

    def check(self: object, question: object, body: bytes) -> checking.Checked:
        order.append(body)
        time.sleep(0.001)
        return checking.Checked(body, 0)

    monkeypatch.setattr(checking.Checker, "_check", check)

    def asks(body: bytes, whose: object) -> "asyncio.Task[checking.Checked]":
        return asyncio.create_task(checker.check(question, body, whose))  # type: ignore[arg-type]

    crowd = [asks(b"crowd", "crowd") for _ in range(400)]
    await asyncio.sleep(0)
    for one in crowd[5:20]:
        one.cancel()
    single = asks(b"single", "single")
    assert (await single).tail == b"single"
    assert len(order) <= 4
    ends = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [str(one) for one in ends if isinstance(one, Refusal)]
    assert len(refused) == 400 - 1 - 256
    assert "wait to be checked" in refused[0]
    assert (await asks(b"late", "crowd")).tail == b"late"  # nothing is left behind
    checker.close()


async def test_what_a_packed_body_has_become_is_counted_while_it_waits(connect: Connect) -> None:
    """Small ones of which each becomes a large one do not fill the memory before they have their slots."""
    first = connect(replica=own_replica(limit=1, depth=100, max_inflight_bytes=100_000))
    first.client.data_received(infer())
    await settle()
    waiting = [RestPair(downstream=first.downstream) for _ in range(6)]
    body = json.dumps({"inputs": [{"name": "I", "datatype": "BYTES", "shape": [1], "data": ["a" * 40_000]}]})
    small = infer(gzip.compress(body.encode()), "own", "Content-Encoding: gzip")
    for pair in waiting:
        pair.client.data_received(small)
        await settle()
    assert [pair.to_client.sent[9:12] for pair in waiting] == [b"", b"", *[b"503"] * 4]


async def test_a_burst_of_one_replica_leaves_triton_to_the_others(connect: Connect) -> None:
    """Data-plane D2: Triton loses answers when too many REST requests are outstanding, its neighbours' too."""
    whole = Outstanding(16)
    names = [Names(b"own", name) for name in (b"own-of-pod-1", b"own-of-pod-2")]
    limits = ReplicaLimits(queue_depth=100)
    replicas = [Replica(one, limits, outstanding=whole) for one in names]
    shared = RestShared(here())
    downstreams = [RestDownstream(shared, replica) for replica in replicas]
    greedy = [connect(downstream=downstreams[0]) for _ in range(50)]
    for one in greedy:
        one.client.data_received(infer())
    await settle()
    pair = greedy[0]
    assert len(pair.tritons) == 7
    assert (replicas[0].admissions.running, replicas[0].admissions.waiting) == (7, 43)
    beside = connect(downstream=downstreams[1])
    beside.client.data_received(infer())
    await settle()
    assert len(pair.tritons) == 8
    answered: list[int] = []
    while busy := [one for one in pair.tritons if one.request is not None]:
        assert len(busy) <= 8
        answered.append(len(busy))
        busy[0].data_received(OK)
        await settle()
    assert len(answered) == 51
    assert all(one.to_client.sent == OK for one in [*greedy, beside])
    assert whole.free == 16


async def test_a_long_answer_or_half_a_request_takes_no_turn_from_others(connect: Connect) -> None:
    """Data-plane D2: what Triton does not compute loses no client's answer."""
    whole = Outstanding(1)
    replicas = [
        Replica(Names(b"own", name), ReplicaLimits(queue_depth=9), outstanding=whole)
        for name in (b"own-1", b"own-2")
    ]
    shared = RestShared(here())
    uploads, reads, quick = (
        connect(downstream=RestDownstream(shared, replicas[index])) for index in (0, 0, 1)
    )
    sent = binary(MIB)
    uploads.client.data_received(sent[:-1])
    await settle()
    reads.client.data_received(infer())
    await settle()
    first = uploads  # its pair has the connections
    first.tritons[1].data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(10))
    quick.client.data_received(infer())
    await settle()
    uploads.client.data_received(sent[-1:])
    await settle()
    assert not first.tritons[0].request_done
    first.tritons[2].data_received(OK)
    await settle()
    assert quick.to_client.sent == OK
    assert first.tritons[0].request_done
    first.tritons[0].data_received(OK)
    first.tritons[1].data_received(bytes(999_990))
    assert whole.free == 1
