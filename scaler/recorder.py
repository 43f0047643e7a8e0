"""What each decision saw, in the lines that `berth scaler --replay` reads."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from berth.contract.scaling import ModelKey
from berth.runtime.logs import fields
from scaler.decision.load import Stat
from scaler.decision.replay import del_line, model_line, scale_line, stat_line

log = logging.getLogger(__name__)


class Recorder:
    """Writes FILE; one that is there becomes FILE.1. It ends at `most_bytes`: what was decided by the lines that were
    left out could not be decided again, so a record is whole from its beginning on or it is none.

    A disk that takes no more ends it as well, and nothing else.
    """

    def __init__(self, path: Path, config: Mapping[str, str], *, most_bytes: int = 1 << 30) -> None:
        """`config`: Knative's ConfigMap as the scaler has read it. Raises OSError."""
        self._path, self._config, self._left = path, config, most_bytes
        if path.is_file():
            path.replace(path.with_name(path.name + ".1"))
        # A line at a time: a kill cuts none in two, and loses none.
        self._file: IO[str] | None = path.open("w", encoding="utf-8", buffering=1)

    def configured(self, config: Mapping[str, str]) -> None:
        """Another ConfigMap, for the lines that follow."""
        self._config = config

    def model(
        self,
        key: ModelKey,
        now_ns: int,
        *,
        is_new: bool,
        ready: int,
        annotations: Mapping[str, str],
        container_concurrency: int,
    ) -> None:
        self._write(
            model_line(
                str(key),
                now_ns,
                is_new=is_new,
                ready=ready,
                config=self._config,
                annotations=annotations,
                container_concurrency=container_concurrency,
                reachable=True,
                scraped=True,
            )
        )

    def stat(self, key: ModelKey, now_ns: int, stat: Stat) -> None:
        self._write(stat_line(str(key), now_ns, stat))

    def scale(self, key: ModelKey, now_ns: int, *, ready: int) -> None:
        self._write(scale_line(str(key), now_ns, ready=ready))

    def gone(self, key: ModelKey) -> None:
        self._write(del_line(str(key)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        self._left -= len(line.encode())
        if self._left < 0:
            self._end("it has become as long as it may")
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._end(error.strerror or str(error))

    def _end(self, why: str) -> None:
        log.warning("the record of decisions ends", extra=fields(file=str(self._path), reason=why))
        file, self._file = self._file, None
        if file is not None:
            # What it still buffered is lost, as the log says.
            with contextlib.suppress(OSError):
                file.close()
