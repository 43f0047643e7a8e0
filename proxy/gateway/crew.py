"""The processes that serve the node's models, as one: this process itself, or several workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

from proxy.gateway.config import GatewayOptions
from proxy.gateway.node import Node
from proxy.gateway.orders import Orders, Sum, Word
from proxy.gateway.plane import open_node

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05

Died = Callable[[frozenset[str]], None]


class Plane(Protocol):
    """What serves."""

    # After Triton's death all that serve have told who was in it.
    settle_seconds: float

    def on_news(self, wake: Callable[[], None], died: Died) -> None:
        """`wake`: what they say is news. `died`: Triton has, with requests of these in it."""
        ...

    def obey(self, orders: Orders) -> None: ...

    def words(self) -> list[Word]: ...

    def tell_sums(self, sums: Mapping[str, Sum]) -> None:
        """For the doors."""
        ...

    def drain_all(self) -> None: ...

    async def idle(self) -> None: ...


class Alone:
    """This process serves."""

    settle_seconds = 0.0

    def __init__(self, node: Node) -> None:
        self._node = node

    def on_news(self, wake: Callable[[], None], died: Died) -> None:
        self._node.wished, self._node.triton_died = wake, died

    def obey(self, orders: Orders) -> None:
        self._node.obey(orders)

    def words(self) -> list[Word]:
        return [self._node.word()]

    def tell_sums(self, sums: Mapping[str, Sum]) -> None:
        self._node.tell_doors(sums)

    def drain_all(self) -> None:
        self._node.drain_all()

    async def idle(self) -> None:
        while not self._node.is_idle:
            await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def open_plane(options: GatewayOptions) -> AsyncIterator[Plane]:
    """Raises CannotStart or ConfigError."""
    async with open_node(options) as node:
        yield Alone(node)
