"""What a ScaledObject's trigger asks for, and what it may not."""

import pytest

from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.v1.externalscaler_pb2 import ScaledObjectRef
from scaler.show.keda import Trigger, trigger_of


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
    with pytest.raises(InvalidValue, match=f"^{named}: .*write"):
        asked(**metadata)


def test_a_refusal_holds_nothing_that_a_terminal_would_obey() -> None:
    with pytest.raises(InvalidValue) as refused:
        asked(metric="\x1b[2J" + "x" * 10_000)
    assert len(str(refused.value)) < 300
    assert "\x1b" not in str(refused.value)
