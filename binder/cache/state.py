"""What the binder knows of the cluster: nodes, pods, its own assumptions, and stale models.

Memory is reserved until the *model* is gone, not the pod. Four kinds of reservations, one per pod uid:

- a pod that is bound to the node and has not ended;
- an *assumed* pod: decided and not yet seen bound;
- a *nominated* pod: it waits for others to make room for it there (preemption);
- a *stale model*: a pod that was bound or assumed and is gone. It stays until a report that had listed it
  no longer does. The agent writes a report that lists a pod before it loads anything for it, so a
  stale model that no report has ever listed holds nothing. That is believed once the node itself has been
  asked (`unsettled`, `settle`), STALE_MODEL_GRACE_SECONDS after the pod's end, for a watch of nodes may be
  far behind that of pods. No stale model outlives STALE_MODEL_LIMIT_SECONDS: what the report still lists by then
  is reserved for that reason alone.

Besides, whatever a report lists is reserved, also when this binder never saw its pod.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef, has_ended, is_deleting, is_initialized, node_of, pod_ref
from berth.contract.report import ModelReport, NodeReport
from binder.cache.loading import ExpectedLoads, loads_by_gpu
from binder.cache.pod_index import Neighbour, PodIndex
from binder.cache.reservations import Reservation, bound_reservation, placed_reservation, reserved_by_gpu
from binder.cache.tenants import tenants
from binder.cache.view import NamespacedId, NodeFacts, NodeView, parse_node
from binder.pod.bounds import MOST_LABELS
from binder.pod.demand import Demand, controller_of
from binder.pod.resources import PODS, Amounts
from binder.pod.selectors import Labels
from binder.pod.topology_terms import ANY_POD_HERE, required_anti_affinity

JsonObject = Mapping[str, Any]

STALE_MODEL_GRACE_SECONDS = 15.0
STALE_MODEL_LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class StaleModel:
    """A reservation whose pod is gone, and since when."""

    reservation: Reservation
    since: float


class ClusterState:
    """Pure but for its clock. Every change returns whether it could let a waiting pod in.

    A uid is in one of `_bound`, `_assumed`, `_nominated` and `_stale_models` at most; `_by_node` holds the
    uids of all four. `pods` are the first two as their neighbours see them.
    """

    def __init__(self, keys: Keys, *, clock: Callable[[], float]) -> None:
        self._keys, self._clock = keys, clock
        self._nodes: dict[NodeName, NodeFacts] = {}
        self._bound: dict[PodUid, Reservation] = {}
        self._assumed: dict[PodUid, Reservation] = {}
        self._assumed_at: dict[PodUid, float] = {}
        self._nominated: dict[PodUid, Reservation] = {}
        self._stale_models: dict[PodUid, StaleModel] = {}
        # Reservation that some report of their node has listed.
        self._listed: set[PodUid] = set()
        self._expected = ExpectedLoads()
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._views: dict[NodeName, NodeView] = {}
        # Pods that are taken out of account for the moment, in the reports too.
        self._hidden: frozenset[PodUid] = frozenset()
        self._touched: set[NodeName] = set()
        self.pods = PodIndex()
        self.claims: Counter[tuple[str, str]] = Counter()

    @property
    def assumed_count(self) -> int:
        return len(self._assumed)

    @property
    def stale_model_count(self) -> int:
        return len(self._stale_models)

    @property
    def hides(self) -> bool:
        """Some pods are taken out of account for a question."""
        return bool(self._hidden)

    def has_place(self, uid: PodUid) -> bool:
        """The pod is bound or assumed. A pod that has a node never loses it again."""
        return uid in self._bound or uid in self._assumed

    @property
    def is_touched(self) -> bool:
        return bool(self._touched)

    def take_touched(self, most: int | None = None) -> set[NodeName]:
        """Nodes that have changed, come or gone and were not taken yet; `most` of them."""
        touched = set(sorted(self._touched)[:most])
        self._touched -= touched
        return touched

    def set_node(self, node: JsonObject) -> bool:
        facts = parse_node(node, self._keys)
        known = self._nodes.get(facts.name)
        if known == facts or (known is not None and known.version > facts.version):
            return False  # a watch that is behind tells nothing new of a node that was asked
        self._nodes[facts.name] = facts
        self._touch(facts.name)
        if facts.report is not None:
            self._follow_report(facts.name, facts.report)
        return known is None or known.content != facts.content

    def remove_node(self, name: NodeName) -> bool:
        """A node that is gone holds nothing, and is in no domain that pods are spread over; its pods follow
        on their own."""
        known = self._nodes.pop(name, None) is not None
        self._touch(name)
        for uid in self._stale_models_on(name):
            self._lift(uid)
        return known

    def set_pod(self, pod: JsonObject) -> bool:
        """Take a pod that has a node. True if something became free."""
        uid, node = pod_ref(pod).uid, node_of(pod)
        if node is None:
            return False
        if has_ended(pod):
            return self.remove_pod(uid)
        reservation = bound_reservation(pod, node, self._keys)
        neighbour = _neighbour(pod, node)
        loaded = is_initialized(pod)
        if loaded and self._expected.forget(uid):
            self._touch(node)
        if self._living(uid) == reservation and self.pods.get(uid) == neighbour:
            self._confirm(uid, reservation)
            return False
        was_listed = uid in self._listed
        before = self._lift(uid)
        self._bound[uid] = reservation
        if before is None and reservation.gpus and not loaded:
            self._expected.note(uid, self._clock())
        # What another node has listed says nothing of this one.
        self._put_on_node(uid, reservation, listed=was_listed and before is not None and before.node == node)
        self.pods.put(uid, neighbour)
        return before is not None and before != reservation

    def remove_pod(self, uid: PodUid) -> bool:
        """The pod is gone or has ended. True if something became free at once."""
        self.withdraw(uid)
        if not self.has_place(uid):
            return False
        self.expire_stale_models()  # here too, so that a standby does not gather them
        self._expected.forget(uid)
        was_listed = uid in self._listed
        reservation = self._lift(uid)
        assert reservation is not None
        report = self._report_of(reservation.node)
        unloaded = was_listed and report is not None and report.model_of(uid) is None
        if reservation.has_model and not unloaded:
            self._stale_models[uid] = StaleModel(reservation, self._clock())
            self._put_on_node(uid, reservation, listed=was_listed)
        return True

    def assume(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        """Count a decision as done, in the same step in which it was made.

        Raises AssertionError where the memory rule does not hold: the decision was wrong.
        """
        uid = demand.model.ref.uid
        assert not self.has_place(uid), f"pod {demand.model.ref} has a place already"
        self._lift(uid)
        self._require_room(demand, node, gpu)
        before, report = self.view(node), self._report_of(node)
        reservation = self._assumed[uid] = placed_reservation(demand, node, gpu)
        self._assumed_at[uid] = self._clock()
        self._expected.note(uid, self._clock())
        self._put_on_node(uid, reservation, listed=False)
        if report is None or report.model_of(uid) is None:  # else it is reserved already
            self._views[node] = with_replica(before, demand, gpu)
        ref, apart = demand.model.ref, demand.neighbours.anti_affinity
        self.pods.put(
            uid, Neighbour(ref.namespace, demand.labels, node, keeps_away=apart, owner=demand.owner)
        )

    def _confirm(self, uid: PodUid, reservation: Reservation) -> None:
        """A pod that was assumed has been seen bound, just as it was assumed: nothing changes for anybody."""
        if self._assumed.pop(uid, None) is not None:
            del self._assumed_at[uid]
            self._bound[uid] = reservation

    def forget(self, uid: PodUid) -> None:
        """The assumed binding did not happen: nothing was ever there. A pod seen bound stays."""
        if uid in self._assumed:
            self._expected.forget(uid)
            self._lift(uid)

    def overdue(self, *, seconds: float) -> list[PodRef]:
        """Pods that were assumed so long ago, and that no watch has shown since."""
        since = self._clock() - seconds
        return [self._assumed[uid].ref for uid, then in self._assumed_at.items() if then <= since]

    def nominate(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        """Keep a place for a pod for which others are about to go."""
        uid = demand.model.ref.uid
        assert not self.has_place(uid), f"pod {demand.model.ref} has a place already"
        self._lift(uid)
        reservation = self._nominated[uid] = placed_reservation(demand, node, gpu)
        self._put_on_node(uid, reservation, listed=False)

    def withdraw(self, uid: PodUid) -> bool:
        """Keep no place for this pod any more. True if one was kept."""
        return uid in self._nominated and self._lift(uid) is not None

    def holds(self, uid: PodUid) -> bool:
        """The pod has a place, or its model may still be where it was."""
        return self.has_place(uid) or uid in self._stale_models

    def reservation_of(self, uid: PodUid) -> Reservation | None:
        return self._reservation(uid)

    def nominated(self) -> Mapping[PodUid, Reservation]:
        return self._nominated

    def expire_stale_models(self) -> bool:
        """Drop stale models that are too old, whichever report lists them. True if there were any."""
        old = [uid for uid, _ in self._stale_models_before(self._clock() - STALE_MODEL_LIMIT_SECONDS)]
        for uid in old:
            self._lift(uid)
        return bool(old)

    def expire_loads(self) -> None:
        """Wait no more for the files of pods that have had a node for long."""
        for uid in self._expected.take_overdue(self._clock()):
            if (reservation := self._living(uid)) is not None:
                self._touch(reservation.node)

    def unsettled(self) -> set[NodeName]:
        """Nodes to ask about stale models that no report has listed and whose grace is over."""
        stale_models = self._stale_models_before(self._clock() - STALE_MODEL_GRACE_SECONDS)
        return {model.reservation.node for uid, model in stale_models if uid not in self._listed}

    def settle(self, node: NodeName, *, asked_at: float) -> bool:
        """The node has been asked then, and its answer was recorded here. True if something became free."""
        stale_models = self._stale_models_before(asked_at - STALE_MODEL_GRACE_SECONDS)
        old = [uid for uid, g in stale_models if g.reservation.node == node and uid not in self._listed]
        for uid in old:
            self._lift(uid)
        return bool(old)

    def facts_of(self, name: NodeName) -> NodeFacts | None:
        """What the Node object says, whatever is on it."""
        return self._nodes.get(name)

    def views(self) -> Iterator[NodeView]:
        """Every node, by name."""
        return (self.view(name) for name in sorted(self._nodes))

    def find(self, name: NodeName) -> NodeView | None:
        return self.view(name) if name in self._nodes else None

    def view(self, name: NodeName) -> NodeView:
        """One node. Kept until something on it changes."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._make_view(name, self._hidden)
        return view

    def view_without(self, name: NodeName, uids: Collection[PodUid]) -> NodeView:
        """One node as if these pods and their models were not there. Nothing is kept of it."""
        return self._make_view(name, self._hidden.union(uids))

    def living_on(self, node: NodeName) -> list[Reservation]:
        """The pods on a node that are bound or assumed."""
        return [
            reservation
            for uid in self._by_node.get(node, ())
            if (reservation := self._living(uid)) is not None
        ]

    def reservations_on(self, node: NodeName) -> list[Reservation]:
        """Everything that holds a share of a node: bound, assumed, nominated, or a stale model."""
        found = (self._reservation(uid) for uid in self._by_node.get(node, ()))
        return [reservation for reservation in found if reservation is not None]

    def labelled(self, reservation: Reservation) -> tuple[PodRef, Labels]:
        """A pod with its labels, as budgets know it."""
        neighbour = self.pods.get(reservation.ref.uid)
        return reservation.ref, {} if neighbour is None else neighbour.labels

    @contextmanager
    def without(self, uids: Iterable[PodUid]) -> Iterator[None]:
        """As if these pods and their models were not there. For a question, never over an await."""
        before = self._hidden
        hidden = self._hidden = before.union(uids)
        nodes = {h.node for uid in hidden - before if (h := self._reservation(uid)) is not None}
        unseen = self.pods.hide(hidden - before)
        self._touch(*nodes)
        try:
            yield
        finally:
            self._hidden = before
            self.pods.show(unseen)
            self._touch(*nodes)

    def _make_view(self, name: NodeName, hidden: frozenset[PodUid]) -> NodeView:
        facts = self._nodes[name]
        uids = self._by_node.get(name, set()) - hidden
        here = {uid: reservation for uid in uids if (reservation := self._present(uid)) is not None}
        reservations = here | {
            uid: self._stale_models[uid].reservation for uid in uids if uid in self._stale_models
        }
        report = facts.report
        models = () if report is None else report.models
        listed = {model.pod_uid: model for model in models if model.pod_uid not in hidden}
        gpus = frozenset(gpu.uuid for gpu in report.gpus) if report is not None else frozenset()
        reserved, anywhere = reserved_by_gpu(reservations, listed, gpus)
        here_now, coders = tenants(reservations, listed)
        reported = None if report is None else report.code.namespace
        # The report speaks of all that are there; whether its code goes with those who are taken out of
        # account, their namespaces say.
        if reported is not None and (reported in here_now or not hidden):
            coders |= {reported}
        return NodeView(
            facts=facts,
            used=_used(facts, [reservation.amounts for reservation in here.values()]),
            reserved=reserved,
            reserved_anywhere=anywhere,
            model_ids=_ids(reservations.values(), listed.values()),
            host_ports=frozenset().union(*(reservation.ports for reservation in here.values())),
            tenants=here_now,
            coders=coders,
            loads=loads_by_gpu(here, listed, gpus, self._expected.among(here)),
        )

    def _require_room(self, demand: Demand, node: NodeName, gpu: GpuChoice) -> None:
        view, model = self.view(node), demand.model
        here = {one.uuid: one for one in view.gpus}
        for one in gpu.gpus:
            free = view.free_on(here[one.uuid])
            if free is None or free < gpu.bytes:
                raise AssertionError(f"{model.ref} does not fit on {one.uuid}: {free} bytes are free")
        if model.model_id is not None and (model.ref.namespace, model.model_id) in view.model_ids:
            raise AssertionError(f"{model.ref}: model {model.model_id} is on {node} already")

    def _living(self, uid: PodUid) -> Reservation | None:
        return self._bound.get(uid) or self._assumed.get(uid)

    def _present(self, uid: PodUid) -> Reservation | None:
        return self._living(uid) or self._nominated.get(uid)

    def _reservation(self, uid: PodUid) -> Reservation | None:
        stale_model = self._stale_models.get(uid)
        return self._present(uid) or (None if stale_model is None else stale_model.reservation)

    def _stale_models_before(self, time: float) -> list[tuple[PodUid, StaleModel]]:
        """Those whose pod had gone by then; they stand in the order in which they came."""
        return list(takewhile(lambda item: item[1].since <= time, self._stale_models.items()))

    def _report_of(self, node: NodeName) -> NodeReport | None:
        facts = self.facts_of(node)
        return None if facts is None else facts.report

    def _stale_models_on(self, node: NodeName) -> list[PodUid]:
        return [uid for uid in self._by_node.get(node, ()) if uid in self._stale_models]

    def _follow_report(self, node: NodeName, report: NodeReport) -> None:
        """Note who is listed, and release the stale models that were and are not any more."""
        now_listed = {model.pod_uid for model in report.models}
        for uid in self._stale_models_on(node):
            if uid in self._listed and uid not in now_listed:
                self._lift(uid)
        self._listed |= now_listed & self._by_node.get(node, set())

    def _put_on_node(self, uid: PodUid, reservation: Reservation, *, listed: bool) -> None:
        """`listed`: some report of this node has named it, the last one perhaps not."""
        self._by_node.setdefault(reservation.node, set()).add(uid)
        self._touch(reservation.node)
        if self.has_place(uid):
            self.claims.update((reservation.ref.namespace, claim) for claim in reservation.claims)
        report = self._report_of(reservation.node)
        if listed or (report is not None and report.model_of(uid) is not None):
            self._listed.add(uid)

    def _lift(self, uid: PodUid) -> Reservation | None:
        """Take a reservation off its node, whatever kind it is."""
        reservation = self._reservation(uid)
        if reservation is None:
            return None
        if self.has_place(uid):
            self.pods.drop(uid)
            for claim in reservation.claims:
                _decrement(self.claims, (reservation.ref.namespace, claim))
        for kind in (self._bound, self._assumed, self._nominated, self._stale_models):
            kind.pop(uid, None)
        self._assumed_at.pop(uid, None)
        self._listed.discard(uid)
        self._by_node[reservation.node].discard(uid)
        if not self._by_node[reservation.node]:
            del self._by_node[reservation.node]
        self._touch(reservation.node)
        return reservation

    def _touch(self, *nodes: NodeName) -> None:
        for node in nodes:
            self._views.pop(node, None)
            self._touched.add(node)


