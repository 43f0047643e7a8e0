"""The agent's flags: what they are without being given, what is refused, and what a deployment may rely on."""

from pathlib import Path
from typing import Any

import pytest

from agent.app import run
from agent.config import AgentOptions
from berth.contract.endpoint import Endpoint, UnixSocket
from berth.runtime.errors import ConfigError
from berth.runtime.options import parse_options

REQUIRED = ("--node-name=n1", "--repository=/r")


def parsed(*flags: str, **environ: str) -> AgentOptions:
    return parse_options(AgentOptions, process="agent", summary="", argv=flags, environ=environ)


def test_two_flags_are_enough_and_the_rest_is_safe() -> None:
    """Every default, so that none changes by accident: others have built on them."""
    given: dict[str, Any] = {
        "node_name": "n1",
        "nvml": "auto",
        "repository": Path("/r"),
        "triton_grpc": Endpoint("127.0.0.1", 8001),
        "triton_keys": None,
        "listen": Endpoint("0.0.0.0", 8470),
        "admin_listen": Endpoint("0.0.0.0", 8471),
        "gateway": None,
        "gateway_control": None,
        "server_name": "triton",
        "capabilities": (),
        "extra_capabilities": (),
        "backend_directory": None,
        "headroom": 256 * 1024**2,
        "auth": "token",
        "heartbeat_seconds": 10.0,
        "poll_seconds": 2.0,
        "load_timeout": 600.0,
        "unload_timeout": 120.0,
        "max_model_bytes": 512 * 1024**3,
        "keep_free": 0.15,
    }
    options = parsed(*REQUIRED)
    assert {name: getattr(options, name) for name in given} == given


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--nvml=mock:x", "mock:x"),
        ("--triton-grpc=h:2", Endpoint("h", 2)),
        ("--triton-grpc=unix:/t/grpc:8001", UnixSocket("/t/grpc:8001")),
        ("--gateway-control=unix:/g/control", UnixSocket("/g/control")),
        ("--triton-keys=/k", Path("/k")),
        ("--listen=[::]:5", Endpoint("::", 5)),
        ("--admin-listen=h:3", Endpoint("h", 3)),
        ("--gateway=h:4", Endpoint("h", 4)),
        ("--server-name=big", "big"),
        ("--capabilities=b, a,,b", ("a", "b")),
        ("--extra-capabilities=c", ("c",)),
        ("--backend-directory=/b", Path("/b")),
        ("--headroom=1Gi", 1024**3),
        ("--auth=none", "none"),
        ("--heartbeat-seconds=1", 1.0),
        ("--poll-seconds=0.1", 0.1),
        ("--load-timeout=1", 1.0),
        ("--unload-timeout=1", 1.0),
        ("--max-model-bytes=0", 0),
        ("--keep-free=0%", 0.0),
        ("--keep-free=99%", 0.99),
    ],
)
def test_a_flag_and_its_variable_say_the_same(flag: str, value: object) -> None:
    name, _, text = flag.removeprefix("--").partition("=")
    variable = f"BERTH_AGENT_{name}".replace("-", "_").upper()
    field = name.replace("-", "_")
    assert getattr(parsed(*REQUIRED, flag), field) == value
    assert getattr(parsed(*REQUIRED, **{variable: text}), field) == value


@pytest.mark.parametrize(
    "flag",
    [
        "--auth=nobody",
        "--code=some",
        "--headroom=lots",
        "--max-model-bytes=-1",
        "--heartbeat-seconds=0.9",
        "--poll-seconds=0.09",
        "--load-timeout=0.9",
        "--unload-timeout=0.9",
        "--listen=8470",
        "--keep-free=15",
        "--keep-free=100%",
        "--keep-free=-1%",
        "--node-name=",
        "--gateway-control=127.0.0.1:1",  # what is said there opens every model
        "--gateway-control=unix:relative",
        "--gateway=10.0.0.1",
        "--node-name= ",
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        parsed(*REQUIRED, flag)


def test_help_tells_each_default_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for shown in (
        "256Mi",
        "512Gi",
        "15%",
        "127.0.0.1:8001",
        "0.0.0.0:8470",
        "10 s",
        "2 s",
        "600 s",
        "120 s",
        "auto",
    ):
        assert f"default {shown}" in said, shown


def test_a_bad_flag_ends_the_process_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*REQUIRED, "--auth=nobody"]) == 2
    assert capsys.readouterr().err == "berth agent: --auth: 'nobody' is not one of token, none\n"
