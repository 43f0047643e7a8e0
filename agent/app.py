"""The agent's composition root: what is made of what, what runs, and in which order it ends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from agent import parts
from agent.access import Access
from agent.admission import Admission, CodeGate, NodeRules
from agent.api import NodeAgentApi, serve
from agent.auth import PodGuard
from agent.cold_starts import ColdStarts
from agent.config import AgentOptions
from agent.gateway_access import GatewayAccess
from agent.gateway_link import GatewayLink, NoGateway
from agent.gpu_facts import GpuFacts
from agent.heartbeat import AgentHeartbeat
from agent.loops import ErrorCounter, GpuLoop, LimitsLoop, Readiness, ReconcileLoop, ReportLoop
from agent.metrics import AgentMetrics
from agent.models import Models
from agent.node_report import NodeReporting
from agent.pods import note_pod
from agent.quarantine_annotation import QuarantineAnnotation
from agent.replicas import LimitsFile, Replicas
from agent.reporter import Reporter, last_report
from agent.repository import Repository, RepositoryUnusable
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.journal import Journal
from agent.serving.outcomes import Outcomes
from agent.serving.serving import Ports, Serving
from agent.serving.slots import Slots, Times
from agent.serving.triton_sync import TritonSync
from agent.stage import StageLimits, Stager
from berth.contract.ids import NodeName
from berth.contract.keys import agent_lease_name, agent_lease_namespace
from berth.kube import paths
from berth.kube.client import KubeClient, open_client, require_reachable
from berth.kube.events import EventRecorder
from berth.kube.informer import Informer
from berth.kube.lease import Heartbeat
from berth.runtime.admin import AdminServer
from berth.runtime.admin.prometheus import metrics_page
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.runtime.tasks import Supervisor, first_of, repeat, supervise, work_or_stop
from berth.triton.admin import TritonAdmin, open_admin
from berth.triton.keys import TritonKeys

log = logging.getLogger(__name__)

SUMMARY = "Publish a node's GPU memory, and load and unload the models of its pods in its Triton."
# Calls in progress get this long when the agent ends; a stage that is cut off is begun again by its loader.
_DRAIN_SECONDS = 5.0
_FLUSH_SECONDS = 2.0
# In heartbeats: an annotation that another writer has changed is restored after this time.
_VERIFY_EVERY = 3


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth agent`."""
    return run_process("agent", SUMMARY, AgentOptions, main, argv)


async def main(options: AgentOptions, stop: asyncio.Event) -> None:
    repository = Repository(options.repository)
    try:
        await asyncio.to_thread(repository.open)
    except RepositoryUnusable as error:
        raise CannotStart(f"--repository: {error}") from error
    keys = parts.triton_keys(options.triton_keys)
    models = Models()
    gpus = GpuFacts(parts.gpus(options.nvml, models), lambda: models.residency)
    async with (
        open_client(options.kubeconfig) as client,
        open_admin(options.triton_grpc, keys or TritonKeys("none", "none")) as admin,
    ):
        node = paths.node(options.node_name)
        reached = require_reachable(client, what_for=f"--node-name {options.node_name}", path=node)
        found = await work_or_stop(reached, stop)
        if found is None:
            return
        if (last := last_report(found, options.key_prefix)) is not None:
            models.remember(last)
        agent = _assembled(options, client, admin, repository, models, gpus)
        await gpus.refresh()
        await _run(agent, options, stop)


@dataclass(frozen=True, slots=True)
class _Loop:
    """`step` runs after each interval, and as soon as `wake` is set."""

    name: str
    step: Callable[[], Awaitable[None]]
    interval_seconds: float
    wake: asyncio.Event | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """What runs. `tasks`: from the moment that the node's pods are known."""

    admin: AdminServer
    pods: Informer
    events: EventRecorder
    api: NodeAgentApi
    serving: Serving
    tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]]
    loops: tuple[_Loop, ...]
    on_error: ErrorCounter


