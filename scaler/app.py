"""The scaler's composition root."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from berth.kube import paths
from berth.kube.client import KubeClient, open_client, require_reachable
from berth.kube.events import EventRecorder
from berth.kube.informer import Informer
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.errors import ConfigError
from berth.runtime.process import spare_the_collector
from berth.runtime.tasks import supervise, work_or_stop
from scaler.activation.authentication import TokenAuthenticator
from scaler.activation.control_server import ControlServer, serving
from scaler.activation.routes import RouteReconciler
from scaler.activation.sessions import Sessions
from scaler.config import ScalerOptions
from scaler.config_map import ConfigMap, ConfigMapWatch, read_config, warn
from scaler.control_loop import Binder, Clock, ControlLoop
from scaler.core.actions import NoRecord, Record
from scaler.core.cache import Cache
from scaler.core.scaler import Scaler
from scaler.export.exporters import Exporters, tls_of
from scaler.go import SECOND_NS
from scaler.leader import ScalingLeader
from scaler.leadership import Leadership
from scaler.metrics import ScalerMetrics
from scaler.recorder import Recorder
from scaler.route_controller import RouteController
from scaler.schedulable import BinderClient
from scaler.watch import Watch
from scaler.writer import Writer


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
    """The wired parts of one life of one replica. Its mirrors are warm whether it leads or not; the rest is a leader's."""

    def __init__(
        self,
        options: ScalerOptions,
        config: ConfigMap,
        client: KubeClient,
        binder: Binder,
        record: Record,
    ) -> None:
        self._options, self._record, self.config = options, record, config
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._metrics = metrics = ScalerMetrics(self._registry)
        self._leadership = leadership = Leadership(client, options)
        self._events = events = EventRecorder(client, component="berth-scaler")
        clock = Clock()
        self._cache = cache = Cache(config.defaults, options.key_prefix)
        core = Scaler(cache, clock(), record)
        self._exporters = exporters = Exporters(options, core, client, leader=lambda: leadership.host)
        writer = Writer(client, options.key_prefix, metrics, leadership.may_write)
        loop = ControlLoop(
            core,
            writer,
            binder,
            events,
            metrics,
            clock,
            on_route_change=lambda action: routes.switched(action),
            on_decisions=exporters.look,
        )
        reconciler = RouteReconciler(began_ns=clock())
        sessions = Sessions(reconciler.activators, clock)
        routes = RouteController(
            cache,
            core,
            reconciler,
            sessions,
            put=writer.put,
            act=loop.act,
            on_report=lambda model: exporters.look((model,)),
            leader=lambda: leadership.other,
            clock_ns=clock,
        )
        self._control_server = ControlServer(
            routes,
            TokenAuthenticator(client, system_namespace=options.system_namespace),
            reconciler.activators,
            sessions,
            clock_ns=clock,
        )
        self._watch = watch = Watch(
            client, cache, routes, system_namespace=options.system_namespace, clock_ns=clock
        )
        self._leader = ScalingLeader(watch, loop, routes, writer, exporters, events, metrics)
        metrics.follow(
            core,
            writes_waiting=lambda: writer.waiting,
            binder_silent_seconds=lambda: core.binder_silent_ns / SECOND_NS,
            control_server=self._control_server,
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
            serving(self._control_server, self._options.control_listen) as port,
            supervise() as tasks,
        ):
            for name, informer in self._informers().items():
                tasks.eternal(name, informer.run())
            tasks.eternal("events", self._events.run())
            tasks.eternal("figures", self._exporters.run())
            if self._options.config is not None:
                invalid = self._metrics.config_refused.set
                watch = ConfigMapWatch(self._options.config, self.config, self._configure, invalid)
                tasks.eternal("config", watch.run())
            await work_or_stop(self._synced(), stop)
            spare_the_collector()
            await self._leadership.run(self._leader, port, stop)

    def _informers(self) -> dict[str, Informer]:
        own = {"leader": self._leadership.lease} if self._options.leader_elect else {}
        return {**self._watch.informers, **own}

    def _configure(self, config: ConfigMap) -> None:
        """The next decisions go by it, whether this replica leads or not."""
        self.config = config
        self._record.configured(config.data)
        self._cache.configure(config.defaults)

    async def _synced(self) -> None:
        for informer in self._informers().values():
            await informer.synced.wait()

    def _not_ready(self) -> str | None:
        """A standby is ready: it can take over."""
        missing = [name for name, one in self._informers().items() if not one.synced.is_set()]
        return f"not mirrored yet: {', '.join(missing)}" if missing else None
