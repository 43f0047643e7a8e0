"""What is shown of a model."""

import json

from berth.contract.scaling import ModelKey
from scaler.core.models_view import Averages, ColdStartView, DecisionView, ModelView, to_json
from scaler.decision.defaults import BERTH, read_defaults
from scaler.decision.spec import spec_of

SECOND_NS = 1_000_000_000


def test_what_is_not_known_is_shown_as_unknown() -> None:
    shown = to_json(ModelView(model=ModelKey("a", "m"), class_name="kpa.autoscaling.knative.dev", spec=None))
    assert [key for key, value in shown.items() if value is None] == [
        *("spec", "replicas", "recommended", "desired", "requested", "since"),
    ]
    assert shown["concurrency"] == {"stable": None, "panic": None}


def test_every_figure_has_its_name() -> None:
    view = ModelView(
        model=ModelKey("a", "m"),
        class_name="kpa.autoscaling.knative.dev",
        spec=spec_of({"autoscaling.knative.dev/target": "2"}, read_defaults(BERTH)),
        ready=1,
        replicas=3,
        recommended=7,
        desired=5,
        requested=3,
        capacity_limited=2,
        message="2 GPUMemoryInsufficient",
        concurrency=Averages(3.0, 9.0),
        decisions=(
            DecisionView(at_ns=60 * SECOND_NS, recommended=7, desired=5, requested=3, ready=1, in_panic=True),
        ),
        cold_starts=(ColdStartView(at_ns=90 * SECOND_NS, phases=(("decide", 0.01), ("load", 2.5))),),
    )
    shown = json.loads(json.dumps(to_json(view)))
    assert (shown["recommended"], shown["desired"], shown["requested"], shown["capacityLimited"]) == (
        7,
        5,
        3,
        2,
    )
    assert shown["spec"]["target"] == 1.4
    assert shown["concurrency"] == {"stable": 3.0, "panic": 9.0}
    assert shown["decisions"] == [
        {
            "at": "1970-01-01T00:01:00Z",
            "recommended": 7,
            "desired": 5,
            "requested": 3,
            "ready": 1,
            "inPanic": True,
            "message": "",
        }
    ]
    assert shown["coldStarts"] == [{"at": "1970-01-01T00:01:30Z", "phases": {"decide": 0.01, "load": 2.5}}]
