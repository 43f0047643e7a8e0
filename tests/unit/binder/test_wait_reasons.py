"""The reason of a waiting pod's condition is an order for hardware: `Unschedulable` only where one more node would help
(ecosystem A1)."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from berth.contract.ids import NodeName
from berth.contract.report import CodeReport, CodeRule, TritonReport
from berth.kube.errors import response_error
from berth.kube.informer import ChangeKind
from binder.loop import wait_reasons
from binder.loop.queue import CAP_SECONDS
from tests.fakes.binder import PLENTY, Api, Bench
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace
from tests.fakes.zones import HOST, apart, near, spread, term

Json = dict[str, Any]
_ZONE = "topology.kubernetes.io/zone"


class Statuses(Api):
    """Keeps the conditions that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, Json]] = []
        self.no_binding = False

    async def create(self, path: str, body: Json) -> Json:
        if self.no_binding and path.endswith("/binding"):
            raise response_error(422, "Invalid", "no such node")
        return await super().create(path, body)

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        for condition in body["status"].get("conditions", ()):
            self.written.append((path.split("/")[-2], condition))
        return await super().patch(path, body, content_type=content_type)


class Office(Bench):
    def __init__(self) -> None:
        self.statuses = Statuses()
        super().__init__(api=self.statuses)

    def says(
        self, name: str, *gpus: Any, labels: Json | None = None, more: Json | None = None, **changes: Any
    ) -> None:
        """A node with this report."""
        facts = {"allocatable": PLENTY, "labels": labels or {}, **(more or {})}
        self.tell("nodes", node(name, says=report(*gpus, **changes), **facts))
        self.scheduler.cluster.decider.table.beat(NodeName(name), math.inf)

    def reasons(self, uid: str = "p") -> list[str]:
        return [one["reason"] for name, one in self.statuses.written if name == uid]

    async def reason(self, uid: str = "p") -> str:
        """Once the pod has been tried at least once more since all that happened."""
        for _ in range(3):
            await self.step(3, seconds=CAP_SECONDS / 2)
        return self.reasons(uid)[-1]


def full(office: Office) -> None:
    """One node of 16 GiB in zone a whose memory is taken."""
    office.node("n1", 16, labels={_ZONE: "a"})
    office.resident("r", "n1", 16, labels={"app": "web"})


def of_report(**changes: Any) -> Callable[[Office], None]:
    return lambda office: office.says("n1", gpu("n1-0"), **changes)


def of_gpu(**changes: Any) -> Callable[[Office], None]:
    return lambda office: office.says("n1", replace(gpu("n1-0"), **changes))


def of_node(**changes: Any) -> Callable[[Office], None]:
    return lambda office: office.node("n1", 16, **changes)


def nothing(office: Office) -> None:
    """No node."""


def cpus(office: Office, kind: str) -> None:
    """Half of the node's CPU is the others'."""
    office.node("n1", 16, allocatable={**PLENTY, "cpu": "8"})
    office.add("other", mem=None, on="n1", schedulerName="other", requests={"cpu": "4"})
    owner = {"kind": kind, "uid": "o", "controller": True}
    office.api.pods["other"]["metadata"]["ownerReferences"] = [owner]
    office.tell("pods", office.api.pods["other"])


def two_pools(office: Office) -> None:
    office.node("n1", 80)
    office.node("n2", 16, labels={"pool": "x"})


