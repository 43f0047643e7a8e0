"""What the agent and the gateway of a node tell each other: JSON, one object a line, over a unix socket.

The agent tells every copy, always all of them, so that nothing hangs on what was said before: what is not
among them has ended. The gateway tells what it has seen. Of both, what is not understood is left aside.

    agent → gateway   {"replicas": [ReplicaSpec…]}                   all there are, at the start and at each change
                      {"drain": POD_UID, "seconds": S}      take nothing new for it; answered by "drained"; it is left
                                                            out of the copies then until it may be used again, as by
                                                            an agent that names it when it comes anew
    gateway → agent   {"drained": POD_UID}                  nothing of it is in Triton any more, or its time is up
                      {"tritonDied": {"suspects": [POD_UID…]}}   Triton went with requests of these in it
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
    """What one copy may take, as its pod asks for; the gateway has ceilings of its own.

    `container_concurrency` 0: no limit. `queue_depth` None: 10 x container_concurrency, or 1000 where that is 0.
    """

    container_concurrency: int = 0
    queue_depth: int | None = None
    request_timeout_seconds: float = 300.0
    max_json_bytes: int = 16 * 1024**2
    max_request_bytes: int = 64 * 1024**2
    # Of all its requests that are here or in Triton.
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

    `withheld`: why it is not to be used whatever Triton says, in the agent's words. `loaded`: whether the agent has seen it
    loaded, which makes nothing ready: Triton alone says that, and is to be asked when this has changed.
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
            copy = cls(
                ticket=ticket,
                namespace=str(data["namespace"]),
                pod=str(data["pod"]),
                pod_uid=str(data["podUid"]),
                model=str(data["model"]),
                server_name=str(data["serverName"]),
                limits=ReplicaLimits.from_json(data["limits"]),
                withheld=data["withheld"],
                loaded=data.get("loaded") is True,  # an older agent does not tell
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue(f"not a copy: {type(error).__name__}: {error}") from error
        if len(ticket) != TICKET_BYTES:
            raise InvalidValue(f"a ticket of {len(ticket)} bytes; it has {TICKET_BYTES}")
        return copy


def ticket_of(secret: bytes, pod_uid: str) -> bytes:
    """A pod's ticket on a node with this secret: nobody can guess it, and an agent that restarts gives the same."""
    import hashlib  # not for those who only read the values: it brings OpenSSL with it
    import hmac

    return hmac.new(secret, f"ticket {pod_uid}".encode(), hashlib.sha256).digest()


def server_name_of(model: str, pod_uid: str) -> ServerName:
    """The name of a pod's model in its node's Triton: no two pods' are the same, and it is never the public one."""
    import hashlib

    return ServerName(f"{model}-{hashlib.sha256(pod_uid.encode()).hexdigest()[:12]}")


def public_name_of(server_name: ServerName) -> ModelName:
    """What people call the model of this name; a name that nobody has made so is as good as any."""
    made = _SERVER_NAME.fullmatch(server_name)
    return ModelName(server_name if made is None else made[1])
