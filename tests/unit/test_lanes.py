"""How all tests are run: in lanes, each group once, and a group that fails fails the whole."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.__main__ import GROUPS, OTHERS, commands, run

ROOT = Path(__file__).parents[2]


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", program)


def test_every_file_of_tests_is_in_one_group() -> None:
    named = set(GROUPS) - {OTHERS}
    assert all((ROOT / group).is_dir() for group in named)
    assert not any(one != other and one.startswith(f"{other}/") for one in named for other in named)
    assert tuple(commands()) == GROUPS
    assert set(commands()[OTHERS]) >= {"tests", *(f"--ignore={group}" for group in named)}
    assert all(commands()[group][-1] == group for group in named)


def test_nightly_tests_are_left_to_the_night() -> None:
    for group in GROUPS:
        by_day, by_night = commands()[group], commands(nightly=True)[group]
        at = by_day.index("-m", 3)  # behind `python -m pytest`
        assert by_day[at + 1] == "not nightly"
        assert [*by_day[:at], *by_day[at + 2 :]] == [*by_night]


async def test_what_each_group_came_to_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {
        "tests/a/b": python("print('said by one')"),
        "second": python("import sys; sys.exit('said by another')"),
        "third": python("print('and the last')"),
    }
    async with asyncio.timeout(60):
        assert await run(groups, lanes=2, logs=tmp_path) == {"tests/a/b": 0, "second": 1, "third": 0}
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("said by one", "said by another", "and the last"))
    assert "tests: second FAILED with status 1" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"a-b.log", "second.log", "third.log"}


async def test_no_more_run_at_once_than_there_are_lanes(tmp_path: Path) -> None:
    count = (
        "import os, pathlib, time\n"
        f"marks = pathlib.Path({str(tmp_path / 'marks')!r})\n"
        "(marks / str(os.getpid())).touch(); time.sleep(0.05)\n"
        "n = len(list(marks.iterdir())); (marks / str(os.getpid())).unlink(); raise SystemExit(n > 2)"
    )
    (tmp_path / "marks").mkdir()
    async with asyncio.timeout(60):
        statuses = await run({str(n): python(count) for n in range(8)}, lanes=2, logs=tmp_path)
    assert set(statuses.values()) == {0}


async def test_who_breaks_it_off_leaves_no_group_running(tmp_path: Path) -> None:
    lasting = python("import time; print('begun', flush=True); time.sleep(600)")
    running = asyncio.ensure_future(run({"one": lasting, "two": lasting}, lanes=2, logs=tmp_path))
    async with asyncio.timeout(60):
        while (
            sum(
                (tmp_path / f"{n}.log").exists() and "begun" in (tmp_path / f"{n}.log").read_text()
                for n in ("one", "two")
            )
            < 2
        ):
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running  # `no_child_is_left` looks for what is
