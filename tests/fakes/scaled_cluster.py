"""A cluster in a nutshell around the scaler's heart, second by second: ReplicaSets, a binder with some places, gateways,
an activator, slices. Whatever happens in it happens in `second()`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from berth.contract.activation import Report
from berth.contract.scaling import (
    ModelKey,
    ReplicaLoad,
    Schedulable,
    SchedulableAnswer,
    SchedulableModel,
    SchedulableRequest,
)
from scaler.core.actions import Action, Event, Record, WriteScale, WriteStatus
from scaler.core.cache import Cache
from scaler.core.models_view import ModelView
from scaler.core.reconcile import RouteStatus
from scaler.core.scaler import Scaler
from scaler.decision.defaults import BERTH, KPA, read_defaults
from tests.fakes.values import replace

GROUP = "autoscaling.knative.dev/"
# A model of one request a replica.
ONE = {"target": "1", "target_utilization_percentage": "100"}
SECOND = 1_000_000_000
BEGAN = 1_700_000_000
LOADED = "seldon.io/trtis-model-loaded"
COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass
class FakePod:
    name: str
    uid: str
    model: ModelKey
    node: str = ""
    ready_at: int | None = None
    ready: bool = False
    refused: bool = False
    refused_for: str = "Unschedulable"
    gated: bool = False
    leaving_until: int | None = None
    failed: str = ""
    waiting_reason: str = ""
    cost: str | None = None
    # Requests in it now, those that came in the last second, when the last one came.
    busy: int = 0
    rate: float = 0.0
    last_arrival: int = 0
    second: int = 0

    def json(self) -> dict[str, Any]:
        conditions = [{"type": "Ready", "status": "True" if self.ready else "False"}]
        if self.refused:
            conditions.append(
                {"type": "PodScheduled", "status": "False", "reason": self.refused_for, "message": "no room"}
            )
        if self.failed:
            conditions.append({"type": LOADED, "status": "False", "message": self.failed})
        meta: dict[str, Any] = {
            "namespace": self.model.namespace,
            "name": self.name,
            "uid": self.uid,
            "labels": {"pod-template-hash": "5f"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": f"{self.model.name}-5f", "controller": True}],
            "annotations": {} if self.cost is None else {COST: self.cost},
        }
        if self.leaving_until is not None:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        waiting = {"waiting": {"reason": self.waiting_reason}} if self.waiting_reason else {}
        return {
            "metadata": meta,
            "spec": ({"nodeName": self.node} if self.node else {})
            | ({"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]} if self.gated else {}),
            "status": {
                "phase": "Running" if self.ready else "Pending",
                "podIP": "10.0.0.1" if self.node else "",
                "conditions": conditions,
                "containerStatuses": [{"state": waiting}],
            },
        }


@dataclass
class FakeModel:
    key: ModelKey
    uid: str
    annotations: dict[str, str]
    replicas: int = 0
    concurrency: int = 1
    priority: int = 0
    # Of all its clients together: requests at once, and how many come a second.
    load: float = 0.0
    rate: float | None = None
    load_seconds: int = 3
    fails: str = ""
    stuck: str = ""
    scaled: str | None = None
    reserved: int = 0
    has_service: bool = True
    # Of its pods: a quota's, an admission's.
    most_pods: int = 1000
    # So many of its pods are let through their scheduling gates; None: they have none.
    quota: int | None = None
    refused_for: str = "Unschedulable"
    written: list[int] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        own = {} if self.scaled is None else {"seldon.io/trtis-scaled": self.scaled}
        args = ["proxy", f"--model={self.key.name}", f"--container-concurrency={self.concurrency}"]
        return {
            "metadata": {
                "namespace": self.key.namespace,
                "name": self.key.name,
                "uid": self.uid,
                "annotations": self.annotations | own,
            },
            "spec": {
                "replicas": self.replicas,
                "template": {
                    "metadata": {"labels": {"app": self.key.name}},
                    "spec": {"containers": [{"args": args}], "priorityClassName": f"p{self.priority}"},
                },
            },
        }


def report(about: FakeModel, **fields: Any) -> Report:
    """An activator's, of its first request."""
    usual = Report(
        version=1,
        model=about.key,
        buffered=1,
        average_buffered=0.0,
        arrived=1.0,
        forwarded=0.0,
        buffered_bytes=10,
        oldest_seconds=0.0,
        cold_start=True,
        rest_port=20000,
        grpc_port=20001,
    )
    return replace(usual, **fields)


