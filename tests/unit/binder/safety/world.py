"""A cluster that misbehaves, for the binder to be safe in: an API server that fails before or after it
has written, watches that lag, repeat and break off, agents that take their time, two replicas that
crash and follow each other, kube-scheduler's extender calls in between, clocks that jump.

A history is a list of operations (name, a, b); a and b choose among what there is at that moment, so
that every part of a history is a history, too, and a failing one can be shortened.
"""

import asyncio
import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName, PodUid
from berth.contract.pod import PodRef, node_of
from berth.contract.report import ModelReport, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind, Mirror
from binder.cluster import slim
from binder.decision import Placement
from binder.extender import Extender
from binder.metrics import BinderMetrics
from binder.scheduler import Scheduler
from binder.strategies import make_strategy
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report

Json = dict[str, Any]
Operation = tuple[str, int, int]

NODES = {"n1": (16, 8), "n2": (24,), "n3": (8, 8, 8)}
_STRATEGIES = ("binpack", "spread", "random", "least-fragmentation")
_KINDS = ("nodes", "pods")
# How a Binding ends: it is done; refused; broken before or after it was written.
_OUTCOMES = ("done", "done", "done", "conflict", "lost", "done unheard")


class Broken(AssertionError):
    """An invariant does not hold."""


class Truth:
    """What is really there: the API server's objects and what each Triton holds."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self.version = 0
        # Per node: what the agent has listed (uid to choice and model id).
        self.listed: dict[str, dict[str, tuple[GpuChoice, str]]] = {name: {} for name in NODES}
        self.cordoned: set[str] = set()

    def node(self, name: str) -> Json:
        gpus = [gpu(f"{name}-{i}", index=i, total=size * GIB) for i, size in enumerate(NODES[name])]
        models = tuple(
            ModelReport(
                PodUid(uid), "team", uid, model_id, model_id, choice.uuid, choice.bytes, None,  # type: ignore[arg-type]
                ModelState.READY, other_gpus=choice.uuids[1:],
            )
            for uid, (choice, model_id) in self.listed[name].items()
        )  # fmt: skip
        self.version += 1
        found = node(
            name,
            says=report(*gpus, models=models, generation=self.version),
            unschedulable=name in self.cordoned,
            allocatable={"cpu": "8", "memory": "64Gi", "pods": "12"},
        )
        found["metadata"]["resourceVersion"] = str(self.version)
        return found

    def touch(self, one: Json) -> Json:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(one)

    def used(self) -> dict[str, int]:
        """Bytes on each GPU: of pods that have a node, and of models that are still there without one."""
        used: dict[str, int] = {}
        for choice in self._choices():
            for uuid in choice.uuids:
                used[uuid] = used.get(uuid, 0) + choice.bytes
        return used

    def _choices(self) -> list[GpuChoice]:
        bound = {
            uid: GpuChoice.decode(one["metadata"]["annotations"][KEYS.gpu])
            for uid, one in self.pods.items()
            if node_of(one)
        }
        gone = {
            uid: c for models in self.listed.values() for uid, (c, _) in models.items() if uid not in bound
        }
        return [*bound.values(), *gone.values()]

    def models_on(self, name: str) -> list[str]:
        """Model ids of pods on the node and of models that are still there."""
        bound = {
            uid: one["metadata"]["annotations"][KEYS.model_id]
            for uid, one in self.pods.items()
            if node_of(one) == name
        }
        return [*bound.values(), *(m for uid, (_, m) in self.listed[name].items() if uid not in bound)]


class Call:
    """A Binding on its way; the world decides how it ends."""

    def __init__(self, body: Json) -> None:
        self.body = body
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Api:
    """One replica's client. Bindings wait for the world; all else is answered at once."""

    def __init__(self, world: "World") -> None:
        self._world = world

    async def create(self, path: str, body: Json) -> Json:
        if path.endswith("/eviction"):
            self._world.evict(self, body)
        elif path.endswith("/binding"):
            call = Call(body)
            self._world.calls.append(call)
            await call.answer
        return {}

    async def get(self, path: str) -> Json:
        kind, name = path.split("/")[-2:]
        if kind == "nodes":
            return self._world.truth.node(name)
        found = self._world.truth.pods.get(name)
        if found is None:
            raise response_error(404, "NotFound", path)
        return copy.deepcopy(found)

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        return {}


