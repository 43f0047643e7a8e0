"""Messages between the agent and the gateway of a node: JSON, one object a line, over a unix socket.

The agent always sends all replicas, so that a message does not depend on earlier ones: a replica that is not in the
list has ended. The gateway reports what it has seen. Fields that are not known are ignored.

    agent → gateway   {"replicas": [ReplicaSpec…]}                   at the start and at each change
                      {"drain": POD_UID, "seconds": S}      accept no new requests for it; answered by "drained";
                                                            the replica is then left out until it may be used again,
                                                            or until a restarted agent lists it
    gateway → agent   {"drained": POD_UID}                  none of its requests is in Triton, or its time is up
                      {"tritonDied": {"suspects": [POD_UID…]}}   Triton died while it had requests of these pods
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName, ServerName

TICKET_BYTES: Final = 32
_SERVER_NAME: Final = re.compile(r"(.+)-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """The limits of one replica, as its pod requests them; the gateway has ceilings of its own.

    `container_concurrency` 0: no limit. `queue_depth` None: 10 x container_concurrency, or 1000 where that is 0.
    """

    container_concurrency: int = 0
    queue_depth: int | None = None
    request_timeout_seconds: float = 300.0
    max_json_bytes: int = 16 * 1024**2
    max_request_bytes: int = 64 * 1024**2
    # Of all its requests that are in the gateway or in Triton.
    max_inflight_bytes: int = 256 * 1024**2

    def to_json(self) -> dict[str, Any]:
        return {
            "containerConcurrency": self.container_concurrency,
            "queueDepth": self.queue_depth,
            "requestTimeoutSeconds": self.request_timeout_seconds,
            "maxJsonBytes": self.max_json_bytes,
            "maxRequestBytes": self.max_request_bytes,
            "maxInflightBytes": self.max_inflight_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReplicaLimits":
        """Raises InvalidValue."""
        try:
            return cls(
                container_concurrency=int(data["containerConcurrency"]),
                queue_depth=None if data["queueDepth"] is None else int(data["queueDepth"]),
                request_timeout_seconds=float(data["requestTimeoutSeconds"]),
                max_json_bytes=int(data["maxJsonBytes"]),
                max_request_bytes=int(data["maxRequestBytes"]),
                max_inflight_bytes=int(data["maxInflightBytes"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidValue(f"not limits: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """One pod's model on one node. `model`: as its clients call it; `server_name`: as the node's Triton does.

    `withheld`: why it must not be used, whatever Triton reports. `loaded`: whether the agent has seen it loaded; a change
    makes the gateway ask Triton, which alone decides whether the replica is ready.
    """

    ticket: bytes = field(repr=False)
    namespace: str
    pod: str
    pod_uid: str
    model: str
    server_name: str
    limits: ReplicaLimits = ReplicaLimits()
    withheld: str | None = None
    loaded: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "ticket": self.ticket.hex(),
            "namespace": self.namespace,
            "pod": self.pod,
            "podUid": self.pod_uid,
            "model": self.model,
            "serverName": self.server_name,
            "limits": self.limits.to_json(),
            "withheld": self.withheld,
            "loaded": self.loaded,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReplicaSpec":
        """Raises InvalidValue."""
        try:
            ticket = bytes.fromhex(data["ticket"])
            replica = cls(
                ticket=ticket,
                namespace=str(data["namespace"]),
                pod=str(data["pod"]),
                pod_uid=str(data["podUid"]),
                model=str(data["model"]),
                server_name=str(data["serverName"]),
                limits=ReplicaLimits.from_json(data["limits"]),
                withheld=data["withheld"],
                loaded=data.get("loaded") is True,  # absent from older agents
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue(f"not a replica: {type(error).__name__}: {error}") from error
        if len(ticket) != TICKET_BYTES:
            raise InvalidValue(f"a ticket of {len(ticket)} bytes; it has {TICKET_BYTES}")
        return replica


def ticket_of(secret: bytes, pod_uid: str) -> bytes:
    """A pod's ticket on a node with this secret: it cannot be guessed, and is the same after a restart of the agent."""
    import hashlib  # imported here: OpenSSL is loaded with it, which readers of the values do not need
    import hmac

    return hmac.new(secret, f"ticket {pod_uid}".encode(), hashlib.sha256).digest()


def server_name_of(model: str, pod_uid: str) -> ServerName:
    """The name of a pod's model in its node's Triton: no two pods' are the same, and it is never the public one."""
    import hashlib

    return ServerName(f"{model}-{hashlib.sha256(pod_uid.encode()).hexdigest()[:12]}")


def public_name_of(server_name: ServerName) -> ModelName:
    """The public name of the model of this name; a name of another form is its own."""
    made = _SERVER_NAME.fullmatch(server_name)
    return ModelName(server_name if made is None else made[1])
