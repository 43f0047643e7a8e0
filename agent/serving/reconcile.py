"""Makes what Triton holds equal to what the pods of this node want.

`plan` is pure: from the pods, the repository and Triton's index to actions. The reconciler calls it
after every change and every few seconds and carries the actions out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.admission import CodeGate
from agent.models import Model, Models, Retry
from agent.repository import Record, Repository
from agent.serving.controller import SlotController
from agent.serving.lifecycle import Lifecycle
from agent.serving.restart import TritonRestarts
from berth.contract.ids import PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.triton.admin import GONE, IndexEntry, IndexState

log = logging.getLogger(__name__)

# Between tries to load again what has failed and may not be at fault. The binder may replace the pod first.
_RETRY_INITIAL_SECONDS, _RETRY_CAP_SECONDS = 15.0, 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. A model is in one of the lists at most."""

    unload: tuple[ServerName, ...] = ()
    load: tuple[PodUid, ...] = ()
    lost: tuple[PodUid, ...] = ()
    forget: tuple[PodUid, ...] = ()


def plan(
    models: Mapping[PodUid, Model],
    records: Mapping[ServerName, Record | None],
    index: Mapping[ServerName, IndexEntry],
) -> Plan:
    """Compare what is wanted with what is there. Pure.

    - a directory, or a model in Triton, that belongs to no living pod is an orphan: unload it;
    - a living pod's staged model that Triton does not serve is to be loaded (again);
    - a living pod whose model was staged, or has served under an earlier agent, and has no files any
      more has lost it;
    - a pod that is gone and has neither files nor a model in Triton is forgotten.
    """
    owners = {
        name: model
        for name, record in records.items()
        if record is not None and (model := models.get(record.pod.uid)) and model.server_name == name
    }
    orphans = {
        name
        for name in {*records, *(name for name, entry in index.items() if not entry.is_gone)}
        if name not in owners or not owners[name].pod_lives
    }
    owned = {model.ref.uid for model in owners.values()}
    load, lost, forget = [], [], []
    for uid, model in models.items():
        if uid in owned:
            if model.pod_lives and _wants_load(model, index):
                load.append(uid)
        elif not model.pod_lives:
            if model.server_name is None or index.get(model.server_name, GONE).is_gone:
                forget.append(uid)
        elif _has_lost(model):
            lost.append(uid)
    return Plan(tuple(sorted(orphans)), tuple(load), tuple(lost), tuple(forget))


def _has_lost(model: Model) -> bool:
    """Of a living pod's model without files: it had some."""
    if model.state in (ModelState.STAGED, ModelState.LOADING, ModelState.READY):
        return True
    return model.state is ModelState.PENDING and model.has_served and not model.deleting


def _wants_load(model: Model, index: Mapping[ServerName, IndexEntry]) -> bool:
    """A pod that is being deleted keeps what it has, but nothing is loaded for it any more."""
    assert model.server_name is not None
    served = index.get(model.server_name, GONE).state is IndexState.READY
    return not model.deleting and not (served and model.state is ModelState.READY)


class Reconciler:
    """Carries out plans. `step()` is one pass."""

    def __init__(
        self,
        *,
        models: Models,
        repository: Repository,
        lifecycle: Lifecycle,
        controller: SlotController,
        restarts: TritonRestarts,
        gate: CodeGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._models, self._repository = models, repository
        self._lifecycle, self._controller = lifecycle, controller
        self._restarts, self._gate = restarts, gate

    async def adopt_repository(self) -> None:
        """At start: take every directory with a record, so that nothing is reported as free too early."""
        for record in (await asyncio.to_thread(self._repository.records)).values():
            if record is not None:
                # Triton may hold it; the first pass will know.
                self._models.set_resident(self._models.adopt(record), True)
                self._gate.hold(record.pod.uid, record.pod.namespace, has_code=record.code)

    async def step(self) -> None:
        """One pass. Raises TritonError while Triton is away, OSError while the disk is."""
        resident = [
            name for model in self._models if model.resident and (name := model.server_name) is not None
        ]
        await asyncio.to_thread(self._repository.show, *resident)  # else Triton does not list what it holds
        index = await self._controller.look()
        if index is None:
            return
        records = await asyncio.to_thread(self._repository.records)
        table = {model.ref.uid: model for model in self._models}
        await self._carry_out(plan(table, records, index))
        await self._restarts.step()

    async def _carry_out(self, todo: Plan) -> None:
        for uid in todo.forget:
            if model := self._models.get(uid):
                self._models.drop(model)
        for uid in todo.lost:
            if (model := self._models.get(uid)) and not self._lifecycle.is_loading(uid):
                await self._lifecycle.mark_lost(model)
                if model.state is ModelState.LOST and model.server_name is not None:
                    # Triton may hold it, and lists nothing that has no directory.
                    self._unload(model.server_name)
        for uid in todo.load:
            if (model := self._models.get(uid)) and self._may_load(model):
                self._lifecycle.start_load(model)
        for name in todo.unload:
            model = self._models.served_as(name)
            if model is None or not (model.is_wanted and self._lifecycle.is_loading(model.ref.uid)):
                self._unload(name)

    def _unload(self, name: ServerName) -> None:
        unload = self._lifecycle.start_unload(name)
        unload.remove_done_callback(_log_failure)  # an earlier pass may have begun it
        unload.add_done_callback(_log_failure)

    def _may_load(self, model: Model) -> bool:
        """Not while it is being loaded, and after a failure only when its pause is over. What is at fault
        itself is not tried again before other files are staged."""
        if self._lifecycle.is_loading(model.ref.uid) or model.state is ModelState.UNLOADING:
            return False
        if model.state is not ModelState.FAILED:
            return True
        if model.failure is Failure.INVALID_MODEL:
            return False
        if model.failure is Failure.QUARANTINED:
            return not self._lifecycle.is_quarantined(model)
        now = self._clock()
        if model.retry is None:
            model.retry = Retry(
                Backoff(initial_seconds=_RETRY_INITIAL_SECONDS, cap_seconds=_RETRY_CAP_SECONDS), after=now
            )
            return False
        return model.retry.is_due(now)


def _log_failure(unload: "asyncio.Task[None]") -> None:
    if not unload.cancelled() and (error := unload.exception()) is not None:
        log.warning("orphan not unloaded yet", extra=fields(task=unload.get_name(), error=error))