class Silent:
    """Events that nobody reads."""

    def record(self, *_: object) -> None:
        pass


class Replica:
    """One binder process: its mirrors, and what the watches have yet to tell it."""

    def __init__(self, world: "World", number: int) -> None:
        name = _STRATEGIES[number % len(_STRATEGIES)]
        self.api = Api(world)
        self.scheduler = Scheduler(
            self.api,  # type: ignore[arg-type]
            keys=KEYS,
            scheduler_name="trtis-scheduler",
            strategy=make_strategy(name, np.random.default_rng(number)),
            events=Silent(),  # type: ignore[arg-type]
            metrics=BinderMetrics(CollectorRegistry()),
            clock=lambda: world.now,
        )
        self.extender = Extender(self.scheduler, KEYS, lambda: "")
        self._hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        self._mirrors = {"nodes": Mirror(), "pods": Mirror(slim)}
        self.pending: dict[str, list[tuple[str, Json]]] = {kind: [] for kind in _KINDS}
        self.tasks: list[asyncio.Task[Any]] = []
        for one in NODES:
            self.scheduler.cluster.decider.table.beat(NodeName(one), math.inf)

    def tell_budgets(self, allowed: int) -> None:
        """At once: what else may be late is tried enough. "both" is counted by two of them."""
        for name, guards, left in (
            ("kept", ["kept"], 0),
            ("one", ["one"], allowed),
            ("both", ["both"], 5),
            ("twice", ["both"], 5),
        ):
            spec = {"selector": {"matchExpressions": [{"key": "guard", "operator": "In", "values": guards}]}}
            meta = {"name": name, "namespace": "team", "uid": name}
            budget = {"metadata": meta, "spec": spec, "status": {"disruptionsAllowed": left}}
            self._hear["poddisruptionbudgets"](Change(ChangeKind.SET, budget))

    def deliver(self, kind: str, *, again: bool) -> None:
        """The watch's next event; `again`: and it will come once more."""
        if self.pending[kind]:
            event = self.pending[kind][0] if again else self.pending[kind].pop(0)
            self._tell(kind, self._mirrors[kind].apply(*copy.deepcopy(event)))

    def relist(self, kind: str, items: list[Json]) -> None:
        """The watch has broken off: a list takes the place of what it has yet to tell."""
        self.pending[kind].clear()
        self._tell(kind, self._mirrors[kind].replace([self._mirrors[kind].keep(item) for item in items]))

    def lead(self) -> None:
        self.scheduler.leads = True
        self.tasks = [asyncio.create_task(work) for work in self.scheduler.background().values()]

    async def stop(self) -> None:
        """Leadership is lost, or the process has died: nothing of it is written any more."""
        self.scheduler.leads = False
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.scheduler.abandon()

    def _tell(self, kind: str, changes: list[Change]) -> None:
        for change in changes:
            self._hear[kind](change)


