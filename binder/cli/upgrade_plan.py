"""What comes next when a node's Berth pods are replaced. Pure: what is observed of the cluster in, the next step out.

Only which models served at the beginning is remembered: how far an upgrade is that was stopped, the next run finds in the
cluster.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.errors import UnreadableReport
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, has_ended, is_deleting, pod_ref
from berth.contract.report import Failure, ModelReport, ModelState, NodeReport
from binder.pod.conditions import is_true

JsonObject = Mapping[str, Any]
SERVER, AGENT = "berth-server", "berth-agent"
_HASH = "controller-revision-hash"
# A load that ended so is not tried again by itself.
_FINAL = frozenset({Failure.INVALID_MODEL, Failure.QUARANTINED})


@dataclass(frozen=True, slots=True)
class Observed:
    """A node as it is now. `namespace`: Berth's; `revisions`: by DaemonSet, the hash that its up-to-date pods carry, None while its
    controller has not seen the last change; `pods`: all that are bound to the node; `heartbeat`: the
    agent's Lease."""

    namespace: str
    node: JsonObject
    pods: tuple[JsonObject, ...]
    revisions: Mapping[str, str | None]
    heartbeat: JsonObject | None


@dataclass(frozen=True, slots=True)
class Cordon:
    """Let no new pod come to the node, and mark that an upgrade did so."""


@dataclass(frozen=True, slots=True)
class Uncordon:
    """Let pods come to the node again."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict a model's pod, within its PodDisruptionBudget."""

    pod: PodRef


@dataclass(frozen=True, slots=True)
class Replace:
    """Delete a pod of a DaemonSet, which makes another."""

    pod: PodRef


Action = Cordon | Uncordon | Evict | Replace


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now, or what to wait for, or the end: `failed` says why it is a bad one."""

    actions: tuple[Action, ...] = ()
    waiting: tuple[str, ...] = ()
    done: bool = False
    failed: str = ""


class Upgrade:
    """One node's. `agent_only`: the agent is replaced, Triton and its models are not touched."""

    def __init__(self, keys: Keys, first: Observed, *, agent_only: bool) -> None:
        self._keys = keys
        self._names = (AGENT,) if agent_only else (SERVER, AGENT)
        # Where Triton need not be replaced, no model has to leave.
        self.moves_models = not agent_only and (
            self.has_cordoned(first)
            or not _current(first, SERVER)
            or any(_is_old(first, pod, SERVER) for pod in pods_of(first, SERVER))
        )
        self._served = frozenset(pod_ref(pod).uid for pod in self._models(first) if is_ready(pod))
        self._renewed_at: object = None

    def stays(self, observed: Observed) -> tuple[PodRef, ...]:
        """The pods whose models the new Triton loads again: nothing would make them elsewhere."""
        return tuple(
            pod_ref(pod) for pod in self._models(observed) if not self.moves_models or not _moves(pod)
        )

    def has_cordoned(self, observed: Observed) -> bool:
        """Whether the node is cordoned, and by an upgrade."""
        return _cordoned(observed) and self._keys.cordoned_by in _annotations(observed.node)

    def step(self, observed: Observed) -> Step:
        unknown = [name for name in self._names if observed.revisions[name] is None]
        if unknown:
            return Step(waiting=tuple(f"the controller to see the change of DaemonSet {n}" for n in unknown))
        if old := self._old(observed):
            return self._replace(observed, old)
        waiting = tuple(f"a ready pod of {name}" for name in self._names if not _current(observed, name))
        if waiting:
            self._renewed_at = None
            return Step(waiting=waiting)
        return self._settle(observed)

    def _replace(self, observed: Observed, old: list[JsonObject]) -> Step:
        if self.moves_models:
            if not _cordoned(observed):
                return Step(actions=(Cordon(),))
            if leaving := [pod for pod in self._models(observed) if _moves(pod)]:
                return Step(
                    actions=tuple(Evict(pod_ref(pod)) for pod in leaving if not is_deleting(pod)),
                    waiting=tuple(f"{pod_ref(pod)} to go" for pod in leaving),
                )
        return Step(
            actions=tuple(Replace(pod_ref(pod)) for pod in old if not is_deleting(pod)),
            waiting=tuple(f"{pod_ref(pod)} to end" for pod in old),
        )

    def _settle(self, observed: Observed) -> Step:
        """The new pods are ready: what of the models?"""
        if not self._has_renewed(observed.heartbeat):
            return Step(waiting=("the agent's heartbeat",))
        try:
            report = NodeReport.decode(_annotations(observed.node).get(self._keys.report, ""))
        except UnreadableReport as error:
            return Step(waiting=(f"the agent's report ({error})",))
        if not report.triton.ready:
            return Step(waiting=("Triton",))
        if lost := [line for pod in self._models(observed) for line in self._lost(pod, report)]:
            return Step(failed="; ".join(lost))
        if waiting := [line for pod in self._models(observed) for line in self._missing(pod, report)]:
            return Step(waiting=tuple(waiting))
        if self.moves_models and self.has_cordoned(observed):
            return Step(actions=(Uncordon(),))
        return Step(done=True)

    def _has_renewed(self, lease: JsonObject | None) -> bool:
        """Whether the agent has renewed its Lease since the new pods were ready, and its report is the
        current one. What counts is that it was written, not the time in it: clocks differ."""
        beat = ((lease or {}).get("spec") or {}).get("renewTime")
        if beat is None or self._renewed_at is None:
            self._renewed_at = beat
            return False
        behind = self._keys.report_behind in _annotations(lease or {"metadata": {}})
        return beat != self._renewed_at and not behind

    def _lost(self, pod: JsonObject, report: NodeReport) -> Iterator[str]:
        """A model that served before and will not by itself."""
        ref = pod_ref(pod)
        model = report.model_of(ref.uid)
        if ref.uid in self._served and model is not None and _is_final(model):
            yield f"the model of {ref}, which served before, does not any more: {model.reason}"

    def _missing(self, pod: JsonObject, report: NodeReport) -> Iterator[str]:
        ref = pod_ref(pod)
        model = report.model_of(ref.uid)
        state = "not reported" if model is None else model.state.value
        if model is not None and model.state is ModelState.READY and is_ready(pod):
            return
        if ref.uid not in self._served and (_is_stuck(pod) or state in ("failed", "lost")):
            return  # it did not serve before, and it is not this upgrade that keeps it from it
        yield f"the model of {ref} ({state})"

    def _old(self, observed: Observed) -> list[JsonObject]:
        return [
            pod for name in self._names for pod in pods_of(observed, name) if _is_old(observed, pod, name)
        ]

    def _models(self, observed: Observed) -> Iterator[JsonObject]:
        """The pods that the binder has given a GPU here, and that have not ended."""
        for pod in observed.pods:
            if self._keys.gpu in _annotations(pod) and not has_ended(pod):
                yield pod


