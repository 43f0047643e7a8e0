"""All nodes side by side: one row a node, one array a fact, so that a rule tests all of them at once.

The arrays are a copy of what `state` knows; `put` and `drop` keep a row in step. Three counters say
since when a row is as it is: `changed` for anything, `moved` for what only people change (labels,
taints, cordon, capabilities, which GPUs there are), which most decisions need not look at again, and
`eased` for what may let a pod in that did not fit.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from berth.contract.ids import NodeName
from berth.contract.quantity import MOST
from berth.contract.report import CodeRule, GpuReport
from binder.cache.view import NamespacedId, NodeFacts, NodeView
from binder.pod.demand import product_key
from binder.pod.resources import PODS
from binder.rules.reasons import Kind

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Codes = NDArray[np.int32]
Floats = NDArray[np.float64]
# Which rows: all of them (`NodeTable.all_rows`), or some by number.
Rows = slice | NDArray[np.intp]

NOT_KNOWN = -1  # no free bytes are known: no such GPU, not healthy, or a fact is missing
MANY = "*"  # in `NodeTable.tenants` and `coders`: more than one namespace; no namespace is called so
NO_MODEL = 0  # in `NodeTable.models`: there is no GPU
_FIRST_CAPACITY, _FIRST_WIDTH = 64, 1
# Of each kind: tenants name labels and resources as they like, and each column costs at every report. Only what some
# node has gets a column, so this is for nodes with very many labels.
_MOST_COLUMNS = 1024
_T = TypeVar("_T")

# Why a GPU is out of the question, whatever is asked of it.
USABLE, ABSENT, SICK, UNKNOWN = 0, 1, 2, 3


class Column:
    """One fact of every node as a small number, with the values behind the numbers. 0 is absent."""

    def __init__(self, capacity: int) -> None:
        self.codes: Codes = np.zeros(capacity, np.int32)
        self.values: list[Any] = [None]
        self._code_of: dict[Hashable, int] = {None: 0}
        # Of each value, once somebody has asked for it.
        self._is_integer, self._integers = np.zeros(0, np.bool_), np.zeros(0, np.int64)

    def set(self, row: int, value: Hashable) -> None:
        code = self._code_of.get(value)
        if code is None:
            code = self._code_of[value] = len(self.values)
            self.values.append(value)
        self.codes[row] = code

    def fill(self, values: Iterable[Hashable]) -> None:
        """All rows from the first one on."""
        code_of = self._code_of
        codes = [code_of.setdefault(value, len(code_of)) for value in values]
        self.codes[: len(codes)] = codes
        self.values = list(code_of)

    def is_one_of(self, values: Iterable[Hashable], rows: Rows) -> Bools:
        """Where the fact is one of these values. None is absence."""
        codes = [code for value in values if (code := self._code_of.get(value)) is not None]
        if len(codes) == 1:
            only: Bools = self.codes[rows] == codes[0]
            return only
        chosen = np.zeros(len(self.values), np.bool_)
        chosen[codes] = True
        found: Bools = chosen[self.codes[rows]]
        return found

    def map(self, rows: Rows, figure: Callable[[Any], Any], kind: Any) -> NDArray[Any]:
        """`figure` of each row's value, computed once for each value that occurs."""
        codes = self.codes[rows]
        if len(codes) < len(self.values):
            return np.array([figure(self.values[code]) for code in codes], kind)
        figures: NDArray[Any] = np.array([figure(value) for value in self.values], kind)[codes]
        return figures

    def integers(self, read: Callable[[Any], int | None]) -> tuple[Bools, Ints]:
        """Of each value whether it is a number, and which: read once, always by the same `read`."""
        if more := [read(value) for value in self.values[len(self._integers) :]]:
            self._is_integer = np.append(self._is_integer, [one is not None for one in more])
            self._integers = np.append(self._integers, np.array([one or 0 for one in more], np.int64))
        return self._is_integer, self._integers

    def widen(self, capacity: int) -> None:
        self.codes = _grown(self.codes, (capacity,), 0)


@dataclass(frozen=True, slots=True)
class Service:
    """What the node's report says beside its GPUs: decides together, so it is one fact."""

    trouble: Kind | None
    server: str = ""
    capabilities: frozenset[str] = frozenset()
    code: CodeRule = CodeRule.ANY


