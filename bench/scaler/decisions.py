"""What a decision costs, and a report."""

import time
from random import Random

from scaler.decision.annotations import GROUP
from scaler.decision.decider import ModelDecider
from scaler.decision.defaults import Defaults
from scaler.decision.load import Stat
from scaler.decision.spec import spec_of

SECOND = 1_000_000_000
SPECS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "weighted": {"metric-aggregation-algorithm": "weighted-exponential"},
    "scale-down-delay 10m": {"scale-down-delay": "10m"},
    "window 1h": {"window": "1h"},
    "window 1h, weighted": {"window": "1h", "metric-aggregation-algorithm": "weighted-exponential"},
}


def microseconds(annotations: dict[str, str], models: int, ticks: int) -> tuple[float, float]:
    """CPU time of a decision, and of a report, of which each model has one a second; a tick is two seconds."""
    chance = Random(1)
    spec = spec_of({GROUP + key: value for key, value in annotations.items()}, Defaults())
    all_models = [ModelDecider(spec, ready=1, now_ns=0) for _ in range(models)]
    deciding = reporting = 0.0
    for now in range(1, 2 * ticks + 1):
        stats = [
            Stat(concurrency=chance.uniform(0, 500), requests=chance.uniform(0, 100)) for _ in all_models
        ]
        begun = time.process_time()
        for model, stat in zip(all_models, stats, strict=True):
            model.record(stat, now * SECOND)
        reporting += time.process_time() - begun
        if now % 2 == 0:
            begun = time.process_time()
            for model in all_models:
                model.decide(ready=3, now_ns=now * SECOND)
            deciding += time.process_time() - begun
    return deciding / (models * ticks) * 1e6, reporting / (models * ticks * 2) * 1e6
