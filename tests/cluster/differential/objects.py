"""The API objects of one world, as they are to be or as the API server gives them."""

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SCHEDULER_NAME = "differential"
GPU_MEMORY = "seldon.io/trtis-gpu-mem"


@dataclass(frozen=True, slots=True)
class Objects:
    """All that a scheduler looks at. `pods` are those that have a node.

    A manifest may carry what no client can create: a `status`, and a `deletionTimestamp` of an object
    that is ending. `reference` brings the object there.
    """

    nodes: list[Json] = field(default_factory=list)
    namespaces: list[Json] = field(default_factory=list)
    storage_classes: list[Json] = field(default_factory=list)
    volumes: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    pods: list[Json] = field(default_factory=list)


def name_of(manifest: Json) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def namespace_of(manifest: Json) -> str:
    namespace: str = manifest["metadata"]["namespace"]
    return namespace
