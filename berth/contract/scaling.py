"""Messages between scaler, activator, binder and gateways about models and their replicas, and the status that the scaler
writes on a Deployment.

    gateway → scaler      GET /stat                    [ReplicaLoad…], every replica of the node
    scaler → binder       POST /schedulable              SchedulableRequest → SchedulableAnswer
    scaler ↔ activator    berth.v1.Scaler/Attend       Assignment, Report (protos/berth/v1/scaler.proto)
    scaler → Deployment   annotation `…scaled`         Scaled

A model is a Deployment of model pods; times are seconds since 1970 where nothing else is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from berth.contract import wire
from berth.contract.errors import InvalidValue

SCALER_AUDIENCE: Final = "berth-scaler"
BINDER_AUDIENCE: Final = "berth-binder"
# Who writes its EndpointSlices.
SLICE_MANAGER: Final = "berth-scaler"
# Ports of the activators: one for a model and protocol.
ACTIVATOR_PORTS: Final = range(20000, 30000)
# A leading scaler sends each activator a message at least this often, if need be an empty one.
BEAT_SECONDS: Final = 1.0


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


# Scaler and activator.


class HoldState(Enum):
    """What an activator does with a model's requests."""

    HOLD = "hold"  # no copy is ready: keep them, wake it
    FORWARD = (
        "forward"  # its Service leads to the copies again: serve what still comes, ask clients to reconnect
    )
    OFF = "off"  # the port closes


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """Of one model on one activator."""

    requests: int = 10_000
    bytes: int = 64 * 1024**2
    seconds: float = 300.0
    wakes_per_second: float = 1.0
    wake_burst: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEndpoint:
    """A copy, told from its binding on. `slots`: how many requests it takes at once from all activators together;
    port 0: it does not serve that protocol. `soon`: its model is loaded, and its door all that is missing."""

    uid: str
    name: str
    address: str
    rest_port: int
    grpc_port: int
    slots: int
    ready: bool
    soon: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an activator is to do for one model; a later `version` replaces an earlier one.

    `public_name`: as the model's clients call it. Ports 0: none. `tls`: bytes are passed on as they come.
    `clients`: namespaces whose pods may call, "*" all. `hopeless`: why no copy will ever come, for its clients.
    `waits_for`: what the first copy waits for, for those whose time is over before it comes; "": its place, or its load.
    `share`: how many activators hold for this model: each has that part of the slots.
    """

    version: int
    model: ModelKey
    public_name: str
    state: HoldState
    rest_port: int
    grpc_port: int
    tls: bool = False
    endpoints: tuple[PodEndpoint, ...] = ()
    limits: HoldLimits = HoldLimits()
    clients: frozenset[str] = frozenset()
    hopeless: str = ""
    waits_for: str = ""
    share: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one model on one activator, each second while it holds, and at once when it begins to.

    `held`: now; `average_held`, `arrived`, `forwarded`: of the time since the last report. What has been forwarded
    is counted again by the copy that takes it. `wake`: a request waits that a copy must come for. `served_ago`: seconds
    since a first copy has taken of those that waited; 0: that has not happened since the last report. Ports: as
    they are open, 0: not.
    """

    version: int
    model: ModelKey
    held: int
    average_held: float
    arrived: float
    forwarded: float
    held_bytes: int
    oldest_seconds: float
    wake: bool
    rest_port: int
    grpc_port: int
    served_ago: float = 0.0


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
