"""What is shown of a model."""

import json

from berth.contract.scaling import ModelKey
from scaler.core.models_view import Averages, DecisionView, ModelView, WakeView, to_json
from scaler.decision.defaults import BERTH, read_defaults
from scaler.decision.spec import spec_of

SECOND_NS = 1_000_000_000


def test_what_is_not_known_is_shown_as_unknown() -> None:
    shown = to_json(ModelView(model=ModelKey("a", "m"), kind="kpa.autoscaling.knative.dev", spec=None))
    assert [key for key, value in shown.items() if value is None] == [
        *("spec", "replicas", "desired", "wanted", "written", "since"),
    ]
    assert shown["concurrency"] == {"stable": None, "panic": None}


def test_every_figure_has_its_name() -> None:
    view = ModelView(
        model=ModelKey("a", "m"),
        kind="kpa.autoscaling.knative.dev",
        spec=spec_of({"autoscaling.knative.dev/target": "2"}, read_defaults(BERTH)),
        ready=1,
        replicas=3,
        desired=7,
        wanted=5,
        written=3,
        clipped=2,
        why="2 GPUMemoryInsufficient",
        concurrency=Averages(3.0, 9.0),
        decisions=(
            DecisionView(at_ns=60 * SECOND_NS, desired=7, wanted=5, written=3, ready=1, in_panic=True),
        ),
        wakes=(WakeView(at_ns=90 * SECOND_NS, phases=(("decide", 0.01), ("load", 2.5))),),
    )
    shown = json.loads(json.dumps(to_json(view)))
    assert (shown["desired"], shown["wanted"], shown["written"], shown["clipped"]) == (7, 5, 3, 2)
    assert shown["spec"]["target"] == 1.4
    assert shown["concurrency"] == {"stable": 3.0, "panic": 9.0}
    assert shown["decisions"] == [
        {
            "at": "1970-01-01T00:01:00Z",
            "desired": 7,
            "wanted": 5,
            "written": 3,
            "ready": 1,
            "inPanic": True,
            "why": "",
        }
    ]
    assert shown["wakes"] == [{"at": "1970-01-01T00:01:30Z", "phases": {"decide": 0.01, "load": 2.5}}]