def with_replica(view: NodeView, demand: Demand, gpu: GpuChoice) -> NodeView:
    """A node with one pod more, as `ClusterState` would have it once the pod is assumed there."""
    model, home = demand.model, demand.model.ref.namespace
    reserved, loads = dict(view.reserved), dict(view.loads)
    for one in gpu.gpus:
        reserved[one.uuid] = reserved.get(one.uuid, 0) + gpu.bytes
        loads[one.uuid] = loads.get(one.uuid, 0) + 1
    reported = None if view.facts.report is None else view.facts.report.code.namespace
    said = frozenset() if reported is None else frozenset({reported})
    tenants = view.tenants | {home}
    alone = len(tenants) == 1 and (demand.has_code or bool(view.coders - said))
    amounts = demand.amounts
    return replace(
        view,
        used={name: used + amounts.get(name, 0) for name, used in view.used.items()},
        reserved=reserved,
        model_ids=view.model_ids if model.model_id is None else view.model_ids | {(home, model.model_id)},
        host_ports=view.host_ports | demand.host_ports,
        tenants=tenants,
        coders=(tenants if alone else frozenset()) | said,
        loads=loads,
    )


def _used(facts: NodeFacts, amounts: Collection[Amounts]) -> dict[str, int]:
    """What pods take of the resources that the node has. What else they name is not available there."""
    return {name: sum([one.get(name, 0) for one in amounts]) for name in (*facts.allocatable, PODS)}


def _neighbour(pod: JsonObject, node: NodeName) -> Neighbour:
    """Of more labels than the bound allows so many count, and no other pod comes to its node: what it is called beyond
    that, and who would keep away from it, is not looked at."""
    meta = pod["metadata"]
    labels, keeps_away = meta.get("labels") or {}, required_anti_affinity(pod)
    if len(labels) > MOST_LABELS:
        labels, keeps_away = dict(islice(labels.items(), MOST_LABELS)), (*keeps_away, ANY_POD_HERE)
    return Neighbour(
        meta.get("namespace", ""),
        labels,
        node,
        deleting=is_deleting(pod),
        keeps_away=keeps_away,
        owner=controller_of(pod),
    )


def _decrement(counts: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _ids(reservations: Iterable[Reservation], listed: Iterable[ModelReport]) -> frozenset[NamespacedId]:
    """The ids that are taken. Names are not: the node's Triton has one of its own for each pod's model."""
    of_pods = {
        (reservation.ref.namespace, reservation.model_id)
        for reservation in reservations
        if reservation.model_id is not None
    }
    return frozenset(
        of_pods | {(model.namespace, model.model_id) for model in listed if model.model_id is not None}
    )
