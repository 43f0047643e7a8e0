"""Publishes the node's report: four annotations, written only when their content has changed.

Where it cannot be written, the agent's heartbeat says that what stands on the node is not the current
report, and the binder places nothing by it (`failure`, `announced`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from msgspec.structs import replace

from agent.gpus import GpuReading
from agent.metrics import AgentMetrics
from berth.contract.errors import ReportTooLarge, UnreadableReport
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.report import NodeReport
from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient
from berth.kube.errors import KubeError
from berth.kube.times import rfc3339, utc_now
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

# `used` and `util` move all the time and no decision depends on them: they alone cause a write this often at most.
GAUGES_EVERY_SECONDS = 30.0
COVER_TIMEOUT_SECONDS = 30.0


class Reporter:
    """`step()` writes if there is something to say; `covers()` waits until it has been written."""

    def __init__(
        self,
        client: KubeClient,
        *,
        node: NodeName,
        keys: Keys,
        build: Callable[[], NodeReport],
        readings: Callable[[], Iterable[GpuReading]],
        metrics: AgentMetrics,
        on_node: Callable[[JsonObject], Awaitable[None]] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._client, self._node, self._keys = client, node, keys
        self._build, self._readings, self._metrics, self._now = build, readings, metrics, now
        self._on_node = on_node
        self._generation = 0
        self._gauges: dict[str, str | None] = {}
        self._gauges_at: datetime | None = None
        self._written: NodeReport | None = None
        self._changed = asyncio.Event()
        self.wake = asyncio.Event()
        self.failure = ""
        """Why the report could not be written; empty where what stands on the node is current."""
        self.failure_changed = asyncio.Event()
        self._is_behind_announced = False

    @property
    def has_written(self) -> bool:
        return self._written is not None

    async def covers(self, uid: PodUid) -> None:
        """Return once a report that lists this pod's model stands on the node, or once the heartbeat says that
        none can be written, for then no pod is placed here. Raises TimeoutError."""
        async with asyncio.timeout(COVER_TIMEOUT_SECONDS):
            while not self._is_listed(uid) and not (self._is_behind_announced and self.failure):
                change = self._changed
                self.wake.set()
                await change.wait()

    def _is_listed(self, uid: PodUid) -> bool:
        return self._written is not None and self._written.model_of(uid) is not None

    def announced(self, failure: str) -> None:
        """The heartbeat has said whether the report on the node is current."""
        self._is_behind_announced = bool(failure)
        self._notify()

    async def step(self) -> None:
        """One pass. Raises KubeError or ReportTooLarge."""
        try:
            await self._write_changes()
        except (KubeError, ReportTooLarge) as error:
            self._set_failure(str(error))
            raise
        self._set_failure("")

    async def _write_changes(self) -> None:
        report, gauges = self._build(), gauge_annotations(self._readings(), self._keys)
        if report == self._content_written() and not self._gauges_due(gauges):
            return
        self._generation += 1
        now = self._now()
        stamped = replace(report, generation=self._generation, observed_at=rfc3339(now))
        annotations = {
            **gauges,
            self._keys.node_total: node_total(report),
            self._keys.report: stamped.encode(),
        }
        await self._client.patch(paths.node(self._node), {"metadata": {"annotations": annotations}})
        self._written, self._gauges, self._gauges_at = stamped, gauges, now
        self._metrics.reported(report)
        log.debug("report written", extra=fields(generation=self._generation))
        self._notify()

    async def verify(self) -> None:
        """Check that the node still has what was written; if another writer has changed it, write it again. The
        rest of the Node is passed to `on_node`.

        Raises KubeError.
        """
        written = self._written
        if written is None:
            return
        node = await self._client.get(paths.node(self._node))
        if self._on_node is not None:
            await self._on_node(node)
        if self._written is not written:
            return  # a write came in between: what was found may be from before it
        found = (node["metadata"].get("annotations") or {}).get(self._keys.report)
        if found != written.encode():
            log.warning("the node's report was changed by another writer", extra=fields(node=self._node))
            self._written = None
            self.wake.set()

    def _content_written(self) -> NodeReport | None:
        return None if self._written is None else replace(self._written, generation=0, observed_at="")

    def _gauges_due(self, gauges: dict[str, str | None]) -> bool:
        if gauges == self._gauges or self._gauges_at is None:
            return False
        return (self._now() - self._gauges_at).total_seconds() >= GAUGES_EVERY_SECONDS

    def _set_failure(self, failure: str) -> None:
        changed, self.failure = bool(failure) != bool(self.failure), failure
        if changed:
            self.failure_changed.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def last_report(node: JsonObject, keys: Keys) -> NodeReport | None:
    """The last report of this node's agent; None if it cannot be read."""
    text = (node["metadata"].get("annotations") or {}).get(keys.report)
    try:
        return None if text is None else NodeReport.decode(text)
    except UnreadableReport as error:
        log.warning("the last report cannot be read", extra=fields(error=error))
        return None


def node_total(report: NodeReport) -> str | None:
    """`trtis-gpu-mem-total`: bytes over healthy GPUs; None (the key is removed) when none is known."""
    totals = [gpu.total_bytes for gpu in report.gpus if gpu.healthy and gpu.total_bytes is not None]
    return str(sum(totals)) if totals else None


def gauge_annotations(readings: Iterable[GpuReading], keys: Keys) -> dict[str, str | None]:
    """The proof of concept's `used` (bytes) and `util` (0 to 1); None removes a key that is not known."""
    healthy = [reading for reading in readings if reading.healthy]
    used = [reading.used_bytes for reading in healthy if reading.used_bytes is not None]
    rates = [reading.utilization for reading in healthy if reading.utilization is not None]
    return {
        keys.node_used: str(sum(used)) if used else None,
        keys.node_util: f"{sum(rates) / len(rates):.2f}" if rates else None,
    }
