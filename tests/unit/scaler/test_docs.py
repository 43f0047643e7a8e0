"""docs/autoscaling.md says what is so: its names are those of the code."""

import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from berth.contract.keys import Keys
from berth.contract.scaling import HoldLimits, ModelKey
from scaler.config import ScalerOptions
from scaler.decision.annotations import check
from scaler.decision.defaults import BERTH, HPA, KPA, read_defaults
from scaler.metrics import ScalerMetrics
from scaler.show.external_metrics import METRICS
from scaler.show.figures import FIGURES
from tests.fakes.models_view import FakeModels

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "autoscaling.md").read_text()
OPERATING = (ROOT / "docs" / "operating.md").read_text()


def section(title: str, text: str = DOCS) -> str:
    """What stands under a heading, up to the next one of its rank."""
    before, found, rest = text.partition(f"# {title}\n")
    assert found, title
    return re.split(rf"\n{before.rpartition(chr(10))[2]}# ", rest)[0]


def rows(text: str) -> list[list[str]]:
    return [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]


def test_every_annotation_of_the_table_is_read() -> None:
    """A value that cannot be meant is refused by its name."""
    knative, berth = section("Annotations").split("And Berth's own")
    names = [row[0].strip(" `") for row in rows(knative)]
    assert len(names) == 15
    for name in set(names) - {"class", "metric"}:
        given = {f"autoscaling.knative.dev/{name}": "nonsense", "autoscaling.knative.dev/class": KPA}
        try:
            check(given, read_defaults(BERTH))
        except ValueError as error:
            assert name in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"{name} is not looked at")
    keys = Keys()
    own = {
        *(keys.hold_timeout, keys.hold_requests, keys.hold_bytes, keys.clients, keys.overflow_pods),
    }
    assert {keys.prefix + row[0].strip(" `") for row in rows(berth)} == own
    defaults = {row[0].strip(" `"): row[1].strip() for row in rows(berth)}
    usual = HoldLimits()
    assert (float(defaults["hold-timeout"]), int(defaults["hold-requests"])) == (
        usual.seconds,
        usual.requests,
    )
    assert defaults["hold-bytes"] == f"{usual.bytes // 1024**2}Mi"
    assert all(kind in section("Classes") for kind in (KPA, HPA))


def test_every_figure_is_told() -> None:
    assert [row[0].strip(" `") for row in rows(section("A HorizontalPodAutoscaler instead"))] == list(METRICS)
    assert all(f"`{name}`" in section("KEDA instead") for name in FIGURES)
    assert re.search(rf"The scaler's \({ScalerOptions.admin_listen.port};", DOCS)


class ToldModels(FakeModels):
    def models(self) -> list[ModelKey]:
        return list(self.views)


def exposed() -> set[str]:
    """Names of all series of scaler and activator."""
    models = ToldModels()
    models.add("a/m", wanted=1)
    registry = CollectorRegistry()
    ScalerMetrics(registry).follow(
        models, writes_waiting=lambda: 0, binder_silent_seconds=lambda: 0.0, activators=lambda: 0
    )
    names = re.findall(r"^(berth_\w+)", generate_latest(registry).decode(), re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


def test_alerts_and_tables_name_series_that_there_are() -> None:
    groups: Any = yaml.safe_load(section("Metrics and alerts").split("```yaml")[1].split("```")[0])
    rules = groups["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    scalers = exposed()
    for rule in rules:
        for name in re.findall(r"berth_scaler_\w+", rule["expr"]):
            assert name in scalers, rule["alert"]
    told = set(re.findall(r"`(berth_scaler_\w+)", section("Metrics", OPERATING)))
    plain = {re.sub(r"_(bucket|count|sum)$", "", name) for name in scalers}
    assert told == plain
