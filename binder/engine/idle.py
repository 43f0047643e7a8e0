"""Which idle pods would have to go so that one replica more has a place. Pure.

Preemption's question asked of other pods: those of the same or a lower priority that their scaler calls idle. The
fewest go; of as many those that have not been used for longest. No PodDisruptionBudget counts here: they go as
their Deployment becomes smaller.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from berth.contract.ids import NodeName
from binder.cache.gpu_columns import USABLE
from binder.cache.reservations import Reservation, place_of
from binder.engine.decision import Decider
from binder.engine.preemption import PreemptionCandidate, Questions, curable, without_those_who_can_stay
from binder.pod.demand import Demand
from binder.rules.registry import Codes

# Of more than so many idle pods of one node the last used ones are not compared with each other, and among groups of
# more than so many the smallest is not searched for: what is found then is a group of which none can stay.
_COMPARED, _GROUP = 16, 4
# Nodes where a group was found, among which the best is chosen; and questions in one search, about a third of a
# millisecond each.
_ENOUGH, _MOST_QUESTIONS = 8, 64
_NEVER = 2**31


@dataclass(frozen=True, slots=True)
class _Idle:
    """`rank`: 0 is who was not used for longest. `bytes`: that would be free on each GPU of its node, by slot."""

    rank: int
    reservation: Reservation
    bytes: dict[int, int]


class IdlePods:
    """`reservations`: idle pods, the least recently used first. The decider learns which were chosen, and
    is found no more."""

    def __init__(self, decider: Decider, reservations: Sequence[Reservation]) -> None:
        self._decider = decider
        self._on: dict[NodeName, list[_Idle]] = {}
        for rank, reservation in enumerate(reservations):
            if reservation.node in decider.table.row_of:
                one = _Idle(rank, reservation, self._bytes_of(reservation))
                self._on.setdefault(reservation.node, []).append(one)

    def find(self, demand: Demand, codes: Codes) -> Generator[None, None, PreemptionCandidate | None]:
        """`codes`: why each row refuses the replica as things are."""
        questions, found = (
            Questions(self._decider, demand),
            list[tuple[int, list[int], PreemptionCandidate]](),
        )
        for fewest, _, node, idle in sorted(self._promising(demand, codes), key=lambda one: one[:3]):
            if found and min(size for size, _, _ in found) < fewest:
                break
            if len(found) == _ENOUGH or questions.asked >= _MOST_QUESTIONS:
                break
            group = yield from self._on_node(questions, demand, node, idle, fewest)
            if group is not None:
                placement = questions.place(node, [one.reservation for one in group])
                assert placement is not None
                going = PreemptionCandidate(placement, tuple(one.reservation for one in group))
                found.append((len(group), _recency(group), going))
            yield
        if not found:
            return None
        best = min(found, key=lambda one: one[:2])[2]
        gone = {reservation.ref.uid for reservation in best.victims}
        node = best.placement.node
        self._on[node] = [one for one in self._on[node] if one.reservation.ref.uid not in gone]
        return best

    def _promising(self, demand: Demand, codes: Codes) -> Iterator[tuple[int, int, NodeName, list[_Idle]]]:
        """Nodes where it may be enough if some go: how many at least, who was not used for longest, and who they are."""
        table = self._decider.table
        for node, everybody in self._on.items():
            row = table.row_of[node]
            idle = [one for one in everybody if one.reservation.priority <= demand.priority]
            if idle and curable(self._decider.rules, codes[row : row + 1])[0]:
                fewest = self._fewest(demand, row, idle)
                if fewest <= len(idle):
                    yield fewest, idle[0].rank, node, idle

    def _on_node(
        self, questions: Questions, demand: Demand, node: NodeName, idle: list[_Idle], fewest: int
    ) -> Generator[None, None, list[_Idle] | None]:
        def enough(group: Sequence[_Idle]) -> bool:
            return questions.place(node, [one.reservation for one in group]) is not None

        if not enough(idle):
            return None
        yield
        row = self._decider.table.row_of[node]
        for size in range(fewest, min(_GROUP, len(idle)) + 1):
            groups = [list(group) for group in combinations(idle[:_COMPARED], size)]
            for group in sorted(groups, key=_recency):
                if questions.asked >= _MOST_QUESTIONS:
                    break
                if self._may_be_enough(demand, row, group):
                    yield
                    if enough(group):
                        return group
        yield
        by_uid = {one.reservation.ref.uid: one for one in idle}
        going = without_those_who_can_stay(
            [one.reservation for one in idle],
            [one.reservation for one in reversed(idle)],
            enough=lambda rest: enough([by_uid[reservation.ref.uid] for reservation in rest]),
        )
        return sorted((by_uid[reservation.ref.uid] for reservation in going), key=lambda one: one.rank)

    def _fewest(self, demand: Demand, row: int, idle: list[_Idle]) -> int:
        """At least so many must go: on as many GPUs as are requested there must be the bytes."""
        table, count = self._decider.table, demand.shape.gpu_count
        needed = []
        for slot in range(table.free.shape[1]):
            if table.condition[row, slot] != USABLE:
                continue
            short, number = demand.shape.request_bytes - int(table.free[row, slot]), 0
            for given in sorted((one.bytes.get(slot, 0) for one in idle), reverse=True):
                if short <= 0:
                    break
                short, number = short - given, number + 1
            needed.append(number if short <= 0 else _NEVER)
        return max(1, sorted(needed)[count - 1]) if len(needed) >= count else _NEVER

    def _may_be_enough(self, demand: Demand, row: int, group: Sequence[_Idle]) -> bool:
        """By the bytes alone: most groups need not be asked about."""
        free = self._decider.table.free[row].tolist()
        fitting = sum(
            bytes + sum(one.bytes.get(slot, 0) for one in group) >= demand.shape.request_bytes
            for slot, bytes in enumerate(free)
        )
        return fitting >= demand.shape.gpu_count

    def _bytes_of(self, reservation: Reservation) -> dict[int, int]:
        view = self._decider.table.view(self._decider.table.row_of[reservation.node])
        report, slots = view.facts.report, {gpu.uuid: slot for slot, gpu in enumerate(view.gpus)}
        gpus, size = place_of(
            reservation, None if report is None else report.model_of(reservation.ref.uid), frozenset(slots)
        )
        return {slots[gpu]: size for gpu in gpus or slots if gpu in slots}


def _recency(group: Sequence[_Idle]) -> list[int]:
    """Smaller is better: who was used last counts first."""
    return sorted((one.rank for one in group), reverse=True)
