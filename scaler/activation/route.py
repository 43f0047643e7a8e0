"""Who takes the requests to a model's Services, its replicas or the activators, and the way from one to the other. Pure.

The mode is that of a Knative ServerlessService:

    to PROXY  the activators are assigned the model · each reports its ports open · the slice with their addresses is
              written · seen written: the route is `proven`, and the last replica may go once it is quiet, or after the
              grace period
    to SERVE  a replica is ready in the slices of the Service's controller · ours is deleted · seen deleted: the activators
              forward what still comes, and ask clients to connect anew · after a minute their ports close

Each pass returns all that is to be done now, whatever earlier passes did: a scaler that starts, or a write that was lost,
changes only how long it takes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from berth.contract.activation import Assignment, BufferLimits, ReplicaEndpoint, RouteMode
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from scaler.activation.activators import Activator, Activators
from scaler.activation.ports import PortPair
from scaler.activation.slices import BerthSlice, Service, desired_slice
from scaler.go import SECOND_NS

# Kube-proxies, and clients that keep connections, learn of a changed slice within this time.
FORWARD_NS: Final = 60 * SECOND_NS
# Once no request has come to the replicas for this long, no client is routed to them any more.
QUIET_NS: Final = 5 * SECOND_NS

# Of one model: each costs a slice, and a look at each of them.
MOST_SERVICES: Final = 16

NO_SERVICE: Final = "no Service with an IPv4 address of its own leads to the ports of its proxy"
TOO_MANY_SERVICES: Final = f"more than {MOST_SERVICES} Services lead to its replicas"
NO_ACTIVATOR: Final = "no activator is connected"
NO_PORTS: Final = "all ports of the activators are taken, or too many by models of this namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """Of one model. `needs_proxy`: no replica may serve, or the last one is about to go.

    `last_arrival_ns`: of a request at one of its replicas, if all of them have reported lately; None: unknown.
    """

    model: ModelKey
    needs_proxy: bool
    public_name: str
    endpoints: tuple[ReplicaEndpoint, ...] = ()
    tls: bool = False
    limits: BufferLimits = BufferLimits()
    clients: frozenset[str] = frozenset()
    unavailable: str = ""
    waiting_for: str = ""
    last_arrival_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ObservedService:
    """A Service as the API server has it. `ready`: its endpoints, by the slices that are not ours; `ours`: our slice,
    created at `since_ns`; None: there is none. `shared_with`: another model that the Service leads to, too."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteState:
    """Of one model, from one pass to the next.

    `forwarding_since_ns`: in mode SERVE, since when activators forward what still comes; None: they have nothing to do.
    `proxied_since_ns`: since when the route to the activators is proven. `is_fresh`: this scaler does not know yet since
    when the slices that it found have existed. `released`: activators that the model was assigned to, and since when it
    is not any more.
    """

    mode: RouteMode = RouteMode.SERVE
    forwarding_since_ns: int | None = None
    proxied_since_ns: int | None = None
    is_fresh: bool = True
    released: Mapping[PodUid, int | None] = field(default_factory=dict)

    @property
    def needs_activators(self) -> bool:
        return self.mode is RouteMode.PROXY or self.forwarding_since_ns is not None


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """`assignments`: by the activators' uids; from the others the model is removed. `needs_activators`: pass again every
    second, else when something has changed.

    `proven`: Services lead to activators that listen, since `proxied_since_ns`; `quiet`: and no replica has had a request
    for a while. `failure`: why the model's requests cannot be routed to the activators.
    """

    mode: RouteMode = RouteMode.SERVE
    needs_activators: bool = False
    assignments: Mapping[PodUid, Assignment] = field(default_factory=dict)
    slices: tuple[SliceAction, ...] = ()
    proven: bool = False
    proxied_since_ns: int | None = None
    quiet: bool = False
    failure: str = ""


def reconcile_route(
    state: RouteState,
    spec: RouteSpec,
    services: Sequence[ObservedService],
    activators: Activators,
    allocate: Callable[[ModelKey], PortPair | None],
    now_ns: int,
) -> tuple[RouteState, RouteDecision]:
    """One pass over one model. `allocate`: the ports of a model that needs some."""
    failure = _failure(services) if spec.needs_proxy else ""
    to_activators = spec.needs_proxy and not failure
    state = _with_mode(state, to_activators, services, now_ns)
    if not state.needs_activators:
        return state, RouteDecision(failure=failure)
    pair = allocate(spec.model)
    if pair is None:
        state = replace(state, mode=RouteMode.SERVE, forwarding_since_ns=None)
        return state, RouteDecision(slices=tuple(_deleted(services)), failure=NO_PORTS)
    chosen = activators.chosen(spec.model)
    listening = activators.listening(chosen, spec.model, pair)
    proven = to_activators and all(_leads_there(service, pair, listening) for service in services)
    state = _with_proof(state, proven, services, now_ns)
    state = replace(state, released=_released(state, chosen, activators, now_ns))
    return state, RouteDecision(
        mode=state.mode,
        needs_activators=True,
        assignments=_assignments(state, spec, pair, chosen),
        slices=tuple(_slices(to_activators, services, pair, listening, activators, now_ns)),
        proven=proven,
        proxied_since_ns=state.proxied_since_ns,
        quiet=proven and _is_quiet(state, spec, now_ns),
        failure=failure if chosen else failure or NO_ACTIVATOR,
    )


