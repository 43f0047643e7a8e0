"""Models whose figures a test sets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from berth.contract.scaling import ModelKey
from scaler.core.models_view import Averages, ModelView
from scaler.decision.bounds import Activity
from scaler.decision.defaults import BERTH, KPA, read_defaults
from scaler.decision.spec import spec_of

IDLE = Averages(0.0, 0.0)


class FakeModels:
    """As `scaler.core.models_view.ModelsView`."""

    def __init__(self) -> None:
        self.leads = True
        self.views: dict[ModelKey, ModelView] = {}

    def names(self, namespace: str) -> Sequence[str]:
        return [model.name for model in self.views if model.namespace == namespace]

    def models(self) -> list[ModelKey]:
        return list(self.views)

    def view(self, model: ModelKey) -> ModelView | None:
        return self.views.get(model)

    def add(self, model: str, *, target: str = "2", metric: str = "concurrency", **figures: Any) -> ModelKey:
        """A model with a replica that nobody asks."""
        annotations = {"autoscaling.knative.dev/target": target, "autoscaling.knative.dev/metric": metric}
        annotations["autoscaling.knative.dev/target-utilization-percentage"] = "100"
        key = ModelKey.parse(model)
        self.views[key] = replace(
            ModelView(
                model=key,
                class_name=KPA,
                spec=spec_of(annotations, read_defaults(BERTH)),
                ready=1,
                replicas=1,
                concurrency=IDLE,
                requests_per_second=IDLE,
                waiting=IDLE,
                activity=Activity.ACTIVE,
            ),
            **figures,
        )
        return key

    def change(self, model: ModelKey, **figures: Any) -> None:
        self.views[model] = replace(self.views[model], **figures)
