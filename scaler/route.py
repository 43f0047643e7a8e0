"""Between the scaler's core, the API server's slices and the activators: who takes which model's requests, kept so.

    route.begin(now_ns)        # this replica leads, the informers have told all there is, the core has made its first step
    route.switched(action)     # the core's word
    route.touch(model)         # its copies have changed
    route.on_service(change), route.on_slice(change), route.on_client(change)
    await route.run()          # beside all that

Every look at a model tells the writer, the activators and the core what follows; a look that finds nothing new says
nothing new to anybody.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from berth.contract.ids import PodUid
from berth.contract.scaling import Assignment, HoldState, ModelKey, Report
from berth.kube.informer import Change, ChangeKind
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from scaler.activation.activators import Activator
from scaler.activation.attend import NotLeading
from scaler.activation.sources import Sources
from scaler.activation.switch import Asked, Outcome, SliceAction
from scaler.activation.switchboard import Switchboard, Template
from scaler.core.actions import Action, RouteChanged
from scaler.core.cache import Cache, Deployment
from scaler.core.reconcile import RouteStatus
from scaler.go import SECOND_NS

log = logging.getLogger(__name__)

_TURN_SECONDS: Final = 1.0
# A model that sleeps and is left in peace is looked at no oftener.
_SETTLED_NS: Final = 10 * SECOND_NS
_STRAYS_NS: Final = 5 * SECOND_NS
# Looks without a pause for others.
_AT_ONCE: Final = 50


class Core(Protocol):
    """`scaler.core.scaler.Scaler`, as far as it is needed here."""

    def report(self, activator: str, report: Report, now_ns: int) -> list[Action]: ...
    def activator_gone(self, activator: str) -> None: ...
    def set_route(self, model: ModelKey, route: RouteStatus) -> None: ...
    def asked(self, model: ModelKey, now_ns: int) -> Asked | None: ...


class Stream(Protocol):
    """`scaler.activation.attend.Attendance`."""

    def tell(self, model: ModelKey, assignments: Mapping[PodUid, Assignment]) -> None: ...
    def sources_changed(self) -> None: ...
    def end(self) -> None: ...


class Route:
    """It is the core of the streams (`attend.Core`), too. `stream` is set before anything is done."""

    stream: Stream

    def __init__(
        self,
        cache: Cache,
        core: Core,
        *,
        put: Callable[[SliceAction], object],
        act: Callable[[list[Action]], object],
        leader: Callable[[], str] = lambda: "",
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`put` writes a slice, `act` does what the core decides. `leader`: HOST:PORT of who leads."""
        self._cache, self._core, self._put, self._act = cache, core, put, act
        # Who else shows what is held.
        self.held: Callable[[ModelKey], None] = lambda model: None
        self._leader, self._clock_ns = leader, clock_ns
        self.sources = Sources()
        self.board = Switchboard(began_ns=clock_ns())
        # Why a model cannot sleep, of those that would.
        self.troubles: dict[ModelKey, str] = {}
        self._leads = False
        self._due: dict[ModelKey, int] = {}
        self._strays_ns = 0
        self._wake = asyncio.Event()

    # What happens.

    def begin(self, now_ns: int) -> None:
        """All models are looked at once, so that whoever attaches is told of all."""
        for model, deployment in self._cache.deployments.items():
            self.board.set_model(model, _template(deployment))
        self.board.adopt(now_ns)
        self.resume(now_ns)

    def resume(self, now_ns: int) -> None:
        """After `end`: this replica leads again, and no other has meanwhile."""
        self.board.activators.begin(now_ns)
        self._leads = True
        self._look_at(list(self._cache.deployments), now_ns)

    def end(self) -> None:
        """This replica leads no more: whoever is attached is sent to the one that does."""
        self._leads = False
        self.stream.end()

    def switched(self, action: RouteChanged) -> None:
        if action.model not in self._cache.deployments:
            self._forget(action.model)
        else:
            self.touch(action.model)

    def touch(self, model: ModelKey) -> None:
        if model in self._cache.deployments:
            self.board.changed.add(model)
            self._wake.set()

    def on_service(self, change: Change) -> None:
        gone = change.kind is ChangeKind.GONE
        (self.board.service_gone if gone else self.board.set_service)(change.object)
        self._wake.set()

    def on_slice(self, change: Change) -> None:
        gone = change.kind is ChangeKind.GONE
        (self.board.slice_gone if gone else self.board.set_slice)(change.object)
        self._wake.set()

    def on_client(self, change: Change) -> None:
        """A pod that may call some model."""
        gone = change.kind is ChangeKind.GONE
        (self.sources.pod_gone if gone else self.sources.set_pod)(change.object)
        self.stream.sources_changed()

    # What activators do.

    def require_leading(self) -> None:
        if not self._leads:
            raise NotLeading(self._leader())

    def attached(self, activator: Activator) -> None:
        self._look_at(self._held_for(), self._clock_ns())

    def detached(self, activator: Activator) -> None:
        self._core.activator_gone(activator.uid)
        for model in self._held_for():
            self.touch(model)

    def opened(self, model: ModelKey) -> None:
        self.touch(model)

    def reported(self, activator: Activator, report: Report) -> None:
        """Also where the core has nothing to do at once: it may have a question now that must not wait for a tick."""
        self._act(self._core.report(activator.uid, report, self._clock_ns()))
        self.held(report.model)

    # What follows.

    async def run(self) -> None:
        """For ever."""
        while True:
            await wait_until_set(self._wake, timeout_seconds=_TURN_SECONDS)
            await self.turn()

    async def turn(self) -> None:
        """Look at what has changed, and at what is due."""
        self._wake.clear()
        if not self._leads:
            return
        models = list(self._to_look_at(self._clock_ns()))
        for first in range(0, len(models), _AT_ONCE):
            self._look_at(models[first : first + _AT_ONCE], self._clock_ns())
            await asyncio.sleep(0)
        self._end_strays(self._clock_ns())

    def _to_look_at(self, now_ns: int) -> Iterator[ModelKey]:
        changed = set(self.board.changed)
        self.board.changed.clear()
        yield from changed
        for model, due_ns in self._due.items():
            if due_ns <= now_ns and model not in changed:
                yield model

    def _look_at(self, models: Iterable[ModelKey], now_ns: int) -> None:
        for model in models:
            try:
                self._look(model, now_ns)
            except Exception as error:  # one model that nobody has thought of must not hold up the others
                log.error("model not looked at", extra=fields(model=model), exc_info=error)

    def _look(self, model: ModelKey, now_ns: int) -> None:
        deployment = self._cache.deployments.get(model)
        if deployment is None:
            self._forget(model)
            return
        self.board.set_model(model, _template(deployment))
        asked = self._core.asked(model, now_ns)
        if asked is None:  # nothing has been decided of it yet
            return
        outcome = self.board.look(asked, now_ns)
        for action in outcome.slices:
            self._put(action)
        self.stream.tell(model, outcome.assignments)
        self._core.set_route(model, _route_status(outcome))
        self._note_trouble(model, outcome.trouble)
        if outcome.state is HoldState.OFF and not outcome.trouble:
            self._due.pop(model, None)
        else:
            self._due[model] = now_ns + (_SETTLED_NS if _is_settled(outcome, deployment) else SECOND_NS)

    def _note_trouble(self, model: ModelKey, trouble: str) -> None:
        if trouble == self.troubles.get(model, ""):
            return
        if trouble:
            self.troubles[model] = trouble
            log.warning("a model cannot be held for", extra=fields(model=model, reason=trouble))
        else:
            del self.troubles[model]

    def _held_for(self) -> list[ModelKey]:
        return list(self._due)

    def _forget(self, model: ModelKey) -> None:
        """Its slices are strays from now on."""
        self.board.model_gone(model, self._clock_ns())
        self.stream.tell(model, {})
        self._due.pop(model, None)
        self.troubles.pop(model, None)
        self._strays_ns = 0
        self._wake.set()

    def _end_strays(self, now_ns: int) -> None:
        if now_ns - self._strays_ns < _STRAYS_NS:
            return
        self._strays_ns = now_ns
        before = {one.uid for one in self.board.activators}
        for action in self.board.strays(now_ns):
            self._put(action)
        if before != {one.uid for one in self.board.activators}:
            self.board.changed.update(self._due)
            self._wake.set()


def _template(deployment: Deployment) -> Template:
    return Template(deployment.labels, deployment.proxy.door)


def _route_status(outcome: Outcome) -> RouteStatus:
    proven_ns = outcome.proxied_since_ns if outcome.proven else None
    return RouteStatus(proven_ns=proven_ns, quiet=outcome.quiet, trouble=outcome.trouble)


def _is_settled(outcome: Outcome, deployment: Deployment) -> bool:
    """It sleeps, or nobody can hold for it, and little but what is told can change that."""
    if outcome.state is HoldState.OFF:
        return True
    return outcome.proven and not outcome.slices and deployment.replicas == 0
