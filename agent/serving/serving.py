"""The serving side of a node, wired."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agent.admission import Admission
from agent.repository import Repository
from agent.serving.controller import Reported, SlotController
from agent.serving.crash_recorder import CrashRecorder
from agent.serving.lifecycle import Lifecycle
from agent.serving.load_call import Gateway, GpuFacts, LoadCall, UnloadCall
from agent.serving.load_queue import LoadQueue
from agent.serving.outcomes import Outcomes
from agent.serving.reconcile import Reconciler
from agent.serving.restart import RestartFile, TritonRestarts
from agent.serving.slots import Slots
from agent.serving.triton_sync import TritonSync
from berth.contract.report import GpuReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What serving needs of the rest of the node. `gpu_reports`: the GPUs as they are now; raises GpusUnknown."""

    triton: TritonSync
    gpus: GpuFacts
    gpu_reports: Callable[[], Iterable[GpuReport]]
    gateway: Gateway
    reported: Reported


class Serving:
    def __init__(
        self,
        slots: Slots,
        repository: Repository,
        admission: Admission,
        ports: Ports,
        *,
        crashes: CrashRecorder,
        outcomes: Outcomes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        times, admin = slots.times, ports.triton.admin
        self.controller = SlotController(
            slots,
            ports.triton,
            LoadQueue(slots, crashes, ports.gpu_reports),
            loads=LoadCall(admin, ports.gpus, repository, timeout_seconds=times.load_timeout),
            unloads=UnloadCall(admin, ports.gateway, timeout_seconds=times.unload_timeout),
            crashes=crashes,
            outcomes=outcomes,
            reported=ports.reported,
        )
        self.lifecycle = Lifecycle(
            slots, self.controller, repository, admission, crashes=crashes, outcomes=outcomes
        )
        self.restarts = TritonRestarts(
            RestartFile(repository.root), slots, ports.triton, crashes, outcomes.events
        )
        self.reconciler = Reconciler(
            models=slots.models,
            repository=repository,
            lifecycle=self.lifecycle,
            controller=self.controller,
            restarts=self.restarts,
            gate=slots.gate,
            clock=clock,
        )
