"""The copies of a node as the agent has told them last: what is new, what has changed, what has ended. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits, ReplicaSpec
from proxy.policy.refusal import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The most that a copy gets of what its pod asks for."""

    request_timeout_seconds: float
    max_json_bytes: int
    max_request_bytes: int
    max_inflight_bytes: int

    def clip(self, limits: ReplicaLimits) -> ReplicaLimits:
        """What a pod asks for, as far as it gets it. A request is never more than all requests may be."""
        inflight = min(limits.max_inflight_bytes, self.max_inflight_bytes)
        request = min(limits.max_request_bytes, self.max_request_bytes, inflight)
        return replace(
            limits,
            request_timeout_seconds=min(limits.request_timeout_seconds, self.request_timeout_seconds),
            max_json_bytes=min(limits.max_json_bytes, self.max_json_bytes, request),
            max_request_bytes=request,
            max_inflight_bytes=inflight,
        )

    def flags(self, clipped: ReplicaLimits) -> Flags:
        """What sets these limits: to ask for more than a ceiling gets nobody anything.

        Nor does a pod say what its requests may take together; what is then too small for all is so for one.
        """
        own = Flags()
        inflight = "--most-inflight-bytes of the node's gateway"
        request, json = own.request, own.json
        if clipped.max_request_bytes >= clipped.max_inflight_bytes:
            request = inflight
        elif clipped.max_request_bytes >= self.max_request_bytes:
            request = _no_more(own.request, "--most-request-bytes")
        if clipped.max_json_bytes >= clipped.max_request_bytes:
            json = request
        elif clipped.max_json_bytes >= self.max_json_bytes:
            json = _no_more(own.json, "--most-json-bytes")
        return Flags(json=json, request=request, inflight=inflight)


def _no_more(own: str, ceiling: str) -> str:
    return f"{own}, bounded by {ceiling} of the node's gateway"


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be done so that there are the copies that were told."""

    new: tuple[ReplicaSpec, ...] = ()
    changed: tuple[ReplicaSpec, ...] = ()
    ended: tuple[ReplicaSpec, ...] = ()


def read_copies(data: object) -> tuple[ReplicaSpec, ...]:
    """All copies of a line. Raises InvalidValue where any of them cannot be, or two of them at once."""
    if not isinstance(data, list):
        raise InvalidValue(f"copies: {type(data).__name__} instead of a list")
    copies = tuple(_read_copy(entry) for entry in data)
    for what, values in (
        ("pod uid", [copy.pod_uid for copy in copies]),
        ("ticket", [copy.ticket for copy in copies]),
        ("name on the server", [copy.server_name for copy in copies]),
    ):
        if len(set(values)) < len(values):
            raise InvalidValue(f"two copies with the same {what}")
    return copies


def _read_copy(entry: object) -> ReplicaSpec:
    if not isinstance(entry, Mapping):
        raise InvalidValue(f"a copy: {type(entry).__name__} instead of an object")
    copy = ReplicaSpec.from_json(dict[str, Any](entry))
    limits = copy.limits
    if not (copy.pod_uid and copy.model and copy.server_name):
        raise InvalidValue("a copy needs a pod uid, a model and a name on the server")
    if len(copy.server_name.encode()) < len(copy.model.encode()):
        raise InvalidValue(f"{copy.pod_uid}: its name on the server is shorter than the model's")
    if limits.container_concurrency < 0 or (limits.queue_depth or 0) < 0:
        raise InvalidValue(f"limits of {copy.pod_uid}: containerConcurrency and queueDepth are at least 0")
    if not 0 < limits.request_timeout_seconds < float("inf"):
        raise InvalidValue(f"limits of {copy.pod_uid}: requestTimeoutSeconds is above 0")
    if min(limits.max_json_bytes, limits.max_request_bytes, limits.max_inflight_bytes) <= 0:
        raise InvalidValue(f"limits of {copy.pod_uid}: maxJsonBytes and the like are above 0")
    if not isinstance(copy.withheld, str | None):
        raise InvalidValue(f"withheld of {copy.pod_uid}: text or null is expected")
    return copy


class Registry:
    """By pod uid. A pod whose ticket, model or name on the server is another is another copy."""

    def __init__(self) -> None:
        self._copies: dict[str, ReplicaSpec] = {}
        # Whether anybody has told, since the start, which there are.
        self.is_told = False

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[ReplicaSpec]:
        return iter(self._copies.values())

    def get(self, pod_uid: str) -> ReplicaSpec | None:
        return self._copies.get(pod_uid)

    def apply(self, copies: Iterable[ReplicaSpec]) -> Changes:
        """These are all that there are, from now on."""
        before, self._copies = self._copies, {copy.pod_uid: copy for copy in copies}
        self.is_told = True
        new, changed = [], []
        for uid, copy in self._copies.items():
            known = before.get(uid)
            if known is None or _identity(known) != _identity(copy):
                new.append(copy)
            elif known != copy:
                changed.append(copy)
        lasting = self._copies.keys() - {copy.pod_uid for copy in new}
        ended = tuple(copy for uid, copy in before.items() if uid not in lasting)
        return Changes(tuple(new), tuple(changed), ended)


def _identity(copy: ReplicaSpec) -> tuple[bytes, str, str, str, str]:
    return copy.ticket, copy.model, copy.server_name, copy.namespace, copy.pod
