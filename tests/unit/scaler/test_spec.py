"""Annotations and defaults: what is refused, in which words, and what becomes of what is not."""

import pytest

from berth.contract.errors import InvalidValue
from scaler.decision.annotations import is_scaled, of_deployment
from scaler.decision.defaults import BERTH, read_defaults
from scaler.decision.spec import Spec, spec_of

GROUP = "autoscaling.knative.dev/"
KPA, HPA = "kpa.autoscaling.knative.dev", "hpa.autoscaling.knative.dev"


def spec(
    annotations: dict[str, str],
    config: dict[str, str] | None = None,
    *,
    concurrency: int = 0,
    reachable: bool = True,
) -> Spec:
    given = {GROUP + key: value for key, value in annotations.items()}
    return spec_of(given, read_defaults(config or {}), container_concurrency=concurrency, reachable=reachable)


PERCENTAGE, DEFAULT = "container-concurrency-target-percentage", "container-concurrency-target-default"


@pytest.mark.parametrize(
    ("concurrency", "annotations", "config", "target", "total"),
    [
        (0, {}, {PERCENTAGE: "100"}, 100, 100),
        (0, {}, {PERCENTAGE: "80"}, 80, 100),
        (0, {}, {PERCENTAGE: "0.8"}, 80, 100),
        (0, {}, {PERCENTAGE: "30", DEFAULT: "2"}, 0.6, 2),
        (12, {"target-utilization-percentage": "75"}, {PERCENTAGE: "80"}, 9, 12),
        (10, {}, {PERCENTAGE: "80"}, 8, 10),
        (1, {}, {PERCENTAGE: "80"}, 0.8, 1),
        (1, {}, {PERCENTAGE: "100"}, 1, 1),
        (0, {"target": "1"}, {PERCENTAGE: "100"}, 1, 1),
        (0, {"target": "1"}, {PERCENTAGE: "0.001"}, 0.01, 1),
        (0, {"target": "1"}, {PERCENTAGE: "75"}, 0.75, 1),
        (0, {"target": "10"}, {PERCENTAGE: "75"}, 7.5, 10),
        (10, {"target": "1"}, {PERCENTAGE: "100"}, 1, 1),
        (0, {"target": "500"}, {PERCENTAGE: "100"}, 500, 500),
        (1, {"target": "10"}, {PERCENTAGE: "100"}, 1, 1),
        (1, {"metric": "rps"}, {PERCENTAGE: "100"}, 140, 200),
        (0, {"metric": "rps", "target": "1"}, {}, 0.7, 1),
        (3, {"metric": "rps", "target-utilization-percentage": "75"}, {}, 150, 200),
        (0, {"metric": "rps"}, {"requests-per-second-target-default": "300"}, 210, 300),
        (5, {"metric": "rps", "target": "300"}, {}, 210, 300),
        (5, {"class": "mine", "target": "300"}, {}, 210, 300),
    ],
)
def test_targets(
    concurrency: int, annotations: dict[str, str], config: dict[str, str], target: float, total: float
) -> None:
    """Knative's own cases (pkg/reconciler/autoscaling/resources/target_test.go)."""
    of = spec(annotations, config, concurrency=concurrency)
    assert (of.target, of.total) == (pytest.approx(target, rel=1e-15), total)


@pytest.mark.parametrize(
    ("window", "percentage", "seconds"),
    [
        ("60s", "10", 6),
        ("10s", "10", 1),
        ("10m", "10", 60),
        ("60s", "50", 30),
        ("60s", "51", 31),
        ("6s", "1", 1),
    ],
)
def test_panic_windows(window: str, percentage: str, seconds: int) -> None:
    assert spec({"window": window, "panic-window-percentage": percentage}).panic_window_seconds == seconds


def test_nothing_is_knatives_default() -> None:
    of = spec({})
    assert (of.metric, of.target, of.total, of.target_burst_capacity, of.panic_threshold) == (
        *("concurrency", 70, 100, 211, 2),
    )
    assert (of.stable_window_seconds, of.panic_window_seconds, of.scale_down_delay_seconds) == (60, 6, 0)
    assert (of.max_scale_up_rate, of.max_scale_down_rate, of.activation_scale, of.weighted) == (
        1000,
        2,
        0,
        False,
    )
    bounds = of.bounds
    assert (bounds.min_scale, bounds.max_scale, bounds.initial_scale, bounds.scale_to_zero) == (0, 0, 1, True)
    assert (bounds.grace_period_ns, bounds.retention_ns) == (30 * 10**9, 0)


