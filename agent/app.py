"""The agent's composition root: what is made of what, what runs, and in which order it ends."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from agent.admission import CodeGate, NodeRules
from agent.api import NodeAgentApi, serve
from agent.auth import Authenticator, PodGuard, TokenAuthenticator, TrustingAuthenticator
from agent.cold_starts import ColdStarts
from agent.config import DEFAULT_CAPABILITIES, AgentOptions
from agent.gateway_link import GatewayLink, NoGateway
from agent.gpu_facts import GpuFacts, OtherUse, gpu_reports
from agent.gpus import Gpus, NoGpus
from agent.heartbeat import AgentHeartbeat
from agent.keys import read_ticket_secret
from agent.metrics import AgentMetrics
from agent.mock_gpus import MockGpus
from agent.models import Models
from agent.nvml import NvmlGpus, NvmlMissing
from agent.pods import note_pod
from agent.replicas import LimitsFile, Replicas
from agent.reporter import Reporter, last_report
from agent.repository import Repository, RepositoryUnusable
from agent.serving.journal import Journal
from agent.serving.lifecycle import Lifecycle
from agent.serving.reconcile import Reconciler
from agent.serving.restart import RestartFile
from berth.contract.backends import backend_name
from berth.contract.errors import InvalidValue
from berth.contract.gateway import TICKET_BYTES
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import agent_lease_name, agent_lease_namespace
from berth.contract.report import GpuReport, NodeReport, TritonReport
from berth.kube import paths
from berth.kube.client import JsonObject, KubeClient, open_client, require_reachable
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, Informer
from berth.kube.lease import Heartbeat
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.runtime.tasks import Supervisor, first_of, in_thread, repeat, supervise, work_or_stop
from berth.triton.admin import TritonAdmin, open_admin
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys

log = logging.getLogger(__name__)

SUMMARY = "Publish a node's GPU memory, and load and unload the models of its pods in its Triton."
# Calls in progress get this long when the agent ends; a stage that is cut off is begun again by its loader.
_DRAIN_SECONDS = 5.0
_FLUSH_SECONDS = 2.0
# In heartbeats: an annotation that another writer has changed is restored after this time.
_VERIFY_EVERY = 3
# A driver that is busy takes seconds; a call that has been away for so long does not come back.
_HANG_SECONDS = 120.0


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth agent`."""
    return run_process("agent", SUMMARY, AgentOptions, main, argv)


async def main(options: AgentOptions, stop: asyncio.Event) -> None:
    repository = Repository(options.repository)
    try:
        await asyncio.to_thread(repository.open)
    except RepositoryUnusable as error:
        raise CannotStart(f"--repository: {error}") from error
    keys = _triton_keys(options.triton_keys)
    models = Models()
    gpus = GpuFacts(_gpus(options.nvml, models), lambda: models.residency)
    async with (
        open_client(options.kubeconfig) as client,
        open_admin(options.triton_grpc, keys or TritonKeys("none", "none")) as triton,
    ):
        node = paths.node(options.node_name)
        reached = require_reachable(client, what_for=f"--node-name {options.node_name}", path=node)
        found = await work_or_stop(reached, stop)
        if found is None:
            return
        if (said := last_report(found, options.key_prefix)) is not None:
            models.remember(said)
        await _run(_Parts(options, client, triton, repository, models, gpus), stop)


