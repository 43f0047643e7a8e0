"""What other autoscalers are told of a model."""

from typing import Any

import pytest

from scaler.core.models_view import Averages
from scaler.export.figures import figure, is_active, target_of
from tests.fakes.models_view import FakeModels

UNKNOWN = Averages()


@pytest.mark.parametrize(
    ("figures", "metric", "value"),
    [
        ({"concurrency": Averages(3.5, 9.0)}, "concurrency", 3.5),
        ({"concurrency": Averages(3.5, 9.0), "in_panic": True}, "concurrency", 9.0),
        ({"concurrency": Averages(3.5, 1.0), "in_panic": True}, "concurrency", 3.5),
        ({"concurrency": Averages(3.5, None), "in_panic": True}, "concurrency", 3.5),
        ({"requests_per_second": Averages(7.0, 0.0)}, "rps", 7.0),
        ({"waiting": Averages(2.0, 0.0)}, "waiting", 2.0),
        # A replica serves and tells nothing: that is not 0.
        ({"concurrency": UNKNOWN}, "concurrency", None),
        # No replica serves: what is held is all there is.
        ({"concurrency": UNKNOWN, "ready": 0, "buffered": 4}, "concurrency", 4.0),
        ({"waiting": UNKNOWN, "ready": 0, "buffered": 4}, "waiting", 4.0),
        ({"requests_per_second": UNKNOWN, "ready": 0, "buffered": 4}, "rps", 0.0),
        # Of windows that have just begun 0 may be too little; what is more than that is somebody's.
        ({"is_young": True}, "concurrency", None),
        ({"is_young": True, "ready": 0}, "waiting", None),
        ({"is_young": True, "concurrency": UNKNOWN, "ready": 0}, "concurrency", None),
        ({"is_young": True, "concurrency": UNKNOWN, "ready": 0, "buffered": 4}, "concurrency", 4.0),
        ({"is_young": True, "concurrency": Averages(0.5, 0.0)}, "concurrency", 0.5),
        ({}, "desired", None),
        ({"desired": 5}, "desired", 5.0),
        ({"desired": 5, "capacity_limited": 2}, "desired", 3.0),
        ({"desired": 0}, "desired", 0.0),
        ({"desired": 1, "capacity_limited": 2}, "desired", 0.0),
    ],
)
def test_figures(figures: dict[str, Any], metric: str, value: float | None) -> None:
    models = FakeModels()
    assert figure(models.views[models.add("a/m", **figures)], metric) == value


def test_what_is_no_figure_is_none() -> None:
    models = FakeModels()
    with pytest.raises(KeyError):
        figure(models.views[models.add("a/m")], "cpu")


@pytest.mark.parametrize(
    ("figures", "active"),
    [
        ({}, False),
        ({"concurrency": Averages(0.01, 0.0)}, True),
        ({"requests_per_second": Averages(0.1, 0.0)}, True),
        ({"waiting": Averages(1.0, 0.0)}, True),
        ({"concurrency": UNKNOWN}, None),
        ({"is_young": True}, None),
        ({"is_young": True, "buffered": 1}, True),
        ({"is_young": True, "waiting": Averages(1.0, 0.0)}, True),
        ({"concurrency": UNKNOWN, "buffered": 1}, True),
        ({"concurrency": UNKNOWN, "requests_per_second": Averages(1.0, 1.0)}, True),
        (dict.fromkeys(("concurrency", "requests_per_second", "waiting"), UNKNOWN) | {"ready": 0}, False),
        (dict.fromkeys(("concurrency", "requests_per_second", "waiting"), UNKNOWN) | {"ready": 1}, None),
    ],
)
def test_activity(figures: dict[str, Any], active: bool | None) -> None:
    models = FakeModels()
    assert is_active(models.views[models.add("a/m", **figures)]) is active


def test_a_replicas_target_is_that_of_the_annotations() -> None:
    models = FakeModels()
    view = models.views[models.add("a/m", target="8", metric="rps")]
    assert [target_of(view, metric) for metric in ("rps", "concurrency", "waiting", "desired")] == [
        *(8.0, None, None, 1.0),
    ]