TAINT = [{"key": "team", "value": "a", "effect": "NoSchedule"}]
STARTING = [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]
_IN_X = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["x"]}]}
ONLY_X = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_IN_X]}}
CLAIM = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
CASES: dict[str, tuple[Callable[[Office], None], Json, str]] = {
    # One more node helps.
    "memory is taken": (full, {"mem": "8Gi"}, "Unschedulable"),
    "memory is taken by strangers": (of_gpu(other_use_bytes=16 * GIB), {}, "Unschedulable"),
    "the model is on each node": (full, {"annotations": {KEYS.model_id: "model-r"}}, "Unschedulable"),
    "cordoned": (of_node(unschedulable=True), {}, "Unschedulable"),
    "starting": (of_node(taints=STARTING), {}, "Unschedulable"),
    "silent": (of_node(beats=False), {}, "Unschedulable"),
    "Triton is away": (of_report(triton=TritonReport(False, "")), {}, "Unschedulable"),
    "a GPU is broken": (of_gpu(healthy=False, broken=True, reason="XID 79"), {}, "Unschedulable"),
    "a GPU is unknown": (of_gpu(total_bytes=None), {"mem": "900Gi"}, "Unschedulable"),
    "no node": (nothing, {"mem": "900Gi"}, "Unschedulable"),
    "no agent": (lambda office: office.tell("nodes", node("n1")), {"mem": "900Gi"}, "Unschedulable"),
    "code of another": (
        of_report(code=CodeReport(CodeRule.NAMESPACE, "others")),
        {"annotations": {KEYS.requirements: "python"}},
        "Unschedulable",
    ),
    "CPU of ordinary pods": (lambda o: cpus(o, "ReplicaSet"), {"requests": {"cpu": "5"}}, "Unschedulable"),
    "apart on nodes": (full, {"affinity": apart(term("web", HOST))}, "Unschedulable"),
    "spread over nodes": (
        full,
        {"mem": "8Gi", "topologySpreadConstraints": [spread(key=HOST, app="web")]},
        "Unschedulable",
    ),
    "together in the zone": (full, {"mem": "8Gi", "affinity": near(term("web", _ZONE))}, "Unschedulable"),
    # A larger one would.
    "GPU": (full, {"mem": "17Gi"}, "ModelTooLarge"),
    "GPUs": (full, {"annotations": {KEYS.gpu_count: "2"}}, "ModelTooLarge"),
    "CPU": (full, {"requests": {"cpu": "129"}}, "ModelTooLarge"),
    "CPU beside a DaemonSet": (lambda o: cpus(o, "DaemonSet"), {"requests": {"cpu": "5"}}, "ModelTooLarge"),
    "CPU beside a static pod": (lambda o: cpus(o, "Node"), {"requests": {"cpu": "5"}}, "ModelTooLarge"),
    # One of a pool of which nothing is known, whatever its size.
    "labels": (full, {"mem": "900Gi", "nodeSelector": {"pool": "x"}}, "Unschedulable"),
    "affinity": (full, {"affinity": {"nodeAffinity": ONLY_X}}, "Unschedulable"),
    "one node's name": (full, {"mem": "8Gi", "nodeSelector": {HOST: "n1"}}, "Unschedulable"),
    "taint": (of_node(taints=TAINT), {}, "Unschedulable"),
    "one known pool is its own": (two_pools, {"mem": "17Gi", "nodeSelector": {"pool": "x"}}, "ModelTooLarge"),
    # Other ones would.
    "product": (full, {"annotations": {KEYS.gpu_product: "H100"}}, "NodesRefuseModel"),
    "server": (full, {"annotations": {KEYS.server: "other"}}, "NodesRefuseModel"),
    "capabilities": (full, {"annotations": {KEYS.requirements: "onnx"}}, "NodesRefuseModel"),
    "code": (
        of_report(code=CodeReport(CodeRule.NONE)),
        {"annotations": {KEYS.requirements: "python"}},
        "NodesRefuseModel",
    ),
    # The pod itself.
    "a claim that is not there": (full, {"volumes": CLAIM}, "PodRefused"),
    "a field that is not decided": (full, {"resourceClaims": [{"name": "x"}]}, "PodRefused"),
    "a value that cannot be read": (full, {"mem": "1.5.2"}, "PodRefused"),
    # Others must come or go.
    "apart in zones": (full, {"affinity": apart(term("web", _ZONE))}, "WaitingForCapacity"),
    "together on a node": (full, {"mem": "8Gi", "affinity": near(term("web", HOST))}, "WaitingForCapacity"),
    "victims go": (full, {"mem": "8Gi", "priority": 10}, "WaitingForCapacity"),
}


@pytest.mark.parametrize("case", sorted(CASES))
async def test_a_node_is_requested_only_where_one_more_would_help(case: str) -> None:
    """Ecosystem A1."""
    setting, asks, expected = CASES[case]
    async with Office() as office:
        setting(office)
        office.add("p", **asks)
        await office.step(3)
        assert office.reasons() == [expected]


async def test_a_kind_of_node_is_remembered_when_its_last_one_has_gone() -> None:
    """Else a pool that has been scaled to zero would never come back (ecosystem A1)."""
    async with Office() as office:
        full(office)
        office.add("p", mem="30Gi")
        assert await office.reason() == "ModelTooLarge"
        office.node("big", 40, unschedulable=True)
        assert await office.reason() == "Unschedulable"
        office.tell("nodes", node("big"), ChangeKind.GONE)
        assert await office.reason() == "Unschedulable"
        assert office.reasons() == ["ModelTooLarge", "Unschedulable"]


async def test_a_standby_remembers_too() -> None:
    """It hears of nodes before it leads (ecosystem A1)."""
    async with Office() as office:
        office.node("big", 40)
        office.tell("nodes", node("big"), ChangeKind.GONE)
        full(office)
        office.add("p", mem="30Gi")
        await office.step(3)
        assert office.reasons() == ["Unschedulable"]


