"""Whether Berth decides as Knative does, over random histories."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from scaler.decision.replay import Json, Replay
from tests.oracles.histories import histories
from tests.oracles.knative import Asked, asking

_KEYS = ("valid", "desired", "ebc", "in_panic")
_AT_ONCE = 100


@dataclass
class Compared:
    """What came of it. `differing` holds the first of them: the lines up to it, and both answers."""

    decisions: int = 0
    refused: int = 0
    differences: int = 0
    differing: list[tuple[list[str], Json, Json]] = field(default_factory=list)
    berth_cpu_seconds: float = 0.0


def compare(seed: str, decisions: int) -> Compared:
    """Ask both about so many decisions."""
    result = Compared()
    with asking() as oracle:
        every = histories(seed, decisions)
        while batch := [*islice(every, _AT_ONCE)]:
            _compare(oracle, batch, result)
    return result


def differences(record: list[str]) -> Compared:
    """Ask both about a record of `berth scaler --record`, less a last line that a kill has cut off."""
    result = Compared()
    whole = [line for line in record if line.endswith("\n")]
    with asking() as oracle:
        _compare(oracle, [whole], result)
    return result


def _compare(oracle: Asked, batch: list[list[str]], result: Compared) -> None:
    theirs = iter(oracle.answers([line for lines in batch for line in lines]))
    for lines in batch:
        begun = time.process_time()
        ours = [*replayed(lines)]
        result.berth_cpu_seconds += time.process_time() - begun
        for place, answer in ours:
            _count(result, lines[: place + 1], answer, next(theirs))


def replayed(lines: list[str]) -> Iterator[tuple[int, Json]]:
    """Berth's answers, with the places of what they answer."""
    core = Replay()
    for place, line in enumerate(lines):
        answer = core.answer(line)
        if answer is not None:
            yield place, answer


def _count(result: Compared, lines: list[str], ours: Json, theirs: Json) -> None:
    is_decision = "valid" in theirs
    result.decisions += is_decision
    result.refused += "err" in theirs
    if ("err" in ours) != ("err" in theirs) or (
        is_decision and any(ours.get(key) != theirs[key] for key in _KEYS)
    ):
        result.differences += 1
        if len(result.differing) < 3:
            result.differing.append((lines, ours, theirs))


def told(result: Compared) -> str:
    """For people."""
    lines = [
        f"{result.decisions} decisions, {result.differences} different; {result.refused} lines refused by both; "
        f"Berth's CPU {result.berth_cpu_seconds:.1f} s"
    ]
    for history, ours, theirs in result.differing:
        lines += [
            "",
            *(line.strip() for line in history),
            f"Berth:   {json.dumps(ours)}",
            f"Knative: {json.dumps(theirs)}",
        ]
    return "\n".join(lines)
