"""What scaler and activators tell each other of models that scale to zero: `berth.v1.Scaler/Control`, as values.

    scaler → activator    Assignment    for which model to open ports, whose requests to buffer, where to forward them
    activator → scaler    Report        what it buffers of a model, and which ports are open

`berth.contract.activation_codec` reads and writes the messages (protos/berth/v1/scaler.proto).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from berth.contract.scaling import ModelKey

SCALER_AUDIENCE: Final = "berth-scaler"
# Who writes the EndpointSlices that lead to the activators.
SLICE_MANAGER: Final = "berth-scaler"
# Ports of the activators: one for a model and protocol.
ACTIVATOR_PORTS: Final = range(20000, 30000)
# A scaler that leads sends each activator a message at least this often, an empty one if nothing has changed.
HEARTBEAT_SECONDS: Final = 1.0


class RouteMode(Enum):
    """Who takes the requests to a model's Service, as the mode of a Knative ServerlessService says it."""

    PROXY = "proxy"  # the activators: no replica serves, or the last one is about to go
    SERVE = "serve"  # the replicas: an activator forwards what still comes and asks clients to connect anew


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLimits:
    """Of one model on one activator."""

    requests: int = 10_000
    bytes: int = 64 * 1024**2
    seconds: float = 300.0
    cold_starts_per_second: float = 1.0
    cold_start_burst: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    """A replica, listed as soon as it is bound. `slots`: how many requests it takes at once from all activators together;
    port 0: it does not serve that protocol. `nearly_ready`: its model is loaded, only its proxy is not ready yet."""

    uid: str
    name: str
    address: str
    rest_port: int
    grpc_port: int
    slots: int
    ready: bool
    nearly_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an activator is to do for one model; a later `version` replaces an earlier one.

    `public_name`: as the model's clients call it. Ports 0: none. `tls`: bytes are forwarded as they come.
    `clients`: namespaces whose pods may call, "*" all. `unavailable`: why no replica will ever come, for its clients.
    `waiting_for`: what the first replica waits for, named to requests that time out before it comes; "": a node, or its
    load. `activators`: how many activators share the slots of the replicas.
    """

    version: int
    model: ModelKey
    public_name: str
    mode: RouteMode
    rest_port: int
    grpc_port: int
    tls: bool = False
    endpoints: tuple[ReplicaEndpoint, ...] = ()
    limits: BufferLimits = BufferLimits()
    clients: frozenset[str] = frozenset()
    unavailable: str = ""
    waiting_for: str = ""
    activators: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one model on one activator, each second while it buffers, and at once when it begins to.

    `buffered`: requests, now; `average_buffered`, `arrived`, `forwarded`: of the time since the last report. A replica
    counts again what was forwarded to it. `cold_start`: a request waits, and no replica is ready. `served_ago`: seconds
    since a first replica took buffered requests; 0: that has not happened since the last report. Ports: as they are
    open, 0: not.
    """

    version: int
    model: ModelKey
    buffered: int
    average_buffered: float
    arrived: float
    forwarded: float
    buffered_bytes: int
    oldest_seconds: float
    cold_start: bool
    rest_port: int
    grpc_port: int
    served_ago: float = 0.0
