"""How much room could be made on every node at once: what pods of each priority would give back.

An upper bound, in arrays: where even all that may go would not do, no closer search follows. Pods that no
budget lets go are not counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import GpuUuid, NodeName, PodUid
from binder.cache.column import Bools, Ints
from binder.cache.disruption_budgets import Budget, Budgets
from binder.cache.gpu_columns import USABLE
from binder.cache.reservations import Reservation, place_of
from binder.cache.state import ClusterState
from binder.cache.table import NodeTable
from binder.cache.view import NOT_KNOWN, NodeView
from binder.pod.demand import Demand
from binder.rules.registry import RULES

Some = NDArray[np.intp]

# More than any node has, and little enough that the sums over all priorities stay within 64 bits.
_PLENTY = 2**56
# Rows that are weighed in one call because of budgets: some milliseconds. A step makes a few calls.
_MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Share:
    """What one pod holds. `budget`: the one that counts it, None where none does."""

    priority: int
    amounts: Sequence[tuple[str, int]]
    slots: tuple[int, ...]
    bytes: int
    budget: Budget | None


class Victims:
    """Kept in step with the table, row by row. A node where more pods may go than before, because of a
    budget or another label, is eased in the table."""

    def __init__(self, state: ClusterState, table: NodeTable, budgets: Budgets) -> None:
        self._state, self._table, self._budgets = state, table, budgets
        # By priority: (rows, GPUs) bytes that pods of it would give back at most, and those of them that no budget
        # counts; (rows) on how many GPUs the others could give back theirs together, and whether there are any.
        # One array each, so that a row is written and compared at once: of g GPUs the first g columns, g more, the last.
        self._given: dict[int, Ints] = {}
        self._any: dict[int, Bools] = {}
        self._amounts: dict[tuple[int, str], Ints] = {}
        self._below: dict[int, tuple[int, ...]] = {}
        self._free: Ints = np.zeros((0, 0), np.int64)
        # Nodes of pods whose budget has changed: a budget may count thousands, and changes with each of them.
        self._due: set[NodeName] = set()
        self._clock = -1

    def below(self, priority: int) -> tuple[int, ...]:
        """The priorities of pods that could go for one of this priority, the lowest first."""
        found = self._below.get(priority)
        if found is None:
            found = self._below[priority] = tuple(sorted(one for one in self._given if one < priority))
        return found

    def reach(self, rows: Some, levels: tuple[int, ...]) -> Ints:
        """(rows, GPUs): what could be free on a node's GPUs if all pods of these priorities went, the
        most first. Bring it up to date first (`renew`)."""
        table = self._table
        usable = table.condition[rows] == USABLE
        # What is over its memory is shown as unknown bytes of a GPU that is usable.
        free = np.maximum(np.minimum(table.free[rows], _PLENTY), 0)
        gpus = free.shape[1]
        given = sum(
            (self._given[level][rows] for level in levels),
            start=np.zeros((len(rows), 2 * gpus + 1), np.int64),
        )
        most, sure, helped = free + given[:, :gpus], free + given[:, gpus : 2 * gpus], given[:, -1:]
        return _at_most(np.where(usable, most, NOT_KNOWN), np.where(usable, sure, NOT_KNOWN), helped)

    def left(self, name: str, rows: Some, levels: tuple[int, ...]) -> Ints:
        """What could be left of a resource then."""
        most: Ints = np.minimum(self._table.left(name)[rows], _PLENTY)
        for level in levels:
            if (amounts := self._amounts.get((level, name))) is not None:
                most += amounts[rows]
        return most

    def some(self, rows: Some, levels: tuple[int, ...]) -> Bools:
        """Where there is anybody of these priorities."""
        found = np.zeros(len(rows), np.bool_)
        for level in levels:
            found |= self._any[level][rows]
        return found

    def in_the_way_for_good(self, demand: Demand, row: int) -> bool:
        """The pod's model or host port is on the node, and not everybody who has it there could go."""
        reservations = self._state.reservations_on(self._table.view(row).facts.name)
        same = [one for one in reservations if any(rule.clashes(demand, one) for rule in RULES.rules)]
        return not all(h.priority < demand.priority and self.may_go(h) for h in same) or not same

    def may_go(self, reservation: Reservation) -> bool:
        """No budget and no earlier failure forbids to end this one pod."""
        if reservation.deleting or not reservation.has_model:
            return False
        return not self._budgets.count(reservation.ref.namespace) or self._budgets.allow(
            [self._state.labelled(reservation)]
        )

    def renew(self, *, lag: int = 0) -> None:
        """Take over what has changed since the last call, unless that is no more than `lag` changes; of what is due to
        budgets a part (`is_behind`): until then it is what it was, and what is eased then is news."""
        table = self._table
        if table.clock - self._clock <= lag and not self._due and not self._budgets.have_changed:
            return
        rows = set(table.changed_since(self._clock).tolist())
        for namespace, selector in self._budgets.take_changed():
            self._due |= {pod.node for pod in self._state.pods.in_namespace(namespace, selector)}
        for name in list(islice(self._due, _MOST_ROWS)):
            self._due.discard(name)
            if (row := table.row_of.get(name)) is not None:
                rows.add(row)
        self._clock = table.clock
        self._fit_to_table()
        for row in rows:
            before = self._row(row)
            self._weigh(row)
            if table.live[row] and _grows(before, self._row(row)):
                table.ease(table.view(row).facts.name)

    @property
    def is_behind(self) -> bool:
        """There is more to take over: `renew` must be called again soon."""
        return bool(self._due)

    def _row(self, row: int) -> "dict[int | None, Ints]":
        """All that a node's reach is made of: what is free, and what pods of each priority would give back."""
        return {
            None: self._free[row].copy(),
            **{level: given[row].copy() for level, given in self._given.items()},
        }

    def _fit_to_table(self) -> None:
        rows, gpus = self._table.free.shape
        width = 2 * gpus + 1
        if self._free.shape == (rows, width):
            return
        known = self._free.shape[1] // 2
        columns = np.concatenate((np.arange(known), gpus + np.arange(known), [2 * gpus]))[
            : self._free.shape[1]
        ]
        self._free = _grown(self._free, (rows, width), columns)
        for level, given in self._given.items():
            self._given[level] = _grown(given, (rows, width), columns)
            self._any[level] = _grown(self._any[level], (rows,))
        for key, amounts in self._amounts.items():
            self._amounts[key] = _grown(amounts, (rows,))

    def _weigh(self, row: int) -> None:
        for level, given in self._given.items():
            given[row] = 0
            self._any[level][row] = False
        for amounts in self._amounts.values():
            amounts[row] = 0
        gpus = self._table.free.shape[1]
        free = np.minimum(np.maximum(self._table.free[row], 0), _PLENTY)
        self._free[row, :gpus] = self._free[row, gpus : 2 * gpus] = free
        if not self._table.live[row]:
            return
        shares = list(self._shares(self._table.view(row)))
        given_back: dict[int, list[int]] = {}
        taken: dict[tuple[int, str], int] = {}
        for share in shares:
            for name, amount in share.amounts:
                taken[share.priority, name] = taken.get((share.priority, name), 0) + amount
            if share.budget is None:
                figures = given_back.setdefault(share.priority, [0] * (2 * gpus + 1))
                for slot in share.slots:
                    figures[slot] += share.bytes
                    figures[gpus + slot] += share.bytes
        self._weigh_budgeted([share for share in shares if share.budget is not None], given_back, gpus)
        for level, figures in given_back.items():
            self._level(level)
            self._given[level][row] = [min(figure, _PLENTY) for figure in figures]
            self._any[level][row] = True
        for key, amount in taken.items():
            if key not in self._amounts:
                self._amounts[key] = np.zeros(len(self._table), np.int64)
            self._amounts[key][row] = min(amount, _PLENTY)

    def _weigh_budgeted(self, shares: "list[_Share]", given_back: dict[int, list[int]], gpus: int) -> None:
        """Of a budget's pods any may be those that go: for each GPU the largest ones count."""
        for slot in range(gpus) if shares else ():
            here = sorted((share for share in shares if slot in share.slots), key=lambda one: -one.bytes)
            for share in _allowed(here):
                given_back.setdefault(share.priority, [0] * (2 * gpus + 1))[slot] += share.bytes
        for share in _allowed(sorted(shares, key=lambda one: -len(one.slots))):
            given_back.setdefault(share.priority, [0] * (2 * gpus + 1))[-1] += len(share.slots)

    def _level(self, priority: int) -> None:
        """There are pods of this priority."""
        if priority not in self._given:
            self._below.clear()
            self._given[priority] = np.zeros(self._free.shape, np.int64)
            self._any[priority] = np.zeros(len(self._table), np.bool_)

    def _shares(self, view: NodeView) -> Iterator[_Share]:
        report, node = view.facts.report, view.facts.name
        listed = {} if report is None else {model.pod_uid: model for model in report.models}
        slots = {gpu.uuid: slot for slot, gpu in enumerate(view.gpus)}
        uuids: frozenset[GpuUuid] = frozenset(slots)
        nominated = self._state.nominated()
        for reservation in self._state.reservations_on(node):
            uid = reservation.ref.uid
            if uid not in nominated and not self.may_go(reservation):
                continue
            gpus, size = place_of(reservation, listed.get(uid), uuids)
            where = tuple(slots[gpu] for gpu in gpus if gpu in slots) if gpus else tuple(slots.values())
            yield _Share(
                reservation.priority, _offered(reservation, view), where, size, self._budget_of(reservation)
            )

    def _budget_of(self, reservation: Reservation) -> Budget | None:
        if not self._budgets.count(reservation.ref.namespace):
            return None
        return next(iter(self._budgets.of(self._state.labelled(reservation))), None)


