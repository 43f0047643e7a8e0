"""What a message of a stream of files may be, judged by its bytes before it is parsed: parsed, two bytes of it can
become fifty. Pure."""

from agent.staging import MAX_ENTRIES, TooLarge
from berth.contract.errors import InvalidValue

# The loader leaves out of a header what would make it larger than 2 MiB.
HEADER_BYTES = 2 * 1024 * 1024 + 16 * 1024
# Of the others but a chunk: a path, a digest.
_SMALL_PART_BYTES = 16 * 1024
_HEADER, _FILE, _CHUNK, _COMMIT = 1, 2, 3, 4
_MOST: dict[int, int | None] = {
    _HEADER: HEADER_BYTES,
    _FILE: _SMALL_PART_BYTES,
    _CHUNK: None,
    _COMMIT: _SMALL_PART_BYTES,
}
_FILES_OF_HEADER = 3
_LENGTH = 2  # the wire type of what says its own length
_FIXED = {1: 8, 5: 4}
_VARINT_BYTES = 10
_NOT_OURS = "the request is not a message of this API"


def check_stage_message(message: bytes) -> None:
    """One part, as large as such a part may be. Raises InvalidValue or TooLarge."""
    if not message:
        return  # says nothing; refused where it is read
    kind, start, end = _field(message, 0)
    if kind not in _MOST or message[0] & 7 != _LENGTH or end != len(message):
        raise InvalidValue(f"{_NOT_OURS}: it has one part, a header, a file, a chunk or a commit")
    most = _MOST[kind]
    if most is not None and end - start > most:
        raise InvalidValue(f"the request has {end - start} bytes in a part that has at most {most}")
    if kind == _HEADER:
        _count_files(message, start)


def _count_files(message: bytes, at: int) -> None:
    """Each takes two bytes at least."""
    if (len(message) - at) // 2 <= MAX_ENTRIES:
        return
    files = 0
    while at < len(message):
        number, _, at = _field(message, at)
        files += number == _FILES_OF_HEADER
        if files > MAX_ENTRIES:
            raise TooLarge(f"more than {MAX_ENTRIES} files are announced; a model has at most so many")


def _field(message: bytes, at: int) -> tuple[int, int, int]:
    """Its number, where its content begins, and where it ends. Raises InvalidValue."""
    tag, at = _varint(message, at)
    kind = tag & 7
    if kind == _LENGTH:
        size, at = _varint(message, at)
    elif kind == 0:
        _, end = _varint(message, at)
        size = end - at
    elif kind in _FIXED:
        size = _FIXED[kind]
    else:
        raise InvalidValue(_NOT_OURS)
    if at + size > len(message):
        raise InvalidValue(_NOT_OURS)
    return tag >> 3, at, at + size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(message[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise InvalidValue(_NOT_OURS)
