"""Container and pod statuses as the API shows them. Pure."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from berth.kube.times import rfc3339

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str
    message: str = ""

    def to_json(self) -> JsonObject:
        return {"waiting": {"reason": self.reason, "message": self.message}}


@dataclass(frozen=True, slots=True)
class Running:
    started: datetime

    def to_json(self) -> JsonObject:
        return {"running": {"startedAt": rfc3339(self.started)}}


@dataclass(frozen=True, slots=True)
class Terminated:
    exit_code: int
    started: datetime
    finished: datetime
    message: str = ""
    out_of_memory: bool = False

    @property
    def reason(self) -> str:
        if self.out_of_memory:
            return "OOMKilled"
        return "Completed" if self.exit_code == 0 else "Error"

    def to_json(self) -> JsonObject:
        return {
            "terminated": {
                "exitCode": self.exit_code,
                "reason": self.reason,
                "message": self.message,
                "startedAt": rfc3339(self.started),
                "finishedAt": rfc3339(self.finished),
            }
        }


@dataclass(slots=True)
class ContainerRecord:
    """What is known of one container. `ended`: it will not be started again."""

    name: str
    image: str
    is_init: bool = False
    is_sidecar: bool = False
    state: Waiting | Running | Terminated = field(default_factory=lambda: Waiting("PodInitializing"))
    last: Terminated | None = None
    restarts: int = 0
    ready: bool = False
    started: bool = False
    ended: bool = False

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "state": self.state.to_json(),
            "lastState": {} if self.last is None else self.last.to_json(),
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
        }

    @property
    def succeeded(self) -> bool:
        return isinstance(self.state, Terminated) and self.state.exit_code == 0


def phase_of(records: list[ContainerRecord]) -> str:
    """The pod's phase from its containers' states."""
    inits = [r for r in records if r.is_init and not r.is_sidecar]
    mains = [r for r in records if not r.is_init]
    if any(r.ended and not r.succeeded for r in inits):
        return "Failed"
    if all(r.ended for r in mains):
        return "Succeeded" if all(r.succeeded for r in mains) else "Failed"
    return "Running" if is_initialized(records) and any(_has_run(r) for r in mains) else "Pending"


def is_initialized(records: list[ContainerRecord]) -> bool:
    return all(r.started if r.is_sidecar else r.succeeded for r in records if r.is_init)


def pod_status(
    records: list[ContainerRecord], *, pod_ip: str, host_ip: str, started: datetime, deleting: bool
) -> JsonObject:
    """The `status` of a pod; conditions other than the kubelet's own are left to strategic merge.

    When each condition became what it is, is for `with_transitions` to say.
    """
    phase = phase_of(records)
    watched = [r for r in records if not r.is_init or r.is_sidecar]
    ready = phase == "Running" and all(r.ready for r in watched)
    initialized = is_initialized(records)
    return {
        "phase": phase,
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "startTime": rfc3339(started),
        "initContainerStatuses": [r.to_json() for r in records if r.is_init],
        "containerStatuses": [r.to_json() for r in records if not r.is_init],
        "conditions": [
            _condition("Initialized", initialized, "ContainersNotInitialized"),
            _condition("ContainersReady", ready, "ContainersNotReady"),
            # A pod that is ending gets no new traffic, whatever its probes say.
            _condition("Ready", ready and not deleting, "ContainersNotReady"),
        ],
    }


def with_transitions(status: JsonObject, before: JsonObject | None, now: datetime) -> JsonObject:
    """`status` with the time of each condition's last change: `now`, or as before if it has not changed."""
    known = {c["type"]: c for c in (before or {}).get("conditions") or []}

    def since(condition: JsonObject) -> str:
        last = known.get(condition["type"])
        same = last is not None and last["status"] == condition["status"]
        return str(last["lastTransitionTime"]) if last is not None and same else rfc3339(now)

    conditions = [{**condition, "lastTransitionTime": since(condition)} for condition in status["conditions"]]
    return {**status, "conditions": conditions}


def _has_run(record: ContainerRecord) -> bool:
    return record.last is not None or not isinstance(record.state, Waiting)


def _condition(kind: str, holds: bool, otherwise: str) -> JsonObject:
    return {"type": kind, "status": "True" if holds else "False", "reason": "" if holds else otherwise}
