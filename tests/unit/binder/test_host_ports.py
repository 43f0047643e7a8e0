"""Host ports: which of a pod's ports are the host's, and which of them clash."""

from typing import Any

import pytest

from binder.pod.demand import host_ports
from tests.fakes.cluster import cluster_of, rule_of
from tests.fakes.objects import node, pod, report

Json = dict[str, Any]
ALWAYS = {"restartPolicy": "Always"}
PORTS: dict[str, tuple[Json, set[Any]]] = {
    "of a container": (
        {"containers": [{"ports": [{"hostPort": 80, "hostIP": "10.0.0.1", "protocol": "SCTP"}]}]},
        {("10.0.0.1", "SCTP", 80)},
    ),
    "on all addresses": ({"containers": [{"ports": [{"hostPort": 80}]}]}, {("0.0.0.0", "TCP", 80)}),
    "of a sidecar": ({"initContainers": [{"ports": [{"hostPort": 80}], **ALWAYS}]}, {("0.0.0.0", "TCP", 80)}),
    "of an init container, which ends": ({"initContainers": [{"ports": [{"hostPort": 80}]}]}, set()),
    "none on the host": ({"containers": [{"ports": [{"containerPort": 80}, {"hostPort": 0}]}, {}]}, set()),
}


@pytest.mark.parametrize("case", PORTS)
def test_the_host_ports_of_a_pod(case: str) -> None:
    spec, ports = PORTS[case]
    assert host_ports({"spec": spec}) == ports


def on_port_80(ip: str) -> Json:
    return {"containers": [{"name": "c", "ports": [{"hostPort": 80, "hostIP": ip}]}]}


@pytest.mark.parametrize(
    ("ip", "rule"), [("", "HostPortTaken"), ("10.0.0.1", "HostPortTaken"), ("10.0.0.2", None)]
)
def test_ports_clash_on_the_same_address_or_any(ip: str, rule: str | None) -> None:
    taken = pod("x", on="n1", mem=None, **on_port_80("10.0.0.1"))
    assert rule_of(cluster_of(node(says=report()), pods=(taken,)), pod(**on_port_80(ip))) == rule
