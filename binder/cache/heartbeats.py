"""Until when a node's facts count, by the Leases that its agent renews. Pure; times are monotonic seconds.

An agent of an earlier version renews its Lease beside the binders' own one. Both count, so that agents
and binders may be updated in any order, and a node counts if either Lease does. What an agent has left
behind runs out; while the newer Lease lives and says that the report is behind, the older one is no witness.
"""

import math

from berth.contract.ids import NodeName
from berth.contract.keys import agent_lease_name
from berth.kube.informer import Change, ChangeKind
from berth.kube.lease import Freshness
from berth.kube.times import utc_now

_PREFIX = agent_lease_name("")


class Heartbeats:
    """`report_behind`: the annotation by which an agent says that its report is not the current one."""

    def __init__(self, report_behind: str) -> None:
        self._newer, self._earlier = _Leases(report_behind), _Leases(report_behind)

    def hear(self, change: Change, *, earlier: bool, now: float) -> NodeName | None:
        """Take one change of a Lease and tell whose agent it speaks of; None if of none."""
        name = change.object["metadata"]["name"]
        if not name.startswith(_PREFIX):
            return None
        node = NodeName(name.removeprefix(_PREFIX))
        (self._earlier if earlier else self._newer).hear(node, change, now)
        return node

    def deadline(self, node: NodeName, *, now: float) -> float:
        """Until when the node's facts count; in the past, or -inf, where they do not."""
        newer, earlier = self._newer.deadline(node), self._earlier.deadline(node)
        return newer if self._newer.is_behind(node, now) else max(newer, earlier)


class _Leases:
    """Those of one namespace."""

    def __init__(self, report_behind: str) -> None:
        self._report_behind = report_behind
        self._fresh = Freshness()
        self._behind: set[NodeName] = set()

    def hear(self, node: NodeName, change: Change, now: float) -> None:
        if change.kind is ChangeKind.GONE:
            self._fresh.forget(agent_lease_name(node))
            self._behind.discard(node)
            return
        self._fresh.observe(change.object, monotonic=now, wall=utc_now())
        if self._report_behind in (change.object["metadata"].get("annotations") or {}):
            self._behind.add(node)
        else:
            self._behind.discard(node)

    def is_behind(self, node: NodeName, now: float) -> bool:
        """A living agent says that its report could not be written."""
        return node in self._behind and self._fresh.is_fresh(agent_lease_name(node), monotonic=now)

    def deadline(self, node: NodeName) -> float:
        # A living agent whose report could not be written is no better than one that is gone.
        return -math.inf if node in self._behind else self._fresh.deadline(agent_lease_name(node))
