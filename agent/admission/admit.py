"""From a model's files to the configuration that Triton is given, or the reason why it is given none.

`judge` is pure. `admit` reads a directory and judges what is there; it blocks.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from agent.admission import instances
from agent.admission.allow_list import TABLE
from agent.admission.backends import BACKENDS, BY_FILE, PLATFORMS, READ_ONNX, UNKNOWN, Backend
from agent.admission.checks import check_together
from agent.admission.errors import CodeRefused, InvalidModel
from agent.admission.files import CONFIG_FILE, ModelFiles, look_at
from agent.admission.onnx import check_graph
from agent.admission.parameters import settle_parameters
from agent.admission.verdicts import written_anew
from berth.contract.backends import backend_name
from berth.contract.ids import ModelName, ServerName
from berth.contract.report import CodeRule
from berth.contract.text import one_line
from berth.triton.wire import model_config_pb2 as pb

# A model with a thousand tensors has a third of it. The parser takes about a second for the worst of so much.
CONFIG_BYTES = 256 * 1024
_WHERE = f"{CONFIG_FILE}: "
_SHOWN_NAME = 80


@dataclass(frozen=True, slots=True)
class NodeRules:
    """What this node takes. `capabilities`: what it reports, among them the backends of its Triton."""

    capabilities: frozenset[str]
    code: CodeRule


class Admission:
    """Admits models by one node's rules."""

    def __init__(self, rules: NodeRules) -> None:
        self.rules = rules

    def foresee(self, config: bytes | None, files: ModelFiles, name: ModelName) -> "Admitted":
        """Judge files that are still to come, by their names and sizes. Raises as `judge`."""
        return judge(config, files, name, self.rules)

    def admit(self, directory: Path, name: ModelName) -> "Admitted":
        """Judge the files of a directory. Blocks. Raises InvalidModel, CodeRefused or OSError."""
        return admit(directory, name, self.rules)

    def rewrite(self, directory: Path, name: ModelName) -> "Admitted":
        """As `admit`, and write the configuration as it was understood."""
        admitted = self.admit(directory, name)
        write_anew(directory, admitted)
        return admitted


@dataclass(frozen=True, slots=True)
class Admitted:
    """A model that may be loaded here. `code`: the first thing about it that is code; None: it has none.
    `overwritten_name`: what config.pbtxt called the model, where that is not the pod's model."""

    config: pb.ModelConfig
    code: str | None
    overwritten_name: str = field(default="", compare=False)

    @property
    def backend(self) -> str:
        return str(self.config.backend)

    @property
    def has_code(self) -> bool:
        return self.code is not None

    def for_gpus(
        self, ordinals: Sequence[int], *, kind: str, server_name: ServerName | None = None
    ) -> dict[str, Any]:
        """ModelConfig as JSON for Triton's load request, on the GPUs that CUDA calls so now. `kind`: what an
        instance on a GPU is here: KIND_GPU, or KIND_CPU where the GPUs are simulated. Triton takes no other
        name than that of its directory, `server_name`, where that is not the model's own."""
        config = instances.placed(self.config, ordinals, kind=kind)
        config.name = server_name or config.name
        return json_format.MessageToDict(config, preserving_proto_field_name=True)

    def text(self) -> str:
        """The config.pbtxt that says this and no more. To admit it again gives the same."""
        return text_format.MessageToString(self.config)


def admit(directory: Path, name: ModelName, rules: NodeRules) -> Admitted:
    """Judge what is in a directory. Blocks. Raises InvalidModel, CodeRefused or OSError."""
    files = look_at(directory)
    config = None
    if CONFIG_FILE in files.sizes:
        with (directory / CONFIG_FILE).open("rb") as file:
            config = file.read(CONFIG_BYTES + 1)
    admitted = judge(config, files, name, rules)
    for path in _graphs(admitted, files):
        check_graph(directory, path, files)
    return admitted


