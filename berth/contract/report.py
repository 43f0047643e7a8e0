"""What one node says of itself, and its wire form in the node annotation `trtis-report`.

A fact that could not be read is None (*unknown*), never 0. A reader must treat unknown as unusable.
"""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from berth.contract.errors import InvalidValue, UnreadableReport
from berth.contract.fields import Fields
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid

VERSION = 1


class ModelState(str, Enum):
    """Where a model is on its way through a node. Every state but `PENDING` and `LOST` may hold memory."""

    PENDING = "pending"  # the pod is bound here; nothing has been staged
    STAGED = "staged"  # the files are complete in the repository
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # the last load failed; `reason` says why
    LOST = "lost"  # the files are gone from the node while the pod still lives


class Failure(str, Enum):
    """Why a load failed, as far as it says whether another node could do better."""

    CAPACITY = "capacity"  # the GPU's memory did not do: another GPU may
    TRANSIENT = "transient"  # the node or its Triton was in trouble: another node may do
    INVALID_MODEL = "invalid_model"  # the same files would fail anywhere


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU. `foreign_bytes` is what NVML counts as used and no Berth model accounts for."""

    uuid: GpuUuid
    index: int
    product: str
    total_bytes: int | None
    foreign_bytes: int | None
    headroom_bytes: int
    healthy: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "index": self.index,
            "product": self.product,
            "totalBytes": self.total_bytes,
            "foreignBytes": self.foreign_bytes,
            "headroomBytes": self.headroom_bytes,
            "healthy": self.healthy,
            "reason": self.reason,
        }

    @classmethod
    def from_fields(cls, fields: Fields) -> "GpuReport":
        return cls(
            uuid=GpuUuid(fields.string("uuid")),
            index=fields.integer("index"),
            product=fields.string("product", default=""),
            total_bytes=fields.optional_integer("totalBytes"),
            foreign_bytes=fields.optional_integer("foreignBytes"),
            headroom_bytes=fields.integer("headroomBytes"),
            healthy=fields.boolean("healthy"),
            reason=fields.string("reason", default=""),
        )


@dataclass(frozen=True, slots=True)
class TritonReport:
    """The node's Triton server. `backends` are those found in its backend directory, sorted."""

    ready: bool
    version: str
    backends: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"ready": self.ready, "version": self.version, "backends": list(self.backends)}

    @classmethod
    def from_fields(cls, fields: Fields) -> "TritonReport":
        return cls(
            ready=fields.boolean("ready"),
            version=fields.string("version", default=""),
            backends=fields.strings("backends"),
        )


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One pod's model on this node. Listed from the moment the agent sees the bound pod until the
    model's memory is free, which is later than the pod's end."""

    pod_uid: PodUid
    namespace: str
    pod_name: str
    model_id: ModelId | None
    model_name: ModelName | None
    gpu: GpuUuid | None
    requested_bytes: int
    measured_bytes: int | None
    state: ModelState
    reason: str = ""
    # Of a model on several GPUs the others; the bytes are those on each.
    other_gpus: tuple[GpuUuid, ...] = ()
    # Of a failed load, what the failure means for another node.
    failure: Failure | None = None

    @property
    def gpus(self) -> frozenset[GpuUuid]:
        """Every GPU that it is on; empty while that is not known."""
        return frozenset(self.other_gpus if self.gpu is None else (self.gpu, *self.other_gpus))

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "podUid": self.pod_uid,
            "namespace": self.namespace,
            "podName": self.pod_name,
            "modelId": self.model_id,
            "modelName": self.model_name,
            "gpu": self.gpu,
            "requestedBytes": self.requested_bytes,
            "measuredBytes": self.measured_bytes,
            "state": self.state.value,
            "reason": self.reason,
        }
        if self.other_gpus:
            data["otherGpus"] = list(self.other_gpus)
        if self.failure is not None:
            data["failure"] = self.failure.value
        return data

    @classmethod
    def from_fields(cls, fields: Fields) -> "ModelReport":
        model_id, name, gpu = (fields.optional_string(key) for key in ("modelId", "modelName", "gpu"))
        return cls(
            pod_uid=PodUid(fields.string("podUid")),
            namespace=fields.string("namespace", default=""),
            pod_name=fields.string("podName", default=""),
            model_id=None if model_id is None else ModelId(model_id),
            model_name=None if name is None else ModelName(name),
            gpu=None if gpu is None else GpuUuid(gpu),
            requested_bytes=fields.integer("requestedBytes"),
            measured_bytes=fields.optional_integer("measuredBytes"),
            state=fields.choice("state", ModelState),
            reason=fields.string("reason", default=""),
            other_gpus=tuple(GpuUuid(uuid) for uuid in fields.optional_strings("otherGpus")),
            failure=fields.choice("failure", Failure) if "failure" in fields.data else None,
        )


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything a binder needs to know of a node.

    `generation` grows by one with every written report of one agent process; `observed_at` is
    RFC 3339 UTC. Neither counts as content: an agent writes only when something else changed.
    """

    server: str
    capabilities: tuple[str, ...]
    triton: TritonReport
    gpus: tuple[GpuReport, ...]
    models: tuple[ModelReport, ...]
    generation: int = 0
    observed_at: str = ""

    def encode(self) -> str:
        """The wire form, at most `fields.TEXT_LIMIT` characters for any node a person would build."""
        return json.dumps(
            {
                "v": VERSION,
                "server": self.server,
                "capabilities": list(self.capabilities),
                "triton": self.triton.to_json(),
                "gpus": [gpu.to_json() for gpu in self.gpus],
                "models": [model.to_json() for model in self.models],
                "generation": self.generation,
                "observedAt": self.observed_at,
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, text: str) -> "NodeReport":
        """Read the wire form. Raises UnreadableReport naming the field that is wrong."""
        try:
            return cls._from_fields(Fields.parse(text, what="node report"))
        except InvalidValue as error:
            raise UnreadableReport(str(error)) from error

    @classmethod
    def _from_fields(cls, fields: Fields) -> "NodeReport":
        version = fields.integer("v")
        if version != VERSION:
            raise InvalidValue(f"node report has version {version}; this Berth reads {VERSION}")
        gpus = tuple(GpuReport.from_fields(gpu) for gpu in fields.objects("gpus"))
        if len({gpu.uuid for gpu in gpus}) != len(gpus):
            raise InvalidValue("node report.gpus names one GPU twice")
        return cls(
            server=fields.string("server"),
            capabilities=fields.strings("capabilities"),
            triton=TritonReport.from_fields(fields.object("triton")),
            gpus=gpus,
            models=tuple(ModelReport.from_fields(model) for model in fields.objects("models")),
            generation=fields.integer("generation"),
            observed_at=fields.string("observedAt"),
        )

    def model_of(self, pod_uid: PodUid) -> ModelReport | None:
        return next((model for model in self.models if model.pod_uid == pod_uid), None)
