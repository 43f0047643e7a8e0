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
from binder.cache.cluster_facts import ClusterEvent
from binder.cache.column import Ints
from binder.cache.table import NodeTable
from binder.engine.cluster import Cluster
from binder.engine.decision import Decider, Refusal
from binder.engine.victims import Victims
from binder.pod.demand import Demand
from binder.rules.registry import FITS, RULES, Codes
from binder.rules.rule import Cure, PairRule

Some = NDArray[np.intp]

# Refusals that stand whatever a node gives back: for as long as it does not move, or for what others do.
_LASTS = RULES.cured_by[Cure.NODE] | RULES.cured_by[Cure.NEIGHBOURS]
_PASSING = RULES.cured_by[Cure.TIME]


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


# It is unknown what has changed.
ANY = QueueingHint(None)
# The search for pods that could go was left off, and goes on.
RESUME_SEARCH = QueueingHint(frozenset())


@dataclass(slots=True)
class NodeToStatus:
    """How a pod stood when it was refused. `codes`: the first rule of each row; `clock`: the table's then.

    Of the search for pods that could go for it: `searched`: the table's clock when none was found; `unasked`: rows that
    it had not come to by then; `met`: what stood in the way without them, which `kinds` have, too.
    """

    codes: Codes
    kinds: set[str]
    unresolvable: bool
    clock: int
    searched: int | None = None
    unasked: Some = field(default_factory=lambda: np.zeros(0, np.intp))
    met: frozenset[str] = frozenset()

    def copy(self) -> "NodeToStatus":
        return replace(self, codes=self.codes.copy(), kinds=set(self.kinds))

    def learn(self, rows: Some, codes: Codes, clock: int) -> None:
        """Some nodes have been looked at again."""
        if len(rows) and (last := int(rows.max())) >= len(self.codes):
            self.codes = np.concatenate([self.codes, np.zeros(last + 1 - len(self.codes), np.int8)])
        self.codes[rows] = codes
        self.kinds |= RULES.names(codes)
        self.clock = clock

    def resume_from(self, before: "NodeToStatus") -> None:
        """What was searched before need not be searched again."""
        self.searched, self.unasked, self.met = before.searched, before.unasked, before.met
        self.kinds |= before.met

    def restart_search(self) -> None:
        """All is to be searched again."""
        self.searched, self.met, self.unasked = None, frozenset(), self.unasked[:0]

    def to_search(self, table: NodeTable) -> Some:
        """Rows where a victim could be found that was not before: what has become better since, and what was not
        asked."""
        if self.searched is None:
            return np.arange(len(table))
        return np.union1d(table.eased_since(self.searched), self.unasked)

    def note_search(self, clock: int, unasked: Some, met: "set[str]") -> None:
        """None was found, but for those rows that were not asked."""
        self.searched, self.unasked = clock, unasked
        self.met |= met
        self.kinds |= self.met


def status_of(decider: Decider, refusal: Refusal) -> NodeToStatus:
    """What to remember of a refusal."""
    codes = refusal.codes.copy()  # a ranking's own are renewed in place
    return NodeToStatus(
        codes, RULES.names(codes[decider.table.live]), refusal.because is not None, decider.table.clock
    )


@dataclass(slots=True)
class ClusterChanges:
    """What has changed since the last look. `rows`: nodes where something became free or better and
    whose agent is alive; `event`: what else."""

    rows: Some
    event: ClusterEvent
    _reach: dict[int, Ints] = field(default_factory=dict)
    _best: dict[tuple[int, int], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.event) or len(self.rows) > 0


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
            event=ClusterEvent(
                moved=bool(len(table.moved_since(self._clock))),
                pods=cluster.state.pods.take_changed(),
                volumes=cluster.volumes_changed,
                namespaces=frozenset(cluster.namespaces_changed),
            ),
        )
        cluster.volumes_changed = False
        cluster.namespaces_changed.clear()
        self._clock = table.clock
        return changes

    def hint(self, demand: Demand, status: NodeToStatus, changes: ClusterChanges) -> QueueingHint | None:
        """What of the changes may help a pod; None where nothing does."""
        if status.unresolvable:
            return None if self._decider.because(demand) else QueueingHint(None)
        context = self._decider.context
        if any(RULES.named(name).woken_by(context, demand, changes.event) for name in status.kinds):
            return QueueingHint(None)
        rows = self._rows(demand, status, changes)
        return QueueingHint(frozenset(rows)) if rows else None

    def spared(self, demand: Demand, status: NodeToStatus) -> QueueingHint | None:
        """Nodes that the pod does not have to keep away from any more: a matter of time alone. The end of a
        quarantine is one, too, or of something that makes no room anywhere."""
        passing = [RULES.named(name) for name in status.kinds if Cure.TIME in RULES.named(name).cures]
        if status.unresolvable and passing:
            return None if self._decider.because(demand) else QueueingHint(None)
        rows = {
            row
            for rule in passing
            if isinstance(rule, PairRule)
            for row in self._spared(rule, demand, status)
        }
        return QueueingHint(frozenset(rows)) if rows else None

    def _spared(self, rule: PairRule, demand: Demand, status: NodeToStatus) -> list[int]:
        """The rows that a rule refused and does not refuse any more."""
        rows = np.flatnonzero(status.codes == RULES.codes[rule.name])
        fails = rule.fails(self._decider.context, demand)
        found: list[int] = rows.tolist() if fails is None else rows[~fails[rows]].tolist()
        return found

    def look(self, demand: Demand, status: NodeToStatus, hint: QueueingHint) -> bool:
        """Whether a try is worth it, by the nodes of the hint. `status` learns of what is found."""
        decider, table = self._decider, self._decider.table
        decider.refresh()
        if because := decider.because(demand):
            # The hint is used up: the end of this wakes the pod instead.
            status.unresolvable = True
            status.kinds.add(because.rule)
            return False
        if status.unresolvable or hint.rows is None:
            rows = np.arange(len(table))
        else:
            moved = table.moved_since(status.clock)
            hoped = np.array(sorted(hint.rows), np.intp)
            rows = np.union1d(np.union1d(moved, hoped), status.unasked).astype(np.intp)
        with decider.without(self._aside(demand)):
            codes = decider.codes_on(demand, rows)
        if (codes == FITS).any():
            return True
        status.unresolvable = False
        status.learn(rows, codes, table.clock)
        return self._may_preempt(demand, rows, status.codes)

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
        return self._without_obstacles(demand, status, rows)

    def _without_obstacles(self, demand: Demand, status: NodeToStatus, rows: Some) -> list[int]:
        """Leaves out rows where a pod that it conflicts with stays, and what only time cures: that is remembered, for its
        end must wake the pod (`spared`)."""
        passing, taken = set[int](), set[int]()
        for code, fails in RULES.pairs(self._decider.context, demand, _PASSING | RULES.clashing):
            failing = rows[fails[rows]]
            if _PASSING[code]:
                status.learn(failing, np.full(len(failing), code, np.int8), status.clock)
                passing.update(failing.tolist())
            else:
                taken.update(failing.tolist())
        return [
            row
            for row in rows.tolist()
            if row not in passing and not (row in taken and self._victims.in_the_way_for_good(demand, row))
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
