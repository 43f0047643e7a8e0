"""Memory as a cache: idle models stay loaded until their memory is needed. Pure.

The binder learns which replicas are idle, the least recently used first, and names those whose eviction makes room for one
replica that cannot be scheduled. They are evicted if their model is still idle, of no higher priority, and no earlier eviction
for the same model is under way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from berth.contract.scaling import ModelKey
from scaler.go import SECOND_NS

# Memory is in use until the model is unloaded, which is a while after its pod is gone.
SETTLE_NS: Final = 10 * SECOND_NS
# An eviction that takes longer has failed.
_PATIENCE_NS: Final = 120 * SECOND_NS
_MOST_IDLE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReplica:
    """A replica that may be evicted."""

    pod: str  # its name
    uid: str
    model: ModelKey
    priority: int
    last_used_ns: int

    @property
    def full_name(self) -> str:
        return f"{self.model.namespace}/{self.pod}"


def least_recently_used(idle: Iterable[IdleReplica], *, most: int = _MOST_IDLE) -> tuple[IdleReplica, ...]:
    """Of equally old ones, those of lower priority first."""
    return tuple(sorted(idle, key=lambda one: (one.last_used_ns, one.priority, one.full_name)))[:most]


@dataclass(frozen=True, slots=True)
class _Going:
    """For one model: the pods whose eviction was requested."""

    uids: frozenset[str]
    since_ns: int
    # When the last one was seen to be gone.
    gone_ns: int | None = None


class Evictions:
    """Which replicas are being evicted for which model."""

    def __init__(self) -> None:
        self._going: dict[ModelKey, _Going] = {}

    def chosen(
        self,
        needy: ModelKey,
        priority: int,
        named: Sequence[str],
        idle: Mapping[str, IdleReplica],
        now_ns: int,
    ) -> tuple[IdleReplica, ...]:
        """Of the replicas that the binder named, all or none: fewer would make no room. `idle`: those of now."""
        if needy in self._going:
            return ()
        busy = {uid for going in self._going.values() for uid in going.uids}
        found = [idle[name] for name in named if name in idle]
        if not found or len(found) < len(named):
            return ()
        if any(one.priority > priority or one.uid in busy or one.model == needy for one in found):
            return ()
        self._going[needy] = _Going(frozenset(one.uid for one in found), now_ns)
        return tuple(found)

    def forget_done(self, is_there: Callable[[str], bool], now_ns: int) -> None:
        """`is_there`: whether the pod of a uid still exists."""
        for needy, going in list(self._going.items()):
            after = _after(going, any(map(is_there, going.uids)), now_ns)
            if after is None:
                del self._going[needy]
            else:
                self._going[needy] = after

    def is_going(self, uid: str) -> bool:
        return any(uid in going.uids for going in self._going.values())


def _after(going: _Going, is_there: bool, now_ns: int) -> _Going | None:
    if is_there:
        return going if now_ns - going.since_ns < _PATIENCE_NS else None
    if going.gone_ns is None:
        return _Going(going.uids, going.since_ns, now_ns)
    return going if now_ns - going.gone_ns < SETTLE_NS else None
