"""What a connection to Triton tells the request that it serves, in either protocol: asked, answered, or broken off.

A request waits for a connection (`wants_connection`), receives it (`connected`) and then of its answer, whole or as it
comes; or, at any time and once, that there will be none (`answer_broke`). None of these may raise.
"""

from collections.abc import Callable
from typing import Protocol

# Called with the requests that Triton had when a connection to it broke off.
Lost = Callable[[object], None]


class UpstreamRequest(Protocol):
    """A request as it is known before it has a connection."""

    @property
    def whose(self) -> object:
        """The replica that it is of, which takes turns with others."""
        ...

    @property
    def wants_connection(self) -> bool:
        """Whether `connected` is still waited for."""
        ...

    def answer_broke(self, reason: str) -> None:
        """There will be no (more of an) answer: Triton has nothing of the request any more."""
        ...