class NodeTable:
    """Rows are given out in order of arrival and used again."""

    def __init__(self, *, like: "NodeTable | None" = None) -> None:
        """`like`: GPU models have its numbers, so that what is known of them there counts here, too."""
        self.row_of: dict[NodeName, int] = {}
        self._spare: list[int] = []
        self.clock = 0
        self._capacity, self._width = _FIRST_CAPACITY, _FIRST_WIDTH
        capacity = self._capacity
        self._live: Bools = np.zeros(capacity, np.bool_)
        self._changed: Ints = np.zeros(capacity, np.int64)
        self._moved: Ints = np.zeros(capacity, np.int64)
        self._eased: Ints = np.zeros(capacity, np.int64)
        self._deadline: Floats = np.full(capacity, -np.inf)
        # Column by column ("F"): a rule runs over all nodes' first GPUs, then over their second ones.
        self._free: Ints = np.full((capacity, self._width), NOT_KNOWN, np.int64, order="F")
        self._condition: NDArray[np.int8] = np.full((capacity, self._width), ABSENT, np.int8, order="F")
        # Which GPUs are alike: (product, bytes) to a number. Before any node has reported a GPU there is
        # one model already, that of the GPUs that are not there.
        self.models: list[tuple[str, int]] = [("", 0)] if like is None else like.models
        self._model_of: dict[tuple[str, int], int] = {} if like is None else like._model_of
        self._gpu_model: NDArray[np.int32] = np.zeros((capacity, self._width), np.int32, order="F")
        self._loads: NDArray[np.int32] = np.zeros((capacity, self._width), np.int32, order="F")
        # By resource and by label: what pods have asked about, the last used ones.
        self._left: OrderedDict[str, Ints] = OrderedDict()
        self._allocatable: OrderedDict[str, Ints] = OrderedDict()
        self._labels: OrderedDict[str, Column] = OrderedDict()
        # On how many nodes each label and resource is; whatever is on none needs no column.
        self._label_keys: Counter[str] = Counter()
        self._offers: Counter[str] = Counter()
        self._no_label, self._nothing = Column(capacity), np.zeros(capacity, np.int64)
        self.name, self.taints, self.cordon, self.service = (Column(capacity) for _ in range(4))
        # Whose models are on a node, and whose code: the namespace, None or MANY.
        self.tenants, self.coders = Column(capacity), Column(capacity)
        self._views: list[NodeView | None] = []
        self._deadlines: dict[NodeName, float] = {}
        self._model_rows: dict[Hashable, set[int]] = {}
        self._port_rows: dict[tuple[str, int], set[int]] = {}

    def __len__(self) -> int:
        """How many rows are given out, spare ones among them."""
        return len(self._views)

    @property
    def all_rows(self) -> slice:
        return slice(0, len(self))

    @property
    def live(self) -> Bools:
        """Which rows are nodes."""
        return self._live[: len(self)]

    @property
    def deadline(self) -> Floats:
        """Until when the agent's heartbeat counts, monotonic seconds."""
        return self._deadline[: len(self)]

    @property
    def free(self) -> Ints:
        """(rows, GPUs): free bytes; below 0 where a GPU takes nothing."""
        return self._free[: len(self)]

    @property
    def condition(self) -> NDArray[np.int8]:
        """(rows, GPUs): USABLE, or why not."""
        return self._condition[: len(self)]

    @property
    def gpu_model(self) -> NDArray[np.int32]:
        """(rows, GPUs): which of `models` the GPU is."""
        return self._gpu_model[: len(self)]

    @property
    def loads(self) -> NDArray[np.int32]:
        """(rows, GPUs): models that are to be loaded there or are being loaded."""
        return self._loads[: len(self)]

    def left(self, resource: str) -> Ints:
        """What is left of a resource on every node; less than MOST, so that a pod which asks for that
        fits nowhere."""
        if resource not in self._offers and resource != PODS:
            return self._nothing[: len(self)]
        return self._amounts(self._left, resource, lambda view: view.left_of(resource))

    def allocatable(self, resource: str) -> Ints:
        if resource not in self._offers:
            return self._nothing[: len(self)]
        return self._amounts(
            self._allocatable, resource, lambda view: view.facts.allocatable.get(resource, 0)
        )

    def has_label(self, key: str) -> bool:
        """Some node has it. Where none has, no node is in any of its domains."""
        return key in self._label_keys

    def label(self, key: str) -> Column:
        """One label of every node."""
        if key not in self._label_keys:
            return self._no_label
        return _recent(self._labels, key, lambda: self._label(key))

    def view(self, row: int) -> NodeView:
        view = self._views[row]
        assert view is not None
        return view

    def rows_with_model(self, model: NamespacedId) -> list[int]:
        """Nodes that hold a model of this id."""
        return sorted(self._model_rows.get(model, ()))

    def rows_with_port(self, protocol: str, port: int) -> list[int]:
        return sorted(self._port_rows.get((protocol, port), ()))

    def changed_since(self, clock: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._changed[: len(self)] > clock)

    def moved_since(self, clock: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._moved[: len(self)] > clock)

    def eased_since(self, clock: int) -> NDArray[np.intp]:
        """Nodes where something became free or better."""
        return np.flatnonzero((self._eased[: len(self)] > clock) & self.live)

    def moved_after(self, rows: NDArray[np.intp], clock: int) -> Bools:
        """Which of these rows have moved since."""
        return self._moved[rows] > clock

    def ease(self, name: NodeName) -> None:
        """Something that is not in the node's view has become better."""
        if (row := self.row_of.get(name)) is not None:
            self.clock += 1
            self._eased[row] = self.clock

    def put(self, view: NodeView, *, hypothetical: bool = False) -> None:
        """Take a node as it is now, or as it is supposed to be for a question."""
        row = self._row(view.facts.name)
        before = self._views[row]
        self.clock += 1
        self._changed[row] = self.clock
        if not hypothetical and eases(before, view):
            self._eased[row] = self.clock
        same = before is not None and before.facts is view.facts
        if before is None or (not same and _moves(before.facts, view.facts)):
            self._moved[row] = self.clock
            _recount(self._label_keys, () if before is None else before.facts.labels, view.facts.labels)
            self._place(row, view.facts)
        self.tenants.set(row, _only(view.tenants))
        self.coders.set(row, _only(view.coders))
        self._index(row, before, view)
        self._views[row] = view
        if not same:
            gone = () if before is None else before.facts.allocatable
            _recount(self._offers, gone, view.facts.allocatable)
            self._measure(row, view)
        self._weigh(row, before if same else None, view)

    def drop(self, name: NodeName) -> None:
        """The node is gone."""
        row = self.row_of.pop(name, None)
        if row is None:
            return
        self.clock += 1
        self._changed[row] = self._moved[row] = self.clock
        before = self._views[row]
        self._index(row, before, None)
        if before is not None:
            _recount(self._label_keys, before.facts.labels, ())
            _recount(self._offers, before.facts.allocatable, ())
        self._views[row] = None
        self._live[row] = False
        for column in self._columns():  # a row of no node is in no domain
            column.set(row, None)
        self._forget_gpus(row)
        self._deadline[row] = -np.inf
        self._spare.append(row)

    def unlike(self, other: "NodeTable", rows: Iterable[int]) -> list[int]:
        """Which of another table's rows are not here as they are there."""
        return [row for row in rows if row >= len(self) or self._views[row] is not other._views[row]]

    def mirror(self, other: "NodeTable", rows: Iterable[int]) -> None:
        """Take some of another table's rows as they are there, under the same numbers: equal figures are decided
        by the row. Whoever mirrors takes every row from that table."""
        for row in rows:
            before, view = self._views[row] if row < len(self) else None, other._views[row]
            if before is not None and (view is None or view.facts.name != before.facts.name):
                self.drop(before.facts.name)
            if view is not None and view is not before:
                if self.row_of.get(view.facts.name, row) != row:
                    self.drop(view.facts.name)
                self._seat(view.facts.name, row)
                self.put(view, hypothetical=True)
        self._spare.clear()

    def mirror_heartbeats(self, other: "NodeTable") -> None:
        """Of the rows that are mirrored."""
        rows = min(len(self), len(other))
        self._deadline[:rows] = other._deadline[:rows]

    def beat(self, name: NodeName, deadline: float) -> None:
        """The node's heartbeat counts until then. It may be heard before the node is known."""
        if deadline == -np.inf:
            self._deadlines.pop(name, None)
        else:
            self._deadlines[name] = deadline
        if (row := self.row_of.get(name)) is not None:
            self._deadline[row] = deadline

    def deadline_of(self, name: NodeName) -> float:
        """-inf without a heartbeat."""
        return self._deadlines.get(name, -np.inf)

    def _label(self, key: str) -> Column:
        column = Column(self._capacity)
        column.fill([None if view is None else view.facts.labels.get(key) for view in self._views])
        return column

    def _place(self, row: int, facts: NodeFacts) -> None:
        for key, column in self._labels.items():
            column.set(row, facts.labels.get(key))
        self.name.set(row, facts.name)
        self.taints.set(row, _taint_key(facts.taints))
        self.cordon.set(row, facts.unschedulable or None)
        self.service.set(row, service_of(facts))

    def _measure(self, row: int, view: NodeView) -> None:
        """What the node has, whatever its pods take of it."""
        for resource, amounts in self._allocatable.items():
            amounts[row] = _within_64_bits(view.facts.allocatable.get(resource, 0))
        if len(view.gpus) > self._width:
            self._widen(len(view.gpus))
        self._forget_gpus(row)
        for slot, gpu in enumerate(view.gpus):
            self._gpu_model[row, slot] = self._model(gpu)

    def _weigh(self, row: int, before: NodeView | None, view: NodeView) -> None:
        """What is left of it. `before`: how it was, if the node is the same: then most of its GPUs are as they were."""
        for resource, left in self._left.items():
            left[row] = _within_64_bits(view.left_of(resource))
        if view.loads or self._loads[row].any():
            self._loads[row, : len(view.gpus)] = [view.loads.get(gpu.uuid, 0) for gpu in view.gpus]
        for slot, gpu in enumerate(view.gpus):
            if before is not None and before.reserved_on(gpu.uuid) == view.reserved_on(gpu.uuid):
                continue
            free = view.free_on(gpu)
            self._condition[row, slot] = SICK if not gpu.healthy else UNKNOWN if free is None else USABLE
            self._free[row, slot] = NOT_KNOWN if free is None else _within_64_bits(max(free, NOT_KNOWN))

    def _forget_gpus(self, row: int) -> None:
        self._free[row], self._condition[row], self._gpu_model[row] = NOT_KNOWN, ABSENT, NO_MODEL
        self._loads[row] = 0

    def _model(self, gpu: GpuReport) -> int:
        key = (product_key(gpu.product), _within_64_bits(max(0, (gpu.total_bytes or 0) - gpu.headroom_bytes)))
        number = self._model_of.get(key)
        if number is None:
            number = self._model_of[key] = len(self.models)
            self.models.append(key)
        return number

    def _index(self, row: int, before: NodeView | None, after: NodeView | None) -> None:
        for rows, old, new in (
            (self._model_rows, _model_keys(before), _model_keys(after)),
            (self._port_rows, _ports(before), _ports(after)),
        ):
            _reindex(rows, row, old, new)

    def _row(self, name: NodeName) -> int:
        row = self.row_of.get(name)
        if row is not None:
            return row
        row = self._spare.pop() if self._spare else len(self._views)
        self._seat(name, row)
        return row

    def _seat(self, name: NodeName, row: int) -> None:
        while row >= len(self._views):
            self._views.append(None)
        while row >= self._capacity:
            self._lengthen()
        self.row_of[name] = row
        self._live[row] = True
        self._deadline[row] = self._deadlines.get(name, -np.inf)

    def _lengthen(self) -> None:
        capacity = self._capacity = 2 * self._capacity
        rows, gpus = (capacity,), (capacity, self._width)
        self._live = _grown(self._live, rows, False)
        self._changed, self._moved, self._eased = (
            _grown(a, rows, 0) for a in (self._changed, self._moved, self._eased)
        )
        self._deadline = _grown(self._deadline, rows, -np.inf)
        self._free = _grown(self._free, gpus, NOT_KNOWN)
        self._condition = _grown(self._condition, gpus, ABSENT)
        self._gpu_model = _grown(self._gpu_model, gpus, NO_MODEL)
        self._loads = _grown(self._loads, gpus, 0)
        for amounts in (self._left, self._allocatable):
            for resource in amounts:
                amounts[resource] = _grown(amounts[resource], rows, 0)
        self._nothing = _grown(self._nothing, rows, 0)
        for column in (*self._columns(), self._no_label):
            column.widen(capacity)

    def _columns(self) -> tuple[Column, ...]:
        own = (self.name, self.taints, self.cordon, self.service, self.tenants, self.coders)
        return (*self._labels.values(), *own)

    def _widen(self, width: int) -> None:
        shape = (self._capacity, width)
        self._free = _grown(self._free, shape, NOT_KNOWN)
        self._condition = _grown(self._condition, shape, ABSENT)
        self._gpu_model = _grown(self._gpu_model, shape, NO_MODEL)
        self._loads = _grown(self._loads, shape, 0)
        self._width = width

    def _amounts(
        self, known: "OrderedDict[str, Ints]", resource: str, figure: Callable[[NodeView], int]
    ) -> Ints:
        return _recent(known, resource, lambda: self._figures(figure))[: len(self)]

    def _figures(self, figure: Callable[[NodeView], int]) -> Ints:
        amounts: Ints = np.zeros(self._capacity, np.int64)
        for row, view in enumerate(self._views):
            if view is not None:
                amounts[row] = _within_64_bits(figure(view))
        return amounts