# The mode.


def _with_mode(
    state: RouteState, to_activators: bool, services: Iterable[ObservedService], now_ns: int
) -> RouteState:
    """A slice of ours that exists leads requests to the activators, whatever is desired."""
    if to_activators or any(service.ours is not None for service in services):
        return replace(state, mode=RouteMode.PROXY, forwarding_since_ns=None)
    if state.mode is RouteMode.PROXY:
        return replace(state, mode=RouteMode.SERVE, forwarding_since_ns=now_ns)
    since_ns = state.forwarding_since_ns
    if since_ns is not None and now_ns - since_ns >= FORWARD_NS:
        return replace(state, forwarding_since_ns=None, released={})
    return state


def _failure(services: Sequence[ObservedService]) -> str:
    """Why the activators cannot take the model's requests."""
    if not services:
        return NO_SERVICE
    if len(services) > MOST_SERVICES:
        return TOO_MANY_SERVICES
    for service in services:
        if service.shared_with is not None:
            return f"Service {service.service.ref.name} leads to {service.shared_with} as well"
    return ""


# Whether requests get there.


def _leads_there(service: ObservedService, pair: PortPair, listening: frozenset[str]) -> bool:
    """Whether a Service leads to activators, all of which listen."""
    ours = service.ours
    if ours is None or not ours.addresses or not listening.issuperset(ours.addresses):
        return False
    return ours == desired_slice(service.service, pair, ours.addresses)


def _with_proof(
    state: RouteState, proven: bool, services: Iterable[ObservedService], now_ns: int
) -> RouteState:
    since_ns = state.proxied_since_ns
    if not proven:
        since_ns = None
    elif since_ns is None:
        written_ns = max(service.since_ns for service in services)
        since_ns = min(written_ns, now_ns) if state.is_fresh else now_ns
    # Until the activators of another scaler have come here, nothing can be proven. A slice that is still to be written has
    # not existed for long, whatever the API server's clock will say of it.
    all_exist = all(service.ours is not None for service in services)
    return replace(state, proxied_since_ns=since_ns, is_fresh=state.is_fresh and all_exist and not proven)


def _is_quiet(state: RouteState, spec: RouteSpec, now_ns: int) -> bool:
    since_ns, last_ns = state.proxied_since_ns, spec.last_arrival_ns
    return since_ns is not None and last_ns is not None and now_ns - max(since_ns, last_ns) >= QUIET_NS


# What is written.


def _slices(
    to_activators: bool,
    services: Iterable[ObservedService],
    pair: PortPair,
    listening: frozenset[str],
    activators: Activators,
    now_ns: int,
) -> Iterator[SliceAction]:
    for service in services:
        addresses = () if service.ours is None else service.ours.addresses
        if not to_activators and service.ready:
            yield from _deleted([service])
        elif to_activators or service.ours is not None:
            returning = {address for address in addresses if activators.may_reconnect(address, now_ns)}
            desired = desired_slice(service.service, pair, listening | returning)
            # An empty slice serves no purpose, but where one exists its addresses are to go.
            if desired != service.ours and (desired.addresses or service.ours is not None):
                yield Apply(desired)


def _deleted(services: Iterable[ObservedService]) -> Iterator[SliceAction]:
    return (Delete(service.ours) for service in services if service.ours is not None)


# What activators are assigned.


def _released(
    state: RouteState, chosen: Iterable[Activator], activators: Activators, now_ns: int
) -> dict[PodUid, int | None]:
    """Activators that are chosen now (None), or were until then and still forward."""
    released: dict[PodUid, int | None] = {**state.released, **{one.uid: None for one in chosen}}
    current = {one.uid for one in chosen}
    for uid in released.keys() - current:
        since_ns = released[uid]
        released[uid] = since_ns = now_ns if since_ns is None else since_ns
        if uid not in activators or now_ns - since_ns >= FORWARD_NS:
            del released[uid]
    return released


def _assignments(
    state: RouteState, spec: RouteSpec, pair: PortPair, chosen: Sequence[Activator]
) -> dict[PodUid, Assignment]:
    """An activator that is not chosen any more forwards what still comes, as all do once a replica is ready."""
    return {
        uid: _assignment(spec, state.mode if since_ns is None else RouteMode.SERVE, pair, len(chosen))
        for uid, since_ns in state.released.items()
    }


def _assignment(spec: RouteSpec, mode: RouteMode, pair: PortPair, activators: int) -> Assignment:
    return Assignment(
        version=0,  # each session has its own
        model=spec.model,
        public_name=spec.public_name,
        mode=mode,
        rest_port=pair.rest,
        grpc_port=pair.grpc,
        tls=spec.tls,
        endpoints=spec.endpoints,
        limits=spec.limits,
        clients=spec.clients,
        unavailable=spec.unavailable,
        waiting_for=spec.waiting_for,
        activators=max(activators, 1),
    )
