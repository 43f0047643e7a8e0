"""The binder's composition root: watches, leadership, and the order in which it ends."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy
from aiohttp import web
from prometheus_client import CollectorRegistry

from berth.contract.endpoint import Endpoint
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, KubeClient, open_client, require_reachable
from berth.kube.election import Election
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, Informer, catch_up, whole
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.logs import fields
from berth.runtime.process import run_process, spare_the_collector, starting
from berth.runtime.tasks import supervise, work_or_stop
from binder.api.callers import Callers
from binder.api.extender import Extender
from binder.api.leader import LeaderOnly, extender_url_of, identity, schedulable_url_of
from binder.api.schedulable import SchedulableApi
from binder.cache.residents import residents
from binder.config import BinderOptions
from binder.engine.cluster import slim
from binder.engine.score import make_strategy
from binder.loop.fenced import FencedClient
from binder.loop.metrics import BinderMetrics
from binder.loop.scheduler import Clocks, Scheduler

log = logging.getLogger(__name__)

SUMMARY = "Place the pods of one schedulerName on nodes and GPUs, by GPU memory."
LEASE = "berth-binder"
_FLUSH_SECONDS = 2.0


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth binder`."""
    return run_process("binder", SUMMARY, BinderOptions, main, argv)


async def main(options: BinderOptions, stop: asyncio.Event) -> None:
    registry = CollectorRegistry()
    async with open_client(options.kubeconfig) as client:
        reached = require_reachable(client, what_for="listing nodes", path=paths.NODES, limit="1")
        if await work_or_stop(reached, stop) is None:
            return
        events = EventRecorder(client, component=options.scheduler_name)
        metrics = BinderMetrics(registry)
        election = _election(options, client) if options.leader_elect else None
        scheduler = Scheduler(
            FencedClient(client, _certain(election)),
            keys=options.key_prefix,
            scheduler_name=options.scheduler_name,
            strategy=make_strategy(options.strategy, numpy.random.default_rng()),
            events=events,
            metrics=metrics,
            clocks=Clocks(),
        )
        await _Binder(options, client, election, scheduler, events, metrics, registry).run(stop)


def _election(options: BinderOptions, client: KubeClient) -> Election:
    return Election(
        client,
        namespace=options.system_namespace,
        name=LEASE,
        identity=identity(
            _unique_name(), extender_url=options.extender_url, schedulable_url=options.schedulable_url
        ),
    )


def _certain(election: Election | None) -> Callable[[], bool]:
    """Asked before every write: a process that was stopped for a while learns of it here first, and what is written last is
    written before another replica can lead."""
    if election is None:
        return lambda: True
    return lambda: election.is_certain(for_seconds=WRITE_SECONDS)


class _Binder:
    """The wired parts of one replica."""

    def __init__(
        self,
        options: BinderOptions,
        client: KubeClient,
        election: Election | None,
        scheduler: Scheduler,
        events: EventRecorder,
        metrics: BinderMetrics,
        registry: CollectorRegistry,
    ) -> None:
        self._options, self._client, self._scheduler, self._events = options, client, scheduler, events
        self._election, self._metrics, self._registry = election, metrics, registry
        self._leader = ""  # its identity
        self._informers = {
            source.name: Informer(
                client,
                source.path,
                on_change=source.hear,
                keep=slim if source.name == "pods" else whole,
            )
            for source in scheduler.sources(options.system_namespace)
        }
        self._informers["leader"] = Informer(
            client,
            paths.leases(options.system_namespace),
            params={"fieldSelector": f"metadata.name={LEASE}"},
            on_change=self._on_leader,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises LeadershipLost when another replica may have taken over."""
        admin = AdminServer(
            self._options.admin_listen,
            not_ready=self._not_ready,
            pages={"/metrics": metrics_page(self._registry)},
        )
        async with admin, self._extender(), self._schedulable_answers(), supervise() as tasks:
            for name, informer in self._informers.items():
                tasks.eternal(name, informer.run())
            tasks.eternal("events", self._events.run())
            await work_or_stop(self._synced(), stop)
            for demand in residents(self._informers["pods"].objects.values(), self._options.key_prefix):
                self._scheduler.prices.note(demand)
            spare_the_collector()
            if self._election is None:
                await self._schedule(stop)
            else:
                await self._lead(self._election, stop)

    async def _lead(self, election: Election, stop: asyncio.Event) -> None:
        """A standby keeps its mirrors warm; a leader places pods for as long as it is sure to lead."""
        try:
            await work_or_stop(election.acquire(), stop)
            if stop.is_set():
                return
            async with supervise() as tasks:
                tasks.eternal("leadership", election.hold())
                # Pods before nodes: a pod that is gone from the first list and may hold memory is in the second one's reports.
                await work_or_stop(catch_up(self._informers[name] for name in ("pods", "nodes")), stop)
                await self._schedule(stop)
        finally:
            # Also when only the answer to the write that acquired it was missing. A Lease with Bindings that
            # may still be written is left to run out, which takes longer than they can.
            if not self._scheduler.bindings.in_doubt:
                await asyncio.shield(election.release())

    async def _schedule(self, stop: asyncio.Event) -> None:
        log.info("placing pods", extra=fields(scheduler=self._options.scheduler_name))
        async with supervise() as tasks:
            tasks.eternal("scheduler", self._scheduler.run())
            await stop.wait()
            await self._scheduler.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await self._events.flush()

    @asynccontextmanager
    async def _extender(self) -> AsyncIterator[None]:
        """Answer kube-scheduler for as long as the replica runs, if that is wanted."""
        listen = self._options.extender_listen
        if listen is None:
            yield
            return
        leader = LeaderOnly(lambda: self._scheduler.leads, lambda: extender_url_of(self._leader))
        extender = Extender(self._scheduler, self._client, leader, keys=self._options.key_prefix)
        async with _serving(extender.application(), listen, "--extender-listen"):
            yield

    @asynccontextmanager
    async def _schedulable_answers(self) -> AsyncIterator[None]:
        """Answer the scaler for as long as the replica runs, if that is wanted."""
        listen = self._options.schedulable_listen
        if listen is None:
            yield
            return
        leader = LeaderOnly(lambda: self._scheduler.leads, lambda: schedulable_url_of(self._leader))
        callers = Callers(self._client, self._options.system_namespace, time.monotonic)
        api = SchedulableApi(self._scheduler, self._metrics, leader, callers, keys=self._options.key_prefix)
        async with _serving(api.application(), listen, "--schedulable-listen"):
            yield

    def _on_leader(self, change: Change) -> None:
        self._leader = (change.object.get("spec") or {}).get("holderIdentity") or ""

    async def _synced(self) -> None:
        for informer in self._informers.values():
            await informer.synced.wait()

    def _not_ready(self) -> str | None:
        """A standby is ready: it can take over."""
        missing = [name for name, informer in self._informers.items() if not informer.synced.is_set()]
        return f"not mirrored yet: {', '.join(missing)}" if missing else None


@asynccontextmanager
async def _serving(application: web.Application, listen: Endpoint, option: str) -> AsyncIterator[None]:
    """Raises CannotStart when the port is taken."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        with starting(option, listen):
            await web.TCPSite(runner, listen.host, listen.port).start()
        yield
    finally:
        await runner.cleanup()


def _unique_name() -> str:
    """Of each life of each replica: a restarted one must not pass for its predecessor."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
