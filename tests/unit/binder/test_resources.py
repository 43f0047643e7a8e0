"""CPU, memory and other resources: what a pod takes of a node, and which node has too little."""

from typing import Any

import pytest

from berth.contract.errors import InvalidPod
from berth.contract.quantity import MOST
from binder.engine.cluster import slim
from binder.pod.resources import pod_amounts
from tests.fakes.cluster import cluster_of, rule_of
from tests.fakes.objects import GIB, KEYS, node, pod, report

Json = dict[str, Any]


ALWAYS = {"restartPolicy": "Always"}


def box(name: str = "c", cpu: str | None = None, **more: Any) -> Json:
    requests = {} if cpu is None else {"cpu": cpu}
    return {"name": name, "resources": {"requests": requests}, **more}


def has(name: str = "c", *, cpu: str | None = None, given: str | None = None) -> Json:
    """What a kubelet says of a container: what it has, and what it was given."""
    return {
        "name": name,
        **({} if cpu is None else {"resources": {"requests": {"cpu": cpu}}}),
        **({} if given is None else {"allocatedResources": {"cpu": given}}),
    }


def pending(reason: str, type: str = "PodResizePending") -> list[Json]:
    return [{"type": "Ready", "status": "False"}, {"type": type, "reason": reason}]


LIMITS = {"name": "c", "resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}}
# What of CPU (milli-cores) and others a pod takes: spec, status, amounts without `pods`.
AMOUNTS: dict[str, tuple[Json, Json, Json]] = {
    "nothing": ({"containers": [box()]}, {}, {}),
    "the sum of its containers": ({"containers": [box(cpu="1"), box("d", "250m")]}, {}, {"cpu": 1250}),
    "limits where no request is": ({"containers": [LIMITS]}, {}, {"cpu": 1000, "memory": GIB}),
    "GPU memory is counted elsewhere": (
        {"containers": [{"name": "c", "resources": {"limits": {KEYS.gpu_mem: "1Gi", "x.io/y": "3"}}}]},
        {},
        {"x.io/y": 3},
    ),
    "the largest init container": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "2"), box("j", "3")]},
        {},
        {"cpu": 3000},
    ),
    "init containers that are smaller": (
        {"containers": [box(cpu="3")], "initContainers": [box("i", "2")]},
        {},
        {"cpu": 3000},
    ),
    "a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "500m", **ALWAYS)]},
        {},
        {"cpu": 1500},
    ),
    "an init container after a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "500m", **ALWAYS), box("i", "3")]},
        {},
        {"cpu": 3500},
    ),
    "an init container before a sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "3"), box("s", "500m", **ALWAYS)]},
        {},
        {"cpu": 3000},
    ),
    "overhead on top of the peak": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "3")], "overhead": {"cpu": "100m"}},
        {},
        {"cpu": 3100},
    ),
    "requests of the pod as a whole": (
        {
            "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "9", "memory": "1Gi", "x.io/y": "1"}}}
            ],
            "resources": {"requests": {"cpu": "4", "hugepages-2Mi": "2Mi", "x.io/y": "7"}},
            "overhead": {"cpu": "1"},
        },
        {},
        {"cpu": 5000, "memory": GIB, "hugepages-2Mi": 2 * 2**20, "x.io/y": 1},
    ),
    "more than any machine has": (
        {"containers": [box(cpu="1e400"), box("d", "1e400")]},
        {},
        {"cpu": MOST},
    ),
    "resized up, not yet done": (
        {"containers": [box(cpu="4")]},
        {"containerStatuses": [has(cpu="1", given="2")]},
        {"cpu": 4000},
    ),
    "resized down, it was given more": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has(cpu="2", given="3")]},
        {"cpu": 3000},
    ),
    "resized down, it has more": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has("other"), has(cpu="3", given="2")]},
        {"cpu": 3000},
    ),
    "a resize that is infeasible": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1", given="2")], "conditions": pending("Infeasible")},
        {"cpu": 2000},
    ),
    "a resize that has to wait": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1", given="2")], "conditions": pending("Deferred")},
        {"cpu": 9000},
    ),
    "something else that is infeasible": (
        {"containers": [box(cpu="9")]},
        {"containerStatuses": [has(cpu="1")], "conditions": pending("Infeasible", "Other")},
        {"cpu": 9000},
    ),
    "a resized sidecar": (
        {"containers": [box(cpu="1")], "initContainers": [box("s", "1", **ALWAYS)]},
        {"initContainerStatuses": [has("s", cpu="2")]},
        {"cpu": 3000},
    ),
    "an init container is not resized": (
        {"containers": [box(cpu="1")], "initContainers": [box("i", "2")]},
        {"initContainerStatuses": [has("i", cpu="5")]},
        {"cpu": 2000},
    ),
    "a kubelet that says nothing of resources": (
        {"containers": [box(cpu="1")]},
        {"containerStatuses": [has(given="5")]},
        {"cpu": 1000},
    ),
    "a resized pod as a whole": (
        {"containers": [box()], "resources": {"requests": {"cpu": "1"}}},
        {"resources": {"requests": {"cpu": "3"}}, "allocatedResources": {"cpu": "2"}},
        {"cpu": 3000},
    ),
    "a resized pod as a whole that was given more": (
        {"containers": [box()], "resources": {"requests": {"cpu": "1"}}},
        {"resources": {"requests": {}}, "allocatedResources": {"cpu": "2"}},
        {"cpu": 2000},
    ),
}


@pytest.mark.parametrize("case", AMOUNTS)
@pytest.mark.parametrize("kept", [lambda one: one, slim], ids=["whole", "as kept"])
def test_what_a_pod_takes_of_a_node(case: str, kept: Any) -> None:
    spec, status, amounts = AMOUNTS[case]
    assert pod_amounts(kept({"metadata": {}, "spec": spec, "status": status}), KEYS) == amounts | {"pods": 1}


WRONG: dict[str, tuple[Json, str]] = {
    "container": ({"containers": [box(cpu="-1")]}, "container 'c': cpu: '-1' is negative"),
    "nameless": ({"containers": [{"resources": {"limits": {"cpu": "x"}}}]}, "container '?': cpu: 'x' is not"),
    "init container": ({"initContainers": [box("i", "x")]}, "container 'i': cpu: 'x' is not a quantity"),
    "overhead": ({"overhead": {"cpu": "x"}}, "overhead: cpu: 'x' is not a quantity"),
    "pod": ({"resources": {"requests": {"cpu": "x"}}}, "pod: cpu: 'x' is not a quantity"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_quantity_that_cannot_be_read_is_named(case: str) -> None:
    spec, message = WRONG[case]
    with pytest.raises(InvalidPod, match=f"^{message.replace('?', '[?]')}"):
        pod_amounts({"metadata": {}, "spec": spec}, KEYS)


@pytest.mark.parametrize("requests", [{"memory": "9Gi"}, {"example.com/fpga": "1"}], ids=["memory", "other"])
def test_a_node_that_has_less_refuses(requests: Json) -> None:
    assert rule_of(cluster_of(node(says=report())), pod(requests=requests)) == "ResourceInsufficient"
