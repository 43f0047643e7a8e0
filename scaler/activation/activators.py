"""Which activators there are, where each listens, and which of them hold for a model. Pure.

What is known of one outlives its stream for a while: it goes on by itself, and comes back to this scaler or to the next.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from scaler.activation.ports import PortPair
from scaler.go import SECOND_NS

# A slice has no more of them, and no model needs more.
MOST: Final = 8
# Longer than an activator's longest pause before it dials again.
LINGER_NS: Final = 10 * SECOND_NS
# A new leader waits for so long for those that another had attached: they may have to notice first that it is gone (15 s
# where it says nothing), and their Service may still name it.
RETURN_NS: Final = 30 * SECOND_NS
_NOWHERE: Final = PortPair(0, 0)


@dataclass(slots=True)
class Activator:
    """`scope`: the one namespace whose models it holds for; None: all. `detached_ns`: since when it has no stream."""

    uid: PodUid
    name: str
    address: str
    scope: str | None
    leaving: bool = False
    detached_ns: int | None = None
    # Its first reports are of all that it has open; until they are here another scaler may know more of it.
    has_told: bool = False
    open: dict[ModelKey, PortPair] = field(default_factory=dict)


class Activators:
    """By the uid of their pod. `began_ns`: since when this scaler leads; what others had attached comes back soon."""

    def __init__(self, *, began_ns: int) -> None:
        self._began_ns = began_ns
        self._all: dict[PodUid, Activator] = {}
        # Of those that are gone for certain: they are not what another scaler may know of.
        self._dead: dict[str, int] = {}

    def begin(self, now_ns: int) -> None:
        """This scaler leads from now on, or again: what it knew as another's deputy is nothing, and whoever has no stream
        now may come back."""
        self._began_ns = now_ns
        self._all = {uid: one for uid, one in self._all.items() if one.detached_ns is None}

    def __iter__(self) -> Iterator[Activator]:
        return iter(self._all.values())

    def __contains__(self, uid: PodUid) -> bool:
        return uid in self._all

    def __len__(self) -> int:
        """Of those that are attached."""
        return sum(1 for one in self._all.values() if one.detached_ns is None)

    def attach(self, uid: PodUid, name: str, address: str, scope: str | None) -> Activator:
        """A stream begins. What it had open counts until it says otherwise."""
        before = self._all.get(uid)
        one = self._all[uid] = Activator(uid, name, address, scope)
        if before is not None and before.address == address:
            one.has_told, one.open = before.has_told, before.open
        self._dead.pop(address, None)
        return one

    def opened(self, one: Activator, model: ModelKey, ports: PortPair) -> bool:
        """What it says of a model's ports; True if that is news."""
        if one.open.get(model, _NOWHERE) == ports:
            return False
        if ports == _NOWHERE:
            del one.open[model]
        else:
            one.open[model] = ports
        return True

    def detach(self, one: Activator, now_ns: int, *, dead: bool = False) -> None:
        """Its stream has ended; `dead`: so has it. One that has attached anew meanwhile stays."""
        if self._all.get(one.uid) is not one:
            return
        if dead or one.leaving:
            del self._all[one.uid]
            self._dead[one.address] = now_ns
        else:
            one.detached_ns = now_ns

    def expire(self, now_ns: int) -> None:
        for one in list(self._all.values()):
            if one.detached_ns is not None and now_ns - one.detached_ns >= LINGER_NS:
                del self._all[one.uid]
                self._dead[one.address] = now_ns
        self._dead = {address: at for address, at in self._dead.items() if now_ns - at < RETURN_NS}

    def chosen(self, model: ModelKey) -> tuple[Activator, ...]:
        """Those that are to hold for a model: few of many, and mostly the same when one comes or goes (rendezvous
        hashing). Where the model's namespace has its own, no other does."""
        fit = [one for one in self._all.values() if not one.leaving and one.scope in (None, model.namespace)]
        own = [one for one in fit if one.scope is not None]
        return tuple(sorted(own or fit, key=lambda one: _weight(model, one.uid))[:MOST])

    def listening(self, chosen: Iterable[Activator], model: ModelKey, ports: PortPair) -> frozenset[str]:
        """The addresses of those that have both ports of a model open."""
        return frozenset(one.address for one in chosen if one.open.get(model) == ports)

    def may_come_back(self, address: str, now_ns: int) -> bool:
        """Whether an address that a slice has from before may be an activator's that is on its way to this scaler."""
        if now_ns - self._began_ns >= RETURN_NS or address in self._dead:
            return False
        return not any(one.address == address and one.has_told for one in self._all.values())


def _weight(model: ModelKey, uid: PodUid) -> bytes:
    return hashlib.blake2b(f"{model} {uid}".encode(), digest_size=8).digest()
