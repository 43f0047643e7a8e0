"""Services of models, the EndpointSlices that their controller keeps, and the one that stands beside them. Pure.

A Service stays as its user made it. While its model has no copy, or is about to lose the last one, one more slice leads
to the activators; readers of slices take all of a Service together:

    SERVICE-berth   labels kubernetes.io/service-name, endpointslice.kubernetes.io/managed-by: berth-scaler; owned by the
                    Service; its ports have the names of the Service's and the numbers of the model's own

What is read here was written by tenants, or may have been.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from berth.contract.activation import SLICE_MANAGER
from scaler.activation.ports import PortPair

Json = Mapping[str, Any]

SERVICE_LABEL: Final = "kubernetes.io/service-name"
MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
_SUFFIX: Final = "-berth"


@dataclass(frozen=True, slots=True)
class ServiceRef:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ProxyPorts:
    """Where a model's replicas take REST and gRPC, and the names that their containers have for ports."""

    rest: int
    grpc: int
    named: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ServicePort:
    """`is_grpc`: which of the model's two ports it leads to."""

    name: str
    is_grpc: bool
    app_protocol: str | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """One that routes to a model's replicas, and can route to the activators as well."""

    ref: ServiceRef
    uid: str
    ports: tuple[ServicePort, ...]


@dataclass(frozen=True, slots=True)
class SlicePort:
    name: str
    number: int
    app_protocol: str | None = None


@dataclass(frozen=True, slots=True)
class BerthSlice:
    """The slice of this Service as it is, or as it is to be: equal ones need no write."""

    service: ServiceRef
    service_uid: str
    ports: tuple[SlicePort, ...]
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.service.name + _SUFFIX

    def to_json(self) -> dict[str, Any]:
        """For server-side apply."""
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": self.name,
                "namespace": self.service.namespace,
                "labels": {SERVICE_LABEL: self.service.name, MANAGED_BY: SLICE_MANAGER},
                "ownerReferences": [
                    {
                        "apiVersion": "v1",
                        "kind": "Service",
                        "name": self.service.name,
                        "uid": self.service_uid,
                    }
                ],
            },
            "addressType": "IPv4",
            "ports": [_port_json(port) for port in self.ports],
            "endpoints": [
                {"addresses": [address], "conditions": {"ready": True, "serving": True, "terminating": False}}
                for address in self.addresses
            ],
        }


def desired_slice(service: Service, ports: PortPair, addresses: Iterable[str]) -> BerthSlice:
    return BerthSlice(
        service.ref,
        service.uid,
        tuple(
            SlicePort(port.name, ports.grpc if port.is_grpc else ports.rest, port.app_protocol)
            for port in service.ports
        ),
        tuple(sorted(addresses)),
    )


# What stands in the API server.


def leads_to(service: Json, labels: Mapping[str, str]) -> bool:
    """Whether a Service selects pods with these labels."""
    selector = service.get("spec", {}).get("selector")
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def service_of(service: Json, proxy_ports: ProxyPorts) -> Service | None:
    """None for one that cannot lead to an activator: without an address of its own its clients take the pods' ports,
    one without an IPv4 address reads no slice of that family, and one without a port of the model's leads elsewhere."""
    meta, spec = service["metadata"], service.get("spec", {})
    if spec.get("clusterIP") in (None, "", "None"):  # an ExternalName has none either
        return None
    if "IPv4" not in spec.get("ipFamilies", ("IPv4",)):
        return None
    ports = tuple(found for port in spec.get("ports") or () if (found := _service_port(port, proxy_ports)))
    return Service(ref_of(service), meta["uid"], ports) if ports else None


def ref_of(service: Json) -> ServiceRef:
    return ServiceRef(service["metadata"].get("namespace", ""), service["metadata"]["name"])


def is_ours(one: Json) -> bool:
    labels = one["metadata"].get("labels") or {}
    return bool(labels.get(MANAGED_BY) == SLICE_MANAGER)


def service_named(one: Json) -> ServiceRef | None:
    """Whose slice it is."""
    meta = one["metadata"]
    name = (meta.get("labels") or {}).get(SERVICE_LABEL)
    return ServiceRef(meta.get("namespace", ""), name) if name else None


def read_slice(one: Json) -> BerthSlice | None:
    """One of ours as it stands; None where that is not what we write, be it by another's hand."""
    ref, owners = service_named(one), one["metadata"].get("ownerReferences") or ()
    if ref is None or one["metadata"]["name"] != ref.name + _SUFFIX or one.get("addressType") != "IPv4":
        return None
    uids = [owner.get("uid") for owner in owners if owner.get("kind") == "Service"]
    ports = tuple(
        SlicePort(port.get("name") or "", port.get("port") or 0, port.get("appProtocol"))
        for port in one.get("ports") or ()
    )
    addresses = sorted(_ready_addresses(one))
    return BerthSlice(ref, uids[0] if len(uids) == 1 else "", ports, tuple(addresses))


def ready_endpoints(slices: Iterable[Json]) -> int:
    """How many endpoints of a Service are ready, by the slices that are not ours."""
    return sum(1 for one in slices if not is_ours(one) for _ in _ready_addresses(one))


def is_ipv4(address: str) -> bool:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True


def _ready_addresses(one: Json) -> Iterator[str]:
    for endpoint in one.get("endpoints") or ():
        # Absent is unknown, which consumers take for ready (discovery/v1, EndpointConditions).
        if (endpoint.get("conditions") or {}).get("ready", True) is not False:
            yield from endpoint.get("addresses") or ()


def _service_port(port: Json, proxy_ports: ProxyPorts) -> ServicePort | None:
    target = port.get("targetPort", port.get("port"))
    number = proxy_ports.named.get(target) if isinstance(target, str) else target
    if port.get("protocol", "TCP") != "TCP" or number not in (proxy_ports.rest, proxy_ports.grpc):
        return None
    return ServicePort(port.get("name") or "", number == proxy_ports.grpc, port.get("appProtocol"))


def _port_json(port: SlicePort) -> dict[str, Any]:
    said: dict[str, Any] = {"name": port.name, "port": port.number, "protocol": "TCP"}
    return said if port.app_protocol is None else {**said, "appProtocol": port.app_protocol}
