"""What scaler, binder, activator and gateways tell each other."""

import json
from typing import Any

import msgspec
import pytest

from berth.contract.errors import InvalidValue
from berth.contract.scaling import (
    ModelKey,
    ReplicaLoad,
    Scaled,
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)

# Texts to the byte: two versions of Berth speak to each other while one replaces the other.
LOAD = (
    b'[{"namespace":"a","podName":"p","podUid":"u","model":"m","second":7,"averageConcurrentRequests":3.25,'
    b'"requestCount":41.0,"waiting":2,"inTriton":1,"containerConcurrency":4,"lastArrival":1755555554,'
    b'"processUptime":9.5,"timestamp":1755555555}]'
)
REQUEST = (
    b'{"models":[{"model":"a/m","desired":5,"running":2,"starting":1,"priority":-1,'
    b'"template":{"spec":{"x":[1]}},"templateHash":"h"}],"idle":["a/p"]}'
)
ANSWER = b'{"generation":7,"models":[{"model":"a/m","now":1,"ifIdleGo":["a/p"],"never":1,"reason":"why"}]}'
SCALED = '{"desired":5,"requested":3,"ready":2,"capacityLimited":2,"message":"no room","activity":"True","since":1.5}'
# In a field that nobody reads.
DEEP = '{"x":' + "[" * 100_000


def test_the_load_of_a_replica() -> None:
    load = ReplicaLoad(
        namespace="a",
        pod_name="p",
        pod_uid="u",
        model="m",
        second=7,
        average_concurrent_requests=3.25,
        request_count=41.0,
        waiting=2,
        in_triton=1,
        container_concurrency=4,
        last_arrival=1755555554,
        process_uptime=9.5,
        timestamp=1755555555,
    )
    assert msgspec.json.encode([load]) == LOAD
    assert msgspec.json.decode(LOAD, type=list[ReplicaLoad]) == [load]


def test_what_the_binder_is_asked() -> None:
    model = SchedulableModel(
        name="a/m",
        desired=5,
        running=2,
        starting=1,
        priority=-1,
        template={"spec": {"x": [1]}},
        template_hash="h",
    )
    request = SchedulableRequest(models=(model,), idle=("a/p",))
    assert request.encode() == REQUEST
    assert SchedulableRequest.decode(REQUEST) == request
    assert request.models[0].model == ModelKey("a", "m")


def test_what_the_binder_answers() -> None:
    found = Schedulable(name="a/m", now=1, if_idle_go=("a/p",), never=1, reason="why")
    answer = SchedulableAnswer(generation=7, models={ModelKey("a", "m"): found})
    assert answer.encode() == ANSWER
    assert SchedulableAnswer.decode(ANSWER) == answer


def test_what_is_written_on_a_deployment() -> None:
    scaled = Scaled(
        desired=5, requested=3, ready=2, capacity_limited=2, message="no room", activity="True", since=1.5
    )
    assert scaled.to_text() == SCALED
    assert Scaled.from_text(SCALED) == scaled


@pytest.mark.parametrize("text", ["", "a", "/a", "a/", "a/b/c"])
def test_a_model_is_named_by_namespace_and_name(text: str) -> None:
    assert str(ModelKey.parse("a/b")) == "a/b"
    with pytest.raises(InvalidValue):
        ModelKey.parse(text)
    with pytest.raises(InvalidValue, match=r"answer.models\[0\]: .*NAMESPACE/NAME"):
        SchedulableAnswer.decode(ANSWER.replace(b"a/m", text.encode()))


@pytest.mark.parametrize(
    "change",
    [
        *({"priority": number} for number in (2**31, -(2**31) - 1, 1.5)),
        *({name: number} for name in ("desired", "running", "starting") for number in (-1, 2**31, 1.5, None)),
        {"templateHash": 1},
        {"template": []},
    ],
)
def test_a_request_beyond_what_a_cluster_has_is_rejected(change: dict[str, Any]) -> None:
    request = json.loads(REQUEST)
    request["models"][0] |= change
    (field,) = change
    with pytest.raises(InvalidValue, match=rf"^request.models\[0\].{field}: "):
        SchedulableRequest.decode(json.dumps(request).encode())


@pytest.mark.parametrize(
    "text",
    ['{"generation": -1, "models": []}', '{"generation": 1, "models": [{"model": "a/m", "now": 2147483648}]}', DEEP],
)  # fmt: skip
def test_an_answer_beyond_what_a_cluster_has_is_rejected(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^answer"):
        SchedulableAnswer.decode(text.encode())


@pytest.mark.parametrize("text", ["", "[]", '{"desired": "x"}', "{" * 9999, DEEP])
def test_an_annotation_that_somebody_has_changed(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^annotation"):
        Scaled.from_text(text)


def test_a_clock_that_goes_back_makes_no_replica_busy_in_the_future() -> None:
    load = ReplicaLoad(namespace="a", pod_name="p", timestamp=100, last_arrival=160)
    assert load.idle_seconds == 0
    assert msgspec.structs.replace(load, timestamp=190).idle_seconds == 30
