"""Who takes a model's requests, its copies or the activators, and the way from the one to the other. Pure.

To zero:  the activators are told to hold · each says that its ports are open · the slice with them is written ·
          seen written: the model is `proven`, and its last copy may go once it is quiet, or after the grace period
Up:       a copy is ready in the slices of the Service's controller · ours goes · seen gone: the activators pass on what
          still comes, and ask clients to connect anew · after a minute their ports close

One look at a model tells all that is to be done now, so that nothing hangs on what was done before: a scaler that
starts, or a write that was lost, changes nothing but the time it takes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from berth.contract.ids import PodUid
from berth.contract.scaling import Assignment, HoldLimits, HoldState, ModelKey, PodEndpoint
from scaler.activation.activators import Activator, Activators
from scaler.activation.ports import PortPair, Ports
from scaler.activation.slices import BerthSlice, Service, wanted_slice
from scaler.go import SECOND_NS

# Kube-proxies, and clients that keep connections, learn of a changed slice within this time.
FORWARD_NS: Final = 60 * SECOND_NS
# Without an arrival at its copies for so long, nobody is led to them any more.
QUIET_NS: Final = 5 * SECOND_NS

# Of one model: each costs a slice, and a look at each of them.
MOST_SERVICES: Final = 16

NO_SERVICE: Final = "no Service with an IPv4 address of its own leads to the ports of its proxy"
TOO_MANY_SERVICES: Final = f"more than {MOST_SERVICES} Services lead to its copies"
NO_ACTIVATOR: Final = "no activator is attached"
NO_PORTS: Final = "all ports of the activators are taken, or too many by models of this namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Of one model. `away`: it has no copy that may serve, or is to lose the last one.

    `last_arrival_ns`: of a request at one of its copies, as far as all of them have told lately; None: unknown.
    """

    model: ModelKey
    away: bool
    public_name: str
    endpoints: tuple[PodEndpoint, ...] = ()
    tls: bool = False
    limits: HoldLimits = HoldLimits()
    clients: frozenset[str] = frozenset()
    hopeless: str = ""
    waits_for: str = ""
    last_arrival_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A Service as the API server shows it. `ready`: its endpoints, by the slices that are not ours; `ours`: that
    slice, `since_ns` when; None: there is none. `shared_with`: another model that it leads to, too."""

    service: Service
    ready: int
    ours: BerthSlice | None = None
    since_ns: int = 0
    shared_with: ModelKey | None = None


@dataclass(frozen=True, slots=True)
class Apply:
    slice: BerthSlice


@dataclass(frozen=True, slots=True)
class Delete:
    slice: BerthSlice


SliceAction = Apply | Delete


@dataclass(frozen=True, slots=True)
class Outcome:
    """`assignments`: what each activator is to do for the model, by its uid; the others have nothing to do with it.

    `proven`: requests are led to activators that listen, since `proxied_since_ns`; `quiet`: and no copy has had one for
    a while. `trouble`: why it cannot be led there.
    """

    state: HoldState = HoldState.OFF
    assignments: Mapping[PodUid, Assignment] = field(default_factory=dict)
    slices: tuple[SliceAction, ...] = ()
    proven: bool = False
    proxied_since_ns: int | None = None
    quiet: bool = False
    trouble: str = ""


class Switch:
    """Of one model. Call `look` when something of it has changed, and every second while its state is not OFF."""

    __slots__ = (
        "_forward_since_ns",
        "_is_fresh",
        "_let_go",
        "_ports",
        "_proxied_since_ns",
        "_state",
        "model",
    )

    def __init__(self, model: ModelKey, ports: Ports) -> None:
        self.model, self._ports = model, ports
        self._state = HoldState.OFF
        self._forward_since_ns = 0
        self._proxied_since_ns: int | None = None
        # Nobody knows yet since when the slices that are there have been what they are.
        self._is_fresh = True
        # Activators that were chosen, and since when they are not any more.
        self._let_go: dict[PodUid, int | None] = {}

    def adopt(self, services: Iterable[Seen]) -> None:
        """Keep the ports of the slices that stand. For all models, before the first look at one."""
        for seen in services:
            if seen.ours is not None and seen.ours.ports:
                self._ports.adopt(self.model, seen.ours.ports[0].number)

    def look(self, asked: Asked, services: Sequence[Seen], activators: Activators, now_ns: int) -> Outcome:
        """What is to be done now."""
        trouble = _trouble(services) if asked.away else ""
        is_away = asked.away and not trouble
        self._move(is_away, services, now_ns)
        if self._state is HoldState.OFF:
            return Outcome(trouble=trouble)
        pair = self._ports.of(self.model)
        if pair is None:
            self._state = HoldState.OFF
            return Outcome(slices=tuple(_deleted(services)), trouble=NO_PORTS)
        chosen = activators.chosen(self.model)
        listening = activators.listening(chosen, self.model, pair)
        is_proven = is_away and all(_leads_there(seen, pair, listening) for seen in services)
        self._note(is_proven, services, now_ns)
        return Outcome(
            state=self._state,
            assignments=self._assignments(asked, pair, chosen, activators, now_ns),
            slices=tuple(_slices(is_away, services, pair, listening, activators, now_ns)),
            proven=is_proven,
            proxied_since_ns=self._proxied_since_ns,
            quiet=is_proven and self._is_quiet(asked, now_ns),
            trouble=trouble if chosen else trouble or NO_ACTIVATOR,
        )

    def _move(self, is_away: bool, services: Iterable[Seen], now_ns: int) -> None:
        """A slice that stands leads requests to the activators, whatever is wanted."""
        if is_away or any(seen.ours is not None for seen in services):
            self._state = HoldState.HOLD
        elif self._state is HoldState.HOLD:
            self._state, self._forward_since_ns = HoldState.FORWARD, now_ns
        elif self._state is HoldState.FORWARD and now_ns - self._forward_since_ns >= FORWARD_NS:
            self._state = HoldState.OFF
            self._let_go.clear()

    def _note(self, is_proven: bool, services: Iterable[Seen], now_ns: int) -> None:
        if not is_proven:
            self._proxied_since_ns = None
        elif self._proxied_since_ns is None:
            written_ns = max(seen.since_ns for seen in services)
            self._proxied_since_ns = min(written_ns, now_ns) if self._is_fresh else now_ns
        # Until those that another scaler had attached have come, nothing can be proven. What is still to be written has
        # not stood for long, whatever the API server's clock will say of it.
        stand = all(seen.ours is not None for seen in services)
        self._is_fresh = self._is_fresh and stand and not is_proven

    def _is_quiet(self, asked: Asked, now_ns: int) -> bool:
        since_ns, last_ns = self._proxied_since_ns, asked.last_arrival_ns
        return since_ns is not None and last_ns is not None and now_ns - max(since_ns, last_ns) >= QUIET_NS

    def _assignments(
        self,
        asked: Asked,
        pair: PortPair,
        chosen: Sequence[Activator],
        activators: Activators,
        now_ns: int,
    ) -> dict[PodUid, Assignment]:
        """Who is not chosen any more passes on what still comes, as all do when the model is up."""
        told = {one.uid: _assignment(asked, self._state, pair, len(chosen)) for one in chosen}
        for uid in told:
            self._let_go[uid] = None
        for uid, since_ns in list(self._let_go.items()):
            if uid in told:
                continue
            since_ns = self._let_go[uid] = now_ns if since_ns is None else since_ns
            if uid not in activators or now_ns - since_ns >= FORWARD_NS:
                del self._let_go[uid]
            else:
                told[uid] = _assignment(asked, HoldState.FORWARD, pair, len(chosen))
        return told


def _trouble(services: Sequence[Seen]) -> str:
    """Why no activator may hold for a model."""
    if not services:
        return NO_SERVICE
    if len(services) > MOST_SERVICES:
        return TOO_MANY_SERVICES
    for seen in services:
        if seen.shared_with is not None:
            return f"Service {seen.service.ref.name} leads to {seen.shared_with} as well"
    return ""


def _leads_there(seen: Seen, pair: PortPair, listening: frozenset[str]) -> bool:
    """Whether a Service leads to activators, all of which listen."""
    ours = seen.ours
    if ours is None or not ours.addresses or not listening.issuperset(ours.addresses):
        return False
    return ours == wanted_slice(seen.service, pair, ours.addresses)


def _slices(
    is_away: bool,
    services: Iterable[Seen],
    pair: PortPair,
    listening: frozenset[str],
    activators: Activators,
    now_ns: int,
) -> Iterator[SliceAction]:
    for seen in services:
        standing = () if seen.ours is None else seen.ours.addresses
        if not is_away and seen.ready:
            yield from _deleted([seen])
        elif is_away or seen.ours is not None:
            returning = {address for address in standing if activators.may_come_back(address, now_ns)}
            wanted = wanted_slice(seen.service, pair, listening | returning)
            # An empty one is nobody's help, but where one stands its addresses are to go.
            if wanted != seen.ours and (wanted.addresses or seen.ours is not None):
                yield Apply(wanted)


def _deleted(services: Iterable[Seen]) -> Iterator[SliceAction]:
    return (Delete(seen.ours) for seen in services if seen.ours is not None)


def _assignment(asked: Asked, state: HoldState, pair: PortPair, share: int) -> Assignment:
    return Assignment(
        version=0,  # whoever tells it numbers it
        model=asked.model,
        public_name=asked.public_name,
        state=state,
        rest_port=pair.rest,
        grpc_port=pair.grpc,
        tls=asked.tls,
        endpoints=asked.endpoints,
        limits=asked.limits,
        clients=asked.clients,
        hopeless=asked.hopeless,
        waits_for=asked.waits_for,
        share=max(share, 1),
    )
