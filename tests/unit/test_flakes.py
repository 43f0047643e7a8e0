"""A test that is red once in a while is found, and named with the seed that shows it again."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.flakes import busy, main

# Every second run is red: what is left behind by one run decides the next.
SOMETIMES = """
from pathlib import Path
def test_sometimes():
    mark = Path(__file__).with_name("mark")
    if mark.exists():
        mark.unlink()
        raise AssertionError
    mark.touch()
def test_always_green():
    pass
"""
LEFT_BEHIND = """
import pytest
@pytest.fixture
def broken():
    yield
    raise RuntimeError("as it ends")
def test_fine_itself(broken):
    pass
"""


def flakes(tmp_path: Path, text: str, *more: str) -> int:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_one.py").write_text(text)
    return main(["--busy=1", f"--output={tmp_path / 'output'}", *more, str(tests)])


def test_a_test_that_is_red_once_in_a_while_is_named_with_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flakes(tmp_path, SOMETIMES, "--times=4", "--seed=7") == 1
    shown = capsys.readouterr().out
    assert "2 of 4 red: " in shown
    assert "test_one::test_sometimes   (--seed 8 --times 1)" in shown
    assert "test_always_green" not in shown
    assert {path.name for path in (tmp_path / "output").glob("*.log")} == {f"{n}.log" for n in (7, 8, 9, 10)}


def test_what_fails_as_a_test_is_ended_counts(tmp_path: Path) -> None:
    assert flakes(tmp_path, LEFT_BEHIND, "--times=1") == 1


def test_green_is_green(tmp_path: Path) -> None:
    assert flakes(tmp_path, "def test_fine(): pass", "--times=1") == 0


@pytest.mark.parametrize("text", ["def helper(): pass", "import nothing_of_this_name"])
def test_rounds_that_ran_no_test_are_not_green(tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit, match=r"pytest ended with \d: see .*1\.log"):
        flakes(tmp_path, text, "--times=1")


@pytest.mark.parametrize("times", ["0", "-1", "many"])
def test_no_rounds_are_refused(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([f"--times={times}"])
    assert "is not a positive number" in capsys.readouterr().err


def test_busy_loops_end_with_the_rounds() -> None:
    def children() -> set[str]:
        listed = subprocess.run(
            ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True
        )
        return {line for line in listed.stdout.splitlines() if "getppid" in line}

    with busy(2):
        assert children()
    assert not children()