class _Parts:
    """What the agent is made of, wired."""

    def __init__(
        self,
        options: AgentOptions,
        client: KubeClient,
        triton: TritonAdmin,
        repository: Repository,
        models: Models,
        gpus: GpuFacts,
    ) -> None:
        self.options, self.models, self.gpus, self._client = options, models, gpus, client
        self.registry = CollectorRegistry()
        self.metrics = AgentMetrics(self.registry)
        self.node = NodeName(options.node_name)
        self._other_use = OtherUse()
        self._backends = _backends(options.backend_directory)
        self.events = EventRecorder(client, component="berth-agent", host=self.node)
        self.reporter = Reporter(
            client,
            node=self.node,
            keys=options.key_prefix,
            build=self.build_report,
            readings=lambda: gpus.readings,
            metrics=self.metrics,
            on_node=self._lift_quarantine,
        )
        rules = NodeRules(frozenset(self._capabilities()), options.code)
        self.gate = CodeGate(options.code)
        self._limits_file = LimitsFile(options.repository)
        self._limits_kept = self._limits_file.read()
        secret = _ticket_secret(options.triton_keys)
        self.replicas = Replicas(models, secret, gpus.listed, self._limits_kept)
        self.limits_changed = asyncio.Event()
        control = options.gateway_control
        self.link = None if control is None else GatewayLink(control, self.replicas.current, self._on_death)
        self.lifecycle = Lifecycle(
            models=models,
            repository=repository,
            triton=triton,
            gpus=gpus,
            room=self._room,
            reported=self.reporter,
            events=self.events,
            gateway=self.link or NoGateway(),
            metrics=self.metrics,
            rules=rules,
            gate=self.gate,
            journal=Journal(options.repository),
            restart_file=RestartFile(options.repository),
            lift_key=options.key_prefix.lift_quarantine,
            load_timeout_seconds=options.load_timeout,
            unload_timeout_seconds=options.unload_timeout,
        )
        self.reconciler = Reconciler(
            models=models, repository=repository, lifecycle=self.lifecycle, gate=self.gate
        )
        self.pods = Informer(
            client,
            paths.PODS,
            params={"fieldSelector": f"spec.nodeName={self.node}"},
            on_change=self._on_pod,
        )
        lease = Heartbeat(
            client,
            namespace=agent_lease_namespace(options.system_namespace),
            name=agent_lease_name(self.node),
            holder=self.node,
            node=self.node,
            duration_seconds=round(4 * options.heartbeat_seconds),
        )
        self.heartbeat = AgentHeartbeat(
            lease,
            self.reporter,
            keys=options.key_prefix,
            patience_seconds=4 * options.heartbeat_seconds,
        )
        self.api = NodeAgentApi(
            authenticator=_authenticator(options.auth, client, models),
            guard=PodGuard(client, node=self.node, keys=options.key_prefix),
            models=models,
            repository=repository,
            lifecycle=self.lifecycle,
            readings=gpus.listed,
            replicas=self.replicas,
            gateway=options.gateway,
            on_limits=self._on_limits,
            metrics=self.metrics,
            rules=rules,
            gate=self.gate,
            max_model_bytes=options.max_model_bytes,
            keep_free=options.keep_free,
        )

    def build_report(self) -> NodeReport:
        """The node as it is now."""
        options = self.options
        version = self.reconciler.triton_version
        return NodeReport(
            server=options.server_name,
            capabilities=self._capabilities(),
            triton=TritonReport(version is not None, version or "", self._backends),
            gpus=self._gpu_reports(),
            models=tuple(sorted((model.report() for model in self.models), key=lambda m: m.pod_uid)),
            code=self.gate.report(),
        )

    def _gpu_reports(self) -> tuple[GpuReport, ...]:
        return gpu_reports(
            self.gpus,
            self.models,
            self._other_use,
            busy=self.lifecycle.busy_gpus(),
            headroom_bytes=self.options.headroom,
        )

    async def _lift_quarantine(self, node: JsonObject) -> None:
        """Do once what the operator's annotation asks, and take it away: it is a command, not a state."""
        key, metadata = self.options.key_prefix.lift_quarantine, node["metadata"]
        wish = (metadata.get("annotations") or {}).get(key)
        if wish is None or not await self.lifecycle.lift(wish):
            return
        # With the version: a value that was written meanwhile is another command.
        done = {"resourceVersion": metadata["resourceVersion"], "annotations": {key: None}}
        await self._client.patch(paths.node(self.node), {"metadata": done})

    def _room(self) -> tuple[GpuReport, ...]:
        """Raises GpusUnknown while no GPU has ever been seen."""
        self.gpus.listed()
        return self._gpu_reports()

    def not_ready(self) -> str | None:
        """Why the agent is not ready, for `/readyz`."""
        if not self.pods.synced.is_set():
            return "the node's pods are not known yet"
        if self.reconciler.triton_version is None:
            return "Triton does not answer"
        if self.reporter.trouble:
            return f"the report cannot be written: {self.reporter.trouble}"
        return None if self.reporter.has_written else "no report has been written"

    def not_alive(self) -> str | None:
        """Why the agent must be restarted, for `/livez`."""
        seconds = self.gpus.hanging_seconds
        return f"NVML has not answered for {seconds:.0f} s" if seconds > _HANG_SECONDS else None

    async def look_at_gpus(self) -> None:
        await self.gpus.refresh()
        if self.gpus.have_turned():
            self.models.touch()  # clients that watch a model on such a GPU must be notified
        self.reporter.wake.set()

    async def reconcile(self) -> None:
        before = self.reconciler.triton_version
        await self.reconciler.step()
        if self.reconciler.triton_version != before:
            self.reporter.wake.set()  # the binder places nothing here before the report says that Triton is ready
        if self.gpus.residency != self.models.residency:
            await self.look_at_gpus()
        self.heartbeat.passed("reconcile")

    async def report(self) -> None:
        try:
            await self.reporter.step()
        finally:
            self.heartbeat.passed("report")  # also where it may not write: the heartbeat says so

    def count_error(self, loop: str) -> Callable[[Exception], None]:
        def count(error: Exception) -> None:
            self.metrics.loop_failed(loop)
            if isinstance(error, TritonError):
                self.heartbeat.passed(
                    loop
                )  # the loop works; it is Triton that does not, and the report says so
                self.reporter.wake.set()

        return count

    async def keep_limits(self) -> None:
        limits = dict(self.replicas.limits())
        if limits != self._limits_kept:
            await in_thread(self._limits_file.write, limits.items())
            self._limits_kept = limits

    def _on_limits(self) -> None:
        self.limits_changed.set()
        if self.link is not None:
            self.link.wake.set()

    def _on_death(self, suspects: Sequence[PodUid]) -> None:
        self.lifecycle.note_suspects(suspects)

    def _capabilities(self) -> tuple[str, ...]:
        base = self.options.capabilities or self._backends or DEFAULT_CAPABILITIES
        return tuple(sorted({backend_name(one) for one in (*base, *self.options.extra_capabilities)}))

    def _on_pod(self, change: Change) -> None:
        note_pod(self.models, change, self.options.key_prefix)


