"""What the scaler has assigned: which models to buffer for, and the namespaces of their clients' addresses. Pure.

Nothing of it ends with the stream that sent it. A model that a new stream does not name is served for a while longer,
because its clients may not know yet; a message that cannot be read is ignored, and the rest of it counts.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Final

from berth.contract.activation import Assignment, RouteMode
from berth.contract.activation_codec import decode_assignment
from berth.contract.errors import InvalidValue
from berth.contract.scaling import ModelKey
from berth.contract.text import one_line
from berth.runtime.logs import fields
from berth.v1 import scaler_pb2 as pb

log = logging.getLogger(__name__)

# As long as the scaler has activators forward after a model's Service leads to its replicas again.
FORWARD_SECONDS: Final = 60.0
ANY_NAMESPACE: Final = "*"


@dataclass(slots=True)
class Changes:
    """What a message changes, in this order."""

    apply: list[Assignment] = field(default_factory=list)
    remove: list[ModelKey] = field(default_factory=list)


class Assignments:
    """All that is in force."""

    def __init__(self) -> None:
        self._models: dict[ModelKey, Assignment] = {}
        # Namespaces of pods, by address.
        self._namespaces: dict[str, str] = {}
        # Models that the newest stream has not named, and until when they are served.
        self._left_over: dict[ModelKey, float] = {}
        self.has_snapshot = False

    def __len__(self) -> int:
        return len(self._models)

    def get(self, model: ModelKey) -> Assignment | None:
        return self._models.get(model)

    def allows(self, model: ModelKey, address: str) -> bool:
        """Whether a client at this address may call a model: one whose namespace is not known may not."""
        assignment = self._models.get(model)
        if assignment is None:
            return False
        namespace = self._namespaces.get(address.removeprefix("::ffff:"))
        return ANY_NAMESPACE in assignment.clients or (
            namespace is not None and namespace in assignment.clients
        )

    def take(self, message: pb.ControlResponse, now: float) -> Changes:
        if message.snapshot:
            self._namespaces.clear()
        for address, namespace in message.client_addresses.items():
            if namespace:
                self._namespaces[address] = namespace
            else:
                self._namespaces.pop(address, None)
        changes = Changes()
        named = [self._take_one(one, changes, is_new_stream=message.snapshot) for one in message.assignments]
        if message.snapshot:
            self.has_snapshot = True
            self._leave_over(frozenset(named), changes, now)
        return changes

    def expire(self, now: float) -> Changes:
        """Models that no stream names and that were served for long enough."""
        over = [model for model, until in self._left_over.items() if now >= until]
        for model in over:
            del self._left_over[model], self._models[model]
        return Changes(remove=over)

    def _take_one(self, message: pb.ModelAssignment, changes: Changes, *, is_new_stream: bool) -> ModelKey:
        """An older version than the last of its stream is ignored; a new stream has versions of its own."""
        model = ModelKey(message.namespace, message.name)
        if message.removed:
            if self._models.pop(model, None) is not None:
                self._left_over.pop(model, None)
                changes.remove.append(model)
            return model
        known = None if is_new_stream or model in self._left_over else self._models.get(model)
        if known is not None and message.version <= known.version:
            return model
        try:
            self._models[model] = assignment = decode_assignment(message)
        except InvalidValue as error:
            log.warning(
                "an assignment is not readable", extra=fields(model=one_line(str(model)), error=error)
            )
            return model
        self._left_over.pop(model, None)
        changes.apply.append(assignment)
        return model

    def _leave_over(self, named: frozenset[ModelKey], changes: Changes, now: float) -> None:
        for model, assignment in self._models.items():
            if model in named or model in self._left_over:
                continue
            self._left_over[model] = now + FORWARD_SECONDS
            if assignment.mode is not RouteMode.SERVE:
                assignment = self._models[model] = replace(assignment, mode=RouteMode.SERVE)
                changes.apply.append(assignment)