def test_berths_own_default() -> None:
    assert spec({}, BERTH).target_burst_capacity == 0


def test_all_that_there_is() -> None:
    of = spec(
        {
            "class": KPA,
            "metric": "rps",
            "target": "8",
            "target-utilization-percentage": "50",
            "target-burst-capacity": "-1",
            "window": "90s",
            "panic-window-percentage": "20",
            "panic-threshold-percentage": "150",
            "scale-down-delay": "2m",
            "scale-to-zero-pod-retention-period": "1m30s",
            "initial-scale": "3",
            "min-scale": "2",
            "max-scale": "9",
            "activation-scale": "4",
            "metric-aggregation-algorithm": "weighted-exponential",
        }
    )
    assert (of.metric, of.target, of.total, of.target_burst_capacity) == ("rps", 4, 8, -1)
    assert (of.panic_threshold, of.stable_window_seconds, of.panic_window_seconds) == (1.5, 90, 18)
    assert (of.scale_down_delay_seconds, of.activation_scale, of.weighted) == (120, 4, True)
    bounds = of.bounds
    assert (bounds.min_scale, bounds.max_scale, bounds.initial_scale, bounds.activator_always) == (
        2,
        9,
        3,
        True,
    )
    assert bounds.retention_ns == 90 * 10**9


def test_what_is_not_reachable_has_no_minimum_and_no_retention() -> None:
    of = spec({"min-scale": "2", "scale-to-zero-pod-retention-period": "1m"}, reachable=False)
    assert (of.bounds.min_scale, of.bounds.retention_ns, of.reachable) == (0, 0, False)


def test_names_of_several_words_may_be_in_camel_case_and_hyphens_win() -> None:
    assert spec({"maxScale": "7", "scaleDownDelay": "5s"}).bounds.max_scale == 7
    assert spec({"maxScale": "7", "max-scale": "8"}).bounds.max_scale == 8
    assert spec({"metricAggregationAlgorithm": "weightedExponential"}).weighted
    assert spec({"activationScale": "7"}).activation_scale == 0


def test_the_pod_template_counts_before_the_deployment_however_it_is_spelt() -> None:
    template = {GROUP + "maxScale": "3", GROUP + "target": "2", GROUP + "activationScale": "x", "other": "1"}
    deployment = {
        GROUP + "max-scale": "9",
        GROUP + "target": "1",
        GROUP + "activation-scale": "2",
        GROUP + "window": "7s",
    }
    assert of_deployment(template, {**deployment, "another": "2"}) == {
        GROUP + "maxScale": "3",
        GROUP + "target": "2",
        GROUP + "activationScale": "x",
        GROUP + "activation-scale": "2",
        GROUP + "window": "7s",
    }
    assert of_deployment(deployment, template) == {**deployment, GROUP + "activationScale": "x"}


def test_a_class_requests_it() -> None:
    assert is_scaled({GROUP + "class": "anything"})
    assert not is_scaled({GROUP + "min-scale": "1"})


ZERO_ALLOWED = {"allow-zero-initial-scale": "true"}


def test_initial_scale_zero() -> None:
    assert spec({"initial-scale": "0"}, ZERO_ALLOWED).bounds.initial_scale == 0
    assert spec({}, {**ZERO_ALLOWED, "initial-scale": "0"}).bounds.initial_scale == 0


