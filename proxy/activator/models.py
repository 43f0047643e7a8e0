"""All models of one activator: assignments come in, reports go out."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

from berth.contract.activation import Assignment, Report
from berth.contract.scaling import ModelKey
from berth.runtime.logs import fields
from proxy.activator.bounds import Bounds
from proxy.activator.model import BufferedModel, Common
from proxy.activator.port import PendingClients
from proxy.downstream.grpc.downstream import GrpcCommon
from proxy.downstream.rest.downstream import RestShared
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster
from proxy.request.replica import Replica
from proxy.transport.tunnel import Watermark
from proxy.upstream.grpc import AnswerReaders

log = logging.getLogger(__name__)

# A model that is removed ends its requests for so long at most.
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
        on_cold_start: Callable[[Report], object] = lambda report: None,
        pending: PendingClients | None = None,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: where the ports are opened. `is_allowed`: whether a client at an address may call a model; it is
        asked before anything is read of a connection. `on_cold_start` gets a report at once when a request waits, no replica
        is ready, and no request waited before. `pending`: clients that may not connect, or not yet."""
        cluster = UpstreamCluster()
        self._rest = RestShared(cluster)
        self._grpc = GrpcCommon(cluster, _NoQuestions())
        self.bounds = bounds or Bounds()
        self._common = Common(
            host,
            self._bounds_of,
            self._rest,
            self._grpc,
            AnswerReaders(),
            Watermark(),
            is_allowed,
            PendingClients() if pending is None else pending,
        )
        self._on_cold_start, self._clock = on_cold_start, clock
        # By namespace, as long as it has models.
        self._tenants: WeakValueDictionary[str, Bounds] = WeakValueDictionary()
        self._models: dict[ModelKey, BufferedModel] = {}
        # Removed ones that end their requests, and until when.
        self._ending: dict[BufferedModel, float] = {}

    def _bounds_of(self, namespace: str) -> Bounds:
        bounds = self._tenants.get(namespace)
        if bounds is None:
            bounds = self._tenants[namespace] = self.bounds.of_tenant()
        return bounds

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._models

    def get(self, key: ModelKey) -> BufferedModel | None:
        return self._models.get(key)

    def all(self) -> list[BufferedModel]:
        return list(self._models.values())

    async def apply(self, assignment: Assignment) -> None:
        """Of one model: the newest, whatever its version; each stream has versions of its own."""
        model = self._models.get(assignment.model)
        if model is not None and _is_another(model.assignment, assignment):
            self._end(model)
            model = None
        if model is None:
            model = self._models[assignment.model] = BufferedModel(assignment, self._common, self._cold_start)
            log.info("model assigned", extra=fields(model=str(assignment.model)))
        await model.apply(assignment)

    async def remove(self, key: ModelKey) -> None:
        """Its ports close, requests that wait are refused, and what is under way ends."""
        model = self._models.get(key)
        if model is not None:
            self._end(model)

    def _end(self, model: BufferedModel) -> None:
        del self._models[model.key]
        self._ending[model] = self._clock() + _ENDING_SECONDS
        model.end()
        log.info("model removed", extra=fields(model=str(model.key)))

    def _cold_start(self, model: BufferedModel) -> None:
        self._on_cold_start(model.report(self._clock()))

    def reports(self, now: float, *, whole: bool = False) -> list[Report]:
        """Of those models of which there is news; `whole`: of all."""
        return [model.report(now) for model in self._models.values() if whole or model.has_news]

    async def tick(self, now: float) -> None:
        """Every second: what has waited too long ends."""
        self._grpc.tick(now)
        for model in [*self._models.values(), *self._ending]:
            try:
                await model.tick(now)
            except Exception as error:  # an unforeseen model must not end what all others buffer
                log.error("a model's tick failed", extra=fields(model=str(model.key)), exc_info=error)
        for model, until in list(self._ending.items()):
            if now > until or not model.is_busy:
                del self._ending[model]
                await model.close()

    async def drain(self) -> None:
        """No new clients; return when nothing is buffered and every answer has been delivered."""
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
        raise NotServed("no replica")

    async def server_metadata(self) -> dict[str, object]:
        raise NotServed("no replica")
