"""PodDisruptionBudgets: how many more pods of each may go. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from binder.labels import Labels, Selector, parse_selector

JsonObject = Mapping[str, Any]
Labelled = tuple[PodRef, Labels]


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
        self._turned: set[tuple[str, Selector]] = set()

    def put(self, budget: JsonObject) -> bool:
        meta, status = budget["metadata"], budget.get("status") or {}
        selector = parse_selector((budget.get("spec") or {}).get("selector"))
        now = Budget(meta["uid"], selector, max(0, status.get("disruptionsAllowed") or 0))
        there = self._budgets.setdefault(meta["namespace"], {})
        known, there[now.uid] = there.get(now.uid), now
        if known == now:
            return False
        self._turn(meta["namespace"], known, now)
        return known is not None and now.eases(known)

    def drop(self, budget: JsonObject) -> bool:
        meta = budget["metadata"]
        known = self._budgets.get(meta["namespace"], {}).pop(meta["uid"], None)
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
        """There is a budget in the namespace; without one nobody's labels need be looked at."""
        return bool(self._budgets.get(namespace))

    @property
    def have_turned(self) -> bool:
        """Some budget has changed since `take_turned`."""
        return bool(self._turned)

    def of(self, pod: Labelled) -> list[Budget]:
        """The budgets that count the pod."""
        ref, labels = pod
        there = self._budgets.get(ref.namespace, {})
        return [one for one in there.values() if one.selector is not None and one.selector.matches(labels)]

    def take_turned(self) -> set[tuple[str, Selector]]:
        """Which pods some budget has changed for since the last call, by namespace and labels."""
        turned, self._turned = self._turned, set()
        return turned

    def _turn(self, namespace: str, *budgets: Budget | None) -> None:
        selectors = (one.selector for one in budgets if one is not None)
        self._turned |= {(namespace, selector) for selector in selectors if selector is not None}
