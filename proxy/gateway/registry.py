"""The replicas of a node as the agent has listed them last: what is new, what has changed, what has ended. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from proxy.policy.refusal import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The most that a replica gets of what its pod requests."""

    request_timeout_seconds: float
    max_json_bytes: int
    max_request_bytes: int
    max_inflight_bytes: int

    def capped(self, limits: ReplicaLimits) -> ReplicaLimits:
        """What a pod requests, as far as it gets it. One request is never allowed more than all together."""
        inflight = min(limits.max_inflight_bytes, self.max_inflight_bytes)
        request = min(limits.max_request_bytes, self.max_request_bytes, inflight)
        return replace(
            limits,
            request_timeout_seconds=min(limits.request_timeout_seconds, self.request_timeout_seconds),
            max_json_bytes=min(limits.max_json_bytes, self.max_json_bytes, request),
            max_request_bytes=request,
            max_inflight_bytes=inflight,
        )

    def flags(self, capped: ReplicaLimits) -> Flags:
        """What sets these limits, for a refusal to name: above a ceiling a pod's own flag changes nothing.

        A pod does not say what its requests may take together; a request that exceeds that is refused by the ceiling too.
        """
        own = Flags()
        inflight = "--most-inflight-bytes of the node's gateway"
        request, json = own.request, own.json
        if capped.max_request_bytes >= capped.max_inflight_bytes:
            request = inflight
        elif capped.max_request_bytes >= self.max_request_bytes:
            request = _no_more(own.request, "--most-request-bytes")
        if capped.max_json_bytes >= capped.max_request_bytes:
            json = request
        elif capped.max_json_bytes >= self.max_json_bytes:
            json = _no_more(own.json, "--most-json-bytes")
        return Flags(json=json, request=request, inflight=inflight)


def _no_more(own: str, ceiling: str) -> str:
    return f"{own}, bounded by {ceiling} of the node's gateway"


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be done so that there are the replicas that were listed."""

    new: tuple[ReplicaSpec, ...] = ()
    changed: tuple[ReplicaSpec, ...] = ()
    ended: tuple[ReplicaSpec, ...] = ()


def read_replicas(data: object) -> tuple[ReplicaSpec, ...]:
    """All replicas of a line. Raises InvalidValue where one of them is invalid, or two exclude each other."""
    if not isinstance(data, list):
        raise InvalidValue(f"replicas: {type(data).__name__} instead of a list")
    replicas = tuple(_read_replica(entry) for entry in data)
    for what, values in (
        ("pod uid", [replica.pod_uid for replica in replicas]),
        ("ticket", [replica.ticket for replica in replicas]),
        ("name on the server", [replica.server_name for replica in replicas]),
    ):
        if len(set(values)) < len(values):
            raise InvalidValue(f"two replicas with the same {what}")
    return replicas


def _read_replica(entry: object) -> ReplicaSpec:
    if not isinstance(entry, Mapping):
        raise InvalidValue(f"a replica: {type(entry).__name__} instead of an object")
    replica = ReplicaSpec.from_json(dict[str, Any](entry))
    limits = replica.limits
    if not (replica.pod_uid and replica.model and replica.server_name):
        raise InvalidValue("a replica needs a pod uid, a model and a name on the server")
    if len(replica.server_name.encode()) < len(replica.model.encode()):
        raise InvalidValue(f"{replica.pod_uid}: its name on the server is shorter than the model's")
    if limits.container_concurrency < 0 or (limits.queue_depth or 0) < 0:
        raise InvalidValue(f"limits of {replica.pod_uid}: containerConcurrency and queueDepth are at least 0")
    if not 0 < limits.request_timeout_seconds < float("inf"):
        raise InvalidValue(f"limits of {replica.pod_uid}: requestTimeoutSeconds is above 0")
    if min(limits.max_json_bytes, limits.max_request_bytes, limits.max_inflight_bytes) <= 0:
        raise InvalidValue(f"limits of {replica.pod_uid}: maxJsonBytes and the like are above 0")
    if not isinstance(replica.withheld, str | None):
        raise InvalidValue(f"withheld of {replica.pod_uid}: text or null is expected")
    return replica


class Registry:
    """By pod uid. A pod whose ticket, model or name on the server is another is another replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaSpec] = {}
        # Whether there has been a list since the start.
        self.is_listed = False

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[ReplicaSpec]:
        return iter(self._replicas.values())

    def get(self, pod_uid: str) -> ReplicaSpec | None:
        return self._replicas.get(pod_uid)

    def apply(self, replicas: Iterable[ReplicaSpec]) -> Changes:
        """These are all that there are, from now on."""
        before, self._replicas = self._replicas, {replica.pod_uid: replica for replica in replicas}
        self.is_listed = True
        new, changed = [], []
        for uid, replica in self._replicas.items():
            known = before.get(uid)
            if known is None or _identity(known) != _identity(replica):
                new.append(replica)
            elif known != replica:
                changed.append(replica)
        lasting = self._replicas.keys() - {replica.pod_uid for replica in new}
        ended = tuple(replica for uid, replica in before.items() if uid not in lasting)
        return Changes(tuple(new), tuple(changed), ended)


def _identity(replica: ReplicaSpec) -> tuple[bytes, str, str, str, str]:
    return replica.ticket, replica.model, replica.server_name, replica.namespace, replica.pod