def _offered(reservation: Reservation, view: NodeView) -> list[tuple[str, int]]:
    """What the pod takes of what the node has: whatever else it names makes room for no pod."""
    amounts = reservation.amounts
    return [(name, amounts[name]) for name in view.facts.allocatable if name in amounts]


def _allowed(shares: Iterable[_Share]) -> Iterator[_Share]:
    """The first ones that a budget allows, of each priority."""
    counted: Counter[tuple[PodUid, int]] = Counter()
    for share in shares:
        if share.budget is not None:
            counted[share.budget.uid, share.priority] += 1
            if counted[share.budget.uid, share.priority] > share.budget.allowed:
                continue
        yield share


def _at_most(most: Ints, sure: Ints, helped: Ints) -> Ints:
    """The most first. Of more GPUs than budgets let be helped, the others have only what is sure."""
    most, sure = -np.sort(-most, axis=1), -np.sort(-sure, axis=1)
    unhelped = np.arange(sure.shape[1]) - helped
    others = np.take_along_axis(sure, np.maximum(unhelped, 0), axis=1)
    return np.where(unhelped < 0, most, np.minimum(most, others))


def _grows(before: "dict[int | None, Ints]", after: "dict[int | None, Ints]") -> bool:
    """Whether more could be free than before for a pod of some priority."""
    was, now = before[None], after[None]
    for level in sorted(level for level in after if level is not None):
        was, now = was + before.get(level, 0), now + after[level]
        if (now > was).any():
            return True
    return False


def _grown(array: NDArray[Any], shape: tuple[int, ...], columns: Some | None = None) -> NDArray[Any]:
    """The same figures in a larger array, in these columns of it."""
    grown = np.zeros(shape, array.dtype)
    if columns is None:
        grown[: len(array)] = array
    else:
        grown[: len(array), columns] = array
    return grown
