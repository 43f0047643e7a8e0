"""The scaler's composition root: watches, leadership, what a leader does, and the order in which it ends."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from berth.contract.endpoint import Endpoint
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, KubeClient, open_client, require_reachable
from berth.kube.election import Election
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, Informer, catch_up
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from berth.runtime.process import spare_the_collector
from berth.runtime.tasks import supervise, work_or_stop
from scaler.activation.attend import Attendance, serving
from scaler.activation.callers import TokenCallers
from scaler.config import LEASE, ScalerOptions
from scaler.config_map import ConfigMap, ConfigMapWatch, read_config, warn
from scaler.core.fleet import Fleet
from scaler.core.plan import NoRecord, Record
from scaler.core.tick import Scaler
from scaler.go import SECOND_NS
from scaler.live import Binder, Clock, Live
from scaler.metrics import ScalerMetrics
from scaler.placeable import BinderClient
from scaler.recorder import Recorder
from scaler.route import Route
from scaler.scrape import Scraper, scraping_session
from scaler.show.showing import Showing, tls_of
from scaler.watch import Watch
from scaler.writer import Writer

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 2.0
# What a leader writes by or has written, in the order in which it is listed anew.
_CAUGHT_UP = ("services", "endpointslices", "deployments", "pods")


async def main(options: ScalerOptions, stop: asyncio.Event) -> None:
    """Scale until `stop`."""
    config = read_config(options.config)
    warn(config)
    tls_of(options)  # what is wrong with it is said before anything else is tried
    async with open_client(options.kubeconfig) as client, aiohttp.ClientSession() as session:
        reached = require_reachable(client, what_for="listing Deployments", path=paths.DEPLOYMENTS, limit="1")
        if await work_or_stop(reached, stop) is None:
            return
        binder = BinderClient(session, options.binder, options.binder_token.read_text)
        with recording(options.record, config.data) as record:
            await Replica(options, config, client, binder, record).run(stop)


@contextmanager
def recording(path: Path | None, config: Mapping[str, str]) -> Iterator[Record]:
    """Raises ConfigError."""
    if path is None:
        yield NoRecord()
        return
    try:
        recorder = Recorder(path, config)
    except OSError as error:
        raise ConfigError(f"--record: {path}: {error.strerror or error}") from error
    with closing(recorder):
        yield recorder


class Replica:
    """The wired parts of one replica. Its mirrors are warm whether it leads or not; the rest is a leader's."""

    def __init__(
        self,
        options: ScalerOptions,
        config: ConfigMap,
        client: KubeClient,
        binder: Binder,
        record: Record,
    ) -> None:
        self._options, self._client, self._config, self._record = options, client, config, record
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._metrics = ScalerMetrics(self._registry)
        self._events = EventRecorder(client, component="berth-scaler")
        self._clock = Clock()
        self._fleet = Fleet(config.defaults, options.key_prefix)
        self._core = Scaler(self._fleet, self._clock(), record)
        self._writer = Writer(client, options.key_prefix, self._metrics)
        self._live = Live(self._core, self._writer, binder, self._events, self._metrics, self._clock)
        self._leader = self._own = ""
        self._route = Route(
            self._fleet,
            self._core,
            put=self._writer.put,
            act=self._live.act,
            leader=self._other_leader,
            clock_ns=self._clock,
        )
        self._live.switched = self._route.switched
        self._attendance = self._route.stream = Attendance(
            self._route,
            TokenCallers(client, system_namespace=options.system_namespace),
            self._route.board.activators,
            self._route.sources,
            clock_ns=self._clock,
        )
        self._watch = Watch(
            client,
            self._fleet,
            self._route,
            system_namespace=options.system_namespace,
            clock_ns=self._clock,
        )
        self._lease = Informer(
            client,
            paths.leases(options.system_namespace),
            params={"fieldSelector": f"metadata.name={LEASE}"},
            on_change=self._on_lease,
        )
        self._showing = Showing(
            options, self._core, client, leader=lambda: self._leader.rpartition(":")[0].strip("[]")
        )
        self._live.decided = self._showing.look
        self._route.held = lambda model: self._showing.look((model,))
        self._metrics.follow(
            self._core,
            writes_waiting=lambda: self._writer.waiting,
            binder_silent_seconds=lambda: self._core.binder_silent_ns / SECOND_NS,
            attendance=self._attendance,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. Raises LeadershipLost when another replica may have taken over."""
        admin = AdminServer(
            self._options.admin_listen,
            not_ready=self._not_ready,
            pages={"/metrics": metrics_page(self._registry), **self._showing.pages()},
        )
        async with (
            admin,
            serving(self._attendance, self._options.attend_listen) as port,
            supervise() as tasks,
        ):
            for name, informer in self._informers().items():
                tasks.eternal(name, informer.run())
            tasks.eternal("events", self._events.run())
            tasks.eternal("figures", self._showing.run())
            if self._options.config is not None:
                refused = self._metrics.config_refused.set
                watch = ConfigMapWatch(self._options.config, self._config, self._configure, refused)
                tasks.eternal("config", watch.run())
            await work_or_stop(self._synced(), stop)
            spare_the_collector()
            if self._options.leader_elect:
                await self._elect(port, stop)
            else:
                await self._lead(stop)

    def _informers(self) -> dict[str, Informer]:
        own = {"leader": self._lease} if self._options.leader_elect else {}
        return {**self._watch.informers, **own}

    def _configure(self, config: ConfigMap) -> None:
        """The next decisions go by it, whether this replica leads or not."""
        self._record.configured(config.data)
        self._fleet.configure(config.defaults)

    # Leadership.

    async def _elect(self, port: int, stop: asyncio.Event) -> None:
        """A standby keeps its mirrors warm; a leader scales for as long as it is sure to lead."""
        name = identity(Endpoint(self._options.attend_listen.host, port))
        self._own = address_of(name)
        election = Election(
            self._client,
            namespace=self._options.system_namespace,
            name=LEASE,
            identity=name,
        )
        # Asked before every write: a process that was stopped for a while learns of it here first, and what is
        # written last is written before anybody else can lead.
        self._writer.may_write = lambda: election.is_certain(for_seconds=WRITE_SECONDS)
        try:
            await work_or_stop(election.acquire(), stop)
            if stop.is_set():
                return
            async with supervise() as tasks:
                tasks.eternal("leadership", election.hold())
                await self._lead(stop)
        finally:
            # A Lease with writes that may still be carried out is left to run out, which takes longer than they can.
            await self._writer.close()
            if not self._writer.in_doubt:
                await asyncio.shield(election.release())

    async def _lead(self, stop: asyncio.Event) -> None:
        await work_or_stop(catch_up(self._watch.informers[name] for name in _CAUGHT_UP), stop)
        if stop.is_set():
            return
        log.info("scaling models", extra=fields(models=len(self._fleet.deployments)))
        self._metrics.leader.set(1)
        first = self._core.step(self._clock())
        self._route.begin(self._clock())
        self._live.act(first)
        try:
            async with scraping_session() as session, self._showing.leading(), supervise() as tasks:
                scraper = Scraper(session, self._watch.gateways, self._live.heard, self._metrics)
                tasks.eternal("scrape", scraper.run())
                tasks.eternal("routes", self._route.run())
                tasks.eternal("decisions", self._live.run())
                await stop.wait()
        finally:
            self._metrics.leader.set(0)
            self._route.end()
        await self._writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._events.flush()

    def _on_lease(self, change: Change) -> None:
        self._leader = address_of((change.object.get("spec") or {}).get("holderIdentity") or "")

    def _other_leader(self) -> str:
        """HOST:PORT; "" where none is known: one that ends is still named by its Lease, and sends nobody to itself."""
        return "" if self._leader == self._own else self._leader

    async def _synced(self) -> None:
        for informer in self._informers().values():
            await informer.synced.wait()

    def _not_ready(self) -> str | None:
        """A standby is ready: it can take over."""
        missing = [name for name, one in self._informers().items() if not one.synced.is_set()]
        return f"not mirrored yet: {', '.join(missing)}" if missing else None


def identity(attend: Endpoint) -> str:
    """Unique for each life of each replica; ends in where its activators reach it, after an @, where that is told."""
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return name if attend.host in ("0.0.0.0", "::", "") else f"{name}@{attend}"  # noqa: S104


def address_of(identity: str) -> str:
    return identity.partition("@")[2]
