"""Berth's decisions are Knative's: its own code, built from its Go module, is asked the same."""

import json
import os
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from berth.contract.errors import InvalidValue
from scaler.decision.defaults import read_defaults
from scaler.decision.load import Load, Stat
from scaler.decision.spec import Spec, spec_of
from scaler.decision.windows import WeightedWindow
from tests.oracles.equality import compare, told
from tests.oracles.histories import GROUP, histories
from tests.oracles.knative import Asked, asking
from tests.unit.scaler.test_go import DURATIONS, NO_DURATIONS, NO_NUMBERS, NUMBERS

# The program may yet have to be built.
pytestmark = pytest.mark.timeout(1800)

DECISIONS = int(os.environ.get("BERTH_DECISIONS", "100000"))
SECOND = 1_000_000_000
TEXTS = (
    *DURATIONS, *NO_DURATIONS, *NUMBERS, *NO_NUMBERS, "nan", "NaN", "Inf", "-inf", "infinity", "6s", "1h", "60m0s",
    "3600.5s", "0.01", "0.0099", "100", "110", "1000", "-1", "-1.0", "2147483647", "2147483648", "9223372036854775808",
    "concurrency", "rps", "cpu", "linear", "weighted-exponential", "weightedExponential", "mine",
    "kpa.autoscaling.knative.dev", "hpa.autoscaling.knative.dev", "other.knative.dev", "true", "T", "1.5", "5", "2", "3",
)  # fmt: skip
ANNOTATIONS = (
    "class", "metric", "metric-aggregation-algorithm", "metricAggregationAlgorithm", "target", "target-burst-capacity",
    "target-utilization-percentage", "targetUtilizationPercentage", "window", "panic-window-percentage",
    "panicWindowPercentage", "panic-threshold-percentage", "scale-down-delay", "scaleDownDelay", "min-scale", "minScale",
    "max-scale", "maxScale", "initial-scale", "initialScale", "activation-scale", "activationScale",
    "scale-to-zero-pod-retention-period", "scaleToZeroPodRetentionPeriod", "targetBurstCapacity",
)  # fmt: skip
KEYS = (
    "pod-autoscaler-class", "enable-scale-to-zero", "allow-zero-initial-scale", "max-scale-up-rate", "max-scale-down-rate",
    "container-concurrency-target-percentage", "container-concurrency-target-default", "initial-scale", "min-scale",
    "requests-per-second-target-default", "target-burst-capacity", "panic-window-percentage", "activator-capacity",
    "panic-threshold-percentage", "max-scale", "max-scale-limit", "stable-window", "scale-down-delay",
    "scale-to-zero-grace-period", "scale-to-zero-pod-retention-period",
)  # fmt: skip


@pytest.fixture(scope="module")
def oracle() -> Iterator[Asked]:
    with asking() as asked:
        yield asked


