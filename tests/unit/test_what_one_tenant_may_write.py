"""Whatever number of anything one tenant writes into one object, reading it costs each process a moment: the others'
objects wait for it in the same loop.

The bounds are many times what was measured, for machines that are slow and busy; what grows faster than its object, or is
read again for each of its parts, passes them by far.
"""

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from agent.models import Models
from agent.pods import note_pod
from berth.contract.errors import InvalidPod
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName
from berth.kube.informer import Change, ChangeKind
from binder.engine.cluster import Cluster, slim
from binder.pod.demand import parse_demand
from scaler.activation.routes import Template
from scaler.core.cache import Cache, keep_deployment, keep_pod
from scaler.decision.annotations import GROUP
from scaler.decision.defaults import BERTH, KPA, read_defaults
from scaler.watch import keep_service, keep_slice
from tests.fakes.largest import ANNOTATION_BYTES, OBJECT_BYTES, THINGS, entries, many, with_most
from tests.fakes.objects import KEYS, gpu, node, pod, report
from tests.unit.scaler.test_routes import DOOR, T0, M, asked, board, endpoints, service

Json = dict[str, Any]
# Measured: 0.25 at most, of the agent 0.21.
MOST_SECONDS = 1.5
OWNER = {"kind": "ReplicaSet", "name": "m-5f", "uid": "r", "controller": True}


def within_bounds(act: Callable[[], object]) -> None:
    """In CPU time of this thread, but for the collector's: it is the whole process's."""
    gc.disable()
    try:
        began = time.thread_time()
        act()
        took = time.thread_time() - began
    finally:
        gc.enable()
    assert took < MOST_SECONDS


def placed(annotations: Json | None = None) -> Json:
    found = pod(on="n1", choice=GpuChoice("GPU-a", 0, 1 << 30), annotations=annotations)
    found["metadata"] |= {"labels": {"app": "m", "pod-template-hash": "5f"}, "ownerReferences": [OWNER]}
    return found


each_thing = pytest.mark.parametrize("thing", THINGS)


@each_thing
def test_a_pod_costs_the_agent_of_its_node_a_moment(thing: str) -> None:
    item = with_most(thing, placed())
    within_bounds(lambda: note_pod(Models(), Change(ChangeKind.SET, item), KEYS))


@each_thing
def test_a_pod_costs_the_scaler_a_moment(thing: str) -> None:
    item = with_most(thing, placed())
    within_bounds(lambda: Cache(read_defaults(BERTH)).observe_pod(keep_pod(item), 0))


def cluster() -> Cluster:
    made = Cluster(KEYS, clock=lambda: 0.0)
    for number in range(100):
        one = node(f"n{number}", says=report(gpu(f"g{number}")), labels={"zone": f"z{number % 3}"})
        made.on_node(Change(ChangeKind.SET, one))
        made.decider.table.beat(NodeName(f"n{number}"), math.inf)
    return made


@each_thing
def test_a_bound_pod_costs_the_binder_a_moment_and_so_does_the_next_decision(thing: str) -> None:
    made, item = cluster(), with_most(thing, placed())
    plain = parse_demand(pod("plain"), KEYS)

    def act() -> None:
        made.on_pod(Change(ChangeKind.SET, slim(item)))
        made.decider.decide(plain)

    within_bounds(act)


@each_thing
def test_a_waiting_pod_costs_the_binder_a_moment(thing: str) -> None:
    made, item = cluster(), with_most(thing, pod("large"))

    def act() -> None:
        try:
            demand = parse_demand(slim(item), KEYS)
        except InvalidPod:
            return
        made.decider.decide(demand)

    within_bounds(act)


def deployment(template: Json, annotations: Json | None = None) -> Json:
    own = {GROUP + "class": KPA, **(annotations or {})}
    return {
        "metadata": {"namespace": "a", "name": "m", "uid": "d", "annotations": own},
        "spec": {"replicas": 1, "template": {part: template[part] for part in ("metadata", "spec")}},
    }


def observed(item: Json) -> Callable[[], object]:
    return lambda: Cache(read_defaults(BERTH)).observe_deployment(keep_deployment(item))


@each_thing
def test_a_template_costs_the_scaler_a_moment(thing: str) -> None:
    within_bounds(observed(deployment(with_most(thing, placed()))))


KEYS_OF_NUMBERS = (
    GROUP + "window",
    GROUP + "target",
    GROUP + "min-scale",
    KEYS.hold_timeout,
    KEYS.hold_bytes,
)
NUMBERS = {"digits": "9", "durations": "1s", "decimals": "0." + "9" * 1000}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(
            (key, text * (ANNOTATION_BYTES // len(text)))
            for key in KEYS_OF_NUMBERS
            for text in NUMBERS.values()
        ),
        (KEYS.clients, ",".join(many(lambda n: f"n{n}", ANNOTATION_BYTES))),
        (KEYS.clients, "," * ANNOTATION_BYTES),
        (KEYS.scaled, "[" * ANNOTATION_BYTES),
        (KEYS.scaled, '{"v":' + "9" * ANNOTATION_BYTES + "}"),
    ],
    ids=lambda one: one.rpartition("/")[2][:16],
)
def test_one_annotation_costs_the_scaler_a_moment(key: str, text: str) -> None:
    within_bounds(observed(deployment(placed(), {key: text})))


def test_annotations_cost_the_scaler_a_moment() -> None:
    within_bounds(observed(deployment(placed(), entries(GROUP + "k", "1", ANNOTATION_BYTES))))


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(service(selector={"app": "m", **entries()}), id="selector"),
        pytest.param(
            service(ports=many(lambda n: {"name": f"p{n}", "port": n % 65535 + 1, "targetPort": 9000})),
            id="ports",
        ),
    ],
)
def test_a_service_costs_the_scaler_a_moment(item: Json) -> None:
    def act() -> None:
        told = board(M)
        told.set_model(M, Template({"app": "m", **entries(size=OBJECT_BYTES // 10)}, DOOR))
        told.services.set_service(keep_service(item))
        told.reconcile(asked(M), T0)

    within_bounds(act)


@pytest.mark.parametrize("is_ours", [False, True], ids=["a controller's", "in our name"])
def test_a_slice_costs_the_scaler_a_moment(is_ours: bool) -> None:
    """1000 endpoints of 100 addresses, 100 ports at most (discovery/v1)."""
    item = endpoints("m", ours=is_ours)
    if is_ours:
        item["metadata"]["name"] = "m-berth"
    item["endpoints"] = [
        {"addresses": [f"10.0.{n % 256}.{m}" for m in range(100)], "conditions": {}} for n in range(1000)
    ]
    item["ports"] = [{"name": f"p{n}", "port": n + 1} for n in range(100)]

    def act() -> None:
        told = board(M)
        told.services.set_service(keep_service(service()))
        told.services.set_slice(keep_slice(item))
        told.reconcile(asked(M), T0)

    within_bounds(act)
