"""Keeps the route of every model as it has to be: between the scaler's core, the API server's slices and the activators.

    routes.begin(now_ns)       # this replica leads, the informers are in sync, the core has made its first step
    routes.switched(action)    # the core has decided
    routes.touch(model)        # its replicas have changed
    routes.on_service(change), routes.on_slice(change), routes.on_client(change)
    await routes.run()         # beside all that

Each pass over a model gives the writer, the activators and the core what follows; a pass that finds nothing new changes
nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from berth.contract.activation import Assignment, Report
from berth.contract.ids import PodUid
from berth.contract.scaling import ModelKey
from berth.kube.informer import Change, ChangeKind
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from scaler.activation.activators import Activator
from scaler.activation.control_server import NotLeading
from scaler.activation.route import RouteDecision, RouteSpec, SliceAction
from scaler.activation.routes import RouteReconciler
from scaler.activation.service_index import Template
from scaler.activation.slices import Json
from scaler.core.actions import Action, RouteChanged
from scaler.core.cache import Cache, Deployment
from scaler.core.reconcile import RouteStatus
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

_TURN_SECONDS: Final = 1.0
# Between two passes over a model at zero to which nothing happens.
_SETTLED_NS: Final = 10 * SECOND_NS
_EXPIRE_NS: Final = 5 * SECOND_NS
# Passes without a pause for other work.
_AT_ONCE: Final = 50


class Core(Protocol):
    """`scaler.core.scaler.Scaler`, as far as it is needed here."""

    def report(self, activator: str, report: Report, now_ns: int) -> list[Action]: ...
    def activator_gone(self, activator: str) -> None: ...
    def set_route(self, model: ModelKey, route: RouteStatus) -> None: ...
    def asked(self, model: ModelKey, now_ns: int) -> RouteSpec | None: ...


class Streams(Protocol):
    """`scaler.activation.sessions.Sessions`, as far as it is needed here."""

    def assign(self, model: ModelKey, assignments: Mapping[PodUid, Assignment]) -> None: ...
    def set_client(self, pod: Json) -> None: ...
    def delete_client(self, pod: Json) -> None: ...
    def end(self) -> None: ...


class RouteController:
    """It handles what the control streams bring, too (`control_server.Handler`)."""

    def __init__(
        self,
        cache: Cache,
        core: Core,
        reconciler: RouteReconciler,
        streams: Streams,
        *,
        put: Callable[[SliceAction], object],
        act: Callable[[list[Action]], object],
        on_report: Callable[[ModelKey], object] = lambda model: None,
        leader: Callable[[], str] = lambda: "",
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`put` writes a slice, `act` does what the core decides, `on_report` is called when an activator has reported what
        it buffers of a model. `leader`: HOST:PORT of the replica that leads."""
        self._cache, self._core, self._reconciler, self._streams = cache, core, reconciler, streams
        self._put, self._act, self._on_report = put, act, on_report
        self._leader, self._clock_ns = leader, clock_ns
        # Why requests cannot be routed to the activators, of models that need it.
        self.failures: dict[ModelKey, str] = {}
        self._leads = False
        # When the next pass is due, of models that the activators have to do with.
        self._due: dict[ModelKey, int] = {}
        self._expired_ns = 0
        self._wake = asyncio.Event()

    # What happens.

    def begin(self, now_ns: int) -> None:
        """One pass over all models at once, so that an activator that connects is assigned all of its models."""
        for model, deployment in self._cache.deployments.items():
            self._reconciler.set_model(model, _template(deployment))
        self._reconciler.adopt(now_ns)
        self.resume(now_ns)

    def resume(self, now_ns: int) -> None:
        """After `end`: this replica leads again, and no other has meanwhile."""
        self._reconciler.activators.lead(now_ns)
        self._leads = True
        self._reconcile_all(list(self._cache.deployments), now_ns)

    def end(self) -> None:
        """This replica does not lead any more: its activators are sent to the one that does."""
        self._leads = False
        self._streams.end()

    def switched(self, action: RouteChanged) -> None:
        if action.model not in self._cache.deployments:
            self._forget(action.model)
        else:
            self.touch(action.model)

    def touch(self, model: ModelKey) -> None:
        if model in self._cache.deployments:
            self._reconciler.services.changed.add(model)
            self._wake.set()

    def on_service(self, change: Change) -> None:
        services = self._reconciler.services
        gone = change.kind is ChangeKind.GONE
        (services.delete_service if gone else services.set_service)(change.object)
        self._wake.set()

    def on_slice(self, change: Change) -> None:
        services = self._reconciler.services
        gone = change.kind is ChangeKind.GONE
        (services.delete_slice if gone else services.set_slice)(change.object)
        self._wake.set()

    def on_client(self, change: Change) -> None:
        """A pod that may call some model."""
        gone = change.kind is ChangeKind.GONE
        (self._streams.delete_client if gone else self._streams.set_client)(change.object)

    # What activators do.

    def require_leading(self) -> None:
        if not self._leads:
            raise NotLeading(self._leader())

    def connected(self, activator: Activator) -> None:
        self._reconcile_all(list(self._due), self._clock_ns())

    def disconnected(self, activator: Activator) -> None:
        self._core.activator_gone(activator.uid)
        for model in list(self._due):
            self.touch(model)

    def ports_changed(self, model: ModelKey) -> None:
        self.touch(model)

    def reported(self, activator: Activator, report: Report) -> None:
        """`act` also where the core has nothing to do at once: it may have a request to the binder that must not wait for
        the next step."""
        self._act(self._core.report(activator.uid, report, self._clock_ns()))
        self._on_report(report.model)

    # What follows.

    async def run(self) -> None:
        """For ever."""
        while True:
            await wait_until_set(self._wake, timeout_seconds=_TURN_SECONDS)
            await self.turn()

    async def turn(self) -> None:
        """A pass over each model that has changed or is due."""
        self._wake.clear()
        if not self._leads:
            return
        models = list(self._next(self._clock_ns()))
        for first in range(0, len(models), _AT_ONCE):
            self._reconcile_all(models[first : first + _AT_ONCE], self._clock_ns())
            await asyncio.sleep(0)
        self._expire(self._clock_ns())

    def _next(self, now_ns: int) -> Iterator[ModelKey]:
        services = self._reconciler.services
        changed = set(services.changed)
        services.changed.clear()
        yield from changed
        for model, due_ns in self._due.items():
            if due_ns <= now_ns and model not in changed:
                yield model

    def _reconcile_all(self, models: Iterable[ModelKey], now_ns: int) -> None:
        for model in models:
            try:
                self._reconcile(model, now_ns)
            except Exception as error:  # an unforeseen model must not hold up the others
                log.error("route not reconciled", extra=fields(model=model), exc_info=error)

    def _reconcile(self, model: ModelKey, now_ns: int) -> None:
        deployment = self._cache.deployments.get(model)
        if deployment is None:
            self._forget(model)
            return
        self._reconciler.set_model(model, _template(deployment))
        spec = self._core.asked(model, now_ns)
        if spec is None:  # nothing has been decided of it yet
            return
        decision = self._reconciler.reconcile(spec, now_ns)
        for action in decision.slices:
            self._put(action)
        self._streams.assign(model, decision.assignments)
        self._core.set_route(model, _route_status(decision))
        self._note_failure(model, decision.failure)
        if not decision.needs_activators and not decision.failure:
            self._due.pop(model, None)
        else:
            self._due[model] = now_ns + (_SETTLED_NS if _is_settled(decision, deployment) else SECOND_NS)

    def _note_failure(self, model: ModelKey, failure: str) -> None:
        if failure == self.failures.get(model, ""):
            return
        if failure:
            self.failures[model] = failure
            log.warning("requests cannot be routed to activators", extra=fields(model=model, reason=failure))
        else:
            del self.failures[model]

    def _forget(self, model: ModelKey) -> None:
        """Its slices are stale from now on."""
        self._reconciler.delete_model(model, self._clock_ns())
        self._streams.assign(model, {})
        self._due.pop(model, None)
        self.failures.pop(model, None)
        self._expired_ns = 0
        self._wake.set()

    def _expire(self, now_ns: int) -> None:
        if now_ns - self._expired_ns < _EXPIRE_NS:
            return
        self._expired_ns = now_ns
        activators = self._reconciler.activators
        before = {one.uid for one in activators}
        for action in self._reconciler.expire(now_ns):
            self._put(action)
        if before != {one.uid for one in activators}:
            self._reconciler.services.changed.update(self._due)
            self._wake.set()


def _template(deployment: Deployment) -> Template:
    return Template(deployment.labels, deployment.proxy.ports)


def _route_status(decision: RouteDecision) -> RouteStatus:
    proven_ns = decision.proxied_since_ns if decision.proven else None
    return RouteStatus(proven_ns=proven_ns, quiet=decision.quiet, failure=decision.failure)


def _is_settled(decision: RouteDecision, deployment: Deployment) -> bool:
    """It is at zero, or no activator can take its requests, and only what is observed can change that."""
    if not decision.needs_activators:
        return True
    return decision.proven and not decision.slices and deployment.replicas == 0
