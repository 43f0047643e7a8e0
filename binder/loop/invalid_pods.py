"""Pods that cannot be read as the binder's: only a change by their owner helps, and the reason is reported to it."""

from dataclasses import dataclass

from berth.contract.errors import InvalidPod
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef, pod_ref
from berth.contract.wait_reason import WaitReason
from binder.loop.conditions import ConditionWriter
from binder.loop.metrics import BinderMetrics
from binder.pod.conditions import JsonObject, reported_message


@dataclass(slots=True)
class _Invalid:
    ref: PodRef
    message: str
    reported: str


class InvalidPods:
    """`put` takes note, on a standby too; only `report` writes."""

    def __init__(self, conditions: ConditionWriter, metrics: BinderMetrics) -> None:
        self._conditions, self._metrics = conditions, metrics
        self._pods: dict[PodUid, _Invalid] = {}

    def put(self, pod: JsonObject, error: InvalidPod) -> None:
        ref = pod_ref(pod)
        known = self._pods.get(ref.uid)
        reported = reported_message(pod) if known is None else known.reported
        self._pods[ref.uid] = _Invalid(ref, f"the pod cannot be placed: {error}", reported)

    def remove(self, uid: PodUid) -> None:
        self._pods.pop(uid, None)

    def report(self) -> None:
        """Once for each message."""
        for pod in self._pods.values():
            if pod.message != pod.reported:
                self._metrics.attempted("invalid")
                self._conditions.report(
                    pod.ref, pod.message, first=not pod.reported, reason=WaitReason.POD_REFUSED
                )
                pod.reported = pod.message
