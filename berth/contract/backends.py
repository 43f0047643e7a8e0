"""Triton's backends by name: what a pod requires, a config.pbtxt names and a node offers."""

from collections.abc import Mapping

# What other systems call a backend, and what Triton does.
ALIASES: Mapping[str, str] = {"onnx": "onnxruntime"}


def backend_name(said: str) -> str:
    """Triton's name of a backend; any other word, as a capability of a cluster's own, stays as it is."""
    return ALIASES.get(said, said)
