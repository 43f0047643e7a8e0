"""Wrong configuration and missing parts: one clear line, the exit codes of docs/architecture.md, nothing left behind."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.support import berth

SCENARIO = "gpus:\n  - {uuid: GPU-a, product: T4, total: 16Gi}\n"


def kubeconfig(path: Path, server: str, **user: str) -> str:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": user or {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return str(path)


@pytest.fixture
def agent_flags(tmp_path: Path) -> dict[str, str]:
    """Flags of an agent that is right but for its API server, which nobody listens for."""
    scenario = tmp_path / "gpus.yaml"
    scenario.write_text(SCENARIO)
    (tmp_path / "repository").mkdir()
    return {
        "--node-name": "gpu-1",
        "--nvml": f"mock:{scenario}",
        "--repository": str(tmp_path / "repository"),
        "--listen": "127.0.0.1:0",
        "--admin-listen": "127.0.0.1:0",
        "--kubeconfig": kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1"),
    }


async def run_agent(flags: dict[str, str]) -> tuple[int, str]:
    code, _, err = await berth("agent", "--log-level=error", *(f"{k}={v}" for k, v in flags.items()))
    return code, err


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"--nvml": "cuda"}, 2, "--nvml"),
        ({"--nvml": "mock:/nowhere.yaml"}, 2, "/nowhere.yaml"),
        ({"--headroom": "1.5Q"}, 2, "--headroom: '1.5Q' is not a quantity"),
        ({"--listen": "everywhere"}, 2, "--listen: 'everywhere' is not HOST:PORT"),
        ({"--repository": "/nowhere/models"}, 3, "/nowhere/models"),
        ({"--kubeconfig": "/nowhere/config"}, 2, "--kubeconfig"),
        pytest.param({}, 3, "http://127.0.0.1:1", marks=pytest.mark.nightly),  # half a minute of tries
    ],
)
async def test_an_agent_that_cannot_start_says_why(
    agent_flags: dict[str, str], changes: dict[str, str], code: int, said: str
) -> None:
    actual, err = await run_agent(agent_flags | changes)
    assert (actual, len(err.strip().splitlines())) == (code, 1), err
    assert said in err


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("gpus: [", "gpus.yaml"),
        ("gpus:\n  - {uuid: GPU-a, total: 16Gigs}\n", "'16Gigs' is not a quantity"),
        ("gpus:\n  - {total: 16Gi}\n", "uuid"),
        ("gpus:\n  - {uuid: GPU-a, total: 16Gi, totl: 1}\n", "totl"),
    ],
)
async def test_a_scenario_with_an_error_names_it(
    agent_flags: dict[str, str], tmp_path: Path, scenario: str, said: str
) -> None:
    (tmp_path / "gpus.yaml").write_text(scenario)
    code, err = await run_agent(agent_flags)
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert said in err
    assert "gpus.yaml" in err


async def test_an_unusable_kubeconfig_is_bad_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    for text in ("", "{", "clusters: 7\n", "a: b\n"):
        path.write_text(text)
        code, _, err = await berth("binder", "--log-level=error", f"--kubeconfig={path}")
        assert code == 2, err
        assert "--kubeconfig" in err


@pytest.mark.nightly
async def test_an_api_server_that_is_away_is_cannot_start(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    for command in (["binder", "--admin-listen=127.0.0.1:0", "--log-level=error"], ["top"], ["why", "p"]):
        code, _, err = await berth(*command, f"--kubeconfig={path}")
        assert (code, len(err.strip().splitlines())) == (3, 1), (command, err)
        assert "127.0.0.1:1" in err


async def test_a_taken_port_is_cannot_start_and_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--http-listen", "--grpc-listen", "--admin-listen"):
            free = {
                "--http-listen": "127.0.0.1:0",
                "--grpc-listen": "127.0.0.1:0",
                "--admin-listen": "127.0.0.1:0",
            }
            code, _, err = await berth(
                "proxy",
                "--model=m",
                "--triton-http=127.0.0.1:1",
                "--triton-grpc=127.0.0.1:1",
                "--log-level=error",
                *(f"{k}={v}" for k, v in (free | {flag: address}).items()),
            )
            assert code == 3, err
            assert flag in err
            assert address in err


async def test_names_that_no_model_may_have() -> None:
    for name in ("..", "a/b", "a\x01b", "x" * 300, "stats"):
        for command in ("proxy", "loader"):
            code, _, err = await berth(command, f"--model={name}", "--log-level=error")
            assert code == 2, (name, err)
            assert "--model" in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MiB, mounted in this process's own mount namespace where that is allowed."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
async def test_a_read_only_repository_is_cannot_start(agent_flags: dict[str, str], small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, err = await run_agent(agent_flags | {"--repository": str(small_disk)})
    assert (code, len(err.strip().splitlines())) == (3, 1), err
    assert str(small_disk) in err
