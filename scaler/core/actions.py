"""What the scaler decides to do: values, and nothing that makes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from berth.contract.scaling import ModelKey, Scaled
from scaler.core.models_view import ColdStartView
from scaler.decision.load import Stat


class Kind(Enum):
    """How much of a model's scaling is the scaler's, by the class in its annotations."""

    KPA = "kpa"  # all of it
    HPA = "hpa"  # to zero and from zero; between them a HorizontalPodAutoscaler that reads its metrics
    EXTERNAL = "external"  # none: its metrics are there to be read, and its requests are buffered while no replica serves


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteScale:
    """`replicas` of the Deployment; the newest of a model counts. Before it `costs`, by the names of pods: the
    annotation controller.kubernetes.io/pod-deletion-cost, of those alone in which it differs."""

    model: ModelKey
    uid: str
    replicas: int
    costs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """The annotation `…scaled` of the Deployment."""

    model: ModelKey
    uid: str
    scaled: Scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """On the Deployment."""

    model: ModelKey
    uid: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChanged:
    """Whether the model's requests are to go to the activators has changed, so its slices are to be looked at now:
    `Scaler.asked` says what they are to be. None there: it is not scaled any more."""

    model: ModelKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStarted:
    """A buffered request has reached the first replica: how long that took, by phase, for a histogram."""

    model: ModelKey
    cold_start: ColdStartView


Action = WriteScale | WriteStatus | Event | RouteChanged | ColdStarted


class Record(Protocol):
    """Where the deciders' inputs are recorded."""

    def configured(self, config: Mapping[str, str]) -> None: ...
    def model(
        self,
        key: ModelKey,
        now_ns: int,
        *,
        is_new: bool,
        ready: int,
        annotations: Mapping[str, str],
        container_concurrency: int,
    ) -> None: ...
    def stat(self, key: ModelKey, now_ns: int, stat: Stat) -> None: ...
    def scale(self, key: ModelKey, now_ns: int, *, ready: int) -> None: ...
    def gone(self, key: ModelKey) -> None: ...


class NoRecord:
    """Nowhere."""

    def configured(self, config: Mapping[str, str]) -> None:
        pass

    def model(self, key: ModelKey, now_ns: int, **_: object) -> None:
        pass

    def stat(self, key: ModelKey, now_ns: int, stat: Stat) -> None:
        pass

    def scale(self, key: ModelKey, now_ns: int, *, ready: int) -> None:
        pass

    def gone(self, key: ModelKey) -> None:
        pass
