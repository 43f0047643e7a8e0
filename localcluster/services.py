"""Services: where a connection to one may go, as kube-proxy takes it from all EndpointSlices of the Service.

Pods have loopback addresses, which the API server takes in no EndpointSlice and gives to no Service: what is
127.X.a.b on this machine is 10.X.a.b there (`addresses.yaml`), for pods and for Services alike.
"""

import asyncio
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network
from typing import Any, NamedTuple

from berth.contract.endpoint import Endpoint
from berth.kube.client import KubeClient
from berth.kube.informer import Informer
from berth.runtime.tasks import supervise

JsonObject = dict[str, Any]

_SERVICES = "/api/v1/services"
_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
_SERVICE_NAME = "kubernetes.io/service-name"
# Of a cluster's /16; its nodes begin at 0.
_SERVICES_SUBNET = 255


def here(address: str) -> str:
    """Where an address of an EndpointSlice or a Service is on this machine."""
    first, _, rest = address.partition(".")
    return f"127.{rest}" if first == "10" else address


def service_range(network: str) -> IPv4Network:
    """The addresses of Services of the cluster that has 127.X, as the API server shows them."""
    return IPv4Network(f"10.{network.partition('.')[2]}.{_SERVICES_SUBNET}.0/24")


class ServicePort(NamedTuple):
    """`port` is the Service's name for it, "" where it has one port only."""

    namespace: str
    service: str
    port: str


def backends(slices: Iterable[JsonObject], port: str) -> tuple[Endpoint, ...]:
    """Where a new connection may go: the union of a Service's slices, each with its own number for the port.

    Ready endpoints; where none is ready, those that are ending and serve on, as kube-proxy has it
    (KEP-1669, proxy terminating endpoints).
    """
    found = list(_endpoints(slices, port))
    ready = [endpoint for endpoint, conditions in found if conditions.get("ready") is not False]
    ending = [
        endpoint
        for endpoint, conditions in found
        if conditions.get("serving") and conditions.get("terminating")
    ]
    return tuple(sorted(set(ready or ending), key=str))


def _endpoints(slices: Iterable[JsonObject], port: str) -> Iterator[tuple[Endpoint, JsonObject]]:
    for one in slices:
        numbers = [p["port"] for p in one.get("ports") or [] if (p.get("name") or "") == port]
        for endpoint in one.get("endpoints") or [] if numbers else []:
            yield (
                Endpoint(here(endpoint["addresses"][0]), numbers[0]),
                endpoint.get("conditions") or {},
            )


class Services:
    """A mirror of all Services and EndpointSlices. `changed` is set after each change."""

    def __init__(self, client: KubeClient) -> None:
        self.changed = asyncio.Event()
        self._services = Informer(client, _SERVICES, on_change=lambda _: self.changed.set())
        self._slices = Informer(client, _SLICES, on_change=lambda _: self.changed.set())

    async def run(self) -> None:
        """For ever."""
        async with supervise() as tasks:
            tasks.eternal("services", self._services.run())
            tasks.eternal("slices", self._slices.run())
            await asyncio.Event().wait()

    async def synced(self) -> None:
        """Return once both have been read."""
        await self._services.synced.wait()
        await self._slices.synced.wait()

    def address(self, namespace: str, name: str) -> str:
        """Where a Service is on this machine. Raises LookupError for one without an address."""
        for service in self._services.objects.values():
            meta = service["metadata"]
            if (meta["namespace"], meta["name"]) == (namespace, name) and _has_address(service):
                return here(service["spec"]["clusterIP"])
        raise LookupError(f"no Service {namespace}/{name} with an address")

    def backends(self, of: ServicePort) -> tuple[Endpoint, ...]:
        """As the function, by what is known now."""
        mine = [one for one in self._slices.objects.values() if _is_of(one, of)]
        return backends(mine, of.port)

    def ports(self) -> dict[ServicePort, Endpoint]:
        """Where each port of each Service with an address is on this machine."""
        found = {}
        for service in self._services.objects.values():
            meta, spec = service["metadata"], service["spec"]
            for port in spec.get("ports") or [] if _has_address(service) else []:
                key = ServicePort(meta["namespace"], meta["name"], port.get("name") or "")
                found[key] = Endpoint(here(spec["clusterIP"]), port["port"])
        return found


def _has_address(service: JsonObject) -> bool:
    return service["spec"].get("clusterIP") not in (None, "", "None")


def _is_of(one: JsonObject, of: ServicePort) -> bool:
    meta = one["metadata"]
    labels = meta.get("labels") or {}
    return (meta["namespace"], labels.get(_SERVICE_NAME), one.get("addressType")) == (
        of.namespace,
        of.service,
        "IPv4",
    )
