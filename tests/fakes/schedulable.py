"""Models that ask how many of their replicas can be scheduled, and the answers."""

from collections.abc import Iterable, Sequence
from typing import Any

from berth.contract.scaling import Schedulable, SchedulableAnswer, SchedulableModel, SchedulableRequest
from binder.engine import schedulable as schedulable
from binder.engine.cluster import Cluster
from binder.engine.schedulable import SchedulableAnswers, Steps
from binder.pod.demand import parse_demand
from tests.fakes.cluster import cluster_of, sized
from tests.fakes.objects import KEYS, pod

Json = dict[str, Any]


def cluster_with(nodes: dict[str, Sequence[int]], *pods: Json, **changes: Any) -> Cluster:
    """Nodes with GPUs of so many GiB."""
    return cluster_of(*(sized(name, *sizes, **changes) for name, sizes in nodes.items()), pods=pods)


def template(gib: int = 4, *, model_id: str | None = None, labels: Json | None = None, **spec: Any) -> Json:
    made = pod("t", mem=f"{gib}Gi", annotations={KEYS.model_id: model_id}, **spec)
    return {
        "metadata": {"annotations": made["metadata"]["annotations"], "labels": labels or {}},
        "spec": made["spec"],
    }


def model(
    name: str,
    wanted: int,
    gib: int = 4,
    *,
    running: int = 0,
    starting: int = 0,
    priority: int = 0,
    **more: Any,
) -> SchedulableModel:
    return SchedulableModel(
        name=f"team/{name}",
        desired=wanted,
        running=running,
        starting=starting,
        priority=priority,
        template=template(gib, **more),
        template_hash=name,
    )


def finish(steps: Steps) -> SchedulableAnswer:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            answer: SchedulableAnswer = done.value
            return answer


def ask(
    cluster: Cluster, *models: SchedulableModel, idle: Iterable[str] = (), pending: Sequence[Json] = ()
) -> dict[str, Schedulable]:
    waiting = [parse_demand(one, KEYS) for one in pending]
    answers = SchedulableAnswers(cluster, KEYS, pending=lambda: waiting, aside=lambda _: [])
    answer = finish(answers.answer(SchedulableRequest(models=models, idle=tuple(idle))))
    return {key.name: one for key, one in answer.models.items()}


def given(cluster: Cluster, *models: SchedulableModel, **more: Any) -> dict[str, int]:
    return {name: one.now for name, one in ask(cluster, *models, **more).items()}
