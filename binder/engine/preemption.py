"""Which pods of lower priority would have to go so that a pod fits. Pure.

As kube-scheduler's DefaultPreemption does (framework/preemption/preemption.go): on each node take all
lower ones away, look whether the pod fits, then give back as many as possible, those that a budget
protects first and then the most important; between nodes choose the one whose victims matter least. Two
things are Berth's own: only model pods are victims, and a PodDisruptionBudget is never violated.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import NodeName
from binder.cache.column import Bools
from binder.cache.disruption_budgets import Budgets
from binder.cache.reservations import Reservation
from binder.engine.decision import Decider, Placement
from binder.engine.victims import Victims
from binder.pod.demand import Demand
from binder.rules.registry import Codes, Registry
from binder.rules.rule import Cure

# Nodes where a candidate was found, among which the cheapest is chosen: kube-scheduler looks at 100, or a
# tenth of the nodes. And questions in one search, at least one for each node, which stand in the order of what
# they promise: no event is handled meanwhile, and each takes up to a millisecond. The next search goes on behind them.
_ENOUGH = 8
MOST_QUESTIONS = 64
# Added to each priority, so that one more victim is never cheaper (kube-scheduler's MaxInt32 + 1).
_PRIORITY_OFFSET = 2**31


@dataclass(frozen=True, slots=True)
class PreemptionCandidate:
    """These pods go, and then the pod has this place."""

    placement: Placement
    victims: tuple[Reservation, ...]

    @property
    def cost(self) -> tuple[int, int, int, str]:
        """Smaller is better: the most important victim, their sum, how many, and a fixed order."""
        priorities = [victim.priority for victim in self.victims]
        weight = sum(priority + _PRIORITY_OFFSET for priority in priorities)
        return (max(priorities), weight, len(priorities), self.placement.node)


def curable(rules: Registry, codes: Codes) -> Bools:
    """Which of these refusals a pod's end can cure."""
    return rules.cured_by[Cure.POD_ENDS][codes]


def find_candidate(
    decider: Decider,
    demand: Demand,
    nodes: Iterable[NodeName],
    *,
    may_go: Callable[[Reservation], bool],
    budgets: Budgets,
) -> PreemptionCandidate | None:
    """The cheapest way to make room for the pod on one of these nodes; None where there is none. Only
    those who `may_go` go, and never more than the budgets allow."""
    return search(Questions(decider, demand), nodes, may_go=may_go, budgets=budgets)


class Questions:
    """Whether a pod has a place on a node without some of the pods there. `asked`: how many there were; `met`: why there
    was none."""

    def __init__(self, decider: Decider, demand: Demand, *, most: int = MOST_QUESTIONS) -> None:
        self.decider, self._demand, self._most = decider, demand, most
        self.asked, self.met = 0, set[str]()

    @property
    def is_over(self) -> bool:
        return self.asked >= self._most

    def place(self, node: NodeName, gone: Iterable[Reservation]) -> Placement | None:
        self.asked += 1
        with self.decider.without([victim.ref.uid for victim in gone]):
            outcome = self.decider.place_on(self._demand, node)
        if isinstance(outcome, Placement):
            return outcome
        self.met.add(outcome.rule)
        return None


def search(
    questions: Questions,
    nodes: Iterable[NodeName],
    *,
    may_go: Callable[[Reservation], bool],
    budgets: Budgets,
) -> PreemptionCandidate | None:
    """As `find_candidate`. It takes from `nodes` only those that it asks."""
    found: list[PreemptionCandidate] = []
    for node in nodes:
        if (one := _on_node(questions, node, may_go, budgets)) is not None:
            found.append(one)
        if len(found) == _ENOUGH or questions.is_over:
            break
    return min(found, key=lambda one: one.cost, default=None)


def promising(
    decider: Decider, victims: Victims, demand: Demand, codes: Codes, among: NDArray[np.intp]
) -> Iterator[NodeName]:
    """The nodes of `ranked`, but for those that hold what stays in the way."""
    rows = ranked(decider, victims, demand, codes, among)
    return names(decider, victims, demand, codes, iter(rows.tolist()))


