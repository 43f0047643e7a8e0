"""From what gateways tell of copies to one stat a model and second."""

import json
import random
from typing import Any

import msgspec
import pytest

from berth.contract.scaling import ModelKey, ReplicaLoad
from scaler.core.seconds import Seconds, read_loads
from scaler.decision.load import Stat

A, B = ModelKey("one", "a"), ModelKey("two", "b")


def load(
    uid: str, second: int = 1, *, concurrency: float = 0.0, requests: float = 0.0, **more: Any
) -> ReplicaLoad:
    return ReplicaLoad(
        namespace="one",
        pod_name=f"pod-{uid}",
        pod_uid=uid,
        second=second,
        average_concurrent_requests=concurrency,
        request_count=requests,
        **more,
    )


def uids(count: int) -> list[str]:
    return [f"{number}" for number in range(count)]


def test_the_load_of_a_model_is_that_of_its_ready_copies() -> None:
    seconds = Seconds()
    assert seconds.take(
        [load("x", concurrency=1.5, requests=3), load("y", concurrency=0.5, requests=1)], {"x", "y"}
    )
    assert seconds.take([load("z", concurrency=7.0, requests=9)], {"z"})
    # z is there and not ready: its load is not the model's.
    assert seconds.close({A: ["x", "y"]}) == {A: Stat(concurrency=2.0, requests=4.0)}


def test_a_second_counts_once_however_often_it_is_told() -> None:
    seconds = Seconds()
    assert seconds.take([load("x", 5, requests=2)], {"x"})
    assert seconds.close({A: ["x"]}) == {A: Stat(requests=2.0)}
    assert not seconds.take([load("x", 5, requests=2)], {"x"})
    assert seconds.close({A: ["x"]}) == {}
    assert seconds.take([load("x", 8, requests=4)], {"x"})  # 6 and 7 were missed
    assert seconds.close({A: ["x"]}) == {A: Stat(requests=4.0)}


def test_the_clock_of_a_node_that_starts_anew_may_have_gone_back() -> None:
    seconds = Seconds()
    seconds.take([load("x", 2**62, requests=2)], {"x"})
    seconds.close({A: ["x"]})
    assert seconds.take([load("x", 3, requests=1)], {"x"})


@pytest.mark.parametrize(
    ("copies", "told", "known"),
    [(1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True), (20, 8, False), (20, 9, True)],
)
def test_too_few_copies_are_no_stat_and_enough_stand_for_all(copies: int, told: int, known: bool) -> None:
    """Knative's sample of 20 copies is 8.94…, which is 9."""
    seconds, of = Seconds(), uids(copies)
    seconds.take([load(uid, concurrency=2.0, requests=4.0) for uid in of[:told]], set(of))
    stat = seconds.close({A: of}).get(A)
    assert stat == (Stat(concurrency=2.0 * copies, requests=4.0 * copies) if known else None)


def test_a_model_without_a_ready_copy_has_no_stat() -> None:
    seconds = Seconds()
    seconds.take([load("x", requests=5)], {"x"})
    assert seconds.close({A: []}) == {}


def test_a_gateway_is_believed_of_its_own_node_alone() -> None:
    seconds = Seconds()
    assert not seconds.take([load("theirs", concurrency=1e6, requests=1e6)], {"mine"})
    assert seconds.close({B: ["theirs"]}) == {}
    assert not seconds.latest


def test_what_has_ended_is_forgotten() -> None:
    seconds = Seconds()
    seconds.take([load("x"), load("y")], {"x", "y"})
    seconds.keep({"y"})
    assert seconds.latest.keys() == {"y"}
    assert seconds.close({A: ["x"]}) == {}


def row(**more: Any) -> dict[str, Any]:
    return {"namespace": "n", "podName": "p", "podUid": "u", "second": 1, **more}


BAD_ROWS: list[Any] = [
    None,
    7,
    "text",
    [],
    {},
    row(podUid=7),
    row(second="1"),
    row(averageConcurrentRequests="much"),
    row(averageConcurrentRequests=-1),
    row(averageConcurrentRequests=1e300),
    row(requestCount=-0.5),
    row(requestCount=None),
    row(waiting=-1),
    row(waiting=1.5),
    row(inTriton=2**62),
    row(podUid=["u"]),
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=repr)
def test_a_row_that_says_nothing_is_left_aside_and_the_others_count(bad: Any) -> None:
    loads, left_aside = read_loads(json.dumps([row(podUid="before"), bad, row(podUid="after")]).encode())
    assert [one.pod_uid for one in loads] == ["before", "after"]
    assert left_aside == 1


def test_what_a_later_gateway_tells_more_is_nobodys_trouble() -> None:
    loads, left_aside = read_loads(json.dumps([row(later={"x": [1]})]).encode())
    assert (len(loads), left_aside) == (1, 0)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"7", b"[", b"\xff", b"null", b"[" * 10_000, b'{"a":' * 10_000, b"[1e999", b'"'],
    ids=lambda b: repr(b[:9]),
)
def test_what_is_no_list_is_told_as_one_error(body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        read_loads(body)


def test_garbage_never_ends_a_scraper() -> None:
    rng = random.Random(3)
    good = json.dumps([row(podUid=f"{n}", requestCount=1.5, waiting=2) for n in range(5)]).encode()
    for _ in range(3000):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            loads, _ = read_loads(bytes(body))
        except (msgspec.DecodeError, UnicodeError):
            continue
        seconds = Seconds()
        seconds.take(loads, {one.pod_uid for one in loads})
        for stat in seconds.close({A: list(seconds.latest)}).values():
            assert 0 <= stat.requests <= 1e12