def _recount(counts: Counter[str], before: Iterable[str], after: Iterable[str]) -> None:
    if before is after:
        return
    counts.update(iter(after))
    for name in before:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def _recent(known: "OrderedDict[str, _T]", key: str, make: Callable[[], _T]) -> _T:
    """One of those that are known, made where it is not; the one that was not used for longest goes."""
    found = known.get(key)
    if found is None:
        found = known[key] = make()
        if len(known) > _MOST_COLUMNS:
            known.popitem(last=False)
    known.move_to_end(key)
    return found


def service_of(facts: NodeFacts) -> Service:
    """What is not known is not there."""
    if facts.report_error:
        return Service(Kind.UNREADABLE_REPORT)
    if facts.report is None:
        return Service(Kind.NO_REPORT)
    report = facts.report
    trouble = None if report.triton.ready else Kind.TRITON_NOT_READY
    return Service(trouble, report.server, frozenset(report.capabilities), report.code.rule)


def eases(before: NodeView | None, after: NodeView) -> bool:
    """Whether a pod that the node refused may fit there now: something was given back, or moved."""
    if before is None or (before.facts is not after.facts and _moves(before.facts, after.facts)):
        return True
    if before.facts is after.facts and before.reserved == after.reserved and before.used == after.used:
        return not (before.reserved_anywhere <= after.reserved_anywhere and _names_more(before, after))
    free = {gpu.uuid: _free_or_unknown(before, gpu) for gpu in before.gpus}
    return (
        any(_free_or_unknown(after, gpu) > free.get(gpu.uuid, NOT_KNOWN) for gpu in after.gpus)
        or any(after.left_of(name) > before.left_of(name) for name in before.used.keys() | after.used.keys())
        or any(after.left_of(name) > before.left_of(name) for name in after.facts.allocatable)
        or not _names_more(before, after)
    )