def names(
    decider: Decider, victims: Victims, demand: Demand, codes: Codes, rows: Iterator[int]
) -> Iterator[NodeName]:
    """Takes from `rows` no more than requested. Leaves out rows where a pod that it conflicts with stays."""
    clashing = decider.rules.clashing
    for row in rows:
        if not clashing[codes[row]] or not victims.in_the_way_for_good(demand, row):
            yield decider.table.view(row).facts.name


def ranked(
    decider: Decider, victims: Victims, demand: Demand, codes: Codes, among: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Those of these rows where the end of pods of lower priority may be enough, by all that they would give back, most
    promising first: where the least important would do, where few would, where little is missing. `codes`: by row."""
    victims.renew()
    table, count, asked = decider.table, demand.shape.gpu_count, demand.shape.request_bytes
    levels = victims.below(demand.priority)
    rows = among[curable(decider.rules, codes[among]) & table.live[among]]
    rows = rows[victims.some(rows, levels)]
    for name, amount in demand.shape.amounts:
        if amount > 0 and len(rows):
            rows = rows[victims.left(name, rows, levels) >= amount]
    if not len(rows) or count > table.free.shape[1]:
        return rows[:0]
    least = np.full(len(rows), len(levels))
    for number in reversed(range(len(levels) + 1)):
        least[victims.reach(rows, levels[:number])[:, count - 1] >= asked] = number
    free = -np.sort(-table.free[rows], axis=1)[:, count - 1]
    reached = victims.reach(rows, levels)[:, count - 1] >= asked
    order = np.lexsort((rows, asked - free, least))
    return rows[order[reached[order]]]


def _on_node(
    questions: Questions, node: NodeName, may_go: Callable[[Reservation], bool], budgets: Budgets
) -> PreemptionCandidate | None:
    decider = questions.decider
    victims = sorted(
        (
            reservation
            for reservation in decider.state.living_on(node)
            if reservation.has_model
            and may_go(reservation)
            and budgets.allow([decider.state.labelled(reservation)])
        ),
        key=lambda h: (-h.priority, h.created, h.ref.uid),
    )
    if not victims or questions.place(node, victims) is None:
        return None
    going = without_those_who_can_stay(
        victims,
        _to_give_back(decider, victims, budgets),
        enough=lambda rest: bool(rest) and questions.place(node, rest) is not None,
    )
    placement = questions.place(node, going)
    if placement is None or not budgets.allow(map(decider.state.labelled, going)):
        return None
    return PreemptionCandidate(placement, tuple(going))


def without_those_who_can_stay(
    going: list[Reservation], candidates: list[Reservation], *, enough: Callable[[list[Reservation]], bool]
) -> list[Reservation]:
    """Give back one after the other, as long as the others' end is `enough`. By halves, because most can
    stay: a node has many pods, and each question costs about a millisecond."""
    staying = {one.ref.uid for one in candidates}
    rest = [one for one in going if one.ref.uid not in staying]
    if not candidates or enough(rest):
        return rest
    if len(candidates) == 1:
        return going
    half = len(candidates) // 2
    going = without_those_who_can_stay(going, candidates[:half], enough=enough)
    return without_those_who_can_stay(going, candidates[half:], enough=enough)


def _to_give_back(decider: Decider, victims: list[Reservation], budgets: Budgets) -> list[Reservation]:
    """Who is to stay if possible, first those who cannot all go at once: of each budget the least
    important ones may. `victims`: the most important first."""
    if budgets.allow(map(decider.state.labelled, victims)):
        return victims
    legal: list[Reservation] = []
    for victim in reversed(victims):
        if budgets.allow(decider.state.labelled(one) for one in (*legal, victim)):
            legal.append(victim)
    return sorted(victims, key=lambda h: h in legal)
