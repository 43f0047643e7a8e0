"""Whether Triton has died, and who had requests in it: told by the connections to it that break."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final

from berth.contract.endpoint import Endpoint

log = logging.getLogger(__name__)

# After a break Triton is asked at these times; it takes seconds to start again.
_LOOKS_SECONDS: Final = (0.0, 0.02, 0.1, 0.3, 1.0)
_CONNECT_SECONDS: Final = 1.0


class CrashDetector:
    """`refuses`: whether nobody listens where Triton should. `died` is told once for each death."""

    def __init__(
        self,
        inside: Callable[[], Collection[str]],
        refuses: Callable[[], Awaitable[bool]],
        died: Callable[[Collection[str]], None],
    ) -> None:
        self._inside, self._refuses, self._died = inside, refuses, died
        self._suspects: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    def broke(self, whose: Collection[str]) -> None:
        """A connection to Triton broke with requests of these in it.

        Of a death the first is the first sign: all who are inside now were inside then.
        """
        if self._looking is None:
            self._suspects = set(self._inside())
            self._looking = asyncio.create_task(self._look())
        self._suspects.update(whose)

    async def _look(self) -> None:
        try:
            for pause in _LOOKS_SECONDS:
                await asyncio.sleep(pause)
                if await self._refuses():
                    self._died(frozenset(self._suspects))
                    return
            log.info("a connection to Triton broke; Triton is there")
        finally:
            self._looking = None

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking


async def refuses(endpoint: Endpoint) -> bool:
    """Whether nobody listens there. One that is too busy to answer is somebody."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
