"""`berth proxy`: which of its two forms, and what fits neither."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.errors import ConfigError
from berth.runtime.options import parse_options
from proxy import command as module
from proxy.config import ProxyOptions
from proxy.gateway import standalone
from proxy.sidecar import app as sidecar

NODE = Endpoint("node", 9)
TRITON: dict[str, Any] = {"triton_http": Endpoint("h", 1), "triton_grpc": Endpoint("h", 2)}


def options(**more: Any) -> ProxyOptions:
    return ProxyOptions(model=ModelName("m"), **more)


@pytest.mark.parametrize(("more", "form"), [({"agent": NODE}, "sidecar"), (TRITON, "standalone")])
async def test_an_agent_makes_it_a_sidecar(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], form: str
) -> None:
    ran: list[object] = []

    def runs(name: str) -> Any:
        async def main(*what: object) -> None:
            ran.append((name, *what))

        return main

    monkeypatch.setattr(sidecar, "main", runs("sidecar"))
    monkeypatch.setattr(standalone, "main", runs("standalone"))
    given, stop = options(**more), asyncio.Event()
    await module.main(given, stop)
    assert ran == [(form, given, stop)]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "--triton-http and --triton-grpc are required together"),
        ({"triton_http": Endpoint("h", 1)}, "--triton-http and --triton-grpc are required together"),
        ({"triton_grpc": Endpoint("h", 1)}, "--triton-http and --triton-grpc are required together"),
        ({**TRITON, "token_file": Path("/t")}, "--token-file is for the agent"),
        ({"agent": NODE, "triton_http": Endpoint("h", 1)}, "--triton-http has no use with --agent"),
        ({"agent": NODE, "triton_grpc": Endpoint("h", 1)}, "--triton-grpc has no use with --agent"),
        ({"agent": NODE, "workers": 2}, "--workers has no use with --agent"),
        ({"agent": NODE, "max_inflight_bytes": 1}, "--max-inflight-bytes has no use with --agent"),
        ({"agent": NODE, "tls_cert": Path("/c")}, "--tls-cert and --tls-key belong together"),
        ({**TRITON, "tls_key": Path("/k")}, "--tls-cert and --tls-key belong together"),
        ({**TRITON, "tls_client_ca": Path("/a")}, "--tls-client-ca needs --tls-cert"),
        ({"agent": NODE, "tls_client_ca": Path("/a")}, "--tls-client-ca needs --tls-cert"),
    ],
)
async def test_flags_that_do_not_fit_are_reported_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(sidecar, "main", None)
    monkeypatch.setattr(standalone, "main", None)
    with pytest.raises(ConfigError, match=told):
        await module.main(options(**more), asyncio.Event())


@pytest.mark.parametrize("more", [{"agent": NODE}, {"agent": NODE, "token_file": Path("/t")}, TRITON])
def test_what_fits_is_taken(more: dict[str, Any]) -> None:
    module.require_consistent(options(**more))


def test_help_teaches_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(ProxyOptions, process="proxy", summary=module.SUMMARY, argv=["--help"], environ={})
    told = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert "With --agent (and --token-file): the proxy of a model's pod" in told
    assert "With --triton-http and --triton-grpc: a gateway of its own for one model" in told


def test_the_command_is_run_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run_process(*what: Any, **more: Any) -> int:
        ran.append((what, more))
        return 7

    monkeypatch.setattr(module, "run_process", run_process)
    assert module.run(["--model", "m"]) == 7
    ((what, more),) = ran
    assert what[0] == "proxy"
    assert what[2:] == (ProxyOptions, module.main, ["--model", "m"])
    loop = more["loop_factory"]()
    assert type(loop).__module__.startswith("uvloop")
    loop.close()
