"""A cluster that misbehaves, for the binder to be safe in: an API server that fails before or after it
has written, or that writes long after it has gone silent, watches that lag, repeat and break off, agents that
take their time, models that outgrow what they asked for, strangers on the GPUs, GPUs and nodes that go and come
back, heartbeats that stop, two replicas that crash, are deposed and follow each other, kube-scheduler's extender
calls in between, clocks that jump.

A history is a list of operations (name, a, b); a and b choose among what there is at that moment, so
that every part of a history is a history, too, and a failing one can be shortened.
"""

import asyncio
import copy
import math
import sys
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import agent_lease_name
from berth.contract.pod import PodRef, node_of
from berth.contract.report import ModelReport, ModelState
from berth.kube.errors import KubeUnreachable, response_error
from berth.kube.informer import Change, ChangeKind, Mirror
from berth.kube.times import micro_time, utc_now
from binder.api.extender import Extender
from binder.api.leader import LeaderOnly
from binder.engine.cluster import slim
from binder.engine.decision import Placement
from binder.loop.metrics import BinderMetrics
from binder.loop.queue import SchedulingQueue, Waiting
from binder.loop.requeue import NodeToStatus
from tests.fakes.binder import scheduler_of
from tests.fakes.objects import GIB, KEYS, gpu, node, pod, report
from tests.fakes.values import replace

Json = dict[str, Any]
Operation = tuple[str, int, int]

NODES = {"n1": (16, 8), "n2": (24,), "n3": (8, 8, 8)}
_STRATEGIES = ("binpack", "spread", "random", "least-fragmentation")
_KINDS = ("nodes", "pods")
# How a Binding ends: it is done; refused; one too many; broken before or after it was written; or nobody hears of
# it any more and it is written later, perhaps.
_OUTCOMES = ("done", "done", "done", "conflict", "busy", "lost", "done unheard", "late", "late")
_SILENT = ("lost", "done unheard", "late")
_REFUSALS = {"conflict": 409, "busy": 429}
# Longer than who is woken pauses (`WOKEN_CAP_SECONDS`, with its jitter).
_QUIET_SECONDS = 12.0


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
        # Measured of models, on each of their GPUs, and held by strangers; GPUs that are not there.
        self.measured: dict[str, int] = {}
        self.other_use: dict[str, int] = {}
        self.lost: set[str] = set()
        # Nodes that are not registered, and those that are and of which no agent has reported yet.
        self.gone: set[str] = set()
        self.silent: set[str] = set()
        self.lives = dict.fromkeys(NODES, 0)

    def node(self, name: str) -> Json:
        gpus = [
            gpu(uuid, index=i, total=size * GIB, other_use_bytes=self.other_use.get(uuid, 0))
            for i, size in enumerate(NODES[name])
            if (uuid := f"{name}-{i}") not in self.lost
        ]
        models = tuple(
            ModelReport(
                pod_uid=PodUid(uid), namespace="team", pod_name=uid, model_id=model_id, model_name=model_id,  # type: ignore[arg-type]
                gpu=choice.uuid, requested_bytes=choice.bytes, measured_bytes=self.measured.get(uid),
                state=ModelState.READY, other_gpus=choice.uuids[1:],
            )
            for uid, (choice, model_id) in self.listed[name].items()
        )  # fmt: skip
        self.version += 1
        says = report(models=models, generation=self.version)
        found = node(
            name,
            says=None if name in self.silent else replace(says, gpus=tuple(gpus)),
            unschedulable=name in self.cordoned,
            allocatable={"cpu": "8", "memory": "64Gi", "pods": "12"},
        )
        found["metadata"] |= {"resourceVersion": str(self.version), "uid": f"{name}-{self.lives[name]}"}
        return found

    def nodes(self) -> list[Json]:
        return [self.node(name) for name in NODES if name not in self.gone]

    def touch(self, one: Json) -> Json:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(one)

    def used(self) -> dict[str, int]:
        """Bytes on each GPU: of pods that have a node, of models that are still there without one, and of
        strangers."""
        used = dict(self.other_use)
        for uid, choice in self.choices().items():
            for uuid in choice.uuids:
                used[uuid] = used.get(uuid, 0) + max(choice.bytes, self.measured.get(uid, 0))
        return used

    def free(self, uuid: str) -> int:
        name, _, index = uuid.rpartition("-")
        return NODES[name][int(index)] * GIB - self.used().get(uuid, 0)

    def choices(self) -> dict[str, GpuChoice]:
        bound = {
            uid: GpuChoice.decode(one["metadata"]["annotations"][KEYS.gpu])
            for uid, one in self.pods.items()
            if node_of(one)
        }
        gone = {
            uid: c for models in self.listed.values() for uid, (c, _) in models.items() if uid not in bound
        }
        return bound | gone

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

    def __init__(self, api: "Api", body: Json) -> None:
        self.api, self.body = api, body
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Api:
    """One replica's client. Bindings wait for the world; all else is answered at once."""

    def __init__(self, world: "World") -> None:
        self._world = world
        # What this replica has sent of each pod and has no answer to; and those of which it heard nothing.
        self.sent: dict[str, Json] = {}
        self.doubts: set[str] = set()

    async def create(self, path: str, body: Json) -> Json:
        if path.endswith("/eviction"):
            self._world.evict(self, body)
        elif path.endswith("/binding"):
            self._world.check_sent(self, body)
            call = Call(self, body)
            self._world.calls.append(call)
            await call.answer
        return {}

    async def get(self, path: str) -> Json:
        kind, name = path.split("/")[-2:]
        if kind == "nodes":
            if name in self._world.truth.gone:
                raise response_error(404, "NotFound", path)
            return self._world.truth.node(name)
        found = self._world.truth.pods.get(name)
        if found is None:
            raise response_error(404, "NotFound", path)
        return copy.deepcopy(found)

    async def patch(self, path: str, body: Json, *, content_type: str) -> Json:
        self._world.patch(self, path.split("/")[-2], body)
        return {}