class World:
    """Takes operations one by one and looks after each whether all is well."""

    def __init__(self) -> None:
        self.truth, self.now, self.calls = Truth(), 1000.0, list[Call]()
        self._made = self._lives = 0
        self.replicas: list[Replica] = []
        self.leader = 0
        self._deciding: list[asyncio.Task[Any]] = []
        # How the next evictions fail, whether who is evicted takes his time, and what a budget allows.
        self.eviction_faults: list[int] = []
        self.graceful, self.allowed = False, 1
        self.broken: str | None = None

    async def begin(self) -> None:
        for _ in range(2):
            self.replicas.append(self._new_replica())
        self._lead(0)

    async def end(self) -> None:
        for replica in self.replicas:
            await replica.stop()
        await self._settle()

    async def do(self, operation: Operation) -> None:
        """One operation, and the invariants. Raises Broken."""
        name, a, b = operation
        await getattr(self, f"op_{name}")(a, b)
        await self._settle()
        self.check()

    def check(self) -> None:
        if self.broken is not None:
            raise Broken(self.broken)
        for uuid, used in self.truth.used().items():
            name, _, index = uuid.rpartition("-")
            if used > NODES[name][int(index)] * GIB:
                raise Broken(f"{used / GIB:g} GiB on {uuid}")
        for name in NODES:
            models = self.truth.models_on(name)
            if len(models) != len(set(models)):
                raise Broken(f"a model twice on {name}: {sorted(models)}")

    async def op_create(self, a: int, b: int) -> None:
        """A pod: its size, model, priority, number of GPUs and scheduler by chance."""
        self._made += 1
        uid = f"p{self._made}"
        annotations = {KEYS.model_id: f"m{a % 7}"}
        if b % 6 == 0:
            annotations[KEYS.gpu_count] = "2"
        one = pod(
            uid,
            mem=f"{1 + a % 9}Gi",
            annotations=annotations,
            requests={"cpu": f"{200 * (b % 5)}m"},
            priority=(b % 3) * 10,
            schedulerName="other" if b % 7 == 0 else "trtis-scheduler",
        )
        one["metadata"]["labels"] = {"guard": ("none", "none", "kept", "one", "both")[(a // 9) % 5]}
        self.truth.pods[uid] = one
        self._publish("pods", "ADDED", self.truth.touch(one))

    async def op_delete(self, a: int, _: int) -> None:
        if uid := self._pick(sorted(self.truth.pods), a):
            self._delete(uid)

    async def op_deliver(self, a: int, b: int) -> None:
        replica, kind = self.replicas[a % 2], _KINDS[(a // 2) % 2]
        for _ in range(1 + b % 4):
            replica.deliver(kind, again=b % 17 == 0)

    async def op_relist(self, a: int, _: int) -> None:
        self._relist(self.replicas[a % 2], _KINDS[(a // 2) % 2])

    async def op_step(self, a: int, _: int) -> None:
        for _ in range(1 + a % 3):
            self.replicas[self.leader].scheduler.step()
            await self._settle()

    async def op_answer(self, a: int, b: int) -> None:
        """A Binding comes to its end, one way or another."""
        if self.calls:
            self._finish(self.calls.pop(a % len(self.calls)), _OUTCOMES[b % len(_OUTCOMES)])

    async def op_see(self, a: int, b: int) -> None:
        """An agent sees a pod that is bound to its node: it lists it, and only then loads it."""
        name = sorted(NODES)[a % len(NODES)]
        there = self.truth.listed[name]
        unseen = [uid for uid, one in self.truth.pods.items() if node_of(one) == name and uid not in there]
        if uid := self._pick(sorted(unseen), b):
            marks = self.truth.pods[uid]["metadata"]["annotations"]
            there[uid] = (GpuChoice.decode(marks[KEYS.gpu]), marks[KEYS.model_id])
            self._publish("nodes", "MODIFIED", self.truth.node(name))

    async def op_unload(self, a: int, b: int) -> None:
        """An agent has unloaded a model without a pod, and only then lists it no more."""
        name = sorted(NODES)[a % len(NODES)]
        orphans = [uid for uid in self.truth.listed[name] if uid not in self.truth.pods]
        if uid := self._pick(sorted(orphans), b):
            del self.truth.listed[name][uid]
            self._publish("nodes", "MODIFIED", self.truth.node(name))

    async def op_cordon(self, a: int, _: int) -> None:
        name = sorted(NODES)[a % len(NODES)]
        self.truth.cordoned ^= {name}
        self._publish("nodes", "MODIFIED", self.truth.node(name))

    async def op_extend(self, a: int, b: int) -> None:
        """kube-scheduler has chosen a node and asks for the Binding."""
        waiting = [uid for uid, one in self.truth.pods.items() if one["spec"]["schedulerName"] == "other"]
        if uid := self._pick(sorted(uid for uid in waiting if not node_of(self.truth.pods[uid])), a):
            scheduler, ref = self.replicas[self.leader].scheduler, PodRef("team", uid, PodUid(uid))
            place = self.replicas[self.leader].extender.place(ref, NodeName(sorted(NODES)[b % len(NODES)]))
            self._deciding.append(asyncio.create_task(scheduler.in_flight(place)))

    async def op_end(self, a: int, _: int) -> None:
        """The grace of somebody who was evicted is over."""
        going = [uid for uid, one in self.truth.pods.items() if "deletionTimestamp" in one["metadata"]]
        if uid := self._pick(sorted(going), a):
            self._delete(uid)

    async def op_evictions(self, a: int, b: int) -> None:
        """How evictions go from now on."""
        self.graceful = a % 2 == 0
        self.eviction_faults += [(429, 500, 503)[b % 3]] * (a % 3)

    async def op_allow(self, a: int, _: int) -> None:
        """The disruption controller has counted anew."""
        self.allowed = a % 3
        self._tell_budgets()

    async def op_crash(self, a: int, b: int) -> None:
        """A replica dies or loses its leadership. What it has sent is written now or never: the Lease
        outlives its requests. The next leader lists before it decides."""
        number = a % 2
        if number == self.leader:
            for call in self.calls:
                self._write(call.body, quietly=True) if b % 2 else None
            self.calls.clear()
        await self.replicas[number].stop()
        self.replicas[number] = self._new_replica()
        if number == self.leader:
            self._lead(1 - number)

    async def op_wait(self, a: int, _: int) -> None:
        """Time passes, and more of it than one would think."""
        self.now += (0.3, 1.0, 5.0, 20.0, 200.0)[a % 5]

    async def op_quiet(self, *_: int) -> None:
        """Everything that is under way comes to its end, and then nothing may be left over."""
        for _ in range(4):
            for call in self.calls:
                self._finish(call, "done")
            self.calls.clear()
            self.eviction_faults.clear()
            self._end_all()
            await self._settle()
            for replica in self.replicas:
                for kind in _KINDS:
                    while replica.pending[kind]:
                        replica.deliver(kind, again=False)
            self.now += 130.0  # longer than any backoff
            for _ in range(3 * len(self.truth.pods) + 3):
                self.replicas[self.leader].scheduler.step()
                await self._settle()
        if self.calls or any("deletionTimestamp" in one["metadata"] for one in self.truth.pods.values()):
            return  # still busy: whoever was evicted made room for one more
        self._check_quiet(self.replicas[self.leader].scheduler)

    def _check_quiet(self, scheduler: Scheduler) -> None:
        waiting = {demand.model.ref.uid: demand for demand in scheduler.queue.demands()}
        for uid, one in self.truth.pods.items():
            ours = one["spec"]["schedulerName"] == "trtis-scheduler"
            if ours and not node_of(one) and uid not in waiting:
                raise Broken(f"pod {uid} is lost")
        if scheduler.state.assumed_count:
            raise Broken(f"{scheduler.state.assumed_count} assumed pods are left")
        for uid, demand in waiting.items():
            if uid not in self.truth.pods:
                raise Broken(f"pod {uid} is gone and waits")
            if scheduler.room.waits_for_room(demand):
                continue
            if isinstance(scheduler.cluster.decider.decide(demand), Placement):
                raise Broken(f"pod {uid} fits and is not tried")

    def evict(self, by: Api, body: Json) -> None:
        """As the API server takes an eviction: budgets count, two of them for one pod are an error, and
        who is evicted goes at once or takes his time."""
        uid, rehearsal = body["metadata"]["name"], body["deleteOptions"].get("dryRun") == ["All"]
        if by is not self.replicas[self.leader].api:
            self.broken = f"{uid} is evicted by one who does not lead"
        one = self.truth.pods.get(uid)
        if one is None:
            raise response_error(404, "NotFound", uid)
        if self.eviction_faults:
            raise response_error(self.eviction_faults.pop(), "", uid)
        guard = one["metadata"]["labels"].get("guard")
        if guard in ("kept", "both"):
            self.broken = f"{uid} is evicted, whom no budget lets go"
        if guard == "one" and self.allowed == 0:
            raise response_error(429, "TooManyRequests", uid)
        if rehearsal or "deletionTimestamp" in one["metadata"]:
            return
        if guard == "one":
            self.allowed -= 1
            self._tell_budgets()
        if self.graceful:
            one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._publish("pods", "MODIFIED", self.truth.touch(one))
        else:
            self._delete(uid)

    def _end_all(self) -> bool:
        """Whoever is on his way out has gone. True if there was anybody."""
        going = [uid for uid, one in self.truth.pods.items() if "deletionTimestamp" in one["metadata"]]
        for uid in going:
            self._delete(uid)
        return bool(going)

    def _tell_budgets(self) -> None:
        for replica in self.replicas:
            replica.tell_budgets(self.allowed)

    def _delete(self, uid: str) -> None:
        self._publish("pods", "DELETED", self.truth.touch(self.truth.pods.pop(uid)))

    def _finish(self, call: Call, outcome: str) -> None:
        if call.answer.done():  # whoever asked has gone
            return
        if outcome == "conflict":
            call.answer.set_exception(response_error(409, "Conflict", "x"))
            return
        if outcome == "lost":
            call.answer.set_exception(KubeUnreachable("reset"))
            return
        error = self._write(call.body)
        if error is not None:
            call.answer.set_exception(error)
        elif outcome == "done unheard":
            call.answer.set_exception(KubeUnreachable("timed out"))
        else:
            call.answer.set_result(None)

    def _write(self, body: Json, *, quietly: bool = False) -> Exception | None:
        """As the API server takes a Binding: the uid is a precondition, and so is having no node."""
        one = self.truth.pods.get(body["metadata"]["name"])
        if one is None:
            return response_error(404, "NotFound", "x")
        if node_of(one):
            return response_error(409, "Conflict", "x")
        one["spec"]["nodeName"] = body["target"]["name"]
        one["metadata"]["annotations"] |= body["metadata"]["annotations"]
        self._publish("pods", "MODIFIED", self.truth.touch(one))
        return None

    def _publish(self, kind: str, event: str, one: Json) -> None:
        for replica in self.replicas:
            replica.pending[kind].append((event, one))

    def _new_replica(self) -> Replica:
        self._lives += 1
        replica = Replica(self, self._lives)
        replica.tell_budgets(self.allowed)
        for kind in _KINDS:
            self._relist(replica, kind)
        return replica

    def _lead(self, number: int) -> None:
        """As `app._catch_up`: pods before nodes."""
        self.leader = number
        for kind in ("pods", "nodes"):
            self._relist(self.replicas[number], kind)
        self.replicas[number].lead()

    def _relist(self, replica: Replica, kind: str) -> None:
        items = [self.truth.node(n) for n in NODES] if kind == "nodes" else list(self.truth.pods.values())
        replica.relist(kind, copy.deepcopy(items))

    async def _settle(self) -> None:
        """Let every task go as far as it can."""
        for _ in range(8):
            await asyncio.sleep(0)
        self._deciding = [task for task in self._deciding if not task.done()]

    def _pick(self, names: list[str], number: int) -> str | None:
        return names[number % len(names)] if names else None


OPERATIONS: dict[str, int] = {
    "create": 12,
    "delete": 6,
    "deliver": 22,
    "relist": 2,
    "step": 16,
    "answer": 14,
    "see": 10,
    "unload": 8,
    "cordon": 1,
    "extend": 4,
    "end": 4,
    "evictions": 2,
    "allow": 2,
    "crash": 1,
    "wait": 5,
    "quiet": 1,
}
"""How often each is drawn."""

Check = Callable[[list[Operation]], Broken | None]