async def test_another_reason_alone_is_written_and_is_no_event() -> None:
    """For people nothing new has happened (ecosystem A1)."""
    async with Office() as office:
        full(office)
        office.add("p", mem="30Gi")
        await office.step(3)
        said = len(office.events.said)
        (_, first), *_ = office.statuses.written
        office.node("big", 40)
        office.tell("nodes", node("big"), ChangeKind.GONE)
        assert await office.reason() == "Unschedulable"
        (_, last) = office.statuses.written[-1]
        assert (last["message"], len(office.events.said)) == (first["message"], said)
        assert "lastTransitionTime" not in last


async def test_a_zone_that_had_a_node_counts_for_pods_that_keep_apart() -> None:
    """By a decision's own rules, with one more node of each kind (ecosystem A1)."""
    async with Office() as office:
        full(office)
        office.add("p", affinity=apart(term("web", _ZONE)))
        assert await office.reason() == "WaitingForCapacity"
        office.node("b1", 16, labels={_ZONE: "b"}, unschedulable=True)
        assert await office.reason() == "Unschedulable"
        await office.step(3)
        names = {view.facts.name for view in office.scheduler.state.views()}
        mirror = office.scheduler._reasons._mirror
        assert set(mirror.table.row_of) == names == {"n1", "b1"}  # nothing is left of the question


async def test_what_others_forbid_counts_as_well() -> None:
    """A pod that has a node keeps this one out of its zone (ecosystem A1)."""
    async with Office() as office:
        full(office)
        office.node("n2", 16, labels={_ZONE: "a"})
        office.add("lonely", mem=None, on="n2", schedulerName="other", affinity=apart(term("p", _ZONE)))
        office.add("p", labels={"app": "p"})
        assert await office.reason() == "WaitingForCapacity"
        office.gone("lonely")
        await office.step(3, seconds=60.0)
        assert office.is_placed("p")


async def test_a_pod_that_could_not_be_bound_requests_no_node() -> None:
    """Ecosystem A1."""
    async with Office() as office:
        office.node("n1", 16)
        office.statuses.no_binding = True
        office.add("p")
        await office.step(3)
        assert office.reasons() == ["SchedulerError"]


@pytest.mark.parametrize("mem", ["1Gi", "1.5.2"])
async def test_a_gated_pod_gets_no_condition(mem: str) -> None:
    """Its condition is the API server's, and quota and hardware are asked for apart (ecosystem A1)."""
    async with Office() as office:
        office.add("p", mem=mem, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])
        await office.step(9, seconds=60.0)
        assert (office.reasons(), office.events.said) == ([], [])
        free = pod("p", mem=mem)
        office.tell("pods", free)
        await office.step(3)
        assert office.reasons() == ["Unschedulable" if mem == "1Gi" else "PodRefused"]


@pytest.mark.parametrize(("before", "written"), [("Unschedulable", []), ("ModelTooLarge", ["Unschedulable"])])
async def test_a_new_leader_corrects_the_reason_and_repeats_nothing(before: str, written: list[str]) -> None:
    """What an earlier leader has told is known from the condition (ecosystem A1)."""
    async with Office() as office:
        full(office)
        waits = pod("p", mem="8Gi")
        message = "0/1 nodes: 1 GPUMemoryInsufficient (8 GiB short on the best GPU)"
        waits["status"]["conditions"] = [{"type": "PodScheduled", "reason": before, "message": message}]
        office.tell("pods", waits)
        await office.step(9, seconds=30.0)
        assert (office.reasons(), office.events.said) == (written, [])


async def test_replicas_that_are_refused_alike_get_the_same_reason() -> None:
    """Ecosystem A1."""
    async with Office() as office:
        full(office)
        for uid in ("p", "q"):
            office.add(uid, mem="17Gi", annotations={KEYS.model_id: "m"})
        await office.step(6)
        assert (office.reasons("p"), office.reasons("q")) == (["ModelTooLarge"], ["ModelTooLarge"])


async def test_while_the_cluster_is_taken_over_no_node_is_asked_for_and_then_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of nodes are not mirrored in one step, and that does not wait for the pod's own tries (ecosystem A1)."""
    monkeypatch.setattr(wait_reasons, "_NODES_AT_ONCE", 1)
    async with Office() as office:
        for number in range(40):
            office.node(f"n{number}", 8, labels={_ZONE: "a"})
        office.add("p", mem="8Gi", affinity=apart(term("web", HOST)))
        for number in range(40):
            office.resident(f"r{number}", f"n{number}", 8, labels={"app": "web"})
        await office.step(2)
        assert office.reasons() == ["WaitingForCapacity"]
        await office.step(400, seconds=1.0)
        assert office.reasons() == ["WaitingForCapacity", "Unschedulable"]
