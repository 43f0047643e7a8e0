"""What a pod's door and its node's gateway tell each other on a REPORT connection: JSON, one object a line. Pure.

    gateway → door   {"notReady": null | REASON, "figures": {…}}  at once, at each change of readiness, each second
                     {"drained": true}      nothing of the replica is in the gateway or in Triton any more, or the
                                            time that the agent has set for it is up
    door → gateway   {"leaving": true}      the pod ends: not ready from now on, but everything is served as before
                     {"drain": true}        take nothing new, let what is there end; answered by "drained"

The figures are `request.traffic.Figures.to_json()`. Of both, what is not understood is left aside.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LINE_BYTES: Final = 64 * 1024
LEAVING: Final = b'{"leaving":true}\n'
DRAIN: Final = b'{"drain":true}\n'
DRAINED: Final = b'{"drained":true}\n'


@dataclass(frozen=True, slots=True)
class Told:
    """What the gateway has said of the replica. `not_ready`: the reason, or None."""

    not_ready: str | None
    figures: Mapping[str, Any]

    def to_line(self) -> bytes:
        line = {"notReady": self.not_ready, "figures": self.figures}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def read_told(line: bytes) -> Told | None:
    """None for a line that tells nothing of the replica."""
    data = _object(line)
    reason, figures = data.get("notReady"), data.get("figures")
    if not isinstance(figures, Mapping) or not isinstance(reason, str | None):
        return None
    return Told(reason, figures)


def says(line: bytes, word: str) -> bool:
    """Whether a line says `word`: leaving, drain, drained."""
    return _object(line).get(word) is True


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
