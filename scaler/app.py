"""The scaler's composition root: watches, leadership, what a leader does, and the order in which it ends."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from berth.contract.endpoint import Endpoint
from berth.kube import paths
from berth.kube.client import WRITE_SECONDS, KubeClient, open_client, require_reachable
from berth.kube.election import Election, LeadershipLost, Predecessor
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
from scaler.control_loop import Binder, Clock, ControlLoop
from scaler.core.actions import NoRecord, Record
from scaler.core.cache import Cache
from scaler.core.scaler import Scaler
from scaler.export.exporters import Exporters, tls_of
from scaler.go import SECOND_NS
from scaler.metrics import ScalerMetrics
from scaler.recorder import Recorder
from scaler.route import Route
from scaler.schedulable import BinderClient
from scaler.scrape import Scraper, scraping_session
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
            while not stop.is_set():
                replica = Replica(options, config, client, binder, record)
                await replica.run(stop)
                config = replica.config


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
        self._options, self._client, self._record = options, client, record
        self._since = time.monotonic()
        self.config = config
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._metrics = ScalerMetrics(self._registry)
        self._events = EventRecorder(client, component="berth-scaler")
        self._clock = Clock()
        self._cache = Cache(config.defaults, options.key_prefix)
        self._core = Scaler(self._cache, self._clock(), record)
        self._writer = Writer(client, options.key_prefix, self._metrics, self._may_write)
        self._loop = ControlLoop(self._core, self._writer, binder, self._events, self._metrics, self._clock)
        self._leader = self._own = ""
        self._election: Election | None = None
        self._regained, self._has_begun = asyncio.Event(), False
        self._route = Route(
            self._cache,
            self._core,
            put=self._writer.put,
            act=self._loop.act,
            leader=self._other_leader,
            clock_ns=self._clock,
        )
        self._loop.switched = self._route.switched
        self._attendance = self._route.stream = Attendance(
            self._route,
            TokenCallers(client, system_namespace=options.system_namespace),
            self._route.board.activators,
            self._route.sources,
            clock_ns=self._clock,
        )
        self._watch = Watch(
            client,
            self._cache,
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
        self._exporters = Exporters(
            options, self._core, client, leader=lambda: self._leader.rpartition(":")[0].strip("[]")
        )
        self._loop.decided = self._exporters.look
        self._route.held = lambda model: self._exporters.look((model,))
        self._metrics.follow(
            self._core,
            writes_waiting=lambda: self._writer.waiting,
            binder_silent_seconds=lambda: self._core.binder_silent_ns / SECOND_NS,
            attendance=self._attendance,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, or until another has led after this one: what was known of the models is then of another time, and
        a new Replica begins as a standby does."""
        admin = AdminServer(
            self._options.admin_listen,
            not_ready=self._not_ready,
            pages={"/metrics": metrics_page(self._registry), **self._exporters.pages()},
        )
        async with (
            admin,
            serving(self._attendance, self._options.attend_listen) as port,
            supervise() as tasks,
        ):
            for name, informer in self._informers().items():
                tasks.eternal(name, informer.run())
            tasks.eternal("events", self._events.run())
            tasks.eternal("figures", self._exporters.run())
            if self._options.config is not None:
                refused = self._metrics.config_refused.set
                watch = ConfigMapWatch(self._options.config, self.config, self._configure, refused)
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
        self.config = config
        self._record.configured(config.data)
        self._cache.configure(config.defaults)

    # Leadership.

    async def _elect(self, port: int, stop: asyncio.Event) -> None:
        """A standby keeps its mirrors warm; a leader scales for as long as it is sure to lead."""
        name = identity(Endpoint(self._options.attend_listen.host, port), self._options.pod_uid)
        self._own = address_of(name)
        election = Election(
            self._client,
            namespace=self._options.system_namespace,
            name=LEASE,
            identity=name,
            predecessor=Predecessor(
                lambda holder: is_predecessor(holder, name, self._options.pod_uid), self._since
            ),
        )
        self._election = election
        ended = asyncio.Event()
        try:
            await work_or_stop(election.acquire(), stop)
            if stop.is_set():
                return
            async with supervise() as tasks:
                tasks.eternal("leadership", self._stay(election, ended))
                tasks.eternal("resume", self._resume_each_time(election))
                tasks.eternal("stop", _pass_on(stop, ended))
                await self._lead(ended, election.is_certain)
        finally:
            # A Lease with writes that may still be carried out is left to run out, which takes longer than they can.
            await self._writer.close()
            if not self._writer.in_doubt:
                await asyncio.shield(election.release())

    def _may_write(self) -> bool:
        """Asked before every write: a process that was stopped for a while learns of it here first, and what is written
        last is written before anybody else can lead."""
        return self._election is None or self._election.is_certain(for_seconds=WRITE_SECONDS)

    async def _stay(self, election: Election, ended: asyncio.Event) -> None:
        """Lead for as long as nobody else has. Without the API server nobody can: the load is followed and decided by, and
        nothing is written until the Lease is renewed."""
        while True:
            try:
                await election.hold()
            except LeadershipLost as error:
                log.warning("leadership lost: deciding on, writing nothing", extra=fields(reason=str(error)))
            self._pause()
            if not await election.regain():
                log.warning("another scaler leads: standing by", extra=fields(lease=LEASE))
                ended.set()
                await asyncio.Event().wait()
            self._regained.set()

    async def _resume_each_time(self, election: Election) -> None:
        while True:
            await self._regained.wait()
            self._regained.clear()
            await self._catch_up()
            if self._has_begun and election.is_certain():
                log.info("leading again", extra=fields(models=len(self._cache.deployments)))
                self._begin(self._route.resume)

    def _pause(self) -> None:
        self._metrics.leader.set(0)
        self._loop.acts = False
        self._writer.discard()
        self._route.end()
        self._core.pause()

    def _begin(self, lead: Callable[[int], None]) -> None:
        """`lead`: of the routes."""
        now_ns = self._clock()
        self._metrics.leader.set(1)
        self._loop.acts = self._has_begun = True
        self._core.resume(now_ns)
        first = self._core.step(now_ns)
        lead(now_ns)
        self._loop.act(first)

    async def _lead(self, ended: asyncio.Event, is_certain: Callable[[], bool] = lambda: True) -> None:
        await work_or_stop(self._catch_up(), ended)
        if ended.is_set():
            return
        log.info("scaling models", extra=fields(models=len(self._cache.deployments)))
        self._begin(self._route.begin)
        if not is_certain():  # lost meanwhile
            self._pause()
        try:
            async with scraping_session() as session, self._exporters.leading(), supervise() as tasks:
                scraper = Scraper(session, self._watch.gateways, self._loop.heard, self._metrics)
                tasks.eternal("scrape", scraper.run())
                tasks.eternal("routes", self._route.run())
                tasks.eternal("decisions", self._loop.run())
                await ended.wait()
        finally:
            self._metrics.leader.set(0)
            self._route.end()
        await self._writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._events.flush()

    async def _catch_up(self) -> None:
        await catch_up(self._watch.informers[name] for name in _CAUGHT_UP)

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


def identity(attend: Endpoint, pod_uid: str = "") -> str:
    """Unique for each life of each replica; ends in where its activators reach it, after an @, where that is told."""
    lives_in = pod_uid.replace("-", "") or str(os.getpid())
    name = f"{socket.gethostname()}-{lives_in}-{secrets.token_hex(4)}"
    return name if attend.host in ("0.0.0.0", "::", "") else f"{name}@{attend}"  # noqa: S104


def is_predecessor(holder: str, own: str, pod_uid: str) -> bool:
    """Whether a holder was the scaler of this pod before this one. A kubelet starts a container again only when the
    one before has ended; without the pod's uid nobody knows."""
    return bool(pod_uid) and holder != own and _life(holder) == _life(own)


def _life(identity: str) -> str:
    return identity.partition("@")[0].rpartition("-")[0]


async def _pass_on(stop: asyncio.Event, ended: asyncio.Event) -> None:
    await stop.wait()
    ended.set()
    await asyncio.Event().wait()


def address_of(identity: str) -> str:
    return identity.partition("@")[2]
