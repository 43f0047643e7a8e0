"""What a replica does while it leads: loads are scraped, decisions made and written, routes kept."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from berth.kube.events import EventRecorder
from berth.kube.informer import catch_up
from berth.runtime.logs import fields
from berth.runtime.tasks import supervise, work_or_stop
from scaler.control_loop import ControlLoop
from scaler.export.exporters import Exporters
from scaler.metrics import ScalerMetrics
from scaler.route_controller import RouteController
from scaler.scrape import Scraper, scraping_session
from scaler.watch import Watch
from scaler.writer import Writer

log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 2.0
# What a leader writes by or has written, in the order in which it is listed anew.
_CAUGHT_UP: Final = ("services", "endpointslices", "deployments", "pods")


class ScalingLeader:
    """As `leadership.Leader`."""

    def __init__(
        self,
        watch: Watch,
        loop: ControlLoop,
        routes: RouteController,
        writer: Writer,
        exporters: Exporters,
        events: EventRecorder,
        metrics: ScalerMetrics,
    ) -> None:
        self._watch, self._loop, self._routes = watch, loop, routes
        self._writer, self._exporters, self._events, self._metrics = writer, exporters, events, metrics
        self._has_begun = False

    async def lead(self, ended: asyncio.Event, is_certain: Callable[[], bool]) -> None:
        await work_or_stop(self._catch_up(), ended)
        if ended.is_set():
            return
        log.info("scaling models", extra=fields(models=self._watch.models))
        self._begin(self._routes.begin)
        if not is_certain():  # lost meanwhile
            self.pause()
        try:
            async with scraping_session() as session, self._exporters.leading(), supervise() as tasks:
                scraper = Scraper(session, self._watch.gateways, self._loop.record_loads, self._metrics)
                tasks.eternal("scrape", scraper.run())
                tasks.eternal("routes", self._routes.run())
                tasks.eternal("decisions", self._loop.run())
                await ended.wait()
        finally:
            self._metrics.leader.set(0)
            self._routes.end()
        await self._writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._events.flush()

    def pause(self) -> None:
        self._metrics.leader.set(0)
        self._loop.pause()
        self._writer.discard()
        self._routes.end()

    async def resume(self, is_certain: Callable[[], bool]) -> None:
        await self._catch_up()
        if self._has_begun and is_certain():
            log.info("leading again", extra=fields(models=self._watch.models))
            self._begin(self._routes.resume)

    async def close(self) -> bool:
        await self._writer.close()
        return not self._writer.in_doubt

    def _begin(self, lead: Callable[[int], None]) -> None:
        """`lead`: of the routes, between the first decisions and their writes."""
        self._metrics.leader.set(1)
        self._has_begun = True
        self._loop.begin(lead)

    async def _catch_up(self) -> None:
        await catch_up(self._watch.informers[name] for name in _CAUGHT_UP)
