"""What is said where classes are asked for that would be Triton's end. Pure."""

from typing import Final, Protocol

# Triton 2.51 dies of the classification of an output that is empty.
NO_CLASSES: Final = (
    "classification is taken for outputs with a fixed shape in the model's configuration, and for inputs "
    "without empty dimensions"
)


class KnowsOutputs(Protocol):
    def has_classes(self, output: str) -> bool:
        """Whether an output cannot be empty, if no input is."""
        ...
