"""The models of this node, by the pod that each belongs to. No I/O; runs on the event loop alone."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.gpus import Resident
from agent.repository import Record
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, ServerName
from berth.contract.pod import ModelPod, PodRef
from berth.contract.report import Failure, ModelReport, ModelState, NodeReport
from berth.runtime.backoff import Backoff

# More than a kubelet ends while one answer is under way.
_MOST_GONE = 4096


class Retry:
    """When a failed load is tried again, by the caller's clock."""

    def __init__(self, backoff: Backoff, *, after: float) -> None:
        self._backoff = backoff
        self._due = after + backoff.next()

    def is_due(self, now: float) -> bool:
        """True once after each pause."""
        if now < self._due:
            return False
        self._due = now + self._backoff.next()
        return True


@dataclass(slots=True)
class Model:
    """One pod's model. `pod_lives`: its pod is bound here and has not ended."""

    ref: PodRef
    model_id: ModelId | None
    name: ModelName | None
    gpu: GpuChoice | None
    requested_bytes: int
    pod_lives: bool = False
    deleting: bool = False
    state: ModelState = ModelState.PENDING
    reason: str = ""
    failure: Failure | None = None
    measured_bytes: int | None = None
    # Triton holds it: its memory is taken. Changed by `Models.set_resident` only.
    resident: bool = False
    # An earlier agent has reported it as served: no loader will stage it for this pod again.
    has_served: bool = False
    # Its pod's proxy has requested it.
    has_proxy: bool = False
    # Since its first failure without success in between.
    retry: Retry | None = None

    @property
    def server_name(self) -> ServerName | None:
        """What Triton calls it; None as long as it has no name at all."""
        return None if self.name is None else server_name_of(self.name, self.ref.uid)

    @property
    def is_wanted(self) -> bool:
        """Its pod goes on living here."""
        return self.pod_lives and not self.deleting

    def report(self) -> ModelReport:
        return ModelReport(
            pod_uid=self.ref.uid,
            namespace=self.ref.namespace,
            pod_name=self.ref.name,
            model_id=self.model_id,
            model_name=self.name,
            gpu=None if self.gpu is None else self.gpu.uuid,
            requested_bytes=self.requested_bytes,
            measured_bytes=self.measured_bytes,
            state=self.state,
            reason=self.reason[:512],
            other_gpus=() if self.gpu is None else tuple(gpu.uuid for gpu in self.gpu.others),
            failure=self.failure,
        )


class IdTaken(Exception):
    """Another pod of the namespace has a model of this id on this node."""


class OneModelOnly(Exception):
    """The pod has a model, and requests another: a pod is one model."""


class PodGone(Exception):
    """The pod and all that it had are gone from this node."""


