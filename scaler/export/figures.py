"""A model's figures as autoscalers of others ask for them: by a name, one number of the whole model.

Source of the arithmetic that they do with it: k8s.io/kubernetes pkg/controller/podautoscaler (a sum over all replicas is
divided by the target of one).
"""

from collections.abc import Callable
from typing import Final

from scaler.core.models_view import Averages, ModelView

CONCURRENCY: Final = "concurrency"
RPS: Final = "rps"
WAITING: Final = "waiting"
DESIRED: Final = "desired"


def figure(view: ModelView, metric: str) -> float | None:
    """None: it is not known. Raises KeyError for a name that is none of `FIGURES`."""
    return FIGURES[metric](view)


def target_of(view: ModelView, metric: str) -> float | None:
    """How much of it a replica is to have, by the model's annotations. None: they do not say."""
    if metric == DESIRED:
        return 1.0
    return view.spec.target if view.spec is not None and view.spec.metric == metric else None


def is_active(view: ModelView) -> bool | None:
    """Whether it has requests: in the stable window, or at this moment. None: it is not known."""
    if view.buffered > 0:
        return True
    figures = [figure(view, metric) for metric in (CONCURRENCY, RPS, WAITING)]
    if any(figures):
        return True
    return None if None in figures else False


def _concurrency(view: ModelView) -> float | None:
    return _average(view, view.concurrency, float(view.buffered))


def _rps(view: ModelView) -> float | None:
    return _average(view, view.requests_per_second, 0.0)


def _waiting(view: ModelView) -> float | None:
    return _average(view, view.waiting, float(view.buffered))


def _average(view: ModelView, of: Averages, without_replicas: float) -> float | None:
    """Of the stable window; in panic the larger of both, so that a burst is not reported a minute late. Where no replica
    serves, the only load is what activators buffer. An average that has just begun is known where it is more than 0: an
    autoscaler removes the last replica by a 0, and by nothing else."""
    if of.stable is None:
        value = without_replicas if view.ready == 0 else None
    else:
        value = max(of.stable, of.panic or 0.0) if view.in_panic else of.stable
    return value or (None if view.is_young else value)


def _desired(view: ModelView) -> float | None:
    """As many as Berth would request: what cannot be scheduled is not among them."""
    return None if view.desired is None else float(max(view.desired - view.capacity_limited, 0))


FIGURES: Final[dict[str, Callable[[ModelView], float | None]]] = {
    CONCURRENCY: _concurrency,
    RPS: _rps,
    WAITING: _waiting,
    DESIRED: _desired,
}
