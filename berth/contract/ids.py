"""Identities that must not be mixed up, and the rule for names that end in a path or a URL."""

import re
from typing import NewType

from berth.contract.errors import InvalidValue

NodeName = NewType("NodeName", str)
PodUid = NewType("PodUid", str)
ModelId = NewType("ModelId", str)
# As its clients call a model; many pods of a node may have models of one name.
ModelName = NewType("ModelName", str)
# As the node's Triton and the directories of its repository call it: one pod's alone (contract/gateway.py).
ServerName = NewType("ServerName", str)
GpuUuid = NewType("GpuUuid", str)

MODEL_NAME_LIMIT = 128
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)

# Triton tests `/v2/models/stats` before its model routes (server/src/http_server.cc, Handle), so
# a model of that name would lose its metadata route to the statistics of every tenant.
_RESERVED_MODEL_NAMES = frozenset({"stats"})


def parse_model_name(text: str) -> ModelName:
    """Check a name that becomes a directory, a URL segment and a Triton model name.

    Triton itself only refuses empty names, `..` and `/`. This is narrower on purpose: 1 to 128
    characters of `A-Z a-z 0-9 . _ -`, the first a letter or a digit, so that the name means the
    same to a file system, a URL and Triton.

    Raises InvalidValue saying which rule is broken.
    """
    if not text:
        raise InvalidValue("model name is empty")
    if len(text) > MODEL_NAME_LIMIT:
        raise InvalidValue(f"model name has {len(text)} characters; at most {MODEL_NAME_LIMIT} are allowed")
    if not _MODEL_NAME.fullmatch(text):
        raise InvalidValue(
            f"model name {text!r} may hold only A-Z a-z 0-9 . _ - and must start with a letter or a digit"
        )
    if ".." in text:
        raise InvalidValue(f"model name {text!r} must not contain '..'")
    if text in _RESERVED_MODEL_NAMES:
        raise InvalidValue(f"model name {text!r} is reserved: Triton answers its route itself")
    return ModelName(text)
