"""Mock GPUs from a YAML scenario, which may be rewritten while the agent runs.

    gpus:
      - uuid: GPU-a            # required
        product: NVIDIA A10    # shown, no effect
        total: 24Gi            # required
        other_use: 1Gi         # used by other processes
        utilization: 0.3
        lost: true             # has fallen off the bus
        error: ECC             # broken, for any reason
        xid: 79                # the driver has reported a critical error of that number
        ecc: 3                 # uncorrected memory errors since the last reset
        remap: pending         # or failed: of a bad row of its memory
        mig: true
    models:                    # what a model takes once it is loaded; `requested` is what its pod requested
      resnet: 10Gi
      "*": requested

A CPU stands in for the GPU: Triton loads the models with KIND_CPU and the memory is the scenario's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.gpu_health import Health
from agent.gpus import GpuReading, GpusUnknown, Resident
from berth.contract.errors import InvalidValue
from berth.contract.ids import GpuUuid
from berth.contract.quantity import parse_bytes

REQUESTED = "requested"
_GPU_FIELDS = frozenset(
    {"uuid", "product", "total", "other_use", "utilization", "lost", "error", "mig", "xid", "ecc", "remap"}
)
_REMAPS = ("pending", "failed")


@dataclass(frozen=True, slots=True)
class MockGpu:
    uuid: GpuUuid
    product: str
    total_bytes: int
    other_use_bytes: int
    utilization: float
    lost: bool
    error: str
    mig: bool
    health: Health = Health()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A parsed scenario file."""

    gpus: tuple[MockGpu, ...]
    takes: Mapping[str, int | None]  # None: what was requested

    def taken_by(self, model: Resident) -> int:
        taken = self.takes.get(model.name, self.takes.get("*"))
        return model.requested_bytes if taken is None else taken


class MockGpus:
    """Reads the file again whenever it has changed. `residents()` lists what Triton holds."""

    instance_kind = "KIND_CPU"

    def __init__(self, path: Path, residents: Callable[[], Iterable[Resident]]) -> None:
        """Raises InvalidValue naming the file and the field."""
        self._path, self._residents = path, residents
        self._text = ""
        self._scenario = self._load()

    async def read(self) -> tuple[GpuReading, ...]:
        try:
            self._scenario = self._load()
        except InvalidValue as error:
            raise GpusUnknown(str(error)) from error
        return tuple(self._reading(index, gpu) for index, gpu in enumerate(self._scenario.gpus))

    def _load(self) -> Scenario:
        try:
            text = self._path.read_text()
        except OSError as error:
            raise InvalidValue(f"{self._path}: {error.strerror}") from error
        if text == self._text:
            return self._scenario
        try:
            scenario = parse_scenario(text)
        except InvalidValue as error:
            raise InvalidValue(f"{self._path}: {error}") from error
        self._text = text
        return scenario

    def _reading(self, index: int, gpu: MockGpu) -> GpuReading:
        if gpu.lost:
            return GpuReading(
                gpu.uuid,
                index,
                gpu.product,
                None,
                None,
                None,
                healthy=False,
                reason="GPU is lost",
                in_cuda=False,
                broken=True,
            )
        taken = sum(self._scenario.taken_by(model) for model in self._residents() if model.gpu == gpu.uuid)
        fault = gpu.error or gpu.health.fault
        reason = "MIGEnabled" if gpu.mig else fault
        return GpuReading(
            gpu.uuid,
            index,
            gpu.product,
            total_bytes=gpu.total_bytes,
            used_bytes=min(gpu.total_bytes, gpu.other_use_bytes + taken),
            utilization=gpu.utilization,
            healthy=not reason,
            reason=reason,
            in_cuda=not gpu.mig,
            broken=bool(fault),
        )


def parse_scenario(text: str) -> Scenario:
    """Read a scenario. Raises InvalidValue naming the field that is wrong, in one line."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidValue(" ".join(str(error).split())) from error
    top = _mapping(data, "scenario", frozenset({"gpus", "models"}))
    gpus = top.get("gpus")
    if not isinstance(gpus, list):
        raise InvalidValue("gpus is not a list")
    parsed = tuple(_gpu(value, f"gpus[{index}]") for index, value in enumerate(gpus))
    if len({gpu.uuid for gpu in parsed}) != len(parsed):
        raise InvalidValue("gpus names one uuid twice")
    models = _mapping(top.get("models") or {}, "models", None)
    return Scenario(parsed, {str(name): _takes(value, f"models.{name}") for name, value in models.items()})


def _gpu(value: Any, path: str) -> MockGpu:
    data = _mapping(value, path, _GPU_FIELDS)
    for required in ("uuid", "total"):
        if required not in data:
            raise InvalidValue(f"{path}.{required} is missing")
    utilization = data.get("utilization", 0.0)
    if not isinstance(utilization, (int, float)) or not 0 <= utilization <= 1:
        raise InvalidValue(f"{path}.utilization is {utilization!r}; 0 to 1 is expected")
    return MockGpu(
        uuid=GpuUuid(str(data["uuid"])),
        product=str(data.get("product", "mock GPU")),
        total_bytes=_bytes(data["total"], f"{path}.total"),
        other_use_bytes=_bytes(data.get("other_use", 0), f"{path}.other_use"),
        utilization=float(utilization),
        lost=_flag(data, "lost", path),
        error=str(data.get("error", "")),
        mig=_flag(data, "mig", path),
        health=_health(data, path),
    )


def _health(data: dict[str, Any], path: str) -> Health:
    remap = data.get("remap")
    if remap is not None and remap not in _REMAPS:
        raise InvalidValue(f"{path}.remap is {remap!r}; {' or '.join(_REMAPS)} is expected")
    return Health(
        xid=_count(data, "xid", path),
        ecc_errors=_count(data, "ecc", path),
        remap_pending=remap == "pending",
        remap_failed=remap == "failed",
    )


def _mapping(value: Any, path: str, known: frozenset[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(f"{path} is not a mapping")
    unknown = sorted(str(key) for key in value if known is not None and key not in known)
    if unknown and known is not None:
        raise InvalidValue(f"{path}.{unknown[0]} is not a field; known are {', '.join(sorted(known))}")
    return value


def _bytes(value: Any, path: str) -> int:
    try:
        return parse_bytes(value)
    except InvalidValue as error:
        raise InvalidValue(f"{path}: {error}") from error


def _count(data: dict[str, Any], key: str, path: str) -> int | None:
    value = data.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidValue(f"{path}.{key} is {value!r}; a whole number is expected")
    return value


def _takes(value: Any, path: str) -> int | None:
    return None if value == REQUESTED else _bytes(value, path)


def _flag(data: dict[str, Any], key: str, path: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise InvalidValue(f"{path}.{key} is {value!r}; true or false is expected")
    return value