REFUSED: dict[tuple[str, str], str] = {
    (
        "class",
        "other.knative.dev",
    ): "kpa.autoscaling.knative.dev, hpa.autoscaling.knative.dev, or a class that is not",
    ("min-scale", "-1"): "a whole number, 0 to 2147483647",
    ("min-scale", "2147483648"): "a whole number, 0 to 2147483647",
    ("max-scale", "many"): "a whole number, 0 to 2147483647",
    ("maxScale", "1.0"): "a whole number, 0 to 2147483647",
    ("activation-scale", "1"): "a whole number from 2 on",
    ("activation-scale", "x"): "a whole number from 2 on",
    ("panic-window-percentage", "0.9"): "1 to 100",
    ("panic-window-percentage", "100.1"): "1 to 100",
    ("panic-window-percentage", "10%"): "1 to 100",
    ("panic-threshold-percentage", "109.9"): "110 to 1000",
    ("panic-threshold-percentage", "1000.1"): "110 to 1000",
    ("target", "0.009"): "a number from 0.01 on",
    ("target", ""): "a number from 0.01 on",
    ("target-utilization-percentage", "0.9"): "1 to 100",
    ("target-utilization-percentage", "101"): "1 to 100",
    ("target-burst-capacity", "-2"): "a number from 0 on, or -1 for no limit",
    ("target-burst-capacity", "-0.5"): "a number from 0 on, or -1 for no limit",
    ("window", "5s"): "a duration, 6s to 1h",
    ("window", "1h1s"): "a duration, 6s to 1h",
    ("window", "60"): "a duration, 6s to 1h",
    ("window", "6500ms"): "whole seconds, 6s to 1h",
    ("scale-down-delay", "-1s"): "a duration, 0s to 1h",
    ("scale-down-delay", "1ms"): "whole seconds, 0s to 1h",
    ("scale-to-zero-pod-retention-period", "2h"): "a duration, 0s to 1h",
    ("metric", "cpu"): "concurrency or rps",
    ("initial-scale", "0"): "a whole number from 1 on",
    ("initial-scale", "-1"): "a whole number from 1 on",
    ("initial-scale", "one"): "a whole number from 1 on",
}


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_is_refused_is_named_with_what_would_be_right(name: str, value: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        spec({name: value})
    assert str(caught.value).startswith(f"{GROUP}{name}: {value!r} is invalid; use {REFUSED[name, value]}")


@pytest.mark.parametrize(
    ("annotations", "config", "said"),
    [
        ({"min-scale": "3", "max-scale": "2"}, {}, "max-scale: '2' is invalid; use at least"),
        ({"activation-scale": "4", "max-scale": "3"}, {}, "activation-scale: '4' is invalid; use 2 to 3"),
        ({"activation-scale": "4", "min-scale": "5"}, {}, "activation-scale: '4' is invalid; use a whole number from 5"),
        ({"max-scale": "9"}, {"max-scale-limit": "8", "max-scale": "1"}, "'9' is invalid; use 1 to 8, the cluster's"),
        ({"max-scale": "0"}, {"max-scale-limit": "8", "max-scale": "1"}, "'0' is invalid; use 1 to 8, the cluster's"),
        ({"class": HPA, "metric": ""}, {}, "metric: '' is invalid; use the name of a metric"),
        ({"class": KPA, "metric-aggregation-algorithm": "mean"}, {}, "use linear or weighted-exponential"),
        ({"metric": "cpu"}, {"pod-autoscaler-class": KPA}, "use concurrency or rps"),
        ({"window": "1s", "target": "0"}, {}, "target: '0' is invalid; use a number from 0.01 on; autoscaling"),
    ],
)  # fmt: skip
def test_what_is_refused_together(annotations: dict[str, str], config: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        spec(annotations, config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("annotations", "config"),
    [
        ({"class": "mine.example.com", "metric": "anything"}, {}),
        ({"class": "", "metric": "anything"}, {}),
        ({"class": HPA, "metric": "memory"}, {}),
        ({"metric": "anything"}, {"pod-autoscaler-class": "mine"}),
        ({"metric-aggregation-algorithm": "mean"}, {}),
        ({"window": "6s"}, {}),
        ({"window": "1h"}, {}),
        ({"scale-down-delay": "0"}, {}),
        ({"target": "0.01"}, {}),
        ({"target": "NaN"}, {}),
        ({"panic-window-percentage": "NaN"}, {}),
        ({"target-burst-capacity": "-1.0"}, {}),
        ({"panic-threshold-percentage": "110"}, {}),
        ({"initial-scale": "3000000000"}, {}),
        ({"max-scale": "0", "min-scale": "5"}, {}),
        ({"max-scale": "8"}, {"max-scale-limit": "8", "max-scale": "1"}),
    ],
)
def test_what_is_taken(annotations: dict[str, str], config: dict[str, str]) -> None:
    spec(annotations, config)
