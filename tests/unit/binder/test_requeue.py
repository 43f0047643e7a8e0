"""What lets a waiting pod in wakes it soon, also what no rule alone foresees. For each rule `test_registry` shows it.

The backoff that is there for what nobody foresaw never comes here.
"""

import math
import random
from typing import Any

import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName
from berth.kube.informer import ChangeKind
from berth.runtime.backoff import Backoff
from binder.cache.live_nodes import LiveNodes
from binder.cache.load_failures import LoadFailures
from binder.cache.quarantine import Quarantines
from binder.engine.decision import Decider, Placement
from binder.engine.preemption import find_candidate
from binder.engine.score import make_strategy
from binder.loop import queue
from binder.loop.queue import WOKEN_CAP_SECONDS
from tests.fakes.binder import Bench
from tests.fakes.objects import GIB, KEYS, node, pod
from tests.fakes.zones import HOST, apart, near, spread, term

_ZONE = "topology.kubernetes.io/zone"
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_other_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def backoff(cap_seconds: float) -> Backoff:
        slow = cap_seconds == queue.CAP_SECONDS
        return Backoff(initial_seconds=1e9 if slow else 0.5, cap_seconds=1e9 if slow else cap_seconds)

    monkeypatch.setattr(queue, "_backoff", backoff)


async def soon(bench: Bench, uid: str) -> None:
    """The pod gets its place within the longest pause."""
    await bench.step()
    assert not bench.is_placed(uid), "nothing to wait for"
    await bench.step(3, seconds=1.0)


def other(bench: Bench, uid: str, on: str, app: str = "x", **more: Any) -> None:
    """A pod of another scheduler that has a node."""
    bench.add(uid, mem=None, on=on, labels={"app": app}, schedulerName="other", **more)


def bind(bench: Bench, claim: str) -> None:
    """The claim has a volume."""
    bench.tell("persistentvolumes", {"metadata": {"name": "v", "uid": "v"}, "spec": {}})
    bench.tell("persistentvolumeclaims", bound_claim(claim))


def bound_claim(name: str) -> Json:
    annotations = {"pv.kubernetes.io/bind-completed": "yes"}
    meta = {"namespace": "team", "name": name, "uid": name, "annotations": annotations}
    return {"metadata": meta, "spec": {"volumeName": "v"}}


async def test_who_must_not_be_near_is_relabelled() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        other(bench, "x", "n1", "noisy")
        bench.add("p", affinity=apart(term("noisy", HOST)))
        await soon(bench, "p")
        other(bench, "x", "n1", "quiet")
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


async def test_the_last_company_that_goes_leaves_one_who_is_company_to_himself() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.node("n2", 16, taints=[{"key": "k", "effect": "NoSchedule"}])
        other(bench, "first", "n2", "me")
        bench.add("p", labels={"app": "me"}, affinity=near(term("me", HOST)))
        await soon(bench, "p")
        bench.gone("first")
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


@pytest.mark.parametrize("how", ["a pod is added elsewhere", "a pod goes", "a domain goes", "a domain comes"])
async def test_a_spread_that_can_be_kept_again(how: str) -> None:
    async with Bench() as bench:
        bench.node("a", 16, labels={_ZONE: "a"})
        bench.node("b", 16, labels={_ZONE: "b"}, unschedulable=True)
        other(bench, "s", "a", "s")
        bench.add("p", labels={"app": "s"}, topologySpreadConstraints=[spread(key=_ZONE, app="s")])
        await soon(bench, "p")
        if how == "a pod is added elsewhere":
            other(bench, "t", "b", "s")
        elif how == "a pod goes":
            bench.gone("s")
        elif how == "a domain goes":
            bench.tell("nodes", node("b"), ChangeKind.GONE)
        else:
            bench.node("c", 16, labels={_ZONE: "c"})
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


