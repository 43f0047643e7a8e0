"""Knative's ConfigMap: which values are read, and which are invalid."""

import pytest

from berth.contract.errors import InvalidValue
from scaler.decision.defaults import Defaults, read_defaults

PERCENTAGE, DEFAULT = "container-concurrency-target-percentage", "container-concurrency-target-default"
ZERO_ALLOWED = {"allow-zero-initial-scale": "true"}


@pytest.mark.parametrize(
    ("key", "value", "more", "right"),
    [
        ("scale-to-zero-grace-period", "0s", {}, "more than 0s"),
        ("scale-down-delay", "-1s", {}, "0s or more"),
        ("scale-down-delay", "1500ms", {}, "whole seconds"),
        ("scale-to-zero-pod-retention-period", "-1ns", {}, "0s or more"),
        ("target-burst-capacity", "-0.5", {}, "0 or more, or -1 for no limit"),
        (PERCENTAGE, "0", {}, "more than 0, at most 100"),
        (PERCENTAGE, "100.5", {}, "more than 0, at most 100"),
        (DEFAULT, "0.01", {}, "what makes at least 0.01 with container-concurrency-target-percentage"),
        ("requests-per-second-target-default", "0.009", {}, "at least 0.01"),
        ("activator-capacity", "0.9", {}, "at least 1"),
        ("max-scale-up-rate", "1", {}, "more than 1"),
        ("max-scale-down-rate", "1.0", {}, "more than 1"),
        ("stable-window", "5s", {}, "6s to 1h"),
        ("stable-window", "3601s", {}, "6s to 1h"),
        ("stable-window", "6100ms", {}, "whole seconds"),
        ("panic-window-percentage", "0.5", {}, "1 to 100"),
        ("panic-window-percentage", "101", {}, "1 to 100"),
        ("initial-scale", "0", {}, "at least 1, or 0 where allow-zero-initial-scale is true"),
        ("initial-scale", "-1", ZERO_ALLOWED, "at least 1, or 0 where"),
        ("min-scale", "-1", {}, "0 or more"),
        ("max-scale", "-1", {}, "at least 0"),
        ("max-scale", "0", {"max-scale-limit": "5"}, "at least 1"),
        ("max-scale", "6", {"max-scale-limit": "5"}, "at most max-scale-limit, 5"),
        ("max-scale-limit", "-1", {}, "0 or more"),
        ("min-scale", "3", {"max-scale": "2"}, "at most max-scale, 2"),
    ],
)
def test_defaults_that_are_refused(key: str, value: str, more: dict[str, str], right: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_defaults({key: value, **more})
    assert str(caught.value).startswith(f"{key}: {value!r} is invalid; use {right}")


@pytest.mark.parametrize(
    ("key", "value"), [("max-scale", "x"), ("stable-window", "60"), ("enable-scale-to-zero", "yes"), ("activator-capacity", "")]
)  # fmt: skip
def test_defaults_that_cannot_be_read(key: str, value: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{key}: {value!r} is n"):
        read_defaults({key: value})


def test_defaults_that_are_taken() -> None:
    assert read_defaults({"_example": "anything", "unknown": "key"}) == Defaults()
    read = read_defaults({"pod-autoscaler-class": " mine ", PERCENTAGE: "1", "target-burst-capacity": "-1"})
    assert (read.autoscaler_class, read.concurrency_target_fraction, read.target_burst_capacity) == (
        "mine",
        1,
        -1,
    )