class Silent:
    """Events that nobody reads."""

    def record(self, *_: object) -> None:
        pass


class Metrics(BinderMetrics):
    """The scheduler keeps what breaks over one pod to itself; here it must be heard of."""

    def attempted(self, result: str) -> None:
        if result == "broken":
            raise Broken(f"a decision broke: {sys.exception()!r}")


class Hinted(SchedulingQueue):
    """A queue in which nobody who was refused is ever tried of himself: a wake-up that is missed would be hidden by
    that, and is a pod that waits here for ever."""

    def park(self, waiting: Waiting, status: NodeToStatus) -> None:
        super().park(waiting, status)
        waiting.due = waiting.again = math.inf
        self._file(waiting)

    def is_held(self, uid: PodUid) -> bool:
        """Its Binding has failed, and the pause after that is not over."""
        known = self.find(uid)
        return known is not None and known.status is None and known.due > self._clock()


class Replica:
    """One binder process: its mirrors, and what the watches have yet to tell it."""

    def __init__(self, world: "World", number: int) -> None:
        name = _STRATEGIES[number % len(_STRATEGIES)]
        self.api = Api(world)
        self.may_write: Callable[[], bool] = lambda: True
        self.scheduler = scheduler_of(
            self.api,
            strategy=name,
            seed=number,
            events=Silent(),
            metrics=Metrics(CollectorRegistry()),
            monotonic=lambda: world.now,
            sleep=world.sleep,
            may_write=lambda: self.may_write(),
        )
        self.scheduler.queue = self.queue = Hinted(lambda: world.now)
        self.extender = Extender(self.scheduler, self.api, LeaderOnly(lambda: True, lambda: ""), keys=KEYS)  # type: ignore[arg-type]
        self._hear = {source.name: source.hear for source in self.scheduler.sources("berth-system")}
        self._mirrors = {"nodes": Mirror(), "pods": Mirror(slim)}
        self.pending: dict[str, list[tuple[str, Json]]] = {kind: [] for kind in _KINDS}
        self.tasks: list[asyncio.Task[Any]] = []
        self.is_deposed = False
        for one in sorted(NODES.keys() - world.stale):
            self.beat(one)

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

    def beat(self, name: str, *, alive: bool = True) -> None:
        """A heartbeat is heard, or its Lease has come to its end."""
        spec = {"renewTime": micro_time(utc_now()), "leaseDurationSeconds": 10**9}
        lease = {"metadata": {"name": agent_lease_name(name)}, "spec": spec}
        self._hear["leases"](Change(ChangeKind.SET if alive else ChangeKind.GONE, lease))

    def depose(self) -> None:
        """It was stopped for so long that another leads, and goes on as if nothing had happened."""
        self.is_deposed = True
        self.may_write = lambda: False

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
        # Bindings that nobody waits for and that the API server may write yet.
        self.late: list[Json] = []
        self.stale: set[str] = set()
        self._faults: list[str] = []
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self.replicas: list[Replica] = []
        self.leader = 0
        self._deciding: list[asyncio.Task[Any]] = []
        # How the next evictions fail, whether who is evicted takes his time, and what a budget allows.
        self.eviction_faults: list[int] = []
        self.graceful, self.allowed = False, 1

    async def begin(self) -> None:
        for _ in range(2):
            self.replicas.append(self._new_replica())
        await self._lead(0)

    async def end(self) -> None:
        for replica in self.replicas:
            await replica.stop()
        await self._settle()

    async def sleep(self, seconds: float) -> None:
        """By this world's clock."""
        woken = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now + seconds, woken))
        await woken

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        waiting, self._sleeping = self._sleeping, []
        for until, woken in waiting:
            if until > self.now:
                self._sleeping.append((until, woken))
            elif not woken.done():
                woken.set_result(None)

    def check_sent(self, api: Api, body: Json) -> None:
        """Only the leader binds; nothing new to a node that is not heard of; and of a pod whose Binding has no
        answer nothing else than that."""
        uid, target = body["metadata"]["uid"], body["target"]["name"]
        if api is not self.replicas[self.leader].api:
            self._faults.append(f"{uid} is bound by a replica that does not lead")
        if uid not in api.sent and target in self.stale:
            self._faults.append(f"{uid} is placed on {target}, which is not heard of")
        if api.sent.setdefault(uid, body) != body:
            self._faults.append(f"{uid} is sent elsewhere while its Binding has no answer")

    async def do(self, operation: Operation) -> None:
        """One operation, and the invariants. Raises Broken."""
        name, a, b = operation
        await getattr(self, f"op_{name}")(a, b)
        await self._settle()
        self.check()

    def check(self) -> None:
        if self._faults:
            raise Broken(self._faults[0])
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
        gpus = 2 if b % 6 == 0 else 1
        annotations = {KEYS.model_id: f"m{a % 7}", KEYS.gpu_count: str(gpus)}
        one = pod(
            uid,
            mem=f"{(1 + a % 9) * gpus}Gi",
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

    async def op_land(self, a: int, b: int) -> None:
        """What nobody waits for is written, or never will be."""
        if self.late:
            body = self.late.pop(a % len(self.late))
            if b % 3:
                self._write(body)

    async def op_see(self, a: int, b: int) -> None:
        """An agent sees a pod that is bound to its node: it lists it, and only then loads it."""
        name = sorted(NODES)[a % len(NODES)]
        there = self.truth.listed[name]
        if name in self.truth.gone:
            return  # it cannot list it
        unseen = [uid for uid, one in self.truth.pods.items() if node_of(one) == name and uid not in there]
        if uid := self._pick(sorted(unseen), b):
            marks = self.truth.pods[uid]["metadata"]["annotations"]
            there[uid] = (GpuChoice.decode(marks[KEYS.gpu]), marks[KEYS.model_id])
            self._report(name)

    async def op_unload(self, a: int, b: int) -> None:
        """An agent has unloaded a model without a pod, and only then lists it no more."""
        name = sorted(NODES)[a % len(NODES)]
        orphans = [uid for uid in self.truth.listed[name] if uid not in self.truth.pods]
        if uid := self._pick(sorted(orphans), b):
            del self.truth.listed[name][uid]
            self.truth.measured.pop(uid, None)
            self._report(name)

    async def op_cordon(self, a: int, _: int) -> None:
        name = sorted(NODES)[a % len(NODES)]
        self.truth.cordoned ^= {name}
        self._show(name)

    async def op_outgrow(self, a: int, b: int) -> None:
        """A model is found to take more than its pod requested."""
        name = sorted(NODES)[a % len(NODES)]
        there = self.truth.listed[name]
        if (uid := self._pick(sorted(there), b)) and self._is_calm(name):
            choice, more = there[uid][0], (1 + b % 3) * GIB
            if all(self.truth.free(uuid) >= more for uuid in choice.uuids):
                self.truth.measured[uid] = max(choice.bytes, self.truth.measured.get(uid, 0)) + more
                self._report_at_once(name)

    async def op_intrude(self, a: int, b: int) -> None:
        """Somebody who is none of Berth's takes memory, or gives it back."""
        name = sorted(NODES)[a % len(NODES)]
        uuid, more = f"{name}-{b % len(NODES[name])}", (1 + b % 4) * GIB
        if self.truth.other_use.pop(uuid, 0):
            self._report(name)
        elif self._is_calm(name) and self.truth.free(uuid) >= more:
            self.truth.other_use[uuid] = more
            self._report_at_once(name)

    async def op_gpu(self, a: int, b: int) -> None:
        """A GPU falls off its node, or is back."""
        name = sorted(NODES)[a % len(NODES)]
        self.truth.lost ^= {f"{name}-{b % len(NODES[name])}"}
        self._report(name)

    async def op_node(self, a: int, b: int) -> None:
        """A node's object is deleted while the machine runs on, or is registered anew, without a report."""
        name = sorted(NODES)[a % len(NODES)]
        if name not in self.truth.gone:
            self._publish("nodes", "DELETED", self.truth.node(name))
            self.truth.gone.add(name)
            return
        self.truth.gone.remove(name)
        self.truth.lives[name] += 1
        self.truth.silent.add(name)
        self._publish("nodes", "ADDED", self.truth.node(name))

    async def op_speak(self, a: int, _: int) -> None:
        """An agent reports on the node that was registered anew."""
        if name := self._pick(sorted(self.truth.silent - self.truth.gone), a):
            self._report(name)

    async def op_stale(self, a: int, _: int) -> None:
        """An agent is not heard of any more, or again."""
        name = sorted(NODES)[a % len(NODES)]
        self.stale ^= {name}
        for replica in self.replicas:
            replica.beat(name, alive=name not in self.stale)

    async def op_depose(self, _: int, b: int) -> None:
        """The leader is stopped for so long that the other one leads. Then it goes on."""
        self._end_of_lease(b)
        self.replicas[self.leader].depose()
        await self._lead(1 - self.leader)

    async def op_zombie(self, a: int, _: int) -> None:
        """One that was deposed goes on."""
        zombie = self.replicas[1 - self.leader]
        if zombie.is_deposed:
            for _ in range(1 + a % 3):
                zombie.scheduler.step()
                await self._settle()

    async def op_extend(self, a: int, b: int) -> None:
        """kube-scheduler has chosen a node and asks for the Binding."""
        waiting = [uid for uid, one in self.truth.pods.items() if one["spec"]["schedulerName"] == "other"]
        if uid := self._pick(sorted(uid for uid in waiting if not node_of(self.truth.pods[uid])), a):
            scheduler, ref = self.replicas[self.leader].scheduler, PodRef("team", uid, PodUid(uid))
            place = self.replicas[self.leader].extender.place(ref, NodeName(sorted(NODES)[b % len(NODES)]))
            self._deciding.append(asyncio.create_task(scheduler.bindings.in_flight(place)))

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
            self._end_of_lease(b)
        await self._renew(number)
        if number == self.leader:
            await self._lead(1 - number)

    def _end_of_lease(self, b: int) -> None:
        """What the leader has sent is written now or never: the Lease outlives its requests."""
        for body in [*(call.body for call in self.calls), *self.late]:
            if b % 2:
                self._write(body)
        for call in self.calls:
            if not call.answer.done():
                call.answer.set_exception(KubeUnreachable("timed out"))
        self.calls.clear()
        self.late.clear()

    async def _renew(self, number: int) -> None:
        """The process ends, and another takes its place."""
        await self.replicas[number].stop()
        self.replicas[number] = self._new_replica()

    async def op_wait(self, a: int, _: int) -> None:
        """Time passes, and more of it than one would think."""
        self.pass_time((0.3, 1.0, 5.0, 20.0, 200.0)[a % 5])

    async def op_quiet(self, *_: int) -> None:
        """Everything that is under way comes to its end, and then nothing may be left over."""
        for body in self.late:
            self._write(body)
        self.late.clear()
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
            self.pass_time(_QUIET_SECONDS)
            for _ in range(3 * len(self.truth.pods) + 3):
                self.replicas[self.leader].scheduler.step()
                await self._settle()
        if self.calls or any("deletionTimestamp" in one["metadata"] for one in self.truth.pods.values()):
            return  # still busy: whoever was evicted made room for one more
        self._check_quiet(self.replicas[self.leader])

    def _check_quiet(self, replica: Replica) -> None:
        scheduler = replica.scheduler
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
            if scheduler.nominator.is_nominated(demand) or replica.queue.is_held(uid):
                continue
            if isinstance(scheduler.cluster.decider.decide(demand), Placement):
                raise Broken(f"pod {uid} fits and is not tried")

    def evict(self, by: Api, body: Json) -> None:
        """As the API server takes an eviction: budgets count, two of them for one pod are an error, and
        who is evicted goes at once or takes his time."""
        uid, rehearsal = body["metadata"]["name"], body["deleteOptions"].get("dryRun") == ["All"]
        if by is not self.replicas[self.leader].api:
            self._faults.append(f"{uid} is evicted by one who does not lead")
        one = self.truth.pods.get(uid)
        if one is None:
            raise response_error(404, "NotFound", uid)
        if self.eviction_faults:
            raise response_error(self.eviction_faults.pop(), "", uid)
        guard = one["metadata"]["labels"].get("guard")
        if guard in ("kept", "both"):
            self._faults.append(f"{uid} is evicted, whom no budget lets go")
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

    def patch(self, by: Api, name: str, body: Json) -> None:
        """As the API server takes a write of a pod's status. Of the status only the nominated node matters here."""
        if by is not self.replicas[self.leader].api:
            self._faults.append(f"the status of {name} is written by one who does not lead")
        one = self.truth.pods.get(name)
        if one is None:
            raise response_error(404, "NotFound", name)
        if "nominatedNodeName" in body["status"]:
            one["status"]["nominatedNodeName"] = body["status"]["nominatedNodeName"]
            self._publish("pods", "MODIFIED", self.truth.touch(one))

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
        uid = call.body["metadata"]["uid"]
        if outcome in _SILENT:
            call.api.doubts.add(uid)
        elif outcome == "conflict" and uid not in call.api.doubts:
            call.api.sent.pop(uid, None)
        if outcome in _REFUSALS:
            call.answer.set_exception(response_error(_REFUSALS[outcome], "", "x"))
            return
        if outcome == "late":
            self.late.append(call.body)
        if outcome in ("late", "lost"):
            call.answer.set_exception(KubeUnreachable("reset"))
            return
        error = self._write(call.body)
        if error is not None:
            call.answer.set_exception(error)
        elif outcome == "done unheard":
            call.answer.set_exception(KubeUnreachable("timed out"))
        else:
            call.answer.set_result(None)

    def _write(self, body: Json) -> Exception | None:
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

    def _is_calm(self, name: str) -> bool:
        """No pod is on its way to the node: what nobody could have known makes no decision wrong."""
        living = self.replicas[self.leader].scheduler.state.living_on(NodeName(name))
        here = {uid for uid, one in self.truth.pods.items() if node_of(one) == name}
        return name not in self.truth.gone | self.truth.silent and {h.ref.uid for h in living} <= here

    def _report(self, name: str) -> None:
        """An agent writes what it knows, if it can."""
        if name not in self.truth.gone:
            self.truth.silent.discard(name)
        self._show(name)

    def _report_at_once(self, name: str) -> None:
        """And everybody hears of it."""
        self._report(name)
        for replica in self.replicas:
            while replica.pending["nodes"]:
                replica.deliver("nodes", again=False)

    def _show(self, name: str) -> None:
        if name not in self.truth.gone:
            self._publish("nodes", "MODIFIED", self.truth.node(name))

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

    async def _lead(self, number: int) -> None:
        """As `catch_up` in `binder/app.py`: pods before nodes. Who was deposed has ended by then."""
        if self.replicas[number].is_deposed:
            await self._renew(number)
        self.leader = number
        for kind in ("pods", "nodes"):
            self._relist(self.replicas[number], kind)
        self.replicas[number].lead()

    def _relist(self, replica: Replica, kind: str) -> None:
        items = self.truth.nodes() if kind == "nodes" else list(self.truth.pods.values())
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
    "land": 6,
    "outgrow": 3,
    "intrude": 2,
    "gpu": 1,
    "node": 1,
    "speak": 2,
    "stale": 1,
    "depose": 1,
    "zombie": 2,
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
