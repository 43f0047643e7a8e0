"""What a request costs Triton in memory, from its arrival to its answer. Pure."""

from typing import Final

# Triton 2.51 keeps a JSON body, what it was read into (rapidjson: 16 bytes a value), the tensors made of it,
# and the same again for the answer.
JSON_BYTE_COST: Final = 3
JSON_VALUE_COST: Final = 64
# Up to here nobody counts the values: there may be one for every second byte.
_SMALL_BYTES: Final = 4096


def of_json(text: bytes) -> int:
    """Of a body, or a head, of JSON."""
    size = len(text)
    values = size // 2 if size <= _SMALL_BYTES else text.count(b",") + 1
    return JSON_BYTE_COST * size + JSON_VALUE_COST * values