async def test_a_namespace_gets_the_labels_that_a_term_requests() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        db = pod("db", mem=None, on="n1", schedulerName="other")
        db["metadata"] |= {"namespace": "data", "labels": {"app": "db"}}
        bench.tell("pods", db)
        bench.add("p", affinity=near(term("db", HOST, namespaceSelector={"matchLabels": {"tier": "data"}})))
        await soon(bench, "p")
        bench.tell("namespaces", {"metadata": {"name": "data", "uid": "data", "labels": {"tier": "data"}}})
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


async def test_a_claim_that_was_not_there_when_room_came_free() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("r", "n1", 16)
        bind(bench, "c")
        bench.add("p", volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}])
        await soon(bench, "p")
        bench.tell("persistentvolumeclaims", bound_claim("c"), ChangeKind.GONE)
        bench.gone("r")
        await bench.step(2, seconds=1.0)
        assert not bench.is_placed("p")
        bind(bench, "c")
        await bench.step(5, seconds=1.0)
        assert bench.is_placed("p")


async def test_a_quarantine_that_began_before_room_came_free(monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine = ""
    monkeypatch.setattr(Quarantines, "because", lambda *_, **__: quarantine)
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("r", "n1", 16)
        bench.add("p")
        await soon(bench, "p")
        quarantine = "its files took a Triton down"
        bench.gone("r")
        await bench.step(2, seconds=1.0)
        assert not bench.is_placed("p")
        quarantine = ""
        await bench.step(5, seconds=1.0)
        assert bench.is_placed("p")


async def test_a_stale_model_that_is_settled() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("r", "n1", 16)
        bench.add("p", mem="16Gi")
        await soon(bench, "p")
        bench.gone("r", unloaded=False)
        await bench.step(2, seconds=1.0)
        assert not bench.is_placed("p")
        bench.scheduler.state.settle(NodeName("n1"), asked_at=math.inf)
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


async def test_other_use_that_falls_and_not_one_that_grows() -> None:
    async with Bench() as bench:
        bench.node("n1", 16, other_use=8 * GIB)
        bench.add("p", mem="10Gi")
        await soon(bench, "p")
        tried = len(bench.events.said)
        bench.node("n1", 16, other_use=9 * GIB)
        await bench.step(20, seconds=1.0)
        assert len(bench.events.said) == tried
        bench.node("n1", 16, other_use=6 * GIB)
        await bench.step(2, seconds=1.0)
        assert bench.is_placed("p")


@pytest.mark.parametrize("how", ["allows more", "goes", "speaks of others", "the pod is relabelled"])
async def test_a_budget_that_lets_somebody_go_again(how: str) -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.budget(0)
        bench.resident("low", "n1", 16, labels={"app": "web"})
        bench.add("vip", mem="16Gi", priority=10)
        await bench.step(5, seconds=1.0)
        assert bench.api.evicted == []
        if how == "allows more":
            bench.budget(1)
        elif how == "goes":
            bench.budget(0, gone=True)
        elif how == "speaks of others":
            bench.budget(0, app="else")
        else:
            bench.api.pods["low"]["metadata"]["labels"] = {"app": "else"}
            bench.tell("pods", bench.api.pods["low"])
        await bench.step(2, seconds=1.0)
        assert bench.api.evicted == ["low"]


async def test_a_victim_that_takes_the_place_of_one_who_was_none() -> None:
    async with Bench() as bench:
        bench.node("n1", 16)
        bench.resident("same", "n1", 16, priority=10)
        bench.add("vip", mem="16Gi", priority=10)
        await bench.step(5, seconds=1.0)
        bench.gone("same")
        bench.resident("low", "n1", 16)
        await bench.step(2, seconds=1.0)
        assert bench.api.evicted == ["low"]


class History:
    """A cluster in which anything may happen, one thing after the other."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.chance, self._made = bench, random.Random(seed), 0
        self.nodes: dict[str, Json] = {}
        self.bound: dict[str, Json] = {}
        self.leaving: set[str] = set()
        self.avoided: list[NodeName] = []

    def step(self) -> str:
        name = self.chance.choice([n for n in dir(self) if n.startswith("do_")])
        getattr(self, name)()
        return name

    def do_node(self) -> None:
        name = f"n{self.chance.randrange(4)}"
        self.nodes[name] = {
            "other_use": self.chance.randrange(1, 9) * GIB,
            "labels": {_ZONE: self.chance.choice("ab")} if self.chance.random() < 0.8 else {},
            "unschedulable": self.chance.random() < 0.15,
            "taints": [{"key": "k", "effect": "NoSchedule"}] if self.chance.random() < 0.15 else [],
            "allocatable": {"cpu": self.chance.choice("48"), "memory": "64Gi", "pods": "20"},
            "beats": self.chance.random() < 0.9,
        }
        self._tell_node(name)

    def do_node_report(self) -> None:
        if self.nodes:
            name = self.chance.choice(sorted(self.nodes))
            self.nodes[name]["other_use"] = self.chance.randrange(1, 9) * GIB
            self._tell_node(name)

    def do_node_goes(self) -> None:
        if self.nodes and self.chance.random() < 0.3:
            name = self.chance.choice(sorted(self.nodes))
            del self.nodes[name]
            self.bench.tell("nodes", node(name), ChangeKind.GONE)

    def do_other(self) -> None:
        if self.nodes:
            self._made += 1
            affinity = (
                {"affinity": apart(term(self.chance.choice("abc"), HOST))}
                if self.chance.random() < 0.3
                else {}
            )
            self._bound(f"x{self._made}", mem=None, schedulerName="other", requests={"cpu": "1"}, **affinity)

    def do_resident(self) -> None:
        if self.nodes:
            self._made += 1
            gib = self.chance.randrange(1, 6)
            on = self.chance.choice(sorted(self.nodes))
            choice = GpuChoice(GpuUuid(f"{on}-0"), 0, gib * GIB)
            priority = self.chance.choice((0, 10, 20))
            self._bound(f"r{self._made}", on=on, mem=f"{gib}Gi", choice=choice, priority=priority)

    def do_pod(self) -> None:
        self._made += 1
        asks: Json = {"mem": f"{self.chance.randrange(1, 15)}Gi", "priority": self.chance.choice((0, 10, 20))}
        app, kind = self.chance.choice("abc"), self.chance.randrange(8)
        if kind < 2:
            asks["affinity"] = (near, apart)[kind](term(app, self.chance.choice((HOST, _ZONE))))
        elif kind == 2:
            asks["topologySpreadConstraints"] = [spread(key=self.chance.choice((HOST, _ZONE)), app=app)]
        elif kind == 3:
            asks["nodeSelector"] = {_ZONE: self.chance.choice("ab")}
        elif kind == 4:
            asks["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": f"c{self._made % 3}"}}]
        elif kind == 5:
            asks["requests"] = {"cpu": str(self.chance.randrange(1, 9))}
        elif kind == 6:
            asks["annotations"] = {KEYS.model_id: f"m{self.chance.randrange(2)}"}
        self.bench.add(f"p{self._made}", labels={"app": self.chance.choice("abc")}, **asks)

    def do_pod_goes(self) -> None:
        if self.bench.api.pods:
            uid = self.chance.choice(sorted(self.bench.api.pods))
            self.bench.gone(uid, unloaded=self.chance.random() < 0.8)

    def do_pod_begins_to_go(self) -> None:
        bound = [uid for uid, one in self.bench.api.pods.items() if "nodeName" in one["spec"]]
        if bound:
            self.bench.begin_to_go(self.chance.choice(sorted(bound)))

    def do_relabel(self) -> None:
        bound = [uid for uid, one in self.bench.api.pods.items() if "nodeName" in one["spec"]]
        if bound:
            one = self.bench.api.pods[self.chance.choice(sorted(bound))]
            one["metadata"]["labels"] = {"app": self.chance.choice("abc")}
            self.bench.tell("pods", one)

    def do_claim(self) -> None:
        self.bench.tell("persistentvolumes", {"metadata": {"name": "v", "uid": "v"}, "spec": {}})
        name = f"c{self.chance.randrange(3)}"
        kind = ChangeKind.GONE if self.chance.random() < 0.3 else ChangeKind.SET
        self.bench.tell("persistentvolumeclaims", bound_claim(name), kind)

    def do_budget(self) -> None:
        gone = self.chance.random() < 0.3
        app = self.chance.choice("abc")
        self.bench.budget(self.chance.randrange(3), app=app, name=f"pdb-{app}", gone=gone)

    def do_avoid(self) -> None:
        self.avoided[:] = [NodeName(f"n{i}") for i in range(4) if self.chance.random() < 0.2]

    def do_eviction_takes_its_time(self) -> None:
        """Somebody who was evicted has gone."""
        gone = [uid for uid in self.bench.api.evicted if uid in self.bench.api.pods]
        if gone:
            self.bench.gone(self.chance.choice(gone))

    def follow_evictions(self) -> None:
        """The API server marks at once who is evicted."""
        for uid in self.bench.api.evicted:
            one = self.bench.api.pods.get(uid)
            if one is not None and "deletionTimestamp" not in one["metadata"]:
                self.bench.begin_to_go(uid)

    def _bound(self, uid: str, *, on: str = "", **asks: Any) -> None:
        on = on or self.chance.choice(sorted(self.nodes))
        self.bench.add(uid, labels={"app": self.chance.choice("abc")}, on=on, **asks)

    def _tell_node(self, name: str) -> None:
        facts = dict(self.nodes[name])
        beats = facts.pop("beats")
        self.bench.node(name, 16, 8, beats=False, **facts)
        table = self.bench.scheduler.cluster.decider.table
        table.beat(NodeName(name), math.inf if beats else -math.inf)
        table.ease(NodeName(name))

    def forgotten(self) -> str:
        """A pod that waits and could be placed, or for which somebody could go; "" if all is well."""
        scheduler = self.bench.scheduler
        cluster, room = scheduler.cluster, scheduler.nominator
        cluster.decider.refresh()
        fresh = Decider(LiveNodes(cluster.state), cluster.facts, make_strategy("binpack", None))  # type: ignore[arg-type]
        for name, facts in self.nodes.items():
            fresh.table.beat(NodeName(name), math.inf if facts["beats"] else -math.inf)
        for demand in list(scheduler.queue.demands()):
            with cluster.state.without(room.aside(demand)):
                fits = isinstance(fresh.decide(demand), Placement)
            if fits:
                return f"{demand.model.ref} fits"
            fresh.refresh()
            if room.is_nominated(demand):
                continue
            candidate = find_candidate(
                fresh,
                demand,
                [NodeName(name) for name in self.nodes],
                may_go=lambda reservation, d=demand: (
                    reservation.priority < d.priority and not reservation.deleting
                ),  # type: ignore[misc]
                budgets=cluster.budgets,
            )
            if candidate is not None:
                return f"{demand.model.ref} could have {candidate.placement.node}"
        cluster.state.take_touched()
        for name in self.nodes:
            cluster.decider.table.put(cluster.state.view(NodeName(name)), hypothetical=True)
        return ""


@pytest.mark.parametrize("seed", range(25))
async def test_no_history_leaves_a_pod_parked_that_could_be_placed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(seed)  # of backoffs
    async with Bench() as bench:
        history = History(bench, seed)
        monkeypatch.setattr(LoadFailures, "excluded", lambda *_: history.avoided)
        done = []
        for _ in range(4):
            history.do_node()
        for _ in range(60):
            done.append(history.step())
            for _ in range(int(1.2 * WOKEN_CAP_SECONDS)):
                bench.now += 1.0
                await bench.until_quiet()
                history.follow_evictions()
            assert history.forgotten() == "", done[-5:]
