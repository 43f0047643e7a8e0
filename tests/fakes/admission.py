"""A node's rules, models' files, and what is understood of a configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import text_format

from agent.admission import Admitted, InvalidModel, ModelFiles, NodeRules, judge
from agent.admission.backends import BACKENDS
from agent.config import DEFAULT_CAPABILITIES
from berth.contract.ids import ModelName
from berth.contract.report import CodeRule
from berth.triton.wire import model_config_pb2 as pb

NAME = ModelName("m")
RULES = NodeRules(frozenset({*DEFAULT_CAPABILITIES, "fil", "vllm"}), CodeRule.NAMESPACE)
NO_CODE = NodeRules(RULES.capabilities, CodeRule.NONE)
ONNX, ONNX_CONFIG = {"1/model.onnx": 9}, 'backend: "onnxruntime" '
PYTHON, PYTHON_CONFIG = {"1/model.py": 9}, 'backend: "python" '

# Every backend finds its files, and every node takes every backend.
ALL_RULES = NodeRules(frozenset(BACKENDS), CodeRule.ANY)
ALL_FILES = ModelFiles(
    dict.fromkeys(
        (
            *("1/model.onnx", "1/model.plan", "1/model.xml", "1/model.bin", "1/xgboost.model", "1/model.py"),
            *("1/model.pt", "1/model.savedmodel", "1/model.dali"),
        ),
        9,
    )
)


def judged(text: str | None, files: Mapping[str, int] = ONNX, rules: NodeRules = RULES) -> Admitted:
    return judge(None if text is None else text.encode(), ModelFiles(files), NAME, rules)


def config_of(text: str | None, files: Mapping[str, int] = ONNX, *gpus: int) -> dict[str, Any]:
    """What Triton is given."""
    return judged(text, files).for_gpus(gpus or [3], kind="KIND_GPU")


def parameter(backend: str, name: str, value: str) -> tuple[bytes, Callable[[pb.ModelConfig], str]]:
    """A config with one parameter, and how to read it."""
    config = pb.ModelConfig(backend=backend)
    config.parameters[name].string_value = value
    return text_of(config), lambda config: str(config.parameters[name].string_value)


def text_of(config: pb.ModelConfig) -> bytes:
    return text_format.MessageToString(config).encode()


def understood(config: bytes, reader: Callable[[pb.ModelConfig], str]) -> str | None:
    """What stands in the config that Triton is given; None where it is refused."""
    try:
        return reader(judge(config, ALL_FILES, NAME, ALL_RULES).config)
    except InvalidModel:
        return None
