"""What the scaler has told: which models to hold for, and whose the addresses of their clients are. Pure.

Nothing of it ends with the stream that told it. What a new stream does not name any more is passed on for a while, for
its clients may not have heard yet; a message that cannot be read is left aside, and the rest of it counts.
"""

import ipaddress
import logging
from dataclasses import dataclass, field, replace
from typing import Final

from berth.contract.errors import InvalidValue
from berth.contract.scaling import ACTIVATOR_PORTS, Assignment, HoldLimits, HoldState, ModelKey, PodEndpoint
from berth.contract.text import one_line
from berth.runtime.logs import fields
from berth.v1 import scaler_pb2 as pb

log = logging.getLogger(__name__)

# As long as the scaler has models passed on.
FORWARD_SECONDS: Final = 60.0
ANYBODY: Final = "*"

_STATES: Final = {
    pb.HOLD_STATE_HOLD: HoldState.HOLD,
    pb.HOLD_STATE_FORWARD: HoldState.FORWARD,
    pb.HOLD_STATE_OFF: HoldState.OFF,
}


@dataclass(slots=True)
class Changes:
    """What a message changes, in this order."""

    apply: list[Assignment] = field(default_factory=list)
    remove: list[ModelKey] = field(default_factory=list)


class Assigned:
    """All that is in force."""

    def __init__(self) -> None:
        self._models: dict[ModelKey, Assignment] = {}
        self._sources: dict[str, str] = {}
        # Those that the newest stream has not named, and until when they are passed on.
        self._left_over: dict[ModelKey, float] = {}
        self.is_told = False

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model: ModelKey) -> Assignment | None:
        return self._models.get(model)

    def allows(self, model: ModelKey, address: str) -> bool:
        """Whether a client at this address may call a model: who is not known may not."""
        told = self._models.get(model)
        if told is None:
            return False
        namespace = self._sources.get(address.removeprefix("::ffff:"))
        return ANYBODY in told.clients or (namespace is not None and namespace in told.clients)

    def take(self, message: pb.AttendResponse, now: float) -> Changes:
        if message.whole:
            self._sources.clear()
        for address, namespace in message.sources.items():
            if namespace:
                self._sources[address] = namespace
            else:
                self._sources.pop(address, None)
        changes = Changes()
        named = [self._take_one(said, changes, is_new_stream=message.whole) for said in message.assignments]
        if message.whole:
            self.is_told = True
            self._leave_over(frozenset(named), changes, now)
        return changes

    def expire(self, now: float) -> Changes:
        """Those that have been passed on for long enough."""
        over = [model for model, until in self._left_over.items() if now >= until]
        for model in over:
            del self._left_over[model], self._models[model]
        return Changes(remove=over)

    def _take_one(self, said: pb.HoldAssignment, changes: Changes, *, is_new_stream: bool) -> ModelKey:
        """An older version than the last of its stream is none; a new stream has versions of its own."""
        model = ModelKey(said.namespace, said.name)
        if said.gone:
            if self._models.pop(model, None) is not None:
                self._left_over.pop(model, None)
                changes.remove.append(model)
            return model
        known = None if is_new_stream or model in self._left_over else self._models.get(model)
        if known is not None and said.version <= known.version:
            return model
        try:
            self._models[model] = told = read_assignment(said)
        except InvalidValue as error:
            log.warning(
                "an assignment is not readable", extra=fields(model=one_line(str(model)), error=error)
            )
            return model
        self._left_over.pop(model, None)
        changes.apply.append(told)
        return model

    def _leave_over(self, named: frozenset[ModelKey], changes: Changes, now: float) -> None:
        for model, told in self._models.items():
            if model in named or model in self._left_over:
                continue
            self._left_over[model] = now + FORWARD_SECONDS
            if told.state is not HoldState.FORWARD:
                told = self._models[model] = replace(told, state=HoldState.FORWARD)
                changes.apply.append(told)


def read_assignment(said: pb.HoldAssignment) -> Assignment:
    """Raises InvalidValue."""
    model = ModelKey.parse(f"{said.namespace}/{said.name}")
    state = _STATES.get(said.state)
    if state is None:
        raise InvalidValue(f"{said.state} is not a state")
    if not said.public_name:
        raise InvalidValue("the model has no name")
    ports = [port for port in (said.rest_port, said.grpc_port) if port]
    if any(port not in ACTIVATOR_PORTS for port in ports) or len(set(ports)) != len(ports):
        raise InvalidValue(f"{ports} are not the ports of a model")
    return Assignment(
        version=said.version,
        model=model,
        public_name=said.public_name,
        state=state,
        rest_port=said.rest_port,
        grpc_port=said.grpc_port,
        tls=said.tls,
        endpoints=tuple(_endpoint(one) for one in said.endpoints),
        limits=HoldLimits(
            requests=said.limits.requests,
            bytes=said.limits.bytes,
            seconds=said.limits.seconds,
            wakes_per_second=said.limits.wakes_per_second,
            wake_burst=said.limits.wake_burst,
        ),
        clients=frozenset(said.clients),
        hopeless=one_line(said.hopeless),
        waits_for=one_line(said.waits_for),
        share=max(1, said.share),
    )


def _endpoint(said: pb.HoldEndpoint) -> PodEndpoint:
    """Raises InvalidValue."""
    try:
        ipaddress.ip_address(said.address)
    except ValueError as error:
        raise InvalidValue(str(error)) from None
    if said.rest_port > 65535 or said.grpc_port > 65535:
        raise InvalidValue("a port is at most 65535")
    return PodEndpoint(
        uid=said.uid,
        name=said.name,
        address=said.address,
        rest_port=said.rest_port,
        grpc_port=said.grpc_port,
        slots=said.slots,
        ready=said.ready,
        soon=said.soon,
    )
