"""Why a pod waits, as the binder has written it into the pod's condition `PodScheduled`. Pure."""

from collections.abc import Mapping
from typing import Any

from berth.contract.wait_reason import WAIT_REASONS, WaitReason


def reported_message(pod: Mapping[str, Any]) -> str:
    """The condition's message; "" where the condition does not say why the pod waits."""
    return str((_condition_of(pod) or {}).get("message") or "")


def reported_reason(pod: Mapping[str, Any]) -> WaitReason | None:
    """The condition's reason; None where the condition does not say why the pod waits."""
    condition = _condition_of(pod)
    return None if condition is None else WaitReason(condition["reason"])


def _condition_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    conditions = pod.get("status", {}).get("conditions") or ()
    ours = (one for one in conditions if one["type"] == "PodScheduled" and one.get("reason") in WAIT_REASONS)
    return next(ours, None)