def _assembled(
    options: AgentOptions,
    client: KubeClient,
    admin: TritonAdmin,
    repository: Repository,
    models: Models,
    gpus: GpuFacts,
) -> _Agent:
    """Each part after those that it depends on."""
    node, keys = NodeName(options.node_name), options.key_prefix
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    events = EventRecorder(client, component="berth-agent", host=node)
    pods = Informer(
        client,
        paths.PODS,
        params={"fieldSelector": f"spec.nodeName={node}"},
        on_change=lambda change: note_pod(models, change, keys),
    )

    # What Triton holds, and what the node's report says of it.
    facts = parts.node_facts(options)
    admission = Admission(NodeRules(frozenset(facts.capabilities), options.code))
    gate = CodeGate(options.code)
    times = Times(load_timeout=options.load_timeout, unload_timeout=options.unload_timeout)
    slots = Slots(models, gate, times)
    triton = TritonSync(admin, repository)
    outcomes = Outcomes(models, metrics, events)
    crashes = CrashRecorder(Journal(options.repository), outcomes, lift_key=keys.lift_quarantine)
    view = NodeReporting(facts, slots, gpus, triton)
    annotation = QuarantineAnnotation(client, node=node, key=keys.lift_quarantine, crashes=crashes)
    reporter = Reporter(
        client,
        node=node,
        keys=keys,
        build=view.report,
        readings=lambda: gpus.readings,
        metrics=metrics,
        on_node=annotation.take,
    )

    # The gateway, and what loads and unloads.
    limits_file = LimitsFile(options.repository)
    kept_limits = limits_file.read()
    replicas = Replicas(models, parts.ticket_secret(options.triton_keys), gpus.listed, kept_limits)
    control = options.gateway_control
    link = None if control is None else GatewayLink(control, replicas.current, crashes.note_requests)
    ports = Ports(
        triton=triton,
        gpus=gpus,
        gpu_reports=view.gpu_reports,
        gateway=link or NoGateway(),
        reported=reporter,
    )
    serving = Serving(slots, repository, admission, ports, crashes=crashes, outcomes=outcomes)

    # Which event starts which loop.
    changes, limits_changed = asyncio.Event(), asyncio.Event()
    link_wakes = [] if link is None else [link.wake]
    cold_starts = ColdStarts(metrics.cold_start)
    tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "changes": lambda: _follow(models, cold_starts, [changes, reporter.wake, *link_wakes])
    }
    if link is not None:
        tasks["gateway"] = link.run

    lease = Heartbeat(
        client,
        namespace=agent_lease_namespace(options.system_namespace),
        name=agent_lease_name(node),
        holder=node,
        node=node,
        duration_seconds=round(4 * options.heartbeat_seconds),
    )
    heartbeat = AgentHeartbeat(lease, reporter, keys=keys, patience_seconds=4 * options.heartbeat_seconds)
    gpu_loop = GpuLoop(gpus, models, reporter)
    reconcile = ReconcileLoop(serving.reconciler, triton, gpu_loop, reporter, heartbeat)
    report = ReportLoop(reporter, heartbeat)
    limits = LimitsLoop(replicas, limits_file, kept_limits)
    poll, beat = options.poll_seconds, options.heartbeat_seconds
    loops = (
        _Loop("gpus", gpu_loop.step, poll),
        _Loop("reconcile", reconcile.step, poll, changes),
        _Loop("report", report.step, poll, reporter.wake),
        _Loop("heartbeat", heartbeat.beat, beat, reporter.failure_changed),
        _Loop("limits", limits.step, _VERIFY_EVERY * beat, limits_changed),
        _Loop("verify", reporter.verify, _VERIFY_EVERY * beat),
    )

    access = Access(
        parts.authenticator(options.auth, client, models),
        PodGuard(client, node=node, keys=keys),
        models,
        gpus.listed,
    )
    stager = Stager(
        access,
        serving.lifecycle,
        repository,
        models,
        admission=admission,
        gate=gate,
        metrics=metrics,
        limits=StageLimits(max_model_bytes=options.max_model_bytes, keep_free=options.keep_free),
    )
    gateway = GatewayAccess(replicas, options.gateway, [limits_changed, *link_wakes])
    api = NodeAgentApi(access, models, repository, serving.lifecycle, stager, gateway, metrics)
    server = AdminServer(
        options.admin_listen,
        not_ready=Readiness(pods, triton, reporter).not_ready,
        not_alive=gpu_loop.not_alive,
        pages={"/metrics": metrics_page(registry)},
    )
    return _Agent(
        admin=server,
        pods=pods,
        events=events,
        api=api,
        serving=serving,
        tasks=tasks,
        loops=loops,
        on_error=ErrorCounter(metrics, reporter, heartbeat),
    )


async def _run(agent: _Agent, options: AgentOptions, stop: asyncio.Event) -> None:
    await agent.serving.reconciler.adopt_repository()
    async with agent.admin, supervise() as tasks:
        tasks.eternal("pods", agent.pods.run())
        tasks.eternal("events", agent.events.run())
        # Which model belongs to which pod is not known before the pods are: until then nothing is unloaded or served.
        await first_of(agent.pods.synced, stop)
        if not agent.pods.synced.is_set():
            return  # stopped before: every model would look unowned
        server = await serve(agent.api, options.listen)
        for name, run in agent.tasks.items():
            tasks.eternal(name, run())
        for loop in agent.loops:
            _start(loop, tasks, agent.on_error, cap_seconds=options.poll_seconds)
        log.info("serving", extra=fields(node=options.node_name, listen=options.listen))
        await stop.wait()
        await server.stop(_DRAIN_SECONDS)
        await agent.serving.lifecycle.close()
        await _bounded(agent.events.flush(), seconds=_FLUSH_SECONDS)


def _start(loop: _Loop, tasks: Supervisor, on_error: ErrorCounter, *, cap_seconds: float) -> None:
    work = repeat(
        loop.step,
        name=loop.name,
        interval_seconds=loop.interval_seconds,
        wake=loop.wake,
        backoff=Backoff(initial_seconds=0.2, cap_seconds=cap_seconds),
        on_error=on_error.of(loop.name),
    )
    tasks.eternal(loop.name, work)


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
