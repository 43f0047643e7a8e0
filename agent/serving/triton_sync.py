"""Reads what Triton holds, and knows since when it has not answered."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from agent.repository import Repository
from agent.serving.model_fsm import Event
from berth.contract.ids import ServerName
from berth.runtime.logs import fields
from berth.triton.admin import IndexEntry, IndexState, TritonAdmin
from berth.triton.errors import TritonError

log = logging.getLogger(__name__)

# What a model's state in Triton's index means to its slot.
EVENTS: Mapping[IndexState, Event] = {
    IndexState.READY: Event.SEEN_SERVED,
    IndexState.LOADING: Event.SEEN_CHANGING,
    IndexState.UNLOADING: Event.SEEN_CHANGING,
    IndexState.UNAVAILABLE: Event.SEEN_ENDED,
    IndexState.UNKNOWN: Event.SEEN_UNKNOWN,
}


class TritonSync:
    """`version`: None until Triton has answered, and while it does not."""

    def __init__(self, triton: TritonAdmin, repository: Repository) -> None:
        self.admin, self._repository = triton, repository
        self.version: str | None = None
        self.away_reason = ""
        self._away_since: float | None = None

    async def read(
        self, names: Iterable[ServerName], *, now: float
    ) -> Mapping[ServerName, IndexEntry] | None:
        """Triton's index; None while Triton is not ready. `names`: the models that it must list, for it lists only
        what has a directory. Raises TritonError or OSError."""
        await asyncio.to_thread(self._repository.show, *names)
        try:
            version = await self.admin.version()
            index = None if version is None else await self.admin.index()
        except TritonError as error:
            self.version = None
            self.note_away(str(error), now)
            raise
        self.version = version
        if index is None:
            self.note_away("it is not ready yet", now)
        else:
            self._away_since = None
        return index

    @property
    def is_away(self) -> bool:
        return self._away_since is not None

    def away_seconds(self, now: float) -> float:
        """For how long Triton has not answered; 0 where it does."""
        return 0.0 if self._away_since is None else now - self._away_since

    def note_away(self, reason: str, now: float) -> None:
        if self._away_since is None:
            self._away_since = now
            log.warning("triton is away", extra=fields(reason=reason))
        self.away_reason = reason
