"""What a request costs Triton in memory, from its arrival until its model has it. Pure.

Measured as the growth of the peak of Triton 2.51's resident memory, shared memory counted, by one request to a
model of the python backend: 8 MiB of `1,` in JSON take 136 MiB (rapidjson keeps 16 bytes for each value on
its stack and 16 in the document, beside the text twice and the tensor); 60 MiB behind the JSON take 120, and
181 as raw contents of a gRPC message. Contents that are a list of numbers are taken apart: 60 MiB of int64 or
uint32 of a byte each take 1021 and 421, of doubles 181; 8 MiB of empty
strings take 291. What an answer takes is the model's own matter: it is
charged when it begins.
"""

from typing import Final

_JSON_BYTE: Final = 2
_JSON_VALUE: Final = 40
# Up to here the values are not counted: there may be one for every second byte.
_SMALL_BYTES: Final = 4096
_BINARY: Final = 2
_MESSAGE: Final = 3
# What a byte of a list takes beyond `_MESSAGE`, by the number of its field (InferTensorContents): numbers of a byte
# become four or eight. A string is an object, of two bytes at least.
_LISTED: Final = {1: 1, 2: 4, 3: 14, 4: 4, 5: 14, 6: 0, 7: 0}
_LISTED_MOST: Final = 34


def of_json(text: bytes) -> int:
    """Of a body, or a head, of JSON."""
    size = len(text)
    values = size // 2 if size <= _SMALL_BYTES else text.count(b",") + 1
    return _JSON_BYTE * size + _JSON_VALUE * values


def of_tensors(size_bytes: int) -> int:
    """Of what comes behind the JSON."""
    return _BINARY * size_bytes


def of_message(size_bytes: int) -> int:
    """Of a gRPC message, without what its lists take more."""
    return _MESSAGE * size_bytes


def of_list(field: int, size_bytes: int) -> int:
    """What contents of so many bytes take more than their bytes in a message. `field`: theirs if it is but one."""
    return _LISTED.get(field, _LISTED_MOST) * size_bytes


def of_short_message(size_bytes: int) -> int:
    """Of a gRPC message that is not read: it may be a list of the dearest kind."""
    return (_MESSAGE + _LISTED_MOST) * size_bytes


def of_grpc_answer(size_bytes: int) -> int:
    """Of a message that waits to be sent: Triton keeps it, and what it is as bytes on the wire."""
    return 2 * size_bytes
