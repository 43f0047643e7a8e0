"""Which of the refused pods a change may help: kube-scheduler's queueing hints, node by node. Pure.

A pod remembers for each node the first rule by which it was refused (`Stand`). News of a node helps it
only if that reason can be gone: what only people change has moved, or so much memory has come free as it
asks for. What depends on pods elsewhere is helped by the pods that it speaks of, a claim by the claims.
Hints may hope too much, never too little; before a woken pod is tried, its nodes are looked at (`look`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import PodUid
from binder.cache.cluster import Cluster
from binder.cache.pod_index import Neighbour, Turn
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
class Hope:
    """Nodes, by row, that may take a pod now; None: perhaps any."""

    rows: frozenset[int] | None

    @property
    def is_news(self) -> bool:
        """Something has changed: more than that a search was left off (`GO_ON`)."""
        return self.rows is None or bool(self.rows)

    def and_also(self, other: "Hope") -> "Hope":
        if self.rows is None or other.rows is None:
            return Hope(None)
        return Hope(self.rows | other.rows)


# Nobody knows what has changed.
ANY = Hope(None)
# The search for pods that could go was left off, and goes on.
GO_ON = Hope(frozenset())


@dataclass(slots=True)
class Stand:
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

    def copy(self) -> "Stand":
        return replace(self, codes=self.codes.copy(), kinds=set(self.kinds))

    def learn(self, rows: Some, codes: Codes, clock: int) -> None:
        """Some nodes have been looked at again."""
        if len(rows) and (last := int(rows.max())) >= len(self.codes):
            self.codes = np.concatenate([self.codes, np.zeros(last + 1 - len(self.codes), np.int8)])
        self.codes[rows] = codes
        self.kinds |= _kinds(codes)
        self.clock = clock

    def go_on_from(self, before: "Stand") -> None:
        """What was searched before need not be searched again."""
        self.searched, self.unasked, self.met = before.searched, before.unasked, before.met
        self.kinds |= before.met

    def begin_anew(self) -> None:
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


def stand_of(decider: Decider, refusal: Refusal) -> Stand:
    """What to remember of a refusal."""
    codes = refusal.codes.copy()  # a ranking's own are renewed in place
    return Stand(codes, _kinds(codes[decider.table.live]), refusal.because is not None, decider.table.clock)


def _kinds(codes: Codes) -> set[Kind]:
    return {KIND[code] for code in np.unique(codes).tolist() if code != FITS}


@dataclass(slots=True)
class News:
    """What has changed since the last look. `rows`: nodes where something became free or better and
    whose agent is alive. `turns`: pods with a node that came, went or changed, None: too many to tell."""

    rows: Some
    moved: bool
    turns: list[Turn] | None
    volumes: bool
    namespaces: frozenset[str]
    _reach: dict[int, Ints] = field(default_factory=dict)
    _best: dict[tuple[int, int], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        flags = self.moved or self.volumes or bool(self.namespaces)
        return flags or self.turns is None or bool(self.turns) or len(self.rows) > 0


class Hints:
    """`aside(demand)`: reservations that do not count for this pod: its own and those of lower priority.
    `may_make_room`: whether others might go for it on these rows, which refuse it so."""

    def __init__(
        self,
        cluster: Cluster,
        victims: Victims,
        *,
        aside: Callable[[Demand], Collection[PodUid]],
        may_make_room: Callable[[Demand, Some, Codes], bool],
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._decider, self._victims = cluster, cluster.decider, victims
        self._aside, self._may_make_room, self._now = aside, may_make_room, clock
        self._clock = 0

    def take_news(self) -> News:
        """What has changed since the last call."""
        cluster, table = self._cluster, self._decider.table
        self._decider.refresh()
        self._victims.renew()  # where more pods may go than before is eased, too
        rows = table.eased_since(self._clock)
        news = News(
            rows=rows[table.deadline[rows] > self._now()],
            moved=bool(len(table.moved_since(self._clock))),
            turns=cluster.state.pods.take_changed(),
            volumes=cluster.volumes_turned,
            namespaces=frozenset(cluster.namespaces_turned),
        )
        cluster.volumes_turned = False
        cluster.namespaces_turned.clear()
        self._clock = table.clock
        return news

    def hope(self, demand: Demand, stand: Stand, news: News) -> Hope | None:
        """What of the news may help a pod; None where nothing does."""
        if stand.hopeless:
            return None if self._decider.because(demand) else Hope(None)
        if news.volumes and demand.claims:
            return Hope(None)
        if not stand.kinds.isdisjoint(_TOPOLOGY) and self._touches(demand, stand, news):
            return Hope(None)
        rows = self._rows(demand, stand, news)
        return Hope(frozenset(rows)) if rows else None

    def spared(self, demand: Demand, stand: Stand) -> Hope | None:
        """Nodes that the pod does not have to keep away from any more: a matter of time alone. The end of a
        quarantine is one, too, or of something that makes no room anywhere."""
        if Kind.QUARANTINED in stand.kinds:
            return None if self._decider.because(demand) else Hope(None)
        if Kind.EXCLUDED not in stand.kinds:
            return None
        rows = np.flatnonzero(stand.codes == CODE[Kind.EXCLUDED])
        rows = rows[~np.isin(rows, self._decider.excluded_rows(demand))]
        return Hope(frozenset(rows.tolist())) if len(rows) else None

    def look(self, demand: Demand, stand: Stand, hope: Hope) -> bool:
        """Whether a try is worth it, by those nodes that gave hope. `stand` learns of what is found."""
        decider, table = self._decider, self._decider.table
        decider.refresh()
        if decider.because(demand):
            return False
        if stand.hopeless or hope.rows is None:
            rows = np.arange(len(table))
        else:
            moved = table.moved_since(stand.clock)
            hoped = np.array(sorted(hope.rows), np.intp)
            rows = np.union1d(np.union1d(moved, hoped), stand.unasked).astype(np.intp)
        with decider.without(self._aside(demand)):
            codes = decider.codes_on(demand, rows)
        if (codes == FITS).any():
            return True
        stand.hopeless = False
        stand.learn(rows, codes, table.clock)
        return self._may_make_room(demand, rows, stand.codes)

    def _touches(self, demand: Demand, stand: Stand, news: News) -> bool:
        if news.moved or news.turns is None or self._is_renamed(demand, news):
            return True
        return any(self._concerns(demand, stand, turn) for turn in news.turns)

    def _is_renamed(self, demand: Demand, news: News) -> bool:
        """A namespace has other labels: the pod's own one, or one that its terms may choose by them."""
        near = demand.neighbours
        chosen = any(t.namespace_selector is not None for t in (*near.affinity, *near.anti_affinity))
        return bool(news.namespaces) and (chosen or demand.model.ref.namespace in news.namespaces)

    def _concerns(self, demand: Demand, stand: Stand, turn: Turn) -> bool:
        """What has happened to one pod may lift a rule between pods. Company helps when it comes, or when
        the last of it goes from one who is company to itself; who keeps away helps when he goes; and a
        spread may be evened out either way."""
        before, after = turn
        near, home = demand.neighbours, demand.model.ref.namespace
        return (
            (Kind.POD_AFFINITY in stand.kinds and any(self._speak_of(near.affinity, pod) for pod in turn))
            or (Kind.POD_ANTI_AFFINITY in stand.kinds and self._speak_of(near.anti_affinity, before))
            or (
                Kind.KEPT_AWAY in stand.kinds
                and before is not None
                and any(
                    term.matches(home, self._labels_of(home), demand.labels) for term in before.keeps_away
                )
            )
            or (
                Kind.SPREAD in stand.kinds
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

    def _rows(self, demand: Demand, stand: Stand, news: News) -> list[int]:
        """Nodes with news that could hold the pod by their figures, and whose reason need not last."""
        table, shape = self._decider.table, demand.shape
        reach, count = self._reach(demand, news), shape.gpu_count
        levels = self._victims.below(demand.priority)
        if count > reach.shape[1] or self._best(demand, news, reach) < shape.request_bytes:
            return []
        keep = reach[:, count - 1] >= shape.request_bytes
        for name, asked in shape.amounts:
            if asked > 0:
                keep &= self._victims.left(name, news.rows, levels) >= asked
        rows: Some = news.rows[keep]
        if not len(rows):
            return []
        known = np.minimum(rows, len(stand.codes) - 1)
        lasts = (
            _LASTS[stand.codes[known]] & (known == rows) if len(stand.codes) else np.zeros(len(rows), bool)
        )
        rows = rows[~lasts | table.moved_after(rows, stand.clock)]
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

    def _reach(self, demand: Demand, news: News) -> Ints:
        """For each row with news what could be free on its GPUs."""
        levels = self._victims.below(demand.priority)
        found = news._reach.get(len(levels))
        if found is None:
            found = news._reach[len(levels)] = self._victims.reach(news.rows, levels)
        return found

    def _best(self, demand: Demand, news: News, reach: Ints) -> int:
        key = (len(self._victims.below(demand.priority)), demand.shape.gpu_count)
        best = news._best.get(key)
        if best is None:
            best = news._best[key] = int(reach[:, key[1] - 1].max()) if len(reach) else -1
        return best
