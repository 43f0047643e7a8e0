"""The report of one node, and its wire form in the node annotation `trtis-report`.

A fact that could not be read is None (*unknown*), never 0. A reader must treat unknown as unusable.
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any

import msgspec

from berth.contract import wire
from berth.contract.errors import InvalidValue, ReportTooLarge, UnreadableReport
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.wire import Count

VERSION = 1

# All annotations of a Node share 256 KiB, and Berth's are not the only ones.
BUDGET_BYTES = 64 * 1024
# How much of each reason is written, as far as the budget goes.
_REASON_BYTES = (512, 128, 32)
_CUT = "..."
# What a GPU or a model says only where there is something to say.
_ONLY_IF_SO = frozenset({"broken", "otherGpus", "failure"})
_WHAT = "node report"


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

    CAPACITY = "capacity"  # this node or GPU has no capacity for it: another may have
    TRANSIENT = "transient"  # the node or its Triton had a failure: another node may work
    INVALID_MODEL = "invalid_model"  # the same files would fail anywhere
    QUARANTINED = "quarantined"  # these files made Triton crash: they are not loaded anywhere


class CodeRule(str, Enum):
    """Which models may bring code that Triton runs (python, native libraries)."""

    NONE = "none"
    NAMESPACE = "namespace"  # a node that holds a model with code holds models of that one namespace
    ANY = "any"


# Backends whose models are programs: a pod that requires one of them runs code.
CODE_BACKENDS = frozenset({"dali", "python", "pytorch", "tensorflow"})


class CodeReport(msgspec.Struct, frozen=True):
    """The node's rule for models with code, and the namespace whose code it holds; None: it holds none."""

    rule: CodeRule
    namespace: str | None = None


# The rule of an agent that does not report one.
_ANY_CODE = CodeReport(CodeRule.ANY)


class GpuReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One GPU. `other_use_bytes` is what NVML counts as used and no Berth model accounts for. `broken`: it is
    known to be, which is more than not healthy; the models on it are not to be trusted."""

    uuid: GpuUuid
    index: Count
    product: str = ""
    total_bytes: Count | None = None
    other_use_bytes: Count | None = None
    headroom_bytes: Count
    healthy: bool
    reason: str = ""
    broken: bool = False


class TritonReport(msgspec.Struct, frozen=True):
    """The node's Triton server. `backends` are those found in its backend directory, sorted."""

    ready: bool
    version: str = ""
    backends: tuple[str, ...] = ()


class ModelReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One pod's model on this node. Listed from the moment the agent sees the bound pod until the
    model's memory is free, which is later than the pod's end."""

    pod_uid: PodUid
    namespace: str = ""
    pod_name: str = ""
    model_id: ModelId | None = None
    model_name: ModelName | None = None
    gpu: GpuUuid | None = None
    requested_bytes: Count
    measured_bytes: Count | None = None
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


class _BriefModel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A model without its names and reason, as an array. A GPU is its position in the report, or its uuid where it is
    not among those."""

    pod_uid: PodUid
    gpus: Annotated[tuple[int | str | None, ...], msgspec.Meta(min_length=1)]
    requested_bytes: Count
    measured_bytes: Count | None
    state: ModelState
    failure: Failure | None = None

    @classmethod
    def of(cls, model: ModelReport, gpus: Sequence[GpuUuid]) -> "_BriefModel":
        on = tuple(gpus.index(one) if one in gpus else one for one in (model.gpu, *model.other_gpus))
        return cls(model.pod_uid, on, model.requested_bytes, model.measured_bytes, model.state, model.failure)

    def model(self, gpus: Sequence[GpuUuid], *, what: str) -> ModelReport:
        """Raises InvalidValue."""
        gpu, *others = [_gpu_at(one, gpus, what=what) for one in self.gpus]
        if None in others:
            raise InvalidValue(f"{what} has null among its other GPUs; a position or a uuid is expected")
        return ModelReport(
            pod_uid=self.pod_uid,
            gpu=gpu,
            requested_bytes=self.requested_bytes,
            measured_bytes=self.measured_bytes,
            state=self.state,
            other_gpus=tuple(one for one in others if one is not None),
            failure=self.failure,
        )


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a binder needs to know of a node.

    `generation` grows by one with every written report of one agent process; `observed_at` is
    RFC 3339 UTC. Neither counts as content: an agent writes only when something else changed.
    """

    server: str
    capabilities: tuple[str, ...]
    triton: TritonReport
    code: CodeReport = _ANY_CODE
    gpus: tuple[GpuReport, ...]
    models: tuple[ModelReport, ...]
    generation: int = 0
    observed_at: str = ""

    def encode(self) -> str:
        """The wire form: ASCII, at most BUDGET_BYTES long. Raises ReportTooLarge.

        What does not fit is left out in this order, and `leftOut` says so: of every reason all but its
        beginning; then names and reasons, first those of ready models, whose pods show their names.
        Which pod's model reserves how much of which GPU is never left out.
        """
        for reason_bytes in _REASON_BYTES:
            text = self._encode([_whole(model, reason_bytes) for model in self.models], reason_bytes)
            if len(text) <= BUDGET_BYTES:
                return text
        return self._encode_in_brief(_REASON_BYTES[-1])

    def _encode_in_brief(self, reason_bytes: int) -> str:
        gpus = [gpu.uuid for gpu in self.gpus]
        models: list[Any] = [_row(_BriefModel.of(model, gpus)) for model in self.models]
        left = BUDGET_BYTES - len(self._encode(models, reason_bytes, brief=len(models)))
        if left < 0:
            raise ReportTooLarge(f"the report of {len(models)} models is {-left} bytes over {BUDGET_BYTES}")
        brief = len(models)
        for at in sorted(range(len(models)), key=lambda at: self.models[at].state is ModelState.READY):
            whole = _whole(self.models[at], reason_bytes)
            more = len(_dumps(whole)) - len(_dumps(models[at]))
            if more <= left:
                models[at], left, brief = whole, left - more, brief - 1
        return self._encode(models, reason_bytes, brief=brief)

    def _encode(self, models: list[Any], reason_bytes: int, *, brief: int = 0) -> str:
        left_out = [f"reasons beyond {reason_bytes} bytes"] * (reason_bytes < _REASON_BYTES[0])
        left_out += [f"names and reasons of {brief} models"] * (brief > 0)
        return _dumps(
            {
                "v": VERSION,
                "server": self.server,
                "capabilities": self.capabilities,
                "triton": msgspec.to_builtins(self.triton),
                "code": msgspec.to_builtins(self.code),
                "gpus": [_whole(gpu, reason_bytes) for gpu in self.gpus],
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
            data = wire.parse(text, what=_WHAT)
            wire.check_version(data, VERSION, what=_WHAT)
            return wire.convert(data, _Read, what=_WHAT).report()
        except InvalidValue as error:
            raise UnreadableReport(str(error)) from error

    def model_of(self, pod_uid: PodUid) -> ModelReport | None:
        return next((model for model in self.models if model.pod_uid == pod_uid), None)


class _Read(msgspec.Struct, kw_only=True, rename="camel"):
    """A report as it was sent: models in full are objects, models in brief are arrays."""

    server: str
    capabilities: tuple[str, ...]
    triton: TritonReport
    code: CodeReport = _ANY_CODE
    gpus: tuple[GpuReport, ...]
    models: list[Any]
    generation: Count
    observed_at: str

    def report(self) -> NodeReport:
        """Raises InvalidValue."""
        gpus = [gpu.uuid for gpu in self.gpus]
        if len(set(gpus)) != len(gpus):
            raise InvalidValue(f"{_WHAT}.gpus names one GPU twice")
        models = tuple(_model(one, gpus, what=f"{_WHAT}.models[{at}]") for at, one in enumerate(self.models))
        return NodeReport(**msgspec.structs.asdict(self) | {"models": models})


def _model(data: object, gpus: Sequence[GpuUuid], *, what: str) -> ModelReport:
    if isinstance(data, list):
        return wire.convert(data, _BriefModel, what=what).model(gpus, what=what)
    return wire.convert(data, ModelReport, what=what)


def _gpu_at(place: int | str | None, gpus: Sequence[GpuUuid], *, what: str) -> GpuUuid | None:
    if not isinstance(place, int):
        return None if place is None else GpuUuid(place)
    if not 0 <= place < len(gpus):
        raise InvalidValue(f"{what} is on GPU {place}; the report has {len(gpus)}")
    return gpus[place]


def _whole(value: GpuReport | ModelReport, reason_bytes: int) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(value)
    data["reason"] = _shortened(value.reason, reason_bytes)
    return {key: said for key, said in data.items() if said or key not in _ONLY_IF_SO}


def _row(model: _BriefModel) -> list[Any]:
    row: list[Any] = list(msgspec.to_builtins(model))
    return row if model.failure is not None else row[:-1]


def _shortened(text: str, limit_bytes: int) -> str:
    """As much of the beginning as takes `limit_bytes` in JSON."""
    if len(_dumps(text)) - 2 <= limit_bytes:
        return text
    kept, left = 0, limit_bytes - len(_CUT)
    for character in text:
        left -= len(_dumps(character)) - 2
        if left < 0:
            break
        kept += 1
    return text[:kept] + _CUT


def _dumps(value: object) -> str:
    """ASCII, so that its characters and its bytes are as many."""
    return json.dumps(value, separators=(",", ":"))
