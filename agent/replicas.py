"""The replicas of this node's models as its gateway is to serve them. No I/O but `LimitsFile`."""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent.gpus import GpuReading, GpusUnknown, gpus_failure
from agent.models import Model, Models
from berth.contract import wire
from berth.contract.errors import InvalidValue
from berth.contract.gateway import ReplicaLimits, ReplicaSpec, ticket_of
from berth.contract.ids import PodUid
from berth.contract.report import ModelState
from berth.runtime.logs import fields
from berth.v1 import node_agent_pb2 as pb

log = logging.getLogger(__name__)

LIMITS_FILE = "limits.json"
# So much of a reason is sent to clients; Triton's own may be a program's whole output.
_REASON_CHARACTERS = 512
_MOST_CHARACTERS = 1024 * 1024
_ENDED = "the model's pod has ended"

Readings = Callable[[], tuple[GpuReading, ...]]  # raises GpusUnknown


def gpu_failure(model: Model, readings: Readings) -> str:
    """What is wrong with the GPU of a model that serves; empty while the GPUs are unknown.
    Triton may go on serving it there; it must get no requests."""
    if model.state is not ModelState.READY or model.gpu is None:
        return ""
    with suppress(GpusUnknown):
        return gpus_failure(model.gpu.uuids, readings())
    return ""


class Replicas:
    """The gateway's view of each pod's model, and the limits that each pod has requested."""

    def __init__(
        self, models: Models, secret: bytes, readings: Readings, limits: Mapping[PodUid, ReplicaLimits]
    ) -> None:
        self._models, self._secret, self._readings = models, secret, readings
        self._limits = dict(limits)

    def gpu_failure(self, model: Model) -> str:
        """What is broken of the GPU of a model that serves."""
        return gpu_failure(model, self._readings)

    def ticket(self, uid: PodUid) -> bytes:
        return ticket_of(self._secret, uid)

    def set_limits(self, uid: PodUid, limits: ReplicaLimits) -> bool:
        """What a pod requests from now on. Returns whether it has changed."""
        if self._limits.get(uid) == limits:
            return False
        self._limits[uid] = limits
        return True

    def limits(self) -> Mapping[PodUid, ReplicaLimits]:
        """Of the pods that are here still."""
        here = {model.ref.uid for model in self._models}
        self._limits = {uid: limits for uid, limits in self._limits.items() if uid in here}
        return self._limits

    def current(self, excluded: Collection[PodUid] = ()) -> tuple[ReplicaSpec, ...]:
        """All replicas: a ticket ends with its pod, once Triton holds nothing of it any more."""
        return tuple(
            self._copy(model)
            for model in self._models
            if model.name is not None
            and model.ref.uid not in excluded
            and (model.pod_lives or model.resident)
        )

    def _copy(self, model: Model) -> ReplicaSpec:
        assert model.name is not None
        assert model.server_name is not None
        return ReplicaSpec(
            ticket=self.ticket(model.ref.uid),
            namespace=model.ref.namespace,
            pod=model.ref.name,
            pod_uid=model.ref.uid,
            model=model.name,
            server_name=model.server_name,
            limits=self._limits.get(model.ref.uid, ReplicaLimits()),
            withheld=self._withheld(model),
            loaded=model.state is ModelState.READY,
        )

    def _withheld(self, model: Model) -> str | None:
        if not model.pod_lives:
            return _ENDED
        if failure := self.gpu_failure(model):
            return failure[:_REASON_CHARACTERS]
        if model.state is ModelState.FAILED:
            return (model.reason or "the agent calls the model failed")[:_REASON_CHARACTERS]
        return None


def read_limits(asked: pb.ReplicaLimits) -> ReplicaLimits:
    """What a pod requests in WatchModel. Raises InvalidValue."""
    usual, timeout = ReplicaLimits(), asked.request_timeout_seconds
    if not (math.isfinite(timeout) and timeout >= 0):
        raise InvalidValue(f"limits.request_timeout_seconds is {timeout}; a number of seconds is expected")
    return ReplicaLimits(
        container_concurrency=asked.container_concurrency,
        queue_depth=asked.queue_depth if asked.HasField("queue_depth") else None,
        request_timeout_seconds=timeout or usual.request_timeout_seconds,
        max_json_bytes=asked.max_json_bytes or usual.max_json_bytes,
        max_request_bytes=asked.max_request_bytes or usual.max_request_bytes,
    )


class LimitsFile:
    """What each pod has requested, kept over a restart of the agent: until the pods' proxies have reconnected,
    which takes seconds, the gateway would otherwise apply no limit.

        DIR/limits.json

    Everything here blocks: call it from a thread, one call at a time.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LIMITS_FILE

    def read(self) -> dict[PodUid, ReplicaLimits]:
        """Never raises: the pods' proxies send all of it again."""
        try:
            data = wire.parse(self._path.read_bytes().decode(), what="limits", limit=_MOST_CHARACTERS)
            kept = wire.convert(data, dict[str, dict[str, Any]], what="limits")
            return {PodUid(uid): ReplicaLimits.from_json(one) for uid, one in kept.items()}
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError, InvalidValue) as error:
            log.warning("the pods' limits cannot be read", extra=fields(error=error))
            return {}

    def write(self, limits: Iterable[tuple[PodUid, ReplicaLimits]]) -> None:
        """Raises OSError."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({uid: one.to_json() for uid, one in limits}))
        fresh.replace(self._path)
