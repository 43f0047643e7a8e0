"""What a pod that has a node holds, as far as it can be read."""

from typing import Any

import pytest

from berth.contract.ids import NodeName
from binder.cache.reservations import bound_reservation
from tests.fakes.objects import GIB, KEYS, pod

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ({KEYS.model_id: " m "}, ("m", "m")),
        ({KEYS.model_id: "m", KEYS.model_name: "n"}, ("m", "n")),
        ({KEYS.model_id: None, KEYS.model_name: "n"}, (None, "n")),
        ({KEYS.model_id: None}, (None, None)),
    ],
)
def test_a_damaged_pod_keeps_its_names(marks: Json, names: tuple[str | None, str | None]) -> None:
    reservation = bound_reservation(pod("p1", on="n1", choice="{", annotations=marks), NodeName("n1"), KEYS)
    assert (reservation.model_id, reservation.model_name) == names
    assert (reservation.gpus, reservation.bytes) == ((), GIB)