def write_anew(directory: Path, admitted: Admitted) -> None:
    """Put what was understood in the place of what the tenant wrote, durably. Blocks. Raises OSError."""
    text, path = admitted.text(), directory / CONFIG_FILE
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    fresh = directory / f".berth.{CONFIG_FILE}"
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def judge(config: bytes | None, files: ModelFiles, name: ModelName, rules: NodeRules) -> Admitted:
    """Pure. `config`: what stands in config.pbtxt; None: there is none. Raises InvalidModel, or CodeRefused
    where the node takes no code at all."""
    if any(path.startswith(f"{CONFIG_FILE}/") for path in files.sizes):
        raise InvalidModel(f"{CONFIG_FILE} is a directory; a file is expected")
    asked = pb.ModelConfig() if config is None else parse(config)
    understood = written_anew(asked, TABLE, where=_WHERE)
    assert isinstance(understood, pb.ModelConfig)
    understood.name = name
    understood.backend = _backend(understood, files, rules)
    _check_runtime(understood)
    understood.runtime = ""
    backend = BACKENDS.get(understood.backend, UNKNOWN)
    instances.settle(understood, backend, where=_WHERE)
    check_together(understood, backend, files, where=_WHERE)
    settle_parameters(understood, backend, files, where=_WHERE)
    code = _code(understood, backend, files)
    if code is not None and rules.code is CodeRule.NONE:
        raise CodeRefused(f"the model has code ({code}), and this node takes none (--code none)")
    said = asked.name[:_SHOWN_NAME] if asked.name != name else ""
    return Admitted(understood, code, overwritten_name=said)


def parse(text: bytes) -> pb.ModelConfig:
    """Raises InvalidModel."""
    if len(text) > CONFIG_BYTES:
        raise InvalidModel(f"{CONFIG_FILE} is larger than {CONFIG_BYTES} bytes")
    config = pb.ModelConfig()
    try:
        text_format.Parse(text.decode("utf-8-sig"), config)  # as Triton, which takes such a mark
    except (text_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidModel(f"{_WHERE}{one_line(str(error), limit=500)}") from error
    return config


def _backend(config: pb.ModelConfig, files: ModelFiles, rules: NodeRules) -> str:
    """Raises InvalidModel."""
    by_platform = PLATFORMS.get(config.platform)
    if "ensemble" in (config.backend, config.platform):
        raise InvalidModel(f"{_WHERE}ensembles are not served, because they reach other models by name")
    if config.platform and by_platform is None:
        known = ", ".join(sorted(PLATFORMS))
        raise InvalidModel(
            f"{_WHERE}platform: {config.platform!r} is none of {known}; name the backend instead"
        )
    said = backend_name(config.backend)
    if by_platform and said not in ("", by_platform):
        raise InvalidModel(
            f"{_WHERE}backend: {config.backend!r} does not go with platform {config.platform!r}"
        )
    name = said or by_platform or _by_files(config, files)
    if name not in rules.capabilities:
        has = ", ".join(sorted(rules.capabilities))
        raise InvalidModel(f"{_WHERE}backend: {name!r} is not among what this node's Triton has: {has}")
    return name


def _by_files(config: pb.ModelConfig, files: ModelFiles) -> str:
    """As Triton does: from the name of the file in a version directory. Raises InvalidModel."""
    names = [config.default_model_filename] if config.default_model_filename else list(BY_FILE)
    for version in files.versions()[:1]:
        found = [BY_FILE[one] for one in names if one in BY_FILE and files.has(f"{version}/{one}")]
        if len(found) == 1:
            return found[0]
    raise InvalidModel(
        f'{_WHERE}no backend is named, and the files do not show it; write backend: "…" into {CONFIG_FILE}, or '
        f"put one of {', '.join(sorted(BY_FILE))} into a version directory like '1'"
    )


def _graphs(admitted: Admitted, files: ModelFiles) -> list[str]:
    """The files that its backend may read as ONNX."""
    if admitted.backend not in READ_ONNX:
        return []
    config = admitted.config
    named = {config.default_model_filename, *config.cc_model_filenames.values()}
    return [path for path in sorted(files.sizes) if path.endswith(".onnx") or path.partition("/")[2] in named]


def _check_runtime(config: pb.ModelConfig) -> None:
    """Triton looks for it in the model's directory first. Raises InvalidModel."""
    if config.runtime not in ("", f"libtriton_{config.backend}.so"):
        raise InvalidModel(
            f"{_WHERE}runtime: {config.runtime[:80]!r}; leave it out: a backend runs with its own library"
        )


def _code(config: pb.ModelConfig, backend: Backend, files: ModelFiles) -> str | None:
    if backend.is_program:
        return f"backend {config.backend!r}"
    return files.code()