def test_every_decision_of_random_histories() -> None:
    """As many as BERTH_DECISIONS says."""
    result = compare(os.environ.get("BERTH_SEED", "every run"), DECISIONS * 51 // 50)
    assert result.differences == 0, told(result)
    assert result.decisions >= DECISIONS
    assert result.refused > 0


def test_what_is_refused_and_what_becomes_of_what_is_not(oracle: Asked) -> None:
    asked = [*configurations(Random("configurations"), 6000)]
    answers = oracle.answers([json.dumps({"op": "new", "id": "m", **one}) + "\n" for one in asked])
    taken = 0
    for one, answer in zip(asked, answers, strict=True):
        spec = spec_if_taken(one)
        assert (spec is None) == ("err" in answer), (one, answer)
        if spec is not None:
            assert told_of(spec) == {key: answer[key] for key in told_of(spec)}, (one, answer)
            taken += 1
    assert 1000 < taken < 4500


def spec_if_taken(asked: dict[str, Any]) -> Spec | None:
    try:
        return spec_of(
            asked["annotations"],
            read_defaults(asked["config"]),
            container_concurrency=asked["containerConcurrency"],
            reachable=not asked["unreachable"],
        )
    except InvalidValue:
        return None


def configurations(chance: Random, count: int) -> Iterator[dict[str, Any]]:
    """Each text for each key, then several at a time."""
    single = [({GROUP + key: text}, {}) for key in ANNOTATIONS for text in TEXTS]
    single += [({}, {key: text}) for key in KEYS for text in TEXTS]
    # A delay of 292 years counts as whole seconds in Go, which then asks for 69 GiB.
    texts = [text for text in TEXTS if text != "9223372036854775807ns"]
    single = [
        (annotations, config)
        for annotations, config in single
        if config.get("scale-down-delay") in (None, *texts)
    ]
    for number in range(count):
        if single and number % 2:
            annotations, config = single.pop(chance.randrange(len(single)))
        else:
            annotations = {
                GROUP + chance.choice(ANNOTATIONS): chance.choice(TEXTS) for _ in range(chance.randrange(3))
            }
            config = {chance.choice(KEYS): chance.choice(texts) for _ in range(chance.choice((0, 0, 1, 2)))}
        yield {
            "annotations": annotations,
            "config": config,
            "containerConcurrency": chance.choice((0, 1, 50)),
            "unreachable": chance.random() < 0.2,
        }


def told_of(spec: Spec) -> dict[str, Any]:
    """A spec in the oracle's words."""
    numbers = (spec.target, spec.total, spec.target_burst_capacity, spec.panic_threshold)
    seconds = (spec.stable_window_seconds, spec.panic_window_seconds, spec.scale_down_delay_seconds)
    bounds = spec.bounds
    return {
        "metric": spec.metric,
        "numbers": [bits(number) for number in (*numbers, spec.max_scale_up_rate, spec.max_scale_down_rate)],
        "windows": [one * SECOND for one in seconds],
        "scales": [bounds.initial_scale, spec.activation_scale, bounds.min_scale, bounds.max_scale],
    }


def bits(number: float) -> str:
    """To the last bit; what is no number is none in many ways."""
    return "7ff8000000000001" if number != number else struct.pack(">d", number).hex()


def test_averages_to_the_last_bit(oracle: Asked) -> None:
    compared = 0
    for lines in histories("averages", 3000):
        asked = [json.loads(line) for line in lines]
        answers = iter(oracle.answers(lines))
        loads: tuple[Load, Load] | None = None
        for one in asked:
            answer = None if one["op"] == "stat" else next(answers)
            now_ns = round(one.get("t", 0) % 1 * SECOND) + int(one.get("t", 0)) * SECOND
            if one["op"] in ("new", "update") and answer and "err" not in answer:
                specs = both(one)
                if one["op"] == "new" or loads is None:
                    loads = (Load(specs[0]), Load(specs[1]))
                else:
                    for load, spec in zip(loads, specs, strict=True):
                        load.update(spec, now_ns)
            elif one["op"] == "stat" and loads:
                for load in loads:
                    load.record(Stat(one["c"], one["pc"], one["n"], one["pn"]), now_ns)
            elif answer and answer.get("valid"):
                assert loads is not None
                found = [bits(value) for load in loads for value in load.averages(now_ns) or (0.0, 0.0)]
                assert found == answer["averages"], (lines, one)
                compared += 1
    assert compared > 2000


def both(asked: dict[str, Any]) -> tuple[Spec, Spec]:
    """By concurrency and by requests, and known to be scraped by nobody, so that both always have an average."""
    defaults = read_defaults(asked["config"])
    given = asked["annotations"]
    by = [
        spec_of({**given, GROUP + "metric": metric}, defaults, scraped=False)
        for metric in ("concurrency", "rps")
    ]
    return by[0], by[1]


def test_the_weight_of_the_newest_second(oracle: Asked) -> None:
    """Each window that is short enough to have a weight of its own, and a longer one."""
    for size in range(6, 44):
        annotations = {
            GROUP + "metric-aggregation-algorithm": "weighted-exponential",
            GROUP + "window": f"{size}s",
        }
        (_, answer) = oracle.answers(
            [
                json.dumps({"op": "new", "id": "w", "t": 100, "annotations": annotations}) + "\n",
                json.dumps({"op": "stat", "id": "w", "t": 100, "c": 1, "n": 1}) + "\n",
                json.dumps({"op": "scale", "id": "w", "t": 100, "ready": 1}) + "\n",
            ]
        )
        window = WeightedWindow(size)
        window.record(100, 1)
        assert bits(window.average(100)) == answer["averages"][0], size
