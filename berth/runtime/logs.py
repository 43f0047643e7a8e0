"""Logging: one line an event, text for people or JSON for programs.

Constant keys go in `extra={"fields": {...}}`; `fields(...)` builds that.
"""

import json
import logging
import sys
import time
from typing import Any


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """The `extra` argument of a log call: `log.info("bound pod", extra=fields(pod=ref, node=node))`."""
    return {"fields": values}


def configure_logging(*, format: str, level: str) -> None:
    """Send all logs to stderr, once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def one_line(text: str) -> str:
    """Text from outside, made safe for one log line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {key}={_word(value)}" for key, value in getattr(record, "fields", {}).items())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower():7} {record.name}: "
        line += one_line(record.getMessage()) + pairs
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: _plain(value) for key, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _word(value: object) -> str:
    text = one_line(str(value))
    return json.dumps(text) if not text or " " in text or '"' in text else text


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
