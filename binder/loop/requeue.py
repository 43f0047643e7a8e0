"""Which of the refused pods a change may help: kube-scheduler's queueing hints, node by node. Pure.

A pod remembers for each node the first rule by which it was refused (`NodeToStatus`). A node's change helps it
only if that reason can be gone: what only people change has moved, or so much memory has come free as it
asks for. What depends on pods elsewhere is helped by the pods that it speaks of, a claim by the claims.
A hint may promise too much, never too little; before a woken pod is tried, its nodes are checked (`look`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import PodUid
from binder.cache.cluster import Cluster
from binder.cache.pod_index import Neighbour, PodChange
from binder.cache.table import Bools, Ints, NodeTable
from binder.engine.decision import Decider, Refusal
from binder.engine.victims import Victims
from binder.pod.demand import Demand
from binder.pod.selectors import Labels
from binder.pod.topology_terms import Term
from binder.rules.filters import CODE, FITS, KIND, Codes
from binder.rules.reasons import Kind

Some = NDArray[np.intp]

_TOPOLOGY = frozenset({Kind.POD_AFFINITY, Kind.POD_ANTI_AFFINITY, Kind.KEPT_AWAY, Kind.SPREAD})
# Reasons that stand whatever a node gives back: for as long as it does not move, or for what others do.
_LASTING = _TOPOLOGY | {
    Kind.VOLUME_ELSEWHERE,
    Kind.NODE_UNSCHEDULABLE,
    Kind.TAINT_NOT_TOLERATED,
    Kind.NODE_SELECTOR,
    Kind.NODE_AFFINITY,
    Kind.NO_REPORT,
    Kind.UNREADABLE_REPORT,
    Kind.TRITON_NOT_READY,
    Kind.WRONG_SERVER,
    Kind.MISSING_CAPABILITIES,
    Kind.CODE_NOT_ALLOWED,
    Kind.NO_GPU,
    Kind.GPU_PRODUCT,
    Kind.GPU_COUNT,
}
_LASTS: Bools = np.array([KIND.get(code) in _LASTING for code in range(len(KIND) + 1)])


@dataclass(frozen=True, slots=True)
class QueueingHint:
    """Nodes, by row, that may take a pod now; None: perhaps any."""

    rows: frozenset[int] | None

    @property
    def is_change(self) -> bool:
        """Something has changed: more than that a search was left off (`RESUME_SEARCH`)."""
        return self.rows is None or bool(self.rows)

    def and_also(self, other: "QueueingHint") -> "QueueingHint":
        if self.rows is None or other.rows is None:
            return QueueingHint(None)
        return QueueingHint(self.rows | other.rows)


# Nobody knows what has changed.
ANY = QueueingHint(None)
# The search for pods that could go was left off, and goes on.
RESUME_SEARCH = QueueingHint(frozenset())


@dataclass(slots=True)
class NodeToStatus:
    """How a pod stood when it was refused. `codes`: the first rule of each row; `clock`: the table's then.

    Of the search for pods that could go for it: `searched`: the table's clock when nobody was found; `unasked`: rows that
    it had not come to by then; `met`: what stood in the way without them, which `kinds` have, too.
    """

    codes: Codes
    kinds: set[Kind]
    hopeless: bool
    clock: int
    searched: int | None = None
    unasked: Some = field(default_factory=lambda: np.zeros(0, np.intp))
    met: frozenset[Kind] = frozenset()

    def copy(self) -> "NodeToStatus":
        return replace(self, codes=self.codes.copy(), kinds=set(self.kinds))

    def learn(self, rows: Some, codes: Codes, clock: int) -> None:
        """Some nodes have been looked at again."""
        if len(rows) and (last := int(rows.max())) >= len(self.codes):
            self.codes = np.concatenate([self.codes, np.zeros(last + 1 - len(self.codes), np.int8)])
        self.codes[rows] = codes
        self.kinds |= _kinds(codes)
        self.clock = clock

    def resume_from(self, before: "NodeToStatus") -> None:
        """What was searched before need not be searched again."""
        self.searched, self.unasked, self.met = before.searched, before.unasked, before.met
        self.kinds |= before.met

    def restart_search(self) -> None:
        """All is to be searched again."""
        self.searched, self.met, self.unasked = None, frozenset(), self.unasked[:0]

    def to_search(self, table: NodeTable) -> Some:
        """Rows where somebody could be found who was not before: what has become better since, and what was not
        asked."""
        if self.searched is None:
            return np.arange(len(table))
        return np.union1d(table.eased_since(self.searched), self.unasked)

    def note_search(self, clock: int, unasked: Some, met: "set[Kind]") -> None:
        """Nobody was found, but for those rows that were not asked."""
        self.searched, self.unasked = clock, unasked
        self.met |= met
        self.kinds |= self.met


def status_of(decider: Decider, refusal: Refusal) -> NodeToStatus:
    """What to remember of a refusal."""
    codes = refusal.codes.copy()  # a ranking's own are renewed in place
    return NodeToStatus(
        codes, _kinds(codes[decider.table.live]), refusal.because is not None, decider.table.clock
    )


def _kinds(codes: Codes) -> set[Kind]:
    return {KIND[code] for code in np.unique(codes).tolist() if code != FITS}


@dataclass(slots=True)
class ClusterChanges:
    """What has changed since the last look. `rows`: nodes where something became free or better and
    whose agent is alive. `turns`: pods with a node that came, went or changed, None: too many to tell."""

    rows: Some
    moved: bool
    turns: list[PodChange] | None
    volumes: bool
    namespaces: frozenset[str]
    _reach: dict[int, Ints] = field(default_factory=dict)
    _best: dict[tuple[int, int], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        flags = self.moved or self.volumes or bool(self.namespaces)
        return flags or self.turns is None or bool(self.turns) or len(self.rows) > 0


class QueueingHints:
    """`aside(demand)`: reservations that do not count for this pod: its own and those of lower priority.
    `may_preempt`: whether others might go for it on these rows, which refuse it so."""

    def __init__(
        self,
        cluster: Cluster,
        victims: Victims,
        *,
        aside: Callable[[Demand], Collection[PodUid]],
        may_preempt: Callable[[Demand, Some, Codes], bool],
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._decider, self._victims = cluster, cluster.decider, victims
        self._aside, self._may_preempt, self._now = aside, may_preempt, clock
        self._clock = 0

    def take_changes(self) -> ClusterChanges:
        """What has changed since the last call."""
        cluster, table = self._cluster, self._decider.table
        self._decider.refresh()
        self._victims.renew()  # where more pods may go than before is eased, too
        rows = table.eased_since(self._clock)
        changes = ClusterChanges(
            rows=rows[table.deadline[rows] > self._now()],
            moved=bool(len(table.moved_since(self._clock))),
            turns=cluster.state.pods.take_changed(),
            volumes=cluster.volumes_changed,
            namespaces=frozenset(cluster.namespaces_changed),
        )
        cluster.volumes_changed = False
        cluster.namespaces_changed.clear()
        self._clock = table.clock
        return changes

    def hint(self, demand: Demand, status: NodeToStatus, changes: ClusterChanges) -> QueueingHint | None:
        """What of the changes may help a pod; None where nothing does."""
        if status.hopeless:
            return None if self._decider.because(demand) else QueueingHint(None)
        if changes.volumes and demand.claims:
            return QueueingHint(None)
        if not status.kinds.isdisjoint(_TOPOLOGY) and self._touches(demand, status, changes):
            return QueueingHint(None)
        rows = self._rows(demand, status, changes)
        return QueueingHint(frozenset(rows)) if rows else None

    def spared(self, demand: Demand, status: NodeToStatus) -> QueueingHint | None:
        """Nodes that the pod does not have to keep away from any more: a matter of time alone. The end of a
        quarantine is one, too, or of something that makes no room anywhere."""
        if Kind.QUARANTINED in status.kinds:
            return None if self._decider.because(demand) else QueueingHint(None)
        if Kind.EXCLUDED not in status.kinds:
            return None
        rows = np.flatnonzero(status.codes == CODE[Kind.EXCLUDED])
        rows = rows[~np.isin(rows, self._decider.excluded_rows(demand))]
        return QueueingHint(frozenset(rows.tolist())) if len(rows) else None

    def look(self, demand: Demand, status: NodeToStatus, hint: QueueingHint) -> bool:
        """Whether a try is worth it, by the nodes of the hint. `status` learns of what is found."""
        decider, table = self._decider, self._decider.table
        decider.refresh()
        if decider.because(demand):
            return False
        if status.hopeless or hint.rows is None:
            rows = np.arange(len(table))
        else:
            moved = table.moved_since(status.clock)
            hoped = np.array(sorted(hint.rows), np.intp)
            rows = np.union1d(np.union1d(moved, hoped), status.unasked).astype(np.intp)
        with decider.without(self._aside(demand)):
            codes = decider.codes_on(demand, rows)
        if (codes == FITS).any():
            return True
        status.hopeless = False
        status.learn(rows, codes, table.clock)
        return self._may_preempt(demand, rows, status.codes)

    def _touches(self, demand: Demand, status: NodeToStatus, changes: ClusterChanges) -> bool:
        if changes.moved or changes.turns is None or self._is_renamed(demand, changes):
            return True
        return any(self._concerns(demand, status, turn) for turn in changes.turns)

    def _is_renamed(self, demand: Demand, changes: ClusterChanges) -> bool:
        """A namespace has other labels: the pod's own one, or one that its terms may choose by them."""
        near = demand.neighbours
        chosen = any(t.namespace_selector is not None for t in (*near.affinity, *near.anti_affinity))
        return bool(changes.namespaces) and (chosen or demand.model.ref.namespace in changes.namespaces)

    def _concerns(self, demand: Demand, status: NodeToStatus, turn: PodChange) -> bool:
        """What has happened to one pod may lift a rule between pods. Company helps when it comes, or when
        the last of it goes from one who is company to itself; who keeps away helps when he goes; and a
        spread may be evened out either way."""
        before, after = turn
        near, home = demand.neighbours, demand.model.ref.namespace
        return (
            (Kind.POD_AFFINITY in status.kinds and any(self._speak_of(near.affinity, pod) for pod in turn))
            or (Kind.POD_ANTI_AFFINITY in status.kinds and self._speak_of(near.anti_affinity, before))
            or (
                Kind.KEPT_AWAY in status.kinds
                and before is not None
                and any(
                    term.matches(home, self._labels_of(home), demand.labels) for term in before.keeps_away
                )
            )
            or (
                Kind.SPREAD in status.kinds
                and any(
                    pod is not None
                    and pod.namespace == home
                    and spread.selector is not None
                    and spread.selector.matches(pod.labels)
                    for pod in (before, after)
                    for spread in near.spread
                )
            )
        )

    def _speak_of(self, terms: tuple[Term, ...], pod: Neighbour | None) -> bool:
        return pod is not None and any(
            term.matches(pod.namespace, self._labels_of(pod.namespace), pod.labels) for term in terms
        )

    def _labels_of(self, namespace: str) -> Labels:
        return self._cluster.namespaces.get(namespace, {})

    def _rows(self, demand: Demand, status: NodeToStatus, changes: ClusterChanges) -> list[int]:
        """Nodes with changes that could hold the pod by their figures, and whose reason need not last."""
        table, shape = self._decider.table, demand.shape
        reach, count = self._reach(demand, changes), shape.gpu_count
        levels = self._victims.below(demand.priority)
        if count > reach.shape[1] or self._best(demand, changes, reach) < shape.request_bytes:
            return []
        keep = reach[:, count - 1] >= shape.request_bytes
        for name, asked in shape.amounts:
            if asked > 0:
                keep &= self._victims.left(name, changes.rows, levels) >= asked
        rows: Some = changes.rows[keep]
        if not len(rows):
            return []
        known = np.minimum(rows, len(status.codes) - 1)
        lasts = (
            _LASTS[status.codes[known]] & (known == rows) if len(status.codes) else np.zeros(len(rows), bool)
        )
        rows = rows[~lasts | table.moved_after(rows, status.clock)]
        return self._without_obstacles(demand, rows)

    def _without_obstacles(self, demand: Demand, rows: Some) -> list[int]:
        """Leaves out where the pod's model or host port is, and what it must keep away from."""
        kept_away = set(self._decider.excluded_rows(demand))
        taken = {*self._decider.model_rows(demand), *self._decider.port_rows(demand)}
        return [
            row
            for row in rows.tolist()
            if row not in kept_away and not (row in taken and self._victims.in_the_way_for_good(demand, row))
        ]

    def _reach(self, demand: Demand, changes: ClusterChanges) -> Ints:
        """For each row with changes what could be free on its GPUs."""
        levels = self._victims.below(demand.priority)
        found = changes._reach.get(len(levels))
        if found is None:
            found = changes._reach[len(levels)] = self._victims.reach(changes.rows, levels)
        return found

    def _best(self, demand: Demand, changes: ClusterChanges, reach: Ints) -> int:
        key = (len(self._victims.below(demand.priority)), demand.shape.gpu_count)
        best = changes._best.get(key)
        if best is None:
            best = changes._best[key] = int(reach[:, key[1] - 1].max()) if len(reach) else -1
        return best
