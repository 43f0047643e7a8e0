"""The cluster's state: Deployments that ask to be scaled, and their pods. Pure.

    cache.observe_deployment(object) / deployment_gone(object), and so for pods and priority classes

take objects as the API server gives them, or what `keep_deployment` and `keep_pod` leave of them. Invalid
annotations make an `AnnotationProblem`, and the last valid reading stays.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from berth.contract.activation import ReplicaEndpoint
from berth.contract.errors import InvalidValue
from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey, Scaled
from scaler.core.deployments import (
    Deployment,
    keep_deployment,
    merged_annotations,
    read_deployment,
    read_recorded,
    scaled_by,
    template_text,
    text_hash,
)
from scaler.core.pods import Counts, JsonObject, Pod, PodState, counted, keep_pod, read_pod
from scaler.decision.annotations import is_scaled, unknown
from scaler.decision.defaults import Defaults

__all__ = [
    "AnnotationProblem",
    "Cache",
    "Counts",
    "Deployment",
    "Pod",
    "PodState",
    "keep_deployment",
    "keep_pod",
]

_INVALID: Final = "InvalidAnnotation"
_UNKNOWN: Final = "UnknownAnnotation"
_NO_PODS: Final[Mapping[str, Pod]] = {}


@dataclass(frozen=True, slots=True)
class AnnotationProblem:
    """An annotation of a Deployment that is invalid, or not read."""

    key: ModelKey
    uid: str
    text: str
    reason: str = _INVALID


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was last made of a Deployment's annotations and template, where its annotations say nothing by `defaults`.
    `deployment`: the last good one, by the annotations `good`; `refused`: why these are not."""

    uid: str
    defaults: Defaults
    annotations: Mapping[str, str]
    template: JsonObject
    deployment: Deployment | None
    good: Mapping[str, str]
    refused: str = ""


