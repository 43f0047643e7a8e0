"""What the proxy must know of the own model to keep Triton alive and to count its requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`is_decoupled`: one request may have many answers, which decides when it is done. `is_known` False: who has
    the model knows its outputs, and will look."""

    is_decoupled: bool = False
    fixed_outputs: frozenset[str] = frozenset()
    is_known: bool = True

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "ModelFacts":
        """From Triton's model configuration as JSON (model_config.proto)."""
        policy = config.get("model_transaction_policy")
        outputs = config.get("output")
        return cls(
            is_decoupled=isinstance(policy, dict) and policy.get("decoupled") is True,
            fixed_outputs=frozenset(
                str(output.get("name"))
                for output in (outputs if isinstance(outputs, list) else ())
                if isinstance(output, dict) and _is_fixed(output.get("dims"))
            ),
        )

    def has_classes(self, output: str) -> bool:
        """Whether an output cannot be empty, if no input is."""
        return not self.is_known or output in self.fixed_outputs


def _is_fixed(dims: object) -> bool:
    """Sizes come as strings: they are int64 in the configuration's message."""
    return (
        isinstance(dims, list) and bool(dims) and all(str(size).isdigit() and int(size) > 0 for size in dims)
    )
