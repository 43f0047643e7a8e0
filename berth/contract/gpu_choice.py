"""The binder's GPU choice, as it stands in the pod annotation `trtis-gpu`."""

import json
from dataclasses import dataclass

from berth.contract.errors import InvalidValue
from berth.contract.fields import Fields
from berth.contract.ids import GpuUuid

VERSION = 1


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """One GPU of the pod's node and the bytes that were reserved on it."""

    uuid: GpuUuid
    index: int
    bytes: int

    def encode(self) -> str:
        """The wire form: `{"v":1,"uuid":"GPU-…","index":0,"bytes":419430400}`."""
        return json.dumps(
            {"v": VERSION, "uuid": self.uuid, "index": self.index, "bytes": self.bytes}, separators=(",", ":")
        )

    @classmethod
    def decode(cls, text: str) -> "GpuChoice":
        """Read the wire form. Raises InvalidValue naming the field that is wrong."""
        fields = Fields.parse(text, what="GPU choice")
        if fields.integer("v") != VERSION:
            raise InvalidValue(f"GPU choice has version {fields.integer('v')}; this Berth reads {VERSION}")
        return cls(
            uuid=GpuUuid(fields.string("uuid")), index=fields.integer("index"), bytes=fields.integer("bytes")
        )
