"""How the outcome of a load becomes known: the model's state, the log, the metrics and the pod's events."""

import logging
from typing import Protocol

from agent.metrics import AgentMetrics
from agent.models import Model, Models
from berth.contract.pod import PodRef
from berth.contract.report import Failure, ModelState
from berth.kube.events import EventType
from berth.runtime.logs import fields

log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where events of a pod go."""

    def record(self, pod: PodRef, type: EventType, reason: str, message: str) -> None: ...


class Outcomes:
    def __init__(self, models: Models, metrics: AgentMetrics, events: EventSink) -> None:
        self.models, self.metrics, self.events = models, metrics, events

    def loaded(self, model: Model, seconds: float) -> None:
        self.metrics.loaded(seconds)
        log.info("model loaded", extra=fields(model=model.name, pod=model.ref, seconds=round(seconds, 2)))
        self.events.record(model.ref, "Normal", "ModelLoaded", f"Triton serves {model.name}")

    def failed(self, model: Model, reason: str, failure: Failure) -> None:
        log.warning(
            "load failed", extra=fields(model=model.name, pod=model.ref, kind=failure.name, reason=reason)
        )
        self.models.set(model, ModelState.FAILED, reason, failure=failure)
        self.metrics.load_failed(failure.value)
        event = "ModelQuarantined" if failure is Failure.QUARANTINED else "ModelLoadFailed"
        self.events.record(model.ref, "Warning", event, reason)