class Cache:
    """By name. What has not changed is not read twice: a Deployment changes with each of its pods."""

    def __init__(self, defaults: Defaults, keys: Keys | None = None) -> None:
        self._defaults = defaults
        self.keys = keys or Keys()
        self._readings: dict[ModelKey, _Reading] = {}
        # As they were seen last, of those that have a reading.
        self._objects: dict[ModelKey, JsonObject] = {}
        self._deployments: dict[ModelKey, Deployment] = {}
        self._pods: dict[str, Pod] = {}
        self._pods_of: dict[ModelKey, dict[str, Pod]] = {}
        # Found when they are first read, until one of the model's pods changes.
        self._counts: dict[ModelKey, Counts] = {}
        self._ready: dict[ModelKey, tuple[Pod, ...]] = {}
        # Value, and whether it is the default.
        self._classes: dict[str, tuple[int, bool]] = {}
        # Of the last pod of each Deployment that said one: of those that have pods, or are scaled.
        self._priorities: dict[ModelKey, int] = {}
        # The newest of each: repeated nonsense is reported no oftener than this is read.
        self._problems: dict[tuple[ModelKey, str], AnnotationProblem] = {}
        # What was last said of annotations that there are not.
        self._unknown: dict[ModelKey, str] = {}

    # Deployments.

    @property
    def deployments(self) -> Mapping[ModelKey, Deployment]:
        """Those that are scaled: they ask for it, and have had valid annotations at least once."""
        return self._deployments

    def configure(self, defaults: Defaults) -> None:
        """Other defaults. A Deployment that is invalid by them keeps what it had, and gets an event."""
        self._defaults = defaults
        for item in list(self._objects.values()):
            self.observe_deployment(item)

    def observe_deployment(self, item: JsonObject) -> None:
        """New or different."""
        key, meta, spec = _key(item), item["metadata"], item.get("spec") or {}
        own, template = meta.get("annotations") or {}, spec.get("template") or {}
        annotations = merged_annotations(template, own, self.keys)
        self._look_for_unknown(key, meta.get("uid", ""), annotations)
        if not is_scaled(annotations):
            self._forget(key)
            return
        self._objects[key] = item
        recorded = read_recorded(own.get(self.keys.scaled))
        reading = self._readings[key] = self._read(key, meta.get("uid", ""), annotations, template, recorded)
        if reading.deployment is None:
            self._deployments.pop(key, None)
            return
        self._deployments[key] = replace(
            reading.deployment,
            replicas=int(spec.get("replicas", 1)),
            recorded=recorded,
            scaled_by=scaled_by(item),
        )

    def deployment_gone(self, item: JsonObject) -> None:
        """A successor of its name is another."""
        key = _key(item)
        reading = self._readings.get(key)
        if reading is not None and reading.uid == item["metadata"].get("uid", ""):
            self._forget(key)
        self._unknown.pop(key, None)
        self._forget_priority(key)

    def refused(self, key: ModelKey) -> str:
        """Why the annotations that it has now are not those it is scaled by; "": they are."""
        reading = self._readings.get(key)
        return "" if reading is None else reading.refused

    def last_valid_of(self, key: ModelKey) -> Mapping[str, str]:
        """The annotations that it is scaled by in place of those it has now; none while these go."""
        reading = self._readings.get(key)
        return reading.good if reading is not None and reading.refused else {}

    def problems(self) -> list[AnnotationProblem]:
        """Each once, the newest of each kind and Deployment."""
        recorded, self._problems = self._problems, {}
        return list(recorded.values())

    def _forget(self, key: ModelKey) -> None:
        self._readings.pop(key, None)
        self._objects.pop(key, None)
        self._deployments.pop(key, None)
        self._problems.pop((key, _INVALID), None)
        self._changed(key)

    def _look_for_unknown(self, key: ModelKey, uid: str, annotations: Mapping[str, str]) -> None:
        """Also of a Deployment that does not ask to be scaled: perhaps it is `class` that is misspelt."""
        text = unknown(annotations)
        if text and text != self._unknown.get(key):
            self._problems[key, _UNKNOWN] = AnnotationProblem(key, uid, text, _UNKNOWN)
        if text:
            self._unknown[key] = text
        else:
            self._unknown.pop(key, None)

    def _forget_priority(self, key: ModelKey) -> None:
        """Who is scaled and has no pod will have more of them."""
        if key not in self._readings and key not in self._pods_of:
            self._priorities.pop(key, None)

    def _read(
        self,
        key: ModelKey,
        uid: str,
        annotations: Mapping[str, str],
        template: JsonObject,
        recorded: Scaled | None,
    ) -> _Reading:
        known = self._readings.get(key)
        if known is not None and known.uid != uid:
            known = None
        if known is not None and _is_of(known, self._defaults, annotations, template):
            return known
        try:
            deployment = self._made_of(key, uid, annotations, template)
        except InvalidValue as error:
            if known is None and recorded is not None:
                known = self._good_before(key, uid, template, recorded)
            return self._refused(key, uid, annotations, template, known, str(error))
        return _Reading(uid, self._defaults, annotations, template, deployment, annotations)

    def _made_of(
        self, key: ModelKey, uid: str, annotations: Mapping[str, str], template: JsonObject
    ) -> Deployment:
        return read_deployment(key, uid, annotations, template, defaults=self._defaults, keys=self.keys)

    def _good_before(
        self, key: ModelKey, uid: str, template: JsonObject, recorded: Scaled
    ) -> _Reading | None:
        """By what the last leader recorded. An editor of the Deployment can write anything there."""
        if not is_scaled(recorded.last_valid):
            return None
        try:
            deployment = self._made_of(key, uid, recorded.last_valid, template)
        except InvalidValue:
            return None
        return _Reading(uid, self._defaults, recorded.last_valid, template, deployment, recorded.last_valid)

    def _refused(
        self,
        key: ModelKey,
        uid: str,
        annotations: Mapping[str, str],
        template: JsonObject,
        known: _Reading | None,
        why: str,
    ) -> _Reading:
        """What is to be placed is the new template all the same."""
        if known is None or known.refused != why:
            self._problems[key, _INVALID] = AnnotationProblem(key, uid, why)
        good = None if known is None else known.deployment
        if good is not None:
            text = template_text(template)
            good = replace(good, template=template, template_hash=text_hash(text), template_bytes=len(text))
        kept = {} if known is None else known.good
        return _Reading(uid, self._defaults, annotations, template, good, kept, why)

    # Pods.

    def observe_pod(self, item: JsonObject, now_ns: int) -> None:
        """New or different, seen now."""
        pod = read_pod(item, self.keys)
        if pod is None:
            self.pod_gone(item)
            return
        before = self._pods.get(pod.uid)
        if before is not None and before.key != pod.key:
            self.pod_gone(item)
        pod = self._pods[pod.uid] = _stamped(pod, before, now_ns)
        self._pods_of.setdefault(pod.key, {})[pod.uid] = pod
        self._changed(pod.key)
        if pod.priority is not None:
            self._priorities[pod.key] = pod.priority

    def pod_gone(self, item: JsonObject) -> None:
        pod = self._pods.pop(item["metadata"].get("uid", ""), None)
        if pod is not None:
            self._changed(pod.key)
            of_model = self._pods_of[pod.key]
            del of_model[pod.uid]
            if not of_model:
                del self._pods_of[pod.key]
                self._forget_priority(pod.key)

    def _changed(self, key: ModelKey) -> None:
        self._counts.pop(key, None)
        self._ready.pop(key, None)

    def pod(self, uid: str) -> Pod | None:
        return self._pods.get(uid)

    def pods(self, key: ModelKey) -> Collection[Pod]:
        return self._pods_of.get(key, _NO_PODS).values()

    def ready(self, key: ModelKey) -> Sequence[Pod]:
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = tuple(pod for pod in self.pods(key) if pod.state is PodState.READY)
        return ready

    def counts(self, key: ModelKey) -> Counts:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = counted(self.pods(key))
        return counts

    def endpoints(self, key: ModelKey) -> tuple[ReplicaEndpoint, ...]:
        """Replicas that have an address, ready or not."""
        deployment = self._deployments.get(key)
        if deployment is None:
            return ()
        ports = deployment.proxy.ports
        return tuple(
            ReplicaEndpoint(
                uid=pod.uid,
                name=pod.name,
                address=pod.address,
                rest_port=ports.rest,
                grpc_port=ports.grpc,
                slots=deployment.slots,
                ready=pod.state is PodState.READY,
                nearly_ready=pod.initialised,
            )
            for pod in self.pods(key)
            if pod.address and pod.state in (PodState.READY, PodState.STARTING)
        )

    # Priorities.

    def observe_priority_class(self, item: JsonObject) -> None:
        """New or different."""
        self._classes[item["metadata"]["name"]] = int(item.get("value", 0)), bool(item.get("globalDefault"))

    def priority_class_gone(self, item: JsonObject) -> None:
        self._classes.pop(item["metadata"]["name"], None)

    def priority(self, key: ModelKey) -> int:
        """As a pod of it would get it, as far as that is known; else as its last one had it."""
        deployment = self._deployments.get(key)
        name = (
            None if deployment is None else (deployment.template.get("spec") or {}).get("priorityClassName")
        )
        if name in self._classes:
            return self._classes[name][0]
        if key in self._priorities:
            return self._priorities[key]
        return next((value for value, is_default in self._classes.values() if is_default and not name), 0)


def _is_of(known: _Reading, defaults: Defaults, annotations: Mapping[str, str], template: JsonObject) -> bool:
    return known.defaults is defaults and known.annotations == annotations and known.template == template


def _key(item: JsonObject) -> ModelKey:
    return ModelKey(item["metadata"].get("namespace", ""), item["metadata"]["name"])


def _stamped(pod: Pod, before: Pod | None, now_ns: int) -> Pod:
    bound_ns = before.bound_ns if before is not None else None
    ready_ns = before.ready_ns if before is not None else None
    return replace(
        pod,
        bound_ns=now_ns if bound_ns is None and pod.node else bound_ns,
        ready_ns=now_ns if ready_ns is None and pod.state is PodState.READY else ready_ns,
    )
