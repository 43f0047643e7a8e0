"""The routes of all models, with the ports and the activators that they share. Pure: `route_controller` does what it
decides.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from berth.contract.scaling import ModelKey
from scaler.activation.activators import Activators
from scaler.activation.ports import PortAllocator, PortPair
from scaler.activation.route import (
    Delete,
    ObservedService,
    RouteDecision,
    RouteSpec,
    RouteState,
    reconcile_route,
)
from scaler.activation.service_index import ServiceIndex, Template

log = logging.getLogger(__name__)


class RouteReconciler:
    """`began_ns`: since when this scaler leads."""

    def __init__(self, *, began_ns: int, ports: PortAllocator | None = None) -> None:
        self.activators = Activators(began_ns=began_ns)
        self.services = ServiceIndex()
        self._ports = PortAllocator() if ports is None else ports
        self._states: dict[ModelKey, RouteState] = {}

    def set_model(self, model: ModelKey, template: Template) -> None:
        self.services.set_model(model, template)
        self._states.setdefault(model, RouteState())

    def delete_model(self, model: ModelKey, now_ns: int) -> None:
        """It is not scaled any more; its ports are free after a while."""
        self.services.delete_model(model)
        self._states.pop(model, None)
        self._ports.release(model, now_ns)

    def adopt(self, now_ns: int) -> None:
        """Keep the ports of the slices that exist: once, with everything observed, before the first `reconcile`. Ports that
        slices of two models have are neither's: else a tenant that can write a slice with another model's ports would get
        its requests."""
        observed = {model: self.services.observed(model) for model in self._states}
        for pair in self._disputed(observed):
            log.warning(
                "ports that slices of several models name are not used", extra={"fields": {"port": pair.rest}}
            )
            self._ports.quarantine(pair, now_ns)
        for model, services in observed.items():
            for port in _first_ports(services):
                self._ports.adopt(model, port)

    def _disputed(self, observed: Mapping[ModelKey, Iterable[ObservedService]]) -> list[PortPair]:
        claims: dict[PortPair, set[ModelKey]] = defaultdict(set)
        for model, services in observed.items():
            for port in _first_ports(services):
                if (pair := self._ports.pair_of(port)) is not None:
                    claims[pair].add(model)
        return [pair for pair, models in claims.items() if len(models) > 1]

    def reconcile(self, spec: RouteSpec, now_ns: int) -> RouteDecision:
        """One pass over one model, which has been set."""
        model = spec.model
        self.services.changed.discard(model)
        self._states[model], decision = reconcile_route(
            self._states[model],
            spec,
            self.services.observed(model),
            self.activators,
            self._ports.allocate,
            now_ns,
        )
        return decision

    def expire(self, now_ns: int) -> tuple[Delete, ...]:
        """Call it every few seconds: forgets what has been gone for long, and returns the slices of ours that nothing needs
        any more."""
        self._ports.expire(now_ns)
        self.activators.expire(now_ns)
        return tuple(self.services.stale_slices())


def _first_ports(services: Iterable[ObservedService]) -> list[int]:
    """As slices of ours are adopted by."""
    ours = (service.ours for service in services)
    return [one.ports[0].number for one in ours if one is not None and one.ports]
