"""Volumes that tie a pod to a node in a way that is not decided here."""

from typing import Any

import pytest

from binder.pod.demand import parse_demand
from tests.fakes.objects import KEYS, pod

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("volume", "unsupported"),
    [
        *(
            ({kind: {}}, None)
            for kind in (
                "configMap",
                "csi",
                "downwardAPI",
                "emptyDir",
                "hostPath",
                "image",
                "nfs",
                "projected",
            )
        ),
        ({"secret": {}}, None),
        ({"ephemeral": {}}, None),
        ({"persistentVolumeClaim": {"claimName": "c"}}, None),
        ({"awsElasticBlockStore": {}}, "volume 'v' (awsElasticBlockStore)"),
        ({"iscsi": {}}, "volume 'v' (iscsi)"),
    ],
)
def test_volumes_that_tie_a_pod_to_a_node(volume: Json, unsupported: str | None) -> None:
    volumes = [{"name": "free", "secret": {}}, {"name": "v", **volume}]
    assert parse_demand(pod(volumes=volumes), KEYS).unsupported == unsupported
