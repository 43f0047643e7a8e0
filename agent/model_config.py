"""The configuration that a model is loaded with: its own, with the instances on the chosen GPU.

Triton's default is one instance on *every* GPU (core, model_config_utils.cc), so the instance group
is always given. Ensembles and repository agents are refused: they name other models of the server,
and whose those are nobody could check.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import ModelName

CONFIG_FILE = "config.pbtxt"
_CONFIG_BYTES = 4 * 1024 * 1024
_MAX_INSTANCES = 64


class InvalidModel(Exception):
    """The model's files say something that cannot be served here; the message says where."""


def load_config(directory: Path, name: ModelName, *, gpu: GpuChoice, kind: str) -> dict[str, Any]:
    """ModelConfig as JSON, for Triton's load request. Raises InvalidModel.

    Without a config.pbtxt Triton completes the configuration from the model's files.
    """
    config = _read(directory / CONFIG_FILE)
    _check(config, name)
    count = max([group.count for group in config.instance_group] or [1]) or 1
    if count > _MAX_INSTANCES:
        raise InvalidModel(f"{CONFIG_FILE}: {count} instances; at most {_MAX_INSTANCES} are allowed")
    del config.instance_group[:]
    group = {
        "kind": kind,
        "count": count,
        **({"gpus": [one.index for one in gpu.gpus]} if kind == "KIND_GPU" else {}),
    }
    # A name would have to equal the directory's, which the agent has chosen.
    config.name = name
    return {**json_format.MessageToDict(config, preserving_proto_field_name=True), "instance_group": [group]}


def pinned(config: Mapping[str, Any], ordinals: Sequence[int]) -> dict[str, Any]:
    """`config` with CUDA's numbers of now for its GPUs, instead of the indexes of the time of the choice."""
    (group,) = config["instance_group"]
    if "gpus" not in group:
        return dict(config)
    return {**config, "instance_group": [{**group, "gpus": list(ordinals)}]}


def _read(path: Path) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig()
    if not path.exists():
        return config
    if not path.is_file():
        raise InvalidModel(f"{CONFIG_FILE} is not a file")
    if path.stat().st_size > _CONFIG_BYTES:
        raise InvalidModel(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES} bytes")
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidModel(f"{CONFIG_FILE}: {error}") from error
    return config


def _check(config: model_config_pb2.ModelConfig, name: ModelName) -> None:
    if config.name not in ("", name):
        raise InvalidModel(
            f"{CONFIG_FILE}: name is {config.name!r}, but the pod's model is {name!r}; leave it out"
        )
    if (
        config.platform == "ensemble"
        or config.backend == "ensemble"
        or config.HasField("ensemble_scheduling")
    ):
        raise InvalidModel(
            f"{CONFIG_FILE}: ensembles are not served, because they reach other models by name"
        )
    if config.HasField("model_repository_agents"):
        raise InvalidModel(f"{CONFIG_FILE}: model_repository_agents are not allowed")