def pods_of(observed: Observed, name: str) -> Iterator[JsonObject]:
    """The pods of one of Berth's DaemonSets. Tenants may call theirs as they like."""
    for pod in observed.pods:
        owner = _controller(pod)
        if (
            pod["metadata"]["namespace"] == observed.namespace
            and owner is not None
            and (owner["kind"], owner["name"]) == ("DaemonSet", name)
        ):
            yield pod


def is_ready(pod: JsonObject) -> bool:
    return is_true(pod, "Ready")


def _is_old(observed: Observed, pod: JsonObject, name: str) -> bool:
    return (pod["metadata"].get("labels") or {}).get(_HASH) != observed.revisions[name]


def _current(observed: Observed, name: str) -> bool:
    """Whether an up-to-date pod of the DaemonSet is there and ready."""
    return any(
        is_ready(pod) and not is_deleting(pod) and not _is_old(observed, pod, name)
        for pod in pods_of(observed, name)
    )


def _moves(pod: JsonObject) -> bool:
    """Whether something makes another pod in its place, elsewhere."""
    owner = _controller(pod)
    return owner is not None and owner["kind"] != "DaemonSet"


def _controller(pod: JsonObject) -> JsonObject | None:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def _cordoned(observed: Observed) -> bool:
    return bool((observed.node.get("spec") or {}).get("unschedulable"))


def _annotations(thing: JsonObject) -> Mapping[str, str]:
    return thing["metadata"].get("annotations") or {}


def _is_final(model: ModelReport) -> bool:
    return model.state is ModelState.LOST or (
        model.state is ModelState.FAILED and model.failure is not None and model.failure in _FINAL
    )


def _is_stuck(pod: JsonObject) -> bool:
    """A container of it fails and is started again."""
    status = pod.get("status") or {}
    states = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return any(state.get("restartCount", 0) > 0 and not state.get("ready") for state in states)
