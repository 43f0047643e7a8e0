"""The conditions of a pod or a node, and what the binder has reported by them earlier. Pure."""

from collections.abc import Mapping
from typing import Any

from berth.contract.keys import Keys
from berth.contract.wait_reason import WAIT_REASONS, WaitReason

JsonObject = Mapping[str, Any]


def conditions(thing: JsonObject) -> dict[str, JsonObject]:
    """Those of the object's status, by type."""
    return {one["type"]: one for one in (thing.get("status") or {}).get("conditions") or ()}


def is_true(thing: JsonObject, kind: str) -> bool:
    """Whether the condition of that type holds."""
    return (conditions(thing).get(kind) or {}).get("status") == "True"


def reported_message(pod: JsonObject) -> str:
    """Why the pod waits, as its condition `PodScheduled` says; "" where it does not say so."""
    return str((_wait_condition(pod) or {}).get("message") or "")


def reported_reason(pod: JsonObject) -> WaitReason | None:
    """For which reason the pod waits, as its condition `PodScheduled` says."""
    condition = _wait_condition(pod)
    return None if condition is None else WaitReason(condition["reason"])


def reported_failure(pod: JsonObject, keys: Keys) -> JsonObject:
    """The condition that says why the pod's model is not loaded; empty where there is none."""
    condition = conditions(pod).get(keys.loaded_condition) or {}
    return condition if condition.get("status") == "False" else {}


def _wait_condition(pod: JsonObject) -> JsonObject | None:
    condition = conditions(pod).get("PodScheduled")
    return condition if condition is not None and condition.get("reason") in WAIT_REASONS else None