class Cluster:
    """`places`: replicas that fit. What a write does is seen at once; `deaf`: nothing that is written is."""

    def __init__(
        self, places: int = 100, *, config: dict[str, str] | None = None, record: Record | None = None
    ):
        self.places, self.now = places, BEGAN
        self.config = {**BERTH, **(config or {})}
        self.record = record
        self.models: dict[ModelKey, FakeModel] = {}
        self.pods: dict[str, FakePod] = {}
        self.binder_answers, self.api_works, self.activators = True, True, 1
        self.taken_by_others = 0
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.proven_since: dict[ModelKey, int] = {}
        self.pending_seconds: dict[str, int] = {}
        self.cut: list[FakePod] = []
        self.on_write: Callable[[WriteScale], None] = lambda write: None
        # How a model's requests spread over its ready replicas.
        self.spread: Callable[[FakeModel, list[FakePod]], None] = evenly
        self._count = 0
        self.restart()

    # What people do.

    def add(
        self,
        name: str,
        *,
        namespace: str = "a",
        replicas: int = 0,
        kind: str = KPA,
        priority: int = 0,
        **options: Any,
    ) -> FakeModel:
        """`options`: fields of the model, or autoscaling's annotations."""
        fields = {key: options.pop(key) for key in [*options] if key in FakeModel.__annotations__}
        annotations = {GROUP + key.replace("_", "-"): text for key, text in options.items()}
        annotations[GROUP + "class"] = kind
        key = ModelKey(namespace, name)
        self._count += 1
        model = FakeModel(key, f"d{self._count}", annotations, replicas, priority=priority, **fields)
        self.models[key] = model
        self.cache.observe_priority_class({"metadata": {"name": f"p{priority}"}, "value": priority})
        self.cache.observe_deployment(model.json())
        return model

    def change(self, model: FakeModel) -> None:
        self.cache.observe_deployment(model.json())

    def annotate(self, model: FakeModel, **annotations: str) -> None:
        """Autoscaling's."""
        model.annotations |= {GROUP + name.replace("_", "-"): text for name, text in annotations.items()}
        self.change(model)

    def report(self, about: FakeModel, **fields: Any) -> None:
        """The activator's, carried out."""
        self.do(self.scaler.report("act", report(about, **fields), self.ns))

    def remove(self, model: FakeModel) -> None:
        del self.models[model.key]
        self.cache.deployment_gone(model.json())
        for pod in self.of(model):
            self._end(pod)

    def restart(self) -> None:
        """Another scaler leads: all that it knows is what stands in the cluster."""
        self.cache = Cache(read_defaults(self.config))
        for model in self.models.values():
            self.cache.observe_priority_class(
                {"metadata": {"name": f"p{model.priority}"}, "value": model.priority}
            )
            self.cache.observe_deployment(model.json())
        for pod in self.pods.values():
            self.cache.observe_pod(pod.json(), self.ns)
        self.scaler = Scaler(self.cache, self.ns, self.record)

    # What is there.

    @property
    def ns(self) -> int:
        return self.now * SECOND

    def of(self, model: FakeModel) -> list[FakePod]:
        return [pod for pod in self.pods.values() if pod.model == model.key]

    def ready(self, model: FakeModel) -> list[FakePod]:
        return [pod for pod in self.of(model) if pod.ready and pod.leaving_until is None]

    def living(self, model: FakeModel) -> list[FakePod]:
        return [pod for pod in self.of(model) if pod.leaving_until is None]

    def view(self, model: FakeModel) -> ModelView:
        view = self.scaler.view(model.key)
        assert view is not None
        return view

    def question(self) -> SchedulableRequest:
        """What the binder is asked now, which there is."""
        question = self.scaler.question(self.ns)
        assert question is not None
        return question

    def events_of(self, reason: str) -> list[str]:
        return [event.message for event in self.events if event.reason == reason]

    @property
    def free(self) -> int:
        return self.places - self.taken_by_others - sum(1 for pod in self.pods.values() if pod.node)

    # What happens.

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def until(self, is_so: Callable[[], bool], most: int = 600) -> int:
        """Seconds that it took."""
        for passed in range(most):
            if is_so():
                return passed
            self.second()
        raise AssertionError(f"not within {most} s")

    def second(self) -> None:
        self.now += 1
        for model in self.models.values():
            self._follow(model)
        self._bind()
        for pod in list(self.pods.values()):
            self._loop(pod)
        for model in self.models.values():
            self._ask(model)
        self._lead()
        self.scaler.close_second(self.ns)
        if self.now % 2 == 0:
            self.do(self.scaler.step(self.ns))

    def do(self, actions: list[Action]) -> None:
        self._carry_out(actions)
        for _ in range(3):
            question = self.scaler.question(self.ns)
            if question is None:
                return
            answer = self.answer(question) if self.binder_answers else None
            self._carry_out(self.scaler.answered(question, answer, self.ns))

    def _carry_out(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            if isinstance(action, Event):
                self.events.append(action)
            elif isinstance(action, WriteScale) and self.api_works:
                self._scale(action)
            elif isinstance(action, WriteStatus) and self.api_works and action.model in self.models:
                self.models[action.model].scaled = action.scaled.to_text()
                self.change(self.models[action.model])

    def _scale(self, write: WriteScale) -> None:
        model = self.models[write.model]
        assert write.uid == model.uid
        self.on_write(write)
        for pod in self.of(model):
            if pod.name in write.costs:
                pod.cost = str(write.costs[pod.name])
                self.cache.observe_pod(pod.json(), self.ns)
        model.replicas = write.replicas
        model.written.append(write.replicas)
        self.change(model)

    def _follow(self, model: FakeModel) -> None:
        """A Deployment with its ReplicaSet."""
        living = self.living(model)
        for _ in range(min(model.replicas, model.most_pods) - len(living)):
            self._count += 1
            pod = FakePod(f"{model.key.name}-5f-{self._count}", f"u{self._count}", model.key)
            pod.gated, pod.refused_for = model.quota is not None, model.refused_for
            self.pods[pod.uid] = pod
            self._show(pod)
        ranked = sorted(living, key=lambda pod: (bool(pod.node), pod.ready, int(pod.cost or 0)))
        for pod in ranked[: max(len(living) - model.replicas, 0)]:
            self.cut.append(pod)
            self._end(pod)

    def _end(self, pod: FakePod) -> None:
        pod.leaving_until = self.now + (2 if pod.node else 0)
        self._show(pod)

    def _admit(self) -> None:
        """As a quota's controller takes gates away."""
        for pod in self.pods.values():
            if not pod.gated or pod.leaving_until is not None:
                continue
            model = self.models[pod.model]
            admitted = sum(not one.gated for one in self.living(model))
            if model.quota is None or admitted < model.quota:
                pod.gated = False
                self._show(pod)

    def _bind(self) -> None:
        self._admit()
        for pod in self.pods.values():
            if pod.node or pod.gated or pod.leaving_until is not None:
                continue
            if self.free > 0:
                pod.node, pod.refused = "n", False
                pod.ready_at = self.now + self.models[pod.model].load_seconds
            elif not pod.refused:
                pod.refused = True
            else:
                self.pending_seconds[pod.uid] = self.pending_seconds.get(pod.uid, 0) + 1
                continue
            self._show(pod)

    def _loop(self, pod: FakePod) -> None:
        if pod.leaving_until is not None:
            if self.now >= pod.leaving_until:
                del self.pods[pod.uid]
                self.cache.pod_gone(pod.json())
            return
        model = self.models[pod.model]
        if pod.ready_at is not None and not pod.ready and self.now >= pod.ready_at:
            pod.failed, pod.waiting_reason = model.fails, model.stuck
            pod.ready = not (model.fails or model.stuck)
            self._show(pod)

    def _ask(self, model: FakeModel) -> None:
        """Clients go to the replicas while there are any, else to the activator."""
        ready = self.ready(model)
        for pod in ready:
            pod.busy, pod.rate = 0, 0.0
        if ready:
            self.spread(model, ready)
        self.scaler.record_loads((self._load(pod) for pod in ready), {pod.uid for pod in ready}, self.ns)
        asked = self.scaler.asked(model.key, self.ns)
        wants = (
            int(model.load)
            if not ready and asked is not None and asked.needs_proxy and self.activators
            else 0
        )
        if asked is not None and asked.unavailable:
            wants = 0
        if wants or model.reserved:
            self._hold(model, wants, served=bool(ready))

    def _hold(self, model: FakeModel, wants: int, *, served: bool) -> None:
        came, went = max(wants - model.reserved, 0), max(model.reserved - wants, 0)
        forwarded = float(went if served else 0)
        model.reserved = wants
        self.report(
            model,
            buffered=wants,
            average_buffered=float(wants),
            arrived=float(came),
            forwarded=forwarded,
            buffered_bytes=0,
            cold_start=wants > 0,
        )

    def _load(self, pod: FakePod) -> ReplicaLoad:
        pod.second += 1
        if pod.rate > 0:
            pod.last_arrival = self.now
        return ReplicaLoad(
            namespace=pod.model.namespace,
            pod_name=pod.name,
            pod_uid=pod.uid,
            second=pod.second,
            average_concurrent_requests=float(pod.busy),
            request_count=pod.rate,
            in_triton=pod.busy,
            last_arrival=pod.last_arrival,
            timestamp=self.now,
        )

    def _lead(self) -> None:
        """Slices and activators: a second after they are asked for."""
        for key in self.scaler.models():
            asked = self.scaler.asked(key, self.ns)
            if asked is None or not asked.needs_proxy:
                self.proven_since.pop(key, None)
                continue
            failure = "" if self.models[key].has_service else "no Service leads to its replicas"
            failure = failure or ("" if self.activators else "no activator is attached")
            if failure:
                self.proven_since.pop(key, None)
                self.scaler.set_route(key, RouteStatus(failure=failure))
            elif key in self.proven_since:
                self.scaler.set_route(key, RouteStatus(proven_ns=self.proven_since[key]))
            else:
                self.proven_since[key] = self.ns

    def _show(self, pod: FakePod) -> None:
        self.cache.observe_pod(pod.json(), self.ns)

    # The binder.

    def answer(self, question: SchedulableRequest) -> SchedulableAnswer:
        """One copy at a time, by priority, then to those who lack most."""
        free = self.free
        lacking = {one.model: one.desired - one.running - one.starting for one in question.models}
        given = dict.fromkeys(lacking, 0)

        def rank(one: SchedulableModel) -> tuple[int, float, ModelKey]:
            return -one.priority, -(lacking[one.model] - given[one.model]) / one.desired, one.model

        while free > 0:
            hungry = [one for one in question.models if given[one.model] < lacking[one.model]]
            if not hungry:
                break
            given[min(hungry, key=rank).model] += 1
            free -= 1
        return SchedulableAnswer(
            generation=self.now,
            models={
                one.model: Schedulable(
                    name=one.name,
                    now=given[one.model],
                    if_idle_go=self._idle_for(one, question) if given[one.model] < lacking[one.model] else (),
                    never=lacking[one.model] if self.places == 0 else 0,
                    reason="" if given[one.model] == lacking[one.model] else "1 GPUMemoryInsufficient",
                )
                for one in question.models
            },
        )

    def _idle_for(self, one: SchedulableModel, question: SchedulableRequest) -> tuple[str, ...]:
        by_name = {f"{pod.model.namespace}/{pod.name}": pod for pod in self.pods.values()}
        named = (name for name in question.idle if self.models[by_name[name].model].priority <= one.priority)
        return tuple(islice(named, 1))


def evenly(model: FakeModel, ready: list[FakePod]) -> None:
    share, rest = divmod(int(model.load), len(ready))
    for place, pod in enumerate(ready):
        pod.busy = share + (place < rest)
        rate = model.load * 10 if model.rate is None else model.rate
        pod.rate = rate / len(ready)
