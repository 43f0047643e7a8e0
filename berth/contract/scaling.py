"""Messages between scaler, activator, binder and gateways about models and their replicas, and the status that the scaler
writes on a Deployment.

    gateway → scaler      GET /stat                    [ReplicaLoad…], every replica of the node
    scaler → binder       POST /schedulable              SchedulableRequest → SchedulableAnswer
    scaler → Deployment   annotation `…scaled`         Scaled

A model is a Deployment of model pods; times are seconds since 1970 where nothing else is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from berth.contract import wire
from berth.contract.errors import InvalidValue

BINDER_AUDIENCE: Final = "berth-binder"


class ModelKey(NamedTuple):
    """A Deployment of model pods."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "ModelKey":
        """Raises InvalidValue."""
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise InvalidValue(f"{text!r} is not NAMESPACE/NAME of a Deployment")
        return cls(namespace, name)


# Gateway to scaler.


# More than any replica has; a sum over all replicas of a cluster is still exact.
_MOST: Final = 10**9
Load = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The last complete second of one replica. `second` grows by one each second: a reader that reads twice within a
    second sees it twice, one that is late misses some.

    `request_count`: arrivals a second, rejected ones included. `waiting` and `in_triton`: requests, now. Times are the
    node's own. `last_arrival`: 0 where none has come yet.
    """

    namespace: str
    pod_name: str
    pod_uid: str = ""
    model: str = ""
    second: int = 0
    average_concurrent_requests: Load = 0.0
    request_count: Load = 0.0
    waiting: Requests = 0
    in_triton: Requests = 0
    # 0: no limit.
    container_concurrency: int = 0
    last_arrival: int = 0
    process_uptime: float = 0.0
    timestamp: int = 0

    @property
    def idle_seconds(self) -> int:
        """Since its last arrival. A node's clock may be wrong, and with it both times: their difference is right."""
        return max(0, self.timestamp - self.last_arrival)


# Scaler to binder.


# Models of one request to the binder.
MOST_ASKED: Final = 4096


_Replicas = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _OfModel(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`name`: the model's, as NAMESPACE/NAME."""

    name: str = msgspec.field(name="model")

    def __post_init__(self) -> None:
        ModelKey.parse(self.name)

    @property
    def model(self) -> ModelKey:
        return ModelKey.parse(self.name)


class SchedulableModel(_OfModel, frozen=True, kw_only=True, rename="camel"):
    """Of one model: how many replicas it desires, has ready (`running`) and has bound but not ready (`starting`).
    `template`: the Deployment's pod template; equal ones have an equal `template_hash`."""

    desired: _Replicas
    running: _Replicas
    starting: _Replicas
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    template: Mapping[str, Any]
    template_hash: str


class SchedulableRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`idle`: pods ("namespace/name") that may go for a model of their priority or above, the least recently used
    first."""

    models: tuple[SchedulableModel, ...]
    idle: tuple[str, ...] = ()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> "SchedulableRequest":
        """Raises InvalidValue."""
        return wire.decode(body, cls, what="request")


class Schedulable(_OfModel, frozen=True, kw_only=True, rename="camel"):
    """Of one model's missing replicas: as many fit `now`; one more if these idle pods go; so many fit on no node
    even if all else went. `reason`: why the others do not, as `berth why` explains it."""

    now: _Replicas
    if_idle_go: tuple[str, ...] = ()
    never: _Replicas = 0
    reason: str = ""


class _Answer(msgspec.Struct, frozen=True):
    generation: Annotated[int, msgspec.Meta(ge=0)]
    models: tuple[Schedulable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulableAnswer:
    """From one snapshot of the cluster. `generation` grows with every change of it that the binder has seen."""

    generation: int
    models: Mapping[ModelKey, Schedulable] = field(default_factory=dict)

    def encode(self) -> bytes:
        return msgspec.json.encode(_Answer(self.generation, tuple(self.models.values())))

    @classmethod
    def decode(cls, body: bytes) -> "SchedulableAnswer":
        """Raises InvalidValue."""
        answer = wire.decode(body, _Answer, what="answer")
        return cls(generation=answer.generation, models={one.model: one for one in answer.models})


# What users read on a Deployment.


class Scaled(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The annotation `…scaled`, as JSON: what was decided last and what became of it. A scaler that starts goes on
    from `activity`, `since` and `initialised`, and from `last_valid` where the annotations of today do not go."""

    version: int = 1
    # By the decider and its bounds; None: nothing is known yet.
    desired: int | None = None
    requested: int | None = None
    ready: int = 0
    # Of `desired`, the replicas that cannot be scheduled.
    capacity_limited: int = 0
    message: str = ""
    in_panic: bool = False
    # Knative's Active: Unknown (activating), True, False.
    activity: str = "Unknown"
    since: float = 0.0
    initialised: bool = False
    # Pods that scheduling gates hold back.
    gated: int = 0
    # The annotations that hold, while those of the Deployment are refused.
    last_valid: dict[str, str] = {}

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> "Scaled":
        """Raises InvalidValue."""
        return wire.decode(text, cls, what="annotation")
