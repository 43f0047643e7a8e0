"""PodDisruptionBudgets: how many more pods of each may go. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from binder.pod.bounds import MOST_TESTS, MOST_VALUES
from binder.pod.selectors import Labels, Selector, parse_selector

JsonObject = Mapping[str, Any]
Labelled = tuple[PodRef, Labels]
# A label of which a pod must have this value; None where any pod may be meant.
_Mark = tuple[str, str] | None

# Of those of a namespace that could count a pod: of more it is taken that several do, and that it may not go.
MOST_MET = 64
# Budgets of a namespace that have changed: of more it is taken that all of its pods are concerned.
_MOST_TURNED = 16
_ANYBODY = Selector(())


@dataclass(frozen=True, slots=True)
class Budget:
    """`allowed`: how many more of its pods may go now."""

    uid: PodUid
    selector: Selector | None
    allowed: int

    def eases(self, before: "Budget") -> bool:
        return self.selector != before.selector or self.allowed > before.allowed


class Budgets:
    """`put` and `drop` return whether a pod may go now that could not."""

    def __init__(self) -> None:
        self._budgets: dict[str, dict[PodUid, Budget]] = {}
        self._filed: dict[str, dict[_Mark, dict[PodUid, Budget]]] = {}
        self._changed_selectors: set[tuple[str, Selector]] = set()

    def put(self, budget: JsonObject) -> bool:
        meta, status = budget["metadata"], budget.get("status") or {}
        selector = parse_selector((budget.get("spec") or {}).get("selector"))
        now = Budget(meta["uid"], selector, max(0, status.get("disruptionsAllowed") or 0))
        if selector is not None and _is_too_long(selector):
            now = Budget(now.uid, _ANYBODY, 0)  # it is not looked at, and no pod of the namespace may go
        there = self._budgets.setdefault(meta["namespace"], {})
        known, there[now.uid] = there.get(now.uid), now
        if known == now:
            return False
        self._unfile(meta["namespace"], known)
        for mark in _marks(now):
            self._filed.setdefault(meta["namespace"], {}).setdefault(mark, {})[now.uid] = now
        self._turn(meta["namespace"], known, now)
        return known is not None and now.eases(known)

    def drop(self, budget: JsonObject) -> bool:
        meta = budget["metadata"]
        known = self._budgets.get(meta["namespace"], {}).pop(meta["uid"], None)
        self._unfile(meta["namespace"], known)
        self._turn(meta["namespace"], known)
        return known is not None

    def allow(self, pods: Iterable[Labelled]) -> bool:
        """Whether all of these may go together. A pod that two budgets count can never be evicted: the
        API server refuses that."""
        left: dict[PodUid, int] = {}
        for pod in pods:
            counted = self.of(pod)
            if len(counted) > 1:
                return False
            for budget in counted:
                left[budget.uid] = left.get(budget.uid, budget.allowed) - 1
                if left[budget.uid] < 0:
                    return False
        return True

    def count(self, namespace: str) -> bool:
        """There is a budget in the namespace; without one no labels need be looked at."""
        return bool(self._budgets.get(namespace))

    @property
    def have_changed(self) -> bool:
        """Some budget has changed since `take_changed`."""
        return bool(self._changed_selectors)

    def of(self, pod: Labelled) -> list[Budget]:
        """The budgets that count the pod; of several, or of too many that could, two."""
        ref, labels = pod
        filed = self._filed.get(ref.namespace, {})
        met = [found for mark in (None, *labels.items()) if (found := filed.get(mark))] if filed else []
        if sum(map(len, met)) > MOST_MET:
            return list(chain.from_iterable(one.values() for one in met))[:2]
        could = chain.from_iterable(one.values() for one in met)
        return [one for one in could if one.selector is not None and one.selector.matches(labels)][:2]

    def _unfile(self, namespace: str, budget: Budget | None) -> None:
        if budget is None:
            return
        for mark in _marks(budget):
            del self._filed[namespace][mark][budget.uid]
            if not self._filed[namespace][mark]:
                del self._filed[namespace][mark]

    def take_changed(self) -> set[tuple[str, Selector]]:
        """Which pods some budget has changed for since the last call, by namespace and labels."""
        changed, self._changed_selectors = self._changed_selectors, set()
        many = {ns for ns, number in Counter(ns for ns, _ in changed).items() if number > _MOST_TURNED}
        return {one for one in changed if one[0] not in many} | {(ns, _ANYBODY) for ns in many}

    def _turn(self, namespace: str, *budgets: Budget | None) -> None:
        selectors = (one.selector for one in budgets if one is not None)
        self._changed_selectors |= {(namespace, selector) for selector in selectors if selector is not None}


def _marks(budget: Budget) -> list[_Mark]:
    """Of one label alone, so that no pod meets a budget twice."""
    if budget.selector is None:
        return []
    fewest = min(budget.selector.lists, key=lambda one: len(one.values), default=None)
    return [None] if fewest is None else [(fewest.key, value) for value in fewest.values]


def _is_too_long(selector: Selector) -> bool:
    tests = selector.requirements
    return len(tests) > MOST_TESTS or sum(len(one.values) for one in tests) > MOST_VALUES
