"""Which files an ONNX graph takes its weights from. ONNX Runtime opens them wherever on the node their names
lead, or takes them for addresses in its own memory, so each must name a file of the model.

Only the places where the format (onnx/onnx.proto) can name a file are walked, and only in a graph that says a
word of it; what may be weights is passed over. Blocks.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from agent.admission.errors import InvalidModel
from agent.admission.files import ModelFiles, require_inside

# No reader of protobuf takes a longer message.
_MOST_BYTES = 2**31 - 1
# Graphs with weights in other files have some 100 000; each costs some microseconds.
_MOST_FIELDS = 1_000_000
_WINDOW_BYTES = 4 * 1024**2
_TEXT_BYTES = 4096
_LOCATION, _COMPILED = b"location", b"EPContext"

_Kind = Literal["model", "training", "function", "graph", "node", "attribute", "sparse", "tensor"]
# Fields by number that lead to a tensor.
_PARTS: Mapping[_Kind, Mapping[int, _Kind]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_OPERATOR, _EXTERNAL_DATA = 4, 13


def check_graph(directory: Path, path: str, files: ModelFiles) -> None:
    """Of one file of a model. Raises InvalidModel or OSError."""
    if files.sizes[path] > _MOST_BYTES:
        raise InvalidModel(
            f"{path}: an ONNX graph has at most {_MOST_BYTES} bytes; its weights may be beside it"
        )
    descriptor = os.open(directory / path, os.O_RDONLY)
    try:
        for location in _Graph(descriptor, files.sizes[path], path).locations():
            _check_location(location, path, files)
    finally:
        os.close(descriptor)


def _check_location(location: bytes, path: str, files: ModelFiles) -> None:
    place = f"{path}: the location of external data"
    name = location.decode("utf-8", "replace").removeprefix("./")
    require_inside(name, where=place)
    beside = "/".join([*path.split("/")[:-1], name])
    if beside not in files.sizes:
        raise InvalidModel(f"{place}: there is no file {beside[:200]!r}")


class _Graph:
    """One open file. Each message is read field by field, at most `_MOST_FIELDS` of them in all."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        self._descriptor, self._size, self._path = descriptor, size, path
        self._fields = 0

    def locations(self) -> Iterator[bytes]:
        """Every name of a file of weights. Raises InvalidModel."""
        if not self._speaks_of_files(0, self._size):
            return
        waiting: list[tuple[_Kind, int, int]] = [("model", 0, self._size)]
        while waiting:
            kind, start, end = waiting.pop()
            for number, begin, stop in self._walk(start, end):
                part = _PARTS[kind].get(number)
                if part is not None and (stop - begin > _WINDOW_BYTES or self._speaks_of_files(begin, stop)):
                    waiting.append((part, begin, stop))
                elif kind == "node" and number == _OPERATOR and self._read(begin, stop) == _COMPILED:
                    raise InvalidModel(
                        f"{self._path}: a node EPContext is another compiler's program; send the graph that it was"
                        " made of"
                    )
                elif kind == "tensor" and number == _EXTERNAL_DATA:
                    yield from self._named(begin, stop)

    def _named(self, start: int, end: int) -> Iterator[bytes]:
        """The values of a StringStringEntryProto whose key is the word for it."""
        entry = [(number, self._read(begin, stop)) for number, begin, stop in self._walk(start, end)]
        if (1, _LOCATION) in entry:
            yield from (text for number, text in entry if number == 2)

    def _walk(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Number, begin and end of each field that is bytes."""
        at = start
        while at < end:
            self._fields += 1
            if self._fields > _MOST_FIELDS:
                raise InvalidModel(f"{self._path}: a graph with more than {_MOST_FIELDS} parts to look into")
            head = os.pread(self._descriptor, min(20, end - at), at)
            key, used = self._varint(head, 0)
            number, wire = (key & 0xFFFFFFFF) >> 3, key & 7
            match wire:  # of protobuf: a number, 8 bytes, a length and so many bytes, 4 bytes
                case 0:
                    at += self._varint(head, used)[1]
                case 1:
                    at += used + 8
                case 2:
                    length, used = self._varint(head, used)
                    if at + used + length > end:
                        raise self._broken()
                    yield number, at + used, at + used + length
                    at += used + length
                case 5:
                    at += used + 4
                case _:
                    raise self._broken()

    def _varint(self, data: bytes, at: int) -> tuple[int, int]:
        """The number, and where it ends."""
        value = 0
        for place, byte in enumerate(data[at : at + 10]):
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value, at + place + 1
        raise self._broken()

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, min(_TEXT_BYTES, end - start), start)

    def _speaks_of_files(self, start: int, end: int) -> bool:
        at = start
        while at < end:
            data = os.pread(self._descriptor, min(_WINDOW_BYTES, end - at), at)
            if _LOCATION in data or _COMPILED in data:
                return True
            at += max(len(data) - len(_COMPILED), 1) if at + len(data) < end else end
        return False

    def _broken(self) -> InvalidModel:
        return InvalidModel(f"{self._path}: it is no ONNX graph")