class Models:
    """The table, and how others learn that it has changed."""

    def __init__(self) -> None:
        self._by_pod: dict[PodUid, Model] = {}
        self._changed = asyncio.Event()
        # Grows whenever a model comes to or leaves Triton: a GPU reading says nothing of the use by
        # other processes unless it was taken since.
        self.residency = 0
        self._served_before: frozenset[PodUid] = frozenset()
        # Pods that the watch has called gone: an answer of the API server that is older says nothing.
        self._gone: OrderedDict[PodUid, None] = OrderedDict()

    def __iter__(self) -> Iterator[Model]:
        return iter(self._by_pod.values())

    def get(self, uid: PodUid) -> Model | None:
        return self._by_pod.get(uid)

    def require_listed(self, model: Model) -> None:
        """Raises PodGone."""
        if self._by_pod.get(model.ref.uid) is not model:
            raise PodGone(f"pod {model.ref} is gone")

    def served_as(self, name: ServerName) -> Model | None:
        return next((model for model in self if model.server_name == name), None)

    def remember(self, report: NodeReport) -> None:
        """The last report of this node's agent before its restart, for the pods that will be seen."""
        served = (ModelState.READY, ModelState.LOST)
        self._served_before = frozenset(one.pod_uid for one in report.models if one.state in served)

    def see_pod(self, pod: ModelPod) -> None:
        """Take a pod that is bound to this node, unless it is known to be gone."""
        if pod.ref.uid in self._gone:
            return
        model = self._by_pod.get(pod.ref.uid)
        if model is None:
            model = Model(pod.ref, pod.model_id, None, pod.gpu, pod.request_bytes)
            if self._holder_of_id(model) is None:
                model.name = pod.model_name  # else it stays nameless and its calls are refused
            model.has_served = pod.ref.uid in self._served_before
            self._by_pod[pod.ref.uid] = model
            self.touch()
        model.gpu = model.gpu or pod.gpu
        self.see_life(pod.ref.uid, ended=pod.ended, deleting=pod.deleting)

    def see_life(self, uid: PodUid, *, ended: bool, deleting: bool) -> None:
        """Of a pod that is bound to this node, if its model is known: does it go on living?"""
        model = self._by_pod.get(uid)
        if model is not None and (model.pod_lives, model.deleting) != (not ended, deleting):
            model.pod_lives, model.deleting = not ended, deleting
            self.touch()

    def lose_pod(self, uid: PodUid) -> None:
        """The pod is gone; its model stays listed until its memory is free."""
        self._gone[uid] = None
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        model = self._by_pod.get(uid)
        if model is not None and model.pod_lives:
            model.pod_lives = False
            self.touch()

    def adopt(self, record: Record) -> Model:
        """Take a directory of the repository whose pod has not been seen (yet)."""
        model = self._by_pod.get(record.pod.uid)
        if model is None:
            model = Model(record.pod, record.model_id, record.name, record.gpu, record.gpu.bytes)
            self._by_pod[record.pod.uid] = model
        model.name, model.gpu = record.name, record.gpu
        model.measured_bytes = model.measured_bytes or record.measured_bytes
        if model.state is ModelState.PENDING:
            model.state = ModelState.STAGED
        self.touch()
        return model

    def claim(self, uid: PodUid, name: ModelName) -> Model:
        """Give a pod's model its name, which an anonymous pod chooses by the first that it stages; it
        keeps it. Raises PodGone, OneModelOnly or IdTaken."""
        model = self.own(uid, name)
        if model.name is None:
            if (holder := self._holder_of_id(model)) is not None:
                raise IdTaken(f"model id {model.model_id!r} on this node belongs to pod {holder.ref}")
            model.name = name
            self.touch()
        return model

    def own(self, uid: PodUid, name: ModelName) -> Model:
        """The pod's model, which has this name or none yet. Raises PodGone or OneModelOnly."""
        model = self._by_pod.get(uid)
        if model is None:
            raise PodGone(f"pod {uid} is gone")
        if model.name not in (None, name):
            raise OneModelOnly(f"pod {model.ref} has model {model.name!r}; it cannot have {name!r} as well")
        return model

    def set(
        self, model: Model, state: ModelState, reason: str = "", *, failure: Failure | None = None
    ) -> None:
        if (model.state, model.reason, model.failure) != (state, reason, failure):
            model.state, model.reason, model.failure = state, reason, failure
            self.touch()

    def see_proxy(self, model: Model) -> None:
        """Its pod's proxy has requested it."""
        if not model.has_proxy:
            model.has_proxy = True
            self.touch()

    def set_resident(self, model: Model, resident: bool) -> None:
        """Triton has come to hold the model, or holds it no more."""
        if model.resident is not resident:
            model.resident = resident
            self.residency += 1
        if not resident:
            model.measured_bytes = None

    def drop(self, model: Model) -> None:
        """The model is gone and so is its pod."""
        if self._by_pod.pop(model.ref.uid, None) is not None:
            self.touch()

    def touch(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Set at the next change. Take it before looking at the table, so that no change is missed."""
        return self._changed

    def residents(self) -> Iterable[Resident]:
        """What Triton holds, for mock GPUs to charge."""
        return [
            Resident(model.name, gpu.uuid, model.requested_bytes)
            for model in self
            if model.resident and model.name is not None and model.gpu is not None
            for gpu in model.gpu.gpus
        ]

    def taken_on(self, gpu: GpuUuid) -> int:
        """Σ bytes of the models that Triton holds on one GPU: as measured, or of one that was
        not measured its pod's request, lest it be counted as other use as well."""
        return sum(
            model.requested_bytes if model.measured_bytes is None else model.measured_bytes
            for model in self
            if model.resident and model.gpu is not None and gpu in model.gpu.uuids
        )

    def _holder_of_id(self, model: Model) -> Model | None:
        """The pod of its namespace that had a model of the same id first. Names need not be unique."""
        if model.model_id is None:
            return None
        mine = (model.ref.namespace, model.model_id)
        return next(
            (
                other
                for other in self
                if other is not model
                and other.name is not None
                and (other.ref.namespace, other.model_id) == mine
            ),
            None,
        )
