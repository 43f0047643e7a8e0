"""What scaler and activators say to each other, as messages of `berth.v1.Scaler/Attend`; and what of it can be. Pure."""

import logging
import math
from typing import Final

from berth.contract.scaling import Assignment, HoldState, ModelKey, Report
from berth.runtime.logs import fields
from berth.v1 import scaler_pb2 as pb

log = logging.getLogger(__name__)

_MOST_FIGURE: Final = 1e9
_STATES: Final = {
    HoldState.HOLD: pb.HOLD_STATE_HOLD,
    HoldState.FORWARD: pb.HOLD_STATE_FORWARD,
    HoldState.OFF: pb.HOLD_STATE_OFF,
}


def is_sane(said: pb.HoldReport) -> bool:
    figures = (said.average_held, said.arrived, said.forwarded, said.oldest_seconds, said.served_ago)
    return all(math.isfinite(figure) and 0 <= figure <= _MOST_FIGURE for figure in figures)


def report_of(model: ModelKey, said: pb.HoldReport, told: Assignment) -> Report:
    """Nobody holds more than it may, and the ports of a model are those that it was told."""
    most = told.limits.requests
    return Report(
        version=said.version,
        model=model,
        held=min(said.held, most),
        average_held=min(said.average_held, float(most)),
        arrived=said.arrived,
        forwarded=said.forwarded,
        held_bytes=min(said.held_bytes, told.limits.bytes),
        oldest_seconds=said.oldest_seconds,
        wake=said.wake,
        rest_port=told.rest_port if said.rest_port == told.rest_port else 0,
        grpc_port=told.grpc_port if said.grpc_port == told.grpc_port else 0,
        served_ago=said.served_ago,
    )


def assignment_message(model: ModelKey, assignment: Assignment | None) -> pb.HoldAssignment | None:
    """None: it cannot be said. Much of it comes from a tenant, and the others are told in the same message."""
    try:
        return _gone(model) if assignment is None else _assignment(assignment)
    except (TypeError, ValueError) as error:
        log.error("an assignment cannot be told", extra=fields(model=model, error=error))
        return None


def _gone(model: ModelKey) -> pb.HoldAssignment:
    return pb.HoldAssignment(namespace=model.namespace, name=model.name, gone=True)


def _assignment(one: Assignment) -> pb.HoldAssignment:
    limits = one.limits
    return pb.HoldAssignment(
        version=one.version,
        namespace=one.model.namespace,
        name=one.model.name,
        public_name=one.public_name,
        state=_STATES[one.state],
        rest_port=one.rest_port,
        grpc_port=one.grpc_port,
        tls=one.tls,
        endpoints=[
            pb.HoldEndpoint(
                uid=pod.uid,
                name=pod.name,
                address=pod.address,
                rest_port=pod.rest_port,
                grpc_port=pod.grpc_port,
                slots=pod.slots,
                ready=pod.ready,
                soon=pod.soon,
            )
            for pod in one.endpoints
        ],
        limits=pb.HoldLimits(
            requests=limits.requests,
            bytes=limits.bytes,
            seconds=limits.seconds,
            wakes_per_second=limits.wakes_per_second,
            wake_burst=limits.wake_burst,
        ),
        clients=sorted(one.clients),
        hopeless=one.hopeless,
        waits_for=one.waits_for,
        share=one.share,
    )
