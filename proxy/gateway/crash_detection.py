"""Whether Triton has crashed, and which replicas had requests in it: seen by the connections to it that break."""

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
    """`refuses`: whether no process listens where Triton should. `crashed` is called once for each crash."""

    def __init__(
        self,
        in_triton: Callable[[], Collection[str]],
        refuses: Callable[[], Awaitable[bool]],
        crashed: Callable[[Collection[str]], None],
    ) -> None:
        self._in_triton, self._refuses, self._crashed = in_triton, refuses, crashed
        self._suspects: set[str] = set()
        self._looking: asyncio.Task[None] | None = None

    def broke(self, whose: Collection[str]) -> None:
        """A connection to Triton broke with requests of these in it.

        The first one is the first sign of a crash: what has requests in Triton now had them then.
        """
        if self._looking is None:
            self._suspects = set(self._in_triton())
            self._looking = asyncio.create_task(self._look())
        self._suspects.update(whose)

    async def _look(self) -> None:
        try:
            for pause in _LOOKS_SECONDS:
                await asyncio.sleep(pause)
                if await self._refuses():
                    self._crashed(frozenset(self._suspects))
                    return
            log.info("a connection to Triton broke; Triton still listens")
        finally:
            self._looking = None

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking


async def refuses(endpoint: Endpoint) -> bool:
    """Whether no process listens there. One that is too busy to answer does."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
