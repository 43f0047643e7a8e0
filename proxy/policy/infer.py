"""What a request for inference may be, whichever protocol it comes in. Pure.

Two readers (`json_guard`, `wire.protobuf.InferReader`) say what they have found; what of that is refused, and in which
words, is decided here alone. A fast path may leave out the reading where nothing of all this can be in the bytes
(`protobuf.needs_closer_look`, `protobuf.names_just`).
"""

from collections.abc import Sequence
from typing import Final, Protocol

from proxy.policy.refusal import Refusal, Why
from proxy.policy.routes import unknown_model

# Triton 2.51 dies of the classification of an output that is empty.
NO_CLASSES: Final = (
    "classification is taken for outputs with a fixed shape in the model's configuration, and for inputs "
    "without empty dimensions"
)
NO_SHARED_MEMORY: Final = "shared memory is not available"
_SHARED_MEMORY: Final = "shared_memory_"


class KnowsOutputs(Protocol):
    def has_classes(self, output: str) -> bool:
        """Whether an output cannot be empty, if no input is."""
        ...


class Found(Protocol):
    """What a reader has found in a request, or in as much of it as is here."""

    @property
    def shared_memory(self) -> str | None:
        """Where a parameter stands that points into it: of a reader that knows no places "", None: there is none."""
        ...

    @property
    def classified(self) -> Sequence[str]:
        """Outputs of which classes are wanted instead of numbers."""
        ...

    @property
    def has_empty_input(self) -> bool: ...


def points_into_shared_memory(parameter: str) -> bool:
    """By its name. Triton applies such a parameter, and a tenant has no business in what it leads to."""
    return parameter.startswith(_SHARED_MEMORY)


def is_own(name: bytes, own: bytes) -> bool:
    """Exact: nothing is stripped, folded or cut, because Triton's front ends differ in what they do."""
    return name == own


def require_own(name: bytes, own: bytes) -> None:
    """Raises Refusal."""
    if not is_own(name, own):
        raise Refusal(Why.FOREIGN_MODEL, unknown_model(name.decode(errors="replace")))


def check_begun(found: Found) -> None:
    """What may be said before all of a request is here. Raises Refusal."""
    where = found.shared_memory
    if where is not None:
        raise Refusal(Why.INVALID, f"{where}: {NO_SHARED_MEMORY}" if where else NO_SHARED_MEMORY)


def check(found: Found, facts: KnowsOutputs) -> None:
    """Of a whole request. Raises Refusal."""
    check_begun(found)
    if found.classified and (found.has_empty_input or not all(map(facts.has_classes, found.classified))):
        raise Refusal(Why.INVALID, NO_CLASSES)
