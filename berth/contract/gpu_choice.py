"""The binder's GPU choice, as it stands in the pod annotation `trtis-gpu`."""

import json
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import InvalidValue
from berth.contract.fields import Fields
from berth.contract.ids import GpuUuid

VERSION = 1


@dataclass(frozen=True, slots=True)
class GpuRef:
    """One GPU of a node."""

    uuid: GpuUuid
    index: int


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """The GPU of the pod's node, and the bytes that were reserved on it; for a pod that asked for
    several GPUs also `others`, with as many bytes on each."""

    uuid: GpuUuid
    index: int
    bytes: int
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
        data: dict[str, Any] = {"v": VERSION, "uuid": self.uuid, "index": self.index, "bytes": self.bytes}
        if self.others:
            data["others"] = [{"uuid": gpu.uuid, "index": gpu.index} for gpu in self.others]
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "GpuChoice":
        """Read the wire form. Raises InvalidValue naming the field that is wrong."""
        fields = Fields.parse(text, what="GPU choice")
        if fields.integer("v") != VERSION:
            raise InvalidValue(f"GPU choice has version {fields.integer('v')}; this Berth reads {VERSION}")
        others = fields.objects("others") if "others" in fields.data else ()
        choice = cls(
            uuid=GpuUuid(fields.string("uuid")),
            index=fields.integer("index"),
            bytes=fields.integer("bytes"),
            others=tuple(GpuRef(GpuUuid(o.string("uuid")), o.integer("index")) for o in others),
        )
        if len({gpu.uuid for gpu in choice.gpus}) != len(choice.gpus):
            raise InvalidValue("GPU choice names one GPU twice")
        return choice
