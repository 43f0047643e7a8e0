"""Reads pods and nodes from the API server where the watches alone do not settle what is reserved.

A watch that breaks off may never show a pod that was bound and deleted meanwhile; and a watch of nodes
may be so far behind that of pods that a model looks as if it had never been loaded. What is read and remains unsettled
is read again less and less often.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from berth.contract.ids import NodeName
from berth.contract.pod import PodRef, node_of
from berth.kube import paths
from berth.kube.errors import KubeError, NotFound
from berth.kube.informer import Change, ChangeKind
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from binder.cache.state import ClusterState
from binder.engine.cluster import slim
from binder.loop.bind import current_pod
from binder.loop.fenced import PodClient

log = logging.getLogger(__name__)

# Longer than a Binding and the watch that shows it ever take.
OVERDUE_SECONDS = 60.0

Hear = Callable[[Change], bool]
_K = TypeVar("_K", PodRef, NodeName)


def _pauses() -> Backoff:
    return Backoff(initial_seconds=1.0, cap_seconds=60.0)


@dataclass(slots=True)
class _Pause:
    until: float = float("-inf")
    backoff: Backoff = field(default_factory=_pauses)


class _Reads(Generic[_K]):
    """What has been read, for as long as it is unsettled."""

    def __init__(self) -> None:
        self._pauses: dict[_K, _Pause] = {}

    def due(self, unsettled: Collection[_K], *, now: float) -> list[_K]:
        """What to read now."""
        for settled in self._pauses.keys() - set(unsettled):
            del self._pauses[settled]
        return [one for one in unsettled if one not in self._pauses or self._pauses[one].until <= now]

    def note(self, one: _K, *, now: float) -> None:
        pause = self._pauses.setdefault(one, _Pause())
        pause.until = now + pause.backoff.next()


class AssumedPodResync:
    """`look` finds what is to be read, `run` reads it. `freed` is called when something may have come free."""

    def __init__(
        self,
        client: PodClient,
        state: ClusterState,
        *,
        on_pod: Hear,
        on_node: Hear,
        freed: Callable[[bool], object],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._state, self._clock = client, state, clock
        self._on_pod, self._on_node, self._freed = on_pod, on_node, freed
        self._wake = asyncio.Event()
        self._pods, self._nodes = _Reads[PodRef](), _Reads[NodeName]()

    def look(self) -> None:
        """Wake `run` if there is anything to read. Cheap; never waits."""
        if self._due_pods() or self._due_nodes():
            self._wake.set()

    def _due_pods(self) -> list[PodRef]:
        return self._pods.due(self._state.overdue(seconds=OVERDUE_SECONDS), now=self._clock())

    def _due_nodes(self) -> list[NodeName]:
        return self._nodes.due(sorted(self._state.unsettled()), now=self._clock())

    async def run(self) -> None:
        """Read for ever, one object at a time."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for ref in self._due_pods():
                self._pods.note(ref, now=self._clock())
                await self._safely(self._read_pod(ref))
            for node in self._due_nodes():
                self._nodes.note(node, now=self._clock())
                await self._safely(self._read_node(node))

    async def _safely(self, read: Awaitable[None]) -> None:
        try:
            await read
        except Exception as error:  # one object that is not as expected must not end all reads
            log.error("answer not taken", exc_info=error)

    async def _read_pod(self, ref: PodRef) -> None:
        pod = await current_pod(self._client, ref)
        if pod is None:
            self._freed(self._state.remove_pod(ref.uid))
        elif node_of(pod) is not None:
            self._on_pod(Change(ChangeKind.SET, slim(pod)))

    async def _read_node(self, name: NodeName) -> None:
        """What the node's report says now, however far its watch is behind."""
        asked_at = self._clock()
        try:
            node = await self._client.get(paths.node(name))
        except NotFound:
            self._freed(self._state.remove_node(name))
        except KubeError as error:  # read again at the next look
            log.warning("node not read", extra=fields(node=name, error=error))
        else:
            self._on_node(Change(ChangeKind.SET, node))
            self._freed(self._state.settle(name, asked_at=asked_at))
