"""Kubernetes' rules for taints: which tolerations a taint lets pass."""

import pytest

from binder.rules.taints import untolerated_taint


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "value": "present"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Equal", "value": "absent"}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Equal", "value": "present"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Odd", "value": "present"}, False),
    ],
)
def test_tolerations(toleration: dict[str, str], tolerated: bool) -> None:
    taint = ("nvidia.com/gpu", "present", "NoSchedule")
    assert (untolerated_taint([taint], [toleration]) is None) is tolerated


def test_a_preference_taint_never_refuses() -> None:
    assert untolerated_taint([("k", "", "PreferNoSchedule")], []) is None
