"""Values on the wire: JSON from outside is read as a `msgspec.Struct`, and what is wrong is named by its path.

A field's type is the rule: its bounds, and whether it may be unknown (None, never 0) or left out (its default).
"""

import json
from typing import Annotated, Any, TypeVar

import msgspec

from berth.contract.errors import InvalidValue

T = TypeVar("T")

# What every reader of the wire can hold, and what a sum of them can be shown of.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TEXT_LIMIT = 256 * 1024  # what the API server allows for all annotations of one object


class _Versioned(msgspec.Struct):
    v: Count


def parse(text: str, *, what: str, limit: int = TEXT_LIMIT) -> Any:
    """Any JSON. Raises InvalidValue; never RecursionError.

    Not by msgspec, which refuses half a surrogate pair: a reason may quote a program's output.
    """
    if len(text) > limit:
        raise InvalidValue(f"{what} has {len(text)} characters; at most {limit} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{what} is not JSON: {error}") from error


def convert(data: object, kind: type[T], *, what: str) -> T:
    """What has been parsed, as `kind`. Raises InvalidValue."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(_named(error, what)) from error
    except UnicodeError as error:  # half a surrogate pair in a name, or in a text where none is expected
        raise InvalidValue(f"{what} is not Unicode: {error}") from error
    except RecursionError as error:
        raise InvalidValue(f"{what} is nested too deeply") from error


def read(text: str, kind: type[T], *, what: str, limit: int = TEXT_LIMIT) -> T:
    """A text that a user may have edited. Raises InvalidValue."""
    return convert(parse(text, what=what, limit=limit), kind, what=what)


def check_version(data: object, version: int, *, what: str) -> None:
    """Before the other fields: another version may have others. Raises InvalidValue."""
    found = convert(data, _Versioned, what=what).v
    if found != version:
        raise InvalidValue(f"{what} has version {found}; this Berth reads {version}")


def decode(body: bytes | str, kind: type[T], *, what: str) -> T:
    """What another process of Berth has sent, in one pass. Raises InvalidValue."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidValue(_named(error, what)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidValue(f"{what} is not JSON: {error}") from error


def _named(error: msgspec.ValidationError, what: str) -> str:
    """`node report.gpus[0].totalBytes: Expected …` for msgspec's `Expected … - at `$.gpus[0].totalBytes``."""
    message, _, path = str(error).partition(" - at `$")
    return f"{what}{path.removesuffix('`')}: {message}"
