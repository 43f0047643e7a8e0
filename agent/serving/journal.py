"""The ledger on disk: one file, replaced as a whole, so that it is whole whenever the agent or the node ends.

    DIR/journal.json

Everything here blocks: call it from a thread, one call at a time.
"""

import logging
import os
from pathlib import Path

from agent.serving.crash_ledger import CrashLedger
from berth.contract.errors import InvalidValue
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

JOURNAL_FILE = "journal.json"


class Journal:
    """An unreadable journal is reported and put aside: an agent without its memory is better than none."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL_FILE
        self.failure = ""
        """Why the journal could not be read; empty where it could."""

    def read(self) -> CrashLedger:
        """Never raises."""
        try:
            return CrashLedger.decode(self.path.read_bytes().decode())
        except FileNotFoundError:
            return CrashLedger()
        except (OSError, UnicodeDecodeError, InvalidValue) as error:
            self.failure = str(error)
            log.error(
                "journal cannot be read: suspects and quarantine are forgotten", extra=fields(error=error)
            )
            self._put_aside()
            return CrashLedger()

    def write(self, text: str) -> None:
        """Durable when it returns. Raises OSError, with the last journal unhurt."""
        fresh = self.path.with_suffix(".new")
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        descriptor = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _put_aside(self) -> None:
        try:
            self.path.replace(self.path.with_suffix(".unreadable"))
        except OSError as error:
            log.warning("journal not put aside", extra=fields(error=error))
