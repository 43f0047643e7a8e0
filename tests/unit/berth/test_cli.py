"""The command `berth`."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import berth.cli
import berth.runtime.process
from berth import __version__
from berth.runtime import options as opt
from berth.runtime.options import CommonOptions
from berth.runtime.process import run_process


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class Plain(CommonOptions):
    word: str = opt.option("a word", default="w")


def run(main: Any, *argv: str) -> int:
    return run_process("t", "s", Plain, main, argv)


def called(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[str]:
    asked: list[str] = []

    def import_module(name: str) -> Any:
        asked.append(name)
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(berth.cli, "importlib", SimpleNamespace(import_module=import_module))
    return asked


def test_a_command_is_given_its_arguments_and_tells_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def command(argv: list[str]) -> int:
        given.append(argv)
        return 5

    asked = called(monkeypatch, SimpleNamespace(run=command))
    assert berth.cli.main(["why", "--node", "n"]) == 5
    monkeypatch.setattr(sys, "argv", ["berth", "top"])
    assert berth.cli.main() == 5
    assert (asked, given) == (["binder.cli.why", "binder.cli.top"], [["--node", "n"], []])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_who_asks_is_told_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert berth.cli.main(argv) == 0
    shown = capsys.readouterr().out
    paragraphs = shown.split("\n\n")
    assert paragraphs[:2] == [
        "usage: berth COMMAND [--flags]",
        "GPU sharing for model serving on Kubernetes.",
    ]
    assert len(paragraphs) == 4
    for command, (_, summary) in berth.cli.COMMANDS.items():
        assert f"  {command:12} {summary}" in paragraphs[2].splitlines()


def test_every_command_can_be_run() -> None:
    names = ["agent", "binder", "loader", "proxy", "gateway", "activator", "scaler", "scale"]
    names += ["top", "why", "would-fit", "upgrade-node"]
    names += ["demo", "keys"]
    assert [*berth.cli.COMMANDS] == names
    for module, _ in berth.cli.COMMANDS.values():
        assert callable(__import__(module, fromlist=["run"]).run)


def test_its_version_and_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert berth.cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"berth {__version__}\n"
    assert berth.cli.main(["agnet"]) == 2
    assert capsys.readouterr().err == "berth: 'agnet' is not a command; see berth --help\n"


def test_what_an_image_does_not_hold_is_reported_and_what_is_broken_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called(monkeypatch, ModuleNotFoundError(name="localcluster"))
    assert berth.cli.main(["demo"]) == 3
    assert "demo runs from a source checkout only: make demo" in capsys.readouterr().err
    called(monkeypatch, ModuleNotFoundError(name="grpc"))
    with pytest.raises(ModuleNotFoundError):
        berth.cli.main(["agent"])
