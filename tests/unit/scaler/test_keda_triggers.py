"""What a ScaledObject's trigger requests, and what it may not."""

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.v1.externalscaler_pb2 import ScaledObjectRef
from scaler.core.models_view import Averages
from scaler.export.keda import KedaScaler, Trigger, trigger_of
from tests.fakes.models_view import FakeModels


def asked(name: str = "resnet", namespace: str = "a", **metadata: str) -> Trigger:
    return trigger_of(ScaledObjectRef(name=name, namespace=namespace, scalerMetadata=metadata))


@pytest.mark.parametrize(
    ("metadata", "trigger"),
    [
        ({}, Trigger(ModelKey("a", "resnet"), "concurrency", None)),
        ({"model": "bert", "metric": "rps"}, Trigger(ModelKey("a", "bert"), "rps", None)),
        ({"target": "2.5"}, Trigger(ModelKey("a", "resnet"), "concurrency", 2.5)),
        ({"metric": "desired", "scalerAddress": "berth:9094", "enableTLS": "true"},
         Trigger(ModelKey("a", "resnet"), "desired", None)),
        # KEDA's placeholders that came to nothing.
        ({"model": "", "metric": "", "target": ""}, Trigger(ModelKey("a", "resnet"), "concurrency", None)),
    ],
)  # fmt: skip
def test_triggers(metadata: dict[str, str], trigger: Trigger) -> None:
    assert asked(**metadata) == trigger


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"model": "b/resnet"}, "model"),
        ({"model": "../b"}, "model"),
        ({"name": "", "model": ""}, "model"),
        ({"namespace": ""}, "model"),
        ({"metric": "cpu"}, "metric"),
        ({"metric": "Concurrency"}, "metric"),
        *(
            ({"target": text}, "target")
            for text in ("0", "-1", "many", "nan", "inf", "1e300", "0x2", "0.0001")
        ),
    ],
)
def test_what_cannot_be_meant_is_named(metadata: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{named}: .*use"):
        asked(**metadata)


def test_whole_numbers_are_reported_as_well_and_are_never_less() -> None:
    """Whoever reads these alone: half a request would be nobody's."""
    models = FakeModels()
    model = models.add("a/m", concurrency=Averages(3.25, 0.0), target="1.5")
    scaler, trigger = KedaScaler(models), Trigger(model, "concurrency", None)
    (value,) = scaler._values(trigger, "").metricValues
    assert (value.metricValue, value.metricValueFloat) == (4, 3.25)
    (spec,) = scaler._spec(trigger).metricSpecs
    assert (spec.targetSize, spec.targetSizeFloat) == (2, 1.5)
    models.change(model, concurrency=Averages(1e300, 0.0))
    (value,) = scaler._values(trigger, "").metricValues
    assert value.metricValue == value.metricValueFloat == 2**53


def test_of_streams_that_ended_nothing_is_kept() -> None:
    scaler, model = KedaScaler(FakeModels()), ModelKey("a", "m")
    watching = [scaler._watch(model) for _ in range(3)]
    for changed in watching:
        scaler._unwatch(model, changed)
    assert (scaler._streams, scaler._open) == ({}, 0)


def test_a_refusal_holds_nothing_that_a_terminal_would_obey() -> None:
    with pytest.raises(InvalidValue) as refused:
        asked(metric="\x1b[2J" + "x" * 10_000)
    assert len(str(refused.value)) < 300
    assert "\x1b" not in str(refused.value)
