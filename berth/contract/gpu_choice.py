"""The binder's GPU choice, as it stands in the pod annotation `trtis-gpu`."""

import json

import msgspec

from berth.contract import wire
from berth.contract.errors import InvalidValue
from berth.contract.ids import GpuUuid
from berth.contract.wire import Count

VERSION = 1
_WHAT = "GPU choice"


class GpuRef(msgspec.Struct, frozen=True):
    """One GPU of a node."""

    uuid: GpuUuid
    index: Count


class GpuChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The GPU of the pod's node, and the bytes that were reserved on it; for a pod that requested
    several GPUs also `others`, with as many bytes on each."""

    uuid: GpuUuid
    index: Count
    bytes: Count
    others: tuple[GpuRef, ...] = ()

    @property
    def gpus(self) -> tuple[GpuRef, ...]:
        """All of them."""
        return (GpuRef(self.uuid, self.index), *self.others)

    @property
    def uuids(self) -> tuple[GpuUuid, ...]:
        return tuple(gpu.uuid for gpu in self.gpus)

    def encode(self) -> str:
        """The wire form: `{"v":1,"uuid":"GPU-…","index":0,"bytes":419430400}`, and where there are
        several `"others":[{"uuid":"GPU-…","index":1}]`."""
        return json.dumps({"v": VERSION, **msgspec.to_builtins(self)}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "GpuChoice":
        """Read the wire form. Raises InvalidValue naming the field that is wrong."""
        data = wire.parse(text, what=_WHAT)
        wire.check_version(data, VERSION, what=_WHAT)
        choice = wire.convert(data, cls, what=_WHAT)
        if len(set(choice.uuids)) != len(choice.gpus):
            raise InvalidValue("GPU choice names one GPU twice")
        return choice
