"""What one node says of itself, and its wire form in the node annotation `trtis-report`.

A fact that could not be read is None (*unknown*), never 0. A reader must treat unknown as unusable.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from berth.contract.errors import InvalidValue, ReportTooLarge, UnreadableReport
from berth.contract.fields import Fields
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid

VERSION = 1

# All annotations of a Node share 256 KiB, and Berth's are not the only ones.
BUDGET_BYTES = 64 * 1024
# How much of each reason is told, as far as the budget goes.
_REASON_BYTES = (512, 128, 32)
_CUT = "..."
# A model in brief is an array of these; the last one only where there is a failure.
_BRIEF = ("podUid", "gpus", "requestedBytes", "measuredBytes", "state", "failure")


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

    CAPACITY = "capacity"  # this place has no room for it, of memory or beside what is there: another may
    TRANSIENT = "transient"  # the node or its Triton was in trouble: another node may do
    INVALID_MODEL = "invalid_model"  # the same files would fail anywhere
    QUARANTINED = "quarantined"  # these files took Triton down: they are not to go anywhere


class CodeRule(str, Enum):
    """Which models may bring code that Triton runs (python, native libraries)."""

    NONE = "none"
    NAMESPACE = "namespace"  # a node that holds a model with code holds models of that one namespace
    ANY = "any"


# Backends whose models are programs: a pod that requires one of them brings code.
CODE_BACKENDS = frozenset({"dali", "python", "pytorch", "tensorflow"})


@dataclass(frozen=True, slots=True)
class CodeReport:
    """The node's rule for models with code, and the namespace whose code it holds; None: it holds none."""

    rule: CodeRule = CodeRule.ANY
    namespace: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule.value, "namespace": self.namespace}

    @classmethod
    def from_fields(cls, fields: Fields) -> "CodeReport":
        return cls(rule=fields.choice("rule", CodeRule), namespace=fields.optional_string("namespace"))


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU. `other_use_bytes` is what NVML counts as used and no Berth model accounts for. `broken`: it is
    known to be, which is more than not healthy; the models on it are not to be trusted."""

    uuid: GpuUuid
    index: int
    product: str
    total_bytes: int | None
    other_use_bytes: int | None
    headroom_bytes: int
    healthy: bool
    reason: str = ""
    broken: bool = False

    def to_json(self, *, reason_bytes: int) -> dict[str, Any]:
        data: dict[str, Any] = {
            "uuid": self.uuid,
            "index": self.index,
            "product": self.product,
            "totalBytes": self.total_bytes,
            "otherUseBytes": self.other_use_bytes,
            "headroomBytes": self.headroom_bytes,
            "healthy": self.healthy,
            "reason": _shortened(self.reason, reason_bytes),
        }
        if self.broken:
            data["broken"] = True
        return data

    @classmethod
    def from_fields(cls, fields: Fields) -> "GpuReport":
        return cls(
            uuid=GpuUuid(fields.string("uuid")),
            index=fields.integer("index"),
            product=fields.string("product", default=""),
            total_bytes=fields.optional_integer("totalBytes"),
            other_use_bytes=fields.optional_integer("otherUseBytes"),
            headroom_bytes=fields.integer("headroomBytes"),
            healthy=fields.boolean("healthy"),
            reason=fields.string("reason", default=""),
            broken="broken" in fields.data and fields.boolean("broken"),
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

    def to_json(self, *, reason_bytes: int) -> dict[str, Any]:
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
            "reason": _shortened(self.reason, reason_bytes),
        }
        if self.other_gpus:
            data["otherGpus"] = list(self.other_gpus)
        if self.failure is not None:
            data["failure"] = self.failure.value
        return data

    def in_brief(self, gpus: Sequence[GpuUuid]) -> list[Any]:
        """Who holds how much of which GPU, and whether it serves. A GPU is its position in `gpus`, or its
        uuid where it is not among them."""
        places = [gpus.index(one) if one in gpus else one for one in (self.gpu, *self.other_gpus)]
        row = [self.pod_uid, places, self.requested_bytes, self.measured_bytes, self.state.value]
        return row if self.failure is None else [*row, self.failure.value]

    @classmethod
    def from_brief(cls, row: list[Any], gpus: Sequence[GpuUuid], *, path: str) -> "ModelReport":
        if not len(_BRIEF) - 1 <= len(row) <= len(_BRIEF):
            raise InvalidValue(f"{path} has {len(row)} entries; {', '.join(_BRIEF)} are expected")
        data = dict(zip(_BRIEF, row, strict=False))
        places = data.pop("gpus")
        if not isinstance(places, list) or not places:
            raise InvalidValue(f"{path} has {places!r} for its GPUs; a list is expected")
        first, *others = [_gpu_at(place, gpus, path=path) for place in places]
        return cls.from_fields(Fields.of({**data, "gpu": first, "otherGpus": others}, path=path))

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
    # What an agent that says nothing of it holds to.
    code: CodeReport = CodeReport()

    def encode(self) -> str:
        """The wire form: ASCII, at most BUDGET_BYTES long. Raises ReportTooLarge.

        What does not fit is left out in this order, and `leftOut` says so: of every reason all but its
        beginning; then names and reasons, first those of models that serve, for their pods tell their
        names. Which pod's model holds how much of which GPU is never left out.
        """
        for reason_bytes in _REASON_BYTES:
            text = self._encode([m.to_json(reason_bytes=reason_bytes) for m in self.models], reason_bytes)
            if len(text) <= BUDGET_BYTES:
                return text
        return self._encode_in_brief(_REASON_BYTES[-1])

    def _encode_in_brief(self, reason_bytes: int) -> str:
        gpus = [gpu.uuid for gpu in self.gpus]
        models: list[Any] = [model.in_brief(gpus) for model in self.models]
        room = BUDGET_BYTES - len(self._encode(models, reason_bytes, brief=len(models)))
        if room < 0:
            raise ReportTooLarge(f"the report of {len(models)} models is {-room} bytes over {BUDGET_BYTES}")
        brief = len(models)
        for at in sorted(range(len(models)), key=lambda at: self.models[at].state is ModelState.READY):
            whole = self.models[at].to_json(reason_bytes=reason_bytes)
            more = len(_dumps(whole)) - len(_dumps(models[at]))
            if more <= room:
                models[at], room, brief = whole, room - more, brief - 1
        return self._encode(models, reason_bytes, brief=brief)

    def _encode(self, models: list[Any], reason_bytes: int, *, brief: int = 0) -> str:
        left_out = [f"reasons beyond {reason_bytes} bytes"] * (reason_bytes < _REASON_BYTES[0])
        left_out += [f"names and reasons of {brief} models"] * (brief > 0)
        return _dumps(
            {
                "v": VERSION,
                "server": self.server,
                "capabilities": list(self.capabilities),
                "triton": self.triton.to_json(),
                "code": self.code.to_json(),
                "gpus": [gpu.to_json(reason_bytes=reason_bytes) for gpu in self.gpus],
                "models": models,
                **({"leftOut": left_out} if left_out else {}),
                "generation": self.generation,
                "observedAt": self.observed_at,
            }
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
            models=tuple(_models(fields, [gpu.uuid for gpu in gpus])),
            generation=fields.integer("generation"),
            observed_at=fields.string("observedAt"),
            code=CodeReport.from_fields(fields.object("code")) if "code" in fields.data else CodeReport(),
        )

    def model_of(self, pod_uid: PodUid) -> ModelReport | None:
        return next((model for model in self.models if model.pod_uid == pod_uid), None)


def _models(fields: Fields, gpus: Sequence[GpuUuid]) -> Iterator[ModelReport]:
    """Whole ones are objects, those in brief are arrays."""
    for path, value in fields.items("models"):
        if isinstance(value, list):
            yield ModelReport.from_brief(value, gpus, path=path)
        else:
            yield ModelReport.from_fields(Fields.of(value, path=path))


def _gpu_at(place: object, gpus: Sequence[GpuUuid], *, path: str) -> GpuUuid | None:
    if isinstance(place, int) and not isinstance(place, bool):
        if not 0 <= place < len(gpus):
            raise InvalidValue(f"{path} is on GPU {place}; the report has {len(gpus)}")
        return gpus[place]
    if place is None or isinstance(place, str):
        return None if place is None else GpuUuid(place)
    raise InvalidValue(f"{path} is on GPU {place!r}; a position or a uuid is expected")


def _shortened(text: str, limit_bytes: int) -> str:
    """As much of the beginning as takes `limit_bytes` in JSON."""
    if len(_dumps(text)) - 2 <= limit_bytes:
        return text
    kept, room = 0, limit_bytes - len(_CUT)
    for character in text:
        room -= len(_dumps(character)) - 2
        if room < 0:
            break
        kept += 1
    return text[:kept] + _CUT


def _dumps(value: object) -> str:
    """ASCII, so that characters are bytes to whoever counts."""
    return json.dumps(value, separators=(",", ":"))