def _free_or_unknown(view: NodeView, gpu: GpuReport) -> int:
    free = view.free_on(gpu)
    return NOT_KNOWN if free is None else free


def _names_more(before: NodeView, after: NodeView) -> bool:
    """All names and ports that were taken still are, and whoever was there is."""
    return (
        before.tenants <= after.tenants
        and before.coders <= after.coders
        and before.model_ids <= after.model_ids
        and before.host_ports <= after.host_ports
    )


def _moves(before: NodeFacts, after: NodeFacts) -> bool:
    return (
        before.labels != after.labels
        or before.taints != after.taints
        or before.unschedulable != after.unschedulable
        or service_of(before) != service_of(after)
        or _gpu_set(before) != _gpu_set(after)
    )


def _gpu_set(facts: NodeFacts) -> "frozenset[tuple[str, str]]":
    gpus = () if facts.report is None else facts.report.gpus
    return frozenset((gpu.uuid, gpu.product) for gpu in gpus)


def _within_64_bits(amount: int) -> int:
    """The amount where it is below MOST. Sums over a node's pods know no bound."""
    return max(1 - MOST, min(amount, MOST - 1))


def _taint_key(taints: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str, str], ...] | None:
    """(key, value, effect) of each; None without any."""
    return tuple((t["key"], t.get("value") or "", t.get("effect") or "") for t in taints) or None


def _only(namespaces: frozenset[str]) -> str | None:
    return next(iter(namespaces), None) if len(namespaces) < 2 else MANY


def _model_keys(view: NodeView | None) -> frozenset[Hashable]:
    return frozenset() if view is None else frozenset(view.model_ids)


def _ports(view: NodeView | None) -> frozenset[tuple[str, int]]:
    return frozenset() if view is None else frozenset((p, n) for _, p, n in view.host_ports)


def _reindex(rows: dict[Any, set[int]], row: int, old: frozenset[Any], new: frozenset[Any]) -> None:
    if old == new:
        return
    for key in old - new:
        rows[key].discard(row)
        if not rows[key]:
            del rows[key]
    for key in new - old:
        rows.setdefault(key, set()).add(row)


def _grown(array: NDArray[Any], shape: tuple[int, ...], filling: Any) -> NDArray[Any]:
    grown = np.full(shape, filling, array.dtype, order="F")
    grown[tuple(slice(length) for length in array.shape)] = array
    return grown
