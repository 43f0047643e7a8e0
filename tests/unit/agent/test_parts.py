"""What the options choose, or which flag cannot be."""

from pathlib import Path
from typing import Any

import pytest

import agent.parts
from agent import parts
from agent.config import DEFAULT_CAPABILITIES, AgentOptions
from agent.gpus import NoGpus
from agent.mock_gpus import MockGpus
from agent.models import Models
from agent.nvml import NvmlMissing
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.options import parse_options


def options(*flags: str) -> AgentOptions:
    argv = ["--node-name=n1", "--repository=/r", *flags]
    return parse_options(AgentOptions, process="agent", summary="", argv=argv, environ={})


@pytest.mark.parametrize(
    ("flags", "capabilities"),
    [
        (("--capabilities=b,a",), {"a", "b"}),
        (("--capabilities=a", "--extra-capabilities=c", "--backend-directory=BACKENDS"), {"a", "c"}),
        (("--capabilities=onnx,a",), {"onnxruntime", "a"}),
        (("--backend-directory=BACKENDS", "--extra-capabilities=c"), {"python", "c"}),
        (("--extra-capabilities=c",), {*DEFAULT_CAPABILITIES, "c"}),
    ],
)
def test_capabilities_are_given_or_found_or_the_images(
    tmp_path: Path, flags: tuple[str, ...], capabilities: set[str]
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "README").write_text("")
    facts = parts.node_facts(options(*(flag.replace("BACKENDS", str(tmp_path)) for flag in flags)))
    assert facts.capabilities == tuple(sorted(capabilities))
    assert facts.backends == (("python",) if any("BACKENDS" in flag for flag in flags) else ())


@pytest.mark.parametrize(
    ("choice", "error", "why"),
    [
        ("mock:DIR/missing", ConfigError, "--nvml: .*/missing: No such file"),
        ("mock:", ConfigError, "--nvml: 'mock:' is not one of auto, nvml, none, mock:FILE"),
        ("amd", ConfigError, "--nvml: 'amd' is not one of"),
        ("nvml", CannotStart, "--nvml nvml: NVML: no driver"),
    ],
)
def test_gpus_that_cannot_be_read_name_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, error: type[Exception], why: str
) -> None:
    class Absent:
        @classmethod
        def open(cls) -> Any:
            raise NvmlMissing("NVML: no driver")

    monkeypatch.setattr(agent.parts, "NvmlGpus", Absent)
    with pytest.raises(error, match=why):
        parts.gpus(choice.replace("DIR", str(tmp_path)), Models())


def test_gpus_are_read_where_the_flag_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        pass

    monkeypatch.setattr(agent.parts, "NvmlGpus", Driver)
    (tmp_path / "gpus.yaml").write_text("gpus: [{uuid: GPU-a, total: 16Gi}]")
    chosen = [parts.gpus(choice, Models()) for choice in ("none", "auto", f"mock:{tmp_path}/gpus.yaml")]
    assert [type(one) for one in chosen] == [NoGpus, Driver, MockGpus]


def test_secrets_that_are_not_there_name_the_flag_and_none_are_made_up_for_triton(tmp_path: Path) -> None:
    for read in (parts.triton_keys, parts.ticket_secret):
        with pytest.raises(ConfigError, match=r"--triton-keys: .*; berth keys makes it"):
            read(tmp_path)
    assert parts.triton_keys(None) is None
    assert parts.ticket_secret(None) != parts.ticket_secret(None)


def test_a_backend_directory_that_is_not_there_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--backend-directory: .*/missing: No such file"):
        parts.node_facts(options(f"--backend-directory={tmp_path}/missing"))
