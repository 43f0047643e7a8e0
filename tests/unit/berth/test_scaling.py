"""What scaler, binder, activator and gateways tell each other."""

import json

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


def test_a_copys_load_is_read_from_the_gateways_json() -> None:
    text = (
        '[{"namespace": "a", "podName": "p", "podUid": "u", "model": "m", "second": 7, '
        '"averageConcurrentRequests": 3.25, "requestCount": 41.0, "waiting": 2, "inTriton": 1, '
        '"containerConcurrency": 4, "lastArrival": 1755555554, "processUptime": 9.5, "timestamp": 1755555555}]'
    )
    (load,) = msgspec.json.decode(text, type=list[ReplicaLoad])
    assert (load.pod_uid, load.second, load.in_triton, load.request_count) == ("u", 7, 1, 41.0)
    assert json.loads(msgspec.json.encode([load])) == json.loads(text)


@pytest.mark.parametrize("text", ["", "a", "/a", "a/", "a/b/c"])
def test_a_model_is_named_by_namespace_and_name(text: str) -> None:
    assert str(ModelKey.parse("a/b")) == "a/b"
    with pytest.raises(InvalidValue):
        ModelKey.parse(text)


def test_what_is_asked_of_the_binder() -> None:
    model = SchedulableModel(
        model=ModelKey("a", "m"), wanted=5, running=2, starting=1, priority=0, template={}, template_hash="h"
    )
    asked = {"model": "a/m", "wanted": 5, "running": 2, "starting": 1, "priority": 0}
    assert SchedulableRequest(models=(model,), idle=("a/p",)).to_json() == {
        "models": [{**asked, "template": {}, "templateHash": "h"}],
        "idle": ["a/p"],
    }
    answer = Schedulable(
        model=ModelKey("a", "m"), now=1, if_idle_go=("a/p",), never=1, reason="why"
    ).to_json()
    assert answer == {"model": "a/m", "now": 1, "ifIdleGo": ["a/p"], "never": 1, "reason": "why"}


# In a field that nobody reads.
DEEP = '{"x":' + "[" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        *({"priority": number} for number in (2**31, -(2**31) - 1, 1.5)),
        *({name: number} for name in ("wanted", "running", "starting") for number in (-1, 2**31)),
    ],
)
def test_a_question_beyond_what_a_cluster_has_is_none(change: dict[str, float]) -> None:
    asked = {"model": "a/m", "wanted": 5, "running": 2, "starting": 1, "priority": 0, "template": {}}
    asked["templateHash"] = "h"
    assert SchedulableRequest.from_json(json.dumps({"models": [asked]}).encode()).models[0].wanted == 5
    with pytest.raises(InvalidValue):
        SchedulableRequest.from_json(json.dumps({"models": [asked | change]}).encode())


@pytest.mark.parametrize(
    "text",
    ['{"generation": -1, "models": []}', '{"generation": 1, "models": [{"model": "a/m", "now": 2147483648}]}', DEEP],
)  # fmt: skip
def test_an_answer_beyond_what_a_cluster_has_is_none(text: str) -> None:
    with pytest.raises(InvalidValue):
        SchedulableAnswer.from_json(text.encode())


def test_a_clock_that_goes_back_makes_no_copy_busy_in_the_future() -> None:
    load = ReplicaLoad(namespace="a", pod_name="p", timestamp=100, last_arrival=160)
    assert load.idle_seconds == 0
    assert msgspec.structs.replace(load, timestamp=190).idle_seconds == 30


def test_what_is_written_on_a_deployment_is_read_again() -> None:
    scaled = Scaled(
        desired=5, requested=3, ready=2, capacity_limited=2, message="no room", activity="True", since=1.5
    )
    assert Scaled.from_text(scaled.to_text()) == scaled
    for text in ("", "[]", '{"desired": "x"}', "{" * 9999, DEEP):
        with pytest.raises(InvalidValue):
            Scaled.from_text(text)
