"""Which activators there are, where each listens, and which of them a model is assigned to. Pure.

An activator outlives its stream here for a while: it works on without one, and connects again to this scaler or to the
next.
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
# A new leader waits this long for the activators of another: they may have to notice first that it is gone (15 s where
# its connection ends without a word), and their Service may still name it.
RETURN_NS: Final = 30 * SECOND_NS
_CLOSED: Final = PortPair(0, 0)


@dataclass(slots=True)
class Activator:
    """`scope`: the one namespace whose models it may be assigned; None: all. `disconnected_ns`: since when it has no
    stream. `has_reported`: until its first reports, which are of all open ports, another scaler may know more of it."""

    uid: PodUid
    name: str
    address: str
    scope: str | None
    draining: bool = False
    disconnected_ns: int | None = None
    has_reported: bool = False
    open: dict[ModelKey, PortPair] = field(default_factory=dict)


class Activators:
    """By the uid of their pod. `began_ns`: since when this scaler leads; activators of another reconnect soon after."""

    def __init__(self, *, began_ns: int) -> None:
        self._began_ns = began_ns
        self._all: dict[PodUid, Activator] = {}
        # Addresses of those that are gone for certain: another scaler cannot know more of them.
        self._gone: dict[str, int] = {}

    def lead(self, now_ns: int) -> None:
        """This scaler leads from now on, or again: what it knew before does not count, and any activator without a stream
        may reconnect."""
        self._began_ns = now_ns
        self._all = {uid: one for uid, one in self._all.items() if one.disconnected_ns is None}

    def __iter__(self) -> Iterator[Activator]:
        return iter(self._all.values())

    def __contains__(self, uid: PodUid) -> bool:
        return uid in self._all

    def __len__(self) -> int:
        """Of those that are connected."""
        return sum(1 for one in self._all.values() if one.disconnected_ns is None)

    def connect(self, uid: PodUid, name: str, address: str, scope: str | None) -> Activator:
        """A stream begins. The ports that it had open count until it reports others."""
        before = self._all.get(uid)
        one = self._all[uid] = Activator(uid, name, address, scope)
        if before is not None and before.address == address:
            one.has_reported, one.open = before.has_reported, before.open
        self._gone.pop(address, None)
        return one

    def set_open(self, one: Activator, model: ModelKey, ports: PortPair) -> bool:
        """The ports of a model that it reports open; True if they have changed."""
        if one.open.get(model, _CLOSED) == ports:
            return False
        if ports == _CLOSED:
            del one.open[model]
        else:
            one.open[model] = ports
        return True

    def disconnect(self, one: Activator, now_ns: int, *, gone: bool = False) -> None:
        """Its stream has ended; `gone`: so has the process. One that has connected again meanwhile stays."""
        if self._all.get(one.uid) is not one:
            return
        if gone or one.draining:
            del self._all[one.uid]
            self._gone[one.address] = now_ns
        else:
            one.disconnected_ns = now_ns

    def expire(self, now_ns: int) -> None:
        for one in list(self._all.values()):
            if one.disconnected_ns is not None and now_ns - one.disconnected_ns >= LINGER_NS:
                del self._all[one.uid]
                self._gone[one.address] = now_ns
        self._gone = {address: at for address, at in self._gone.items() if now_ns - at < RETURN_NS}

    def chosen(self, model: ModelKey) -> tuple[Activator, ...]:
        """Those that a model is to be assigned to: few of many, and mostly the same when one comes or goes (rendezvous
        hashing). Where the model's namespace has its own, no other is."""
        fit = [one for one in self._all.values() if not one.draining and one.scope in (None, model.namespace)]
        own = [one for one in fit if one.scope is not None]
        return tuple(sorted(own or fit, key=lambda one: _weight(model, one.uid))[:MOST])

    def listening(self, chosen: Iterable[Activator], model: ModelKey, ports: PortPair) -> frozenset[str]:
        """The addresses of those that have both ports of a model open."""
        return frozenset(one.address for one in chosen if one.open.get(model) == ports)

    def may_reconnect(self, address: str, now_ns: int) -> bool:
        """Whether an address in a slice from before may be an activator's that has not reported to this scaler yet."""
        if now_ns - self._began_ns >= RETURN_NS or address in self._gone:
            return False
        return not any(one.address == address and one.has_reported for one in self._all.values())


def _weight(model: ModelKey, uid: PodUid) -> bytes:
    return hashlib.blake2b(f"{model} {uid}".encode(), digest_size=8).digest()
