"""Pods that cannot be read: their owners are told why, once for each message."""

from typing import Any

from prometheus_client import CollectorRegistry

from berth.contract.errors import InvalidPod
from berth.contract.wait_reason import WaitReason
from binder.loop.invalid_pods import InvalidPods
from binder.loop.metrics import BinderMetrics
from tests.fakes.objects import pod

MESSAGE = "the pod cannot be placed: no such memory"


class Conditions:
    def __init__(self) -> None:
        self.reported: list[tuple[str, str, bool, WaitReason]] = []

    def report(self, ref: Any, message: str, *, first: bool, reason: WaitReason) -> None:
        self.reported.append((ref.name, message, first, reason))


class Invalid:
    def __init__(self) -> None:
        self.conditions, self.registry = Conditions(), CollectorRegistry()
        self.pods = InvalidPods(self.conditions, BinderMetrics(self.registry))  # type: ignore[arg-type]

    def put(self, uid: str, why: str = "no such memory", *, reported: str = "") -> None:
        one = pod(uid)
        condition = {"type": "PodScheduled", "reason": "PodRefused", "message": reported}
        one["status"]["conditions"] = [condition] if reported else []
        self.pods.put(one, InvalidPod(why))


def test_each_message_is_reported_once() -> None:
    invalid = Invalid()
    invalid.put("p1")
    for _ in range(2):
        invalid.pods.report()
        invalid.put("p1")
    assert invalid.conditions.reported == [("p1", MESSAGE, True, WaitReason.POD_REFUSED)]
    invalid.put("p1", "no such GPU")
    invalid.pods.report()
    assert invalid.conditions.reported[1:] == [
        ("p1", "the pod cannot be placed: no such GPU", False, WaitReason.POD_REFUSED)
    ]
    tries = invalid.registry.get_sample_value("berth_binder_attempts_total", {"result": "invalid"})
    assert tries == 2


def test_what_an_earlier_leader_has_reported_is_not_repeated() -> None:
    invalid = Invalid()
    invalid.put("p1", reported=MESSAGE)
    invalid.put("p2", reported="the pod cannot be placed: another reason")
    invalid.pods.report()
    assert invalid.conditions.reported == [("p2", MESSAGE, False, WaitReason.POD_REFUSED)]


def test_a_pod_that_was_corrected_or_is_gone_is_not_reported() -> None:
    invalid = Invalid()
    invalid.put("p1")
    invalid.pods.remove(pod("p1")["metadata"]["uid"])
    invalid.pods.remove(pod("p2")["metadata"]["uid"])
    invalid.pods.report()
    assert invalid.conditions.reported == []
