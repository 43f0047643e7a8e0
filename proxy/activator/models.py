"""All models that one activator holds requests of: what is assigned comes in, what is held is told."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from berth.contract.scaling import Assignment, ModelKey, Report
from berth.runtime.logs import fields
from proxy.activator.hold import Bounds
from proxy.activator.model import Common, HeldModel
from proxy.activator.port import Doorstep
from proxy.downstream.grpc.downstream import GrpcCommon
from proxy.downstream.rest.downstream import RestShared
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster
from proxy.request.replica import Replica
from proxy.transport.tunnel import Watermark
from proxy.upstream.grpc import AnswerReaders

log = logging.getLogger(__name__)

# A model that is gone ends its requests for so long at most.
_ENDING_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.05

IsAllowed = Callable[[ModelKey, str], bool]


class Models:
    """`apply`, `remove` and `close` are for one caller at a time, as is `tick`, every second."""

    def __init__(
        self,
        host: str,
        is_allowed: IsAllowed,
        *,
        doorstep: Doorstep | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: where the ports are opened. `is_allowed`: whether a client at an address may call a model; it is
        asked before anything is read of a connection. `doorstep`: where those wait who may not, or not yet."""
        where = UpstreamCluster()
        self._rest = RestShared(where)
        self._grpc = GrpcCommon(where, _NoQuestions())
        self.bounds = bounds or Bounds()
        self._common = Common(
            host,
            self._bounds_of,
            self._rest,
            self._grpc,
            AnswerReaders(),
            Watermark(),
            is_allowed,
            Doorstep() if doorstep is None else doorstep,
        )
        self._clock = clock
        # By namespace, as long as it has models.
        self._tenants: WeakValueDictionary[str, Bounds] = WeakValueDictionary()
        self._models: dict[ModelKey, HeldModel] = {}
        # Until when.
        self._ending: dict[HeldModel, float] = {}
        self._told: Callable[[Report], None] = lambda report: None

    def _bounds_of(self, namespace: str) -> Bounds:
        bounds = self._tenants.get(namespace)
        if bounds is None:
            bounds = self._tenants[namespace] = self.bounds.of_tenant()
        return bounds

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._models

    def get(self, key: ModelKey) -> HeldModel | None:
        return self._models.get(key)

    def all(self) -> list[HeldModel]:
        return list(self._models.values())

    def on_wake(self, told: Callable[[Report], None]) -> None:
        """`told` gets a report at once when a request waits for which there is no copy, and none waited before."""
        self._told = told

    async def apply(self, assignment: Assignment) -> None:
        """Of one model: the newest, whatever its version; each stream has versions of its own."""
        model = self._models.get(assignment.model)
        if model is not None and _is_another(model.told, assignment):
            self._end(model)
            model = None
        if model is None:
            model = self._models[assignment.model] = HeldModel(assignment, self._common, self._wake)
            log.info("a model is held", extra=fields(model=str(assignment.model)))
        await model.apply(assignment)

    async def remove(self, key: ModelKey) -> None:
        """Its ports close, whoever waits is told, and what is under way ends."""
        model = self._models.get(key)
        if model is not None:
            self._end(model)

    def _end(self, model: HeldModel) -> None:
        del self._models[model.key]
        self._ending[model] = self._clock() + _ENDING_SECONDS
        model.end()
        log.info("a model is held no more", extra=fields(model=str(model.key)))

    def _wake(self, model: HeldModel) -> None:
        self._told(model.report(self._clock()))

    def reports(self, now: float, *, whole: bool = False) -> list[Report]:
        """Of those models of which there is news; `whole`: of all."""
        return [model.report(now) for model in self._models.values() if whole or model.has_news]

    async def tick(self, now: float) -> None:
        """Every second: what has waited too long ends."""
        self._grpc.tick(now)
        for model in [*self._models.values(), *self._ending]:
            try:
                await model.tick(now)
            except (
                Exception
            ) as error:  # one model that nobody has thought of must not end what all others hold
                log.error("a model was not looked at", extra=fields(model=str(model.key)), exc_info=error)
        for model, until in list(self._ending.items()):
            if now > until or not model.is_busy:
                del self._ending[model]
                await model.close()

    async def drain(self) -> None:
        """Nobody new; return when nothing is held and every answer has been delivered."""
        for model in self._models.values():
            model.stop_accepting()
        while any(model.is_busy for model in [*self._models.values(), *self._ending]):
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        for model in [*self._models.values(), *self._ending]:
            await model.close()
        self._models.clear()
        self._ending.clear()
        await self._grpc.close()
        await self._rest.close()


def _is_another(one: Assignment, other: Assignment) -> bool:
    """What its requests are checked by has changed."""
    return one.public_name != other.public_name or one.tls is not other.tls


class _NoQuestions:
    """Each model answers by itself."""

    async def versions(self, copy: Replica) -> list[str]:
        raise NotServed("no copy")

    async def server_metadata(self) -> dict[str, object]:
        raise NotServed("no copy")
