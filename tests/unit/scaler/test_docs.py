"""docs/autoscaling.md says what is so: its names are those of the code."""

import re
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from agent import cold_starts as agent_cold_starts
from berth.contract.activation import BufferLimits
from berth.contract.keys import Keys
from berth.contract.scaling import ModelKey
from proxy.activator.bounds import Bounds
from proxy.activator.metrics import ActivatorCollector, ActivatorStats, Connection
from scaler.activation.sessions import Connected
from scaler.config import ScalerOptions
from scaler.core import cold_starts
from scaler.decision.annotations import check
from scaler.decision.defaults import BERTH, HPA, KPA, read_defaults
from scaler.export.external_metrics import METRICS
from scaler.export.figures import FIGURES
from scaler.metrics import ScalerMetrics
from tests.fakes.control_server import FakeControlServer
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
    usual = BufferLimits()
    assert (float(defaults["hold-timeout"]), int(defaults["hold-requests"])) == (
        usual.seconds,
        usual.requests,
    )
    assert defaults["hold-bytes"] == f"{usual.bytes // 1024**2}Mi"
    assert all(kind in section("Classes") for kind in (KPA, HPA))


def test_every_figure_is_reported() -> None:
    assert [row[0].strip(" `") for row in rows(section("A HorizontalPodAutoscaler instead"))] == list(METRICS)
    assert all(f"`{name}`" in section("KEDA instead") for name in FIGURES)
    assert re.search(rf"The scaler's \({ScalerOptions.admin_listen.port};", DOCS)


def test_the_samples_ask_for_what_there_is() -> None:
    samples = {
        path.name: path.read_text() for path in (ROOT / "deploy" / "samples" / "autoscaling").iterdir()
    }
    assert all(f"samples/autoscaling/{name}" in DOCS for name in samples)
    for text in samples.values():
        for kind in re.findall(r"autoscaling\.knative\.dev/class: (\S+)", text):
            check({"autoscaling.knative.dev/class": kind}, read_defaults(BERTH))
    for name in ("hpa-concurrency.yaml", "hpa-desired.yaml"):
        (one,) = yaml.safe_load(samples[name])["spec"]["metrics"]
        assert one["external"]["metric"]["name"] in METRICS
    (trigger,) = yaml.safe_load(samples["keda.yaml"])["spec"]["triggers"]
    asked = trigger["metadata"]
    assert set(asked) <= {row[0].strip(" `") for row in rows(section("KEDA instead"))}
    assert asked["metric"] in FIGURES
    patches = (ROOT / "deploy" / "keda" / "service-patch.yaml").read_text()
    (port,) = yaml.safe_load(patches)
    assert asked["scalerAddress"] == f"berth-scaler.berth-system:{port['value']['port']}"


class Refusing:
    key = ModelKey("a", "m")
    refusals: Final = {"NO_ROOM": 1}


def exposed() -> dict[str, set[str]]:
    """Names of all series of scaler and activator, and the labels that each may have."""
    models = FakeModels()
    models.add("a/m", desired=1, recommended=1)
    registry = CollectorRegistry()
    ScalerMetrics(registry).follow(
        models,
        writes_waiting=lambda: 0,
        binder_silent_seconds=lambda: 0.0,
        control_server=FakeControlServer([Connected("n/p", 1.0, 0)]),
    )
    stats = ActivatorStats(lambda: 0.0)
    stats.cold_start_began(ModelKey("a", "m"))
    registry.register(
        ActivatorCollector(
            stats, lambda: [Refusing()], lambda: Connection(True, 1), Bounds().buffered_seconds
        )
    )
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(
        r"^(berth_\w+)(?:\{(.*)\})? ", generate_latest(registry).decode(), re.MULTILINE
    ):
        if not name.endswith("_created"):
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_alerts_and_tables_name_series_that_there_are() -> None:
    groups: Any = yaml.safe_load(section("Metrics and alerts").split("```yaml")[1].split("```")[0])
    rules = groups["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    series = exposed()
    for rule in rules:
        named = set(re.findall(r"berth_\w+", rule["expr"]))
        assert named <= set(series), rule["alert"]
        labels = set().union(*(series[name] for name in named))
        asked = re.findall(r"(\w+)=~?\"", rule["expr"])
        shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert {*asked, *shown} <= labels, rule["alert"]
    told = set(re.findall(r"`(berth_(?:scaler|activator)_\w+)", section("Metrics", OPERATING)))
    assert told == {re.sub(r"_(bucket|count|sum)$", "", name) for name in series}


def test_knatives_metrics_stand_beside_ours() -> None:
    """No table mapped its names, and several had no counterpart."""
    table = section("Metrics and alerts").partition("| Knative |")[2].partition("\n\n")[0]
    series = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed()}
    named = set(re.findall(r"`(berth_(?:scaler|activator)_\w+)`", table))
    assert named <= series
    assert len(named) > 15
    theirs = set(re.findall(r"`(kn\.[a-z_.]+)`", table))
    assert {
        "kn.revision.pods.desired",
        "kn.revision.pods.terminating.count",
        "kn.autoscaler.scrape.duration",
    } <= theirs


def test_the_phases_of_a_cold_start_are_those_that_are_reported_in_their_order() -> None:
    table = OPERATING.partition("| `berth_scaler_cold_start_seconds` | `berth_cold_start_seconds` |")[
        2
    ].partition("\n\n")[0]
    found = [line.split("|")[1:3] for line in table.splitlines()[2:] if line.startswith("|")]
    scaler, agent = ([cell.strip(" `") for cell in column] for column in zip(*found, strict=True))
    assert [one for one in scaler if one] == list(cold_starts.PHASES)
    assert [one for one in agent if one != "–"] == list(agent_cold_starts.PHASES)
