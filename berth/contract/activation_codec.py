"""Assignments and reports as the messages of `berth.v1.Scaler/Control`: both ends read and write them here."""

import ipaddress
import math
from typing import Final

from berth.contract.activation import (
    ACTIVATOR_PORTS,
    Assignment,
    BufferLimits,
    ReplicaEndpoint,
    Report,
    RouteMode,
)
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.contract.text import one_line
from berth.v1 import scaler_pb2 as pb

_MODES: Final = {RouteMode.PROXY: pb.ROUTE_MODE_PROXY, RouteMode.SERVE: pb.ROUTE_MODE_SERVE}
_MODE_OF: Final = {number: mode for mode, number in _MODES.items()}
# What a figure of a report can be: a sum over all activators is still exact.
_LARGEST_FIGURE: Final = 1e9
_LAST_PORT: Final = 65535


# Scaler → activator.


def encode_assignment(assignment: Assignment) -> pb.ModelAssignment:
    """Raises TypeError or ValueError where a tenant's text or number does not fit a field."""
    limits = assignment.limits
    return pb.ModelAssignment(
        version=assignment.version,
        namespace=assignment.model.namespace,
        name=assignment.model.name,
        public_name=assignment.public_name,
        mode=_MODES[assignment.mode],
        rest_port=assignment.rest_port,
        grpc_port=assignment.grpc_port,
        tls=assignment.tls,
        endpoints=[_encode_endpoint(endpoint) for endpoint in assignment.endpoints],
        limits=pb.BufferLimits(
            requests=limits.requests,
            bytes=limits.bytes,
            seconds=limits.seconds,
            cold_starts_per_second=limits.cold_starts_per_second,
            cold_start_burst=limits.cold_start_burst,
        ),
        clients=sorted(assignment.clients),
        unavailable=assignment.unavailable,
        waiting_for=assignment.waiting_for,
        activators=assignment.activators,
    )


def encode_removal(model: ModelKey) -> pb.ModelAssignment:
    """The model is not this activator's any more."""
    return pb.ModelAssignment(namespace=model.namespace, name=model.name, removed=True)


def decode_assignment(message: pb.ModelAssignment) -> Assignment:
    """Of a message that is no removal. Raises InvalidValue."""
    mode = _MODE_OF.get(message.mode)
    if mode is None:
        raise InvalidValue(f"{message.mode} is not a mode")
    if not message.public_name:
        raise InvalidValue("the model has no name")
    ports = [port for port in (message.rest_port, message.grpc_port) if port]
    if any(port not in ACTIVATOR_PORTS for port in ports) or len(set(ports)) != len(ports):
        raise InvalidValue(f"{ports} are not the ports of a model")
    return Assignment(
        version=message.version,
        model=ModelKey.parse(f"{message.namespace}/{message.name}"),
        public_name=message.public_name,
        mode=mode,
        rest_port=message.rest_port,
        grpc_port=message.grpc_port,
        tls=message.tls,
        endpoints=tuple(_decode_endpoint(endpoint) for endpoint in message.endpoints),
        limits=BufferLimits(
            requests=message.limits.requests,
            bytes=message.limits.bytes,
            seconds=message.limits.seconds,
            cold_starts_per_second=message.limits.cold_starts_per_second,
            cold_start_burst=message.limits.cold_start_burst,
        ),
        clients=frozenset(message.clients),
        unavailable=one_line(message.unavailable),
        waiting_for=one_line(message.waiting_for),
        activators=max(1, message.activators),
    )


def _encode_endpoint(endpoint: ReplicaEndpoint) -> pb.ReplicaEndpoint:
    return pb.ReplicaEndpoint(
        uid=endpoint.uid,
        name=endpoint.name,
        address=endpoint.address,
        rest_port=endpoint.rest_port,
        grpc_port=endpoint.grpc_port,
        slots=endpoint.slots,
        ready=endpoint.ready,
        nearly_ready=endpoint.nearly_ready,
    )


def _decode_endpoint(message: pb.ReplicaEndpoint) -> ReplicaEndpoint:
    """Raises InvalidValue."""
    try:
        ipaddress.ip_address(message.address)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    if message.rest_port > _LAST_PORT or message.grpc_port > _LAST_PORT:
        raise InvalidValue(f"a port is at most {_LAST_PORT}")
    return ReplicaEndpoint(
        uid=message.uid,
        name=message.name,
        address=message.address,
        rest_port=message.rest_port,
        grpc_port=message.grpc_port,
        slots=message.slots,
        ready=message.ready,
        nearly_ready=message.nearly_ready,
    )


# Activator → scaler.


def encode_report(report: Report) -> pb.ModelReport:
    return pb.ModelReport(
        version=report.version,
        namespace=report.model.namespace,
        name=report.model.name,
        buffered=report.buffered,
        average_buffered=report.average_buffered,
        arrived=report.arrived,
        forwarded=report.forwarded,
        buffered_bytes=report.buffered_bytes,
        oldest_seconds=report.oldest_seconds,
        cold_start=report.cold_start,
        rest_port=report.rest_port,
        grpc_port=report.grpc_port,
        served_ago=report.served_ago,
    )


def decode_report(message: pb.ModelReport) -> Report:
    """Raises InvalidValue."""
    figures = (
        message.average_buffered,
        message.arrived,
        message.forwarded,
        message.oldest_seconds,
        message.served_ago,
    )
    if not all(math.isfinite(figure) and 0 <= figure <= _LARGEST_FIGURE for figure in figures):
        raise InvalidValue(f"a figure of a report is 0 to {_LARGEST_FIGURE:.0f}")
    return Report(
        version=message.version,
        model=ModelKey(message.namespace, message.name),
        buffered=message.buffered,
        average_buffered=message.average_buffered,
        arrived=message.arrived,
        forwarded=message.forwarded,
        buffered_bytes=message.buffered_bytes,
        oldest_seconds=message.oldest_seconds,
        cold_start=message.cold_start,
        rest_port=message.rest_port,
        grpc_port=message.grpc_port,
        served_ago=message.served_ago,
    )
