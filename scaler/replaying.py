"""`berth scaler --replay`: the decider's answers to JSON lines from a file or a pipe."""

import json
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from berth.runtime.errors import ConfigError, Failed
from scaler.decision.replay import BadLine, Json, Replay

# More than all annotations of an object may be.
_LINE_BYTES = 1 << 20


def replay_named(name: str) -> None:
    """A file, or standard input for `-`."""
    try:
        if name == "-":
            replay(sys.stdin.buffer, "standard input")
        else:
            with open(name, "rb") as file:
                replay(file, name)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Failed("the reader of the answers has closed the pipe") from None
    except OSError as error:
        raise ConfigError(f"--replay: {name}: {error.strerror or error}") from error


def replay(lines: BinaryIO, source: str) -> None:
    """Answer each line on standard output before the next one is read. Raises Failed if one could not be read."""
    core, bad, first = Replay(), 0, ""
    for number, line in _numbered(lines):
        try:
            answer = core.answer(_text(line))
        except BadLine as error:
            said = f"line {number}: {error}"
            bad, first = bad + 1, first or said
            answer = {"err": said} if error.answered else None
        if answer is not None:
            _say(answer)
    if bad:
        raise Failed(f"{source}: {bad} of its lines could not be read, the first: {first}")


def _numbered(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank; of one that is too long, its beginning."""
    number = 0
    while line := lines.readline(_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > _LINE_BYTES and not rest.endswith(b"\n"):
            rest = lines.readline(_LINE_BYTES + 1)
        if line.strip():
            yield number, line


def _text(line: bytes) -> str:
    if len(line) > _LINE_BYTES:
        raise BadLine(f"it is longer than {_LINE_BYTES} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"it is not UTF-8: {error.reason} at byte {error.start}") from None


def _say(answer: Json) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
