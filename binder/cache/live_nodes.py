"""The nodes as they are: the table kept in step with what is known of the cluster."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from berth.contract.ids import NodeName, PodUid
from berth.runtime.logs import fields
from binder.cache.pod_index import PodIndex
from binder.cache.state import ClusterState
from binder.cache.table import NodeTable

log = logging.getLogger(__name__)


class LiveNodes:
    """Of a state, whose one table it is."""

    def __init__(self, state: ClusterState) -> None:
        self.state, self.table = state, NodeTable()
        for view in state.views():
            self.table.put(view)

    @property
    def pods(self) -> PodIndex:
        return self.state.pods

    def is_claimed(self, namespace: str, claim: str) -> bool:
        """A pod that has a node mounts this volume claim."""
        return bool(self.state.claims[namespace, claim])

    def refresh(self, *, most: int | None = None) -> None:
        """Take over what has changed in the state, of `most` nodes."""
        for name in sorted(self.state.take_touched(most)):  # rows in one order, whatever the sets' is
            try:
                self._take(name)
            except Exception as error:  # one node must not hide what has changed on the others
                log.error("node left out", extra=fields(node=name), exc_info=error)
                self.table.drop(name)

    @contextmanager
    def without(self, uids: Collection[PodUid]) -> Iterator[None]:
        """As if these pods and their models were not there. For a question, never over an await.

        The table is in step with the state before and after: it tells what is eased by comparing, and
        must compare what is with what was.
        """
        if not uids:
            yield
            return
        self.refresh()
        try:
            with self.state.without(uids):
                yield
        finally:
            self.refresh()

    def _take(self, name: NodeName) -> None:
        view = self.state.find(name)
        if view is None:
            self.table.drop(name)
        else:
            self.table.put(view, hypothetical=self.state.hides)
