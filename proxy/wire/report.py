"""What a pod's proxy and its node's gateway exchange on a REPORT connection: JSON, one object a line. Pure.

    gateway → sidecar   {"notReady": null | REASON, "figures": {…}}  at once, at each change of readiness, each second
                        {"drained": true}      nothing of the replica is in the gateway or in Triton any more, or the
                                               time that the agent has set for it is up
    sidecar → gateway   {"leaving": true}      the pod ends: not ready from now on, but everything is served as before
                        {"drain": true}        take nothing new, let what is there end; answered by "drained"

The figures are `proxy.request.traffic.Figures.to_json()`. Keys and lines that are not known are ignored on both sides.
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
class Report:
    """The replica's status. `not_ready`: the reason, or None."""

    not_ready: str | None
    figures: Mapping[str, Any]

    def to_line(self) -> bytes:
        line = {"notReady": self.not_ready, "figures": self.figures}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def read_report(line: bytes) -> Report | None:
    """None for a line that is no report."""
    data = _object(line)
    reason, figures = data.get("notReady"), data.get("figures")
    if not isinstance(figures, Mapping) or not isinstance(reason, str | None):
        return None
    return Report(reason, figures)


def says(line: bytes, word: str) -> bool:
    """Whether a line says `word`: leaving, drain, drained."""
    return _object(line).get(word) is True


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