async def _run(parts: _Parts, stop: asyncio.Event) -> None:
    options = parts.options
    await parts.gpus.refresh()
    await parts.reconciler.adopt_repository()
    admin = AdminServer(
        options.admin_listen,
        not_ready=parts.not_ready,
        not_alive=parts.not_alive,
        pages={"/metrics": metrics_page(parts.registry)},
    )
    async with admin, supervise() as tasks:
        tasks.eternal("pods", parts.pods.run())
        tasks.eternal("events", parts.events.run())
        # Whose model is whose is not known before the pods are: until then nothing is unloaded or served.
        await first_of(parts.pods.synced, stop)
        if not parts.pods.synced.is_set():
            return  # stopped before: every model would look unowned
        server = await serve(parts.api, options.listen)
        changes = asyncio.Event()
        wakes = [changes, parts.reporter.wake]
        if parts.link is not None:
            tasks.eternal("gateway", parts.link.run())
            wakes.append(parts.link.wake)
        tasks.eternal("changes", _follow(parts.models, ColdStarts(parts.metrics.cold_start), wakes))
        _start_loops(parts, tasks, changes)
        log.info("serving", extra=fields(node=parts.node, listen=options.listen))
        await stop.wait()
        await server.stop(_DRAIN_SECONDS)
        await parts.lifecycle.close()
        await _bounded(parts.events.flush(), seconds=_FLUSH_SECONDS)


def _start_loops(parts: _Parts, tasks: Supervisor, changes: asyncio.Event) -> None:
    options = parts.options
    poll = options.poll_seconds
    loops = (
        ("gpus", parts.look_at_gpus, poll, None),
        ("reconcile", parts.reconcile, poll, changes),
        ("report", parts.report, poll, parts.reporter.wake),
        ("heartbeat", parts.heartbeat.beat, options.heartbeat_seconds, parts.reporter.trouble_changed),
        ("limits", parts.keep_limits, _VERIFY_EVERY * options.heartbeat_seconds, parts.limits_changed),
        ("verify", parts.reporter.verify, _VERIFY_EVERY * options.heartbeat_seconds, None),
    )
    for name, step, interval, wake in loops:
        backoff = Backoff(initial_seconds=0.2, cap_seconds=poll)
        work = repeat(
            step,
            name=name,
            interval_seconds=interval,
            wake=wake,
            backoff=backoff,
            on_error=parts.count_error(name),
        )
        tasks.eternal(name, work)


async def _follow(models: Models, cold_starts: ColdStarts, wakes: Sequence[asyncio.Event]) -> None:
    """Pass every change of the table on to the loops that live by it."""
    while True:
        change = models.next_change()
        cold_starts.look(models, time.monotonic())
        for wake in wakes:
            wake.set()
        await change.wait()


async def _bounded(work: Awaitable[None], *, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


def _authenticator(kind: str, client: KubeClient, models: Models) -> Authenticator:
    if kind == "token":
        return TokenAuthenticator(client, knows=lambda uid: models.get(uid) is not None)
    log.warning(
        "--auth none: any client that reaches the agent's API can stage, load and unload every model of this node"
    )
    return TrustingAuthenticator()


def _ticket_secret(directory: Path | None) -> bytes:
    """Without one that is kept, a restart of the agent ends every ticket."""
    if directory is None:
        return secrets.token_bytes(TICKET_BYTES)
    try:
        return read_ticket_secret(directory)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error


def _triton_keys(directory: Path | None) -> TritonKeys | None:
    if directory is None:
        log.warning("no --triton-keys: any client that reaches Triton's ports can use and change every model")
        return None
    try:
        return TritonKeys.read(directory)
    except InvalidValue as error:
        raise ConfigError(f"--triton-keys: {error}") from error


def _gpus(choice: str, models: Models) -> Gpus:
    kind, _, file = choice.partition(":")
    if kind == "mock" and file:
        try:
            return MockGpus(Path(file), models.residents)
        except InvalidValue as error:
            raise ConfigError(f"--nvml: {error}") from error
    if choice == "none":
        return NoGpus()
    if choice == "auto":
        return NvmlGpus()  # without a driver its facts are unknown, and the node takes no models
    if choice == "nvml":
        try:
            return NvmlGpus.open()
        except NvmlMissing as error:
            raise CannotStart(f"--nvml nvml: {error}") from error
    raise ConfigError(f"--nvml: {choice!r} is not one of auto, nvml, none, mock:FILE")


def _backends(directory: Path | None) -> tuple[str, ...]:
    if directory is None:
        return ()
    try:
        return tuple(sorted(entry.name for entry in directory.iterdir() if entry.is_dir()))
    except OSError as error:
        raise ConfigError(f"--backend-directory: {directory}: {error.strerror}") from error
