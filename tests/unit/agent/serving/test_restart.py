"""When Triton is restarted, and the file that says so."""

import os
from pathlib import Path

import pytest

from agent.serving.restart import (
    LEAST_SECONDS_BETWEEN,
    NEEDED_SECONDS,
    PATIENCE_SECONDS,
    Other,
    RestartFile,
    Stuck,
    why_restart,
)
from berth.contract.ids import ServerName

X, Y = ServerName("x"), ServerName("y")


@pytest.mark.parametrize(
    ("stuck", "others", "loads", "last", "is_restarted"),
    [
        ([], [], 0, None, False),
        ([Stuck(X, 0)], [], 0, None, True),  # nobody is served: at once
        ([Stuck(X, 0)], [], 1, None, False),  # what is being loaded would be lost
        ([Stuck(X, 0)], [], 0, LEAST_SECONDS_BETWEEN - 1, False),
        ([Stuck(X, 0)], [], 0, LEAST_SECONDS_BETWEEN, True),
        ([Stuck(X, NEEDED_SECONDS - 1)], [Other(Y, 1.0)], 0, None, False),
        ([Stuck(X, NEEDED_SECONDS)], [Other(Y, 1.0)], 0, None, True),  # back in a moment
        ([Stuck(X, NEEDED_SECONDS)], [Other(Y, 300.0)], 0, None, False),
        ([Stuck(X, NEEDED_SECONDS, is_needed=True)], [Other(Y, 300.0)], 0, None, True),
        ([Stuck(X, PATIENCE_SECONDS)], [Other(Y, 300.0)], 0, None, True),
        ([Stuck(X, PATIENCE_SECONDS)], [Other(Y, None), Other(X, None)], 0, None, True),
        ([Stuck(X, NEEDED_SECONDS)], [Other(Y, None), Other(X, None)], 0, None, False),
        ([Stuck(X, 9e9, is_needed=True)], [Other(Y, 1.0, comes_back=False)], 0, None, False),
    ],
)
def test_when_triton_is_restarted(
    stuck: list[Stuck], others: list[Other], loads: int, last: float | None, is_restarted: bool
) -> None:
    why = why_restart(stuck, others, loads_under_way=loads, since_last_seconds=last)
    assert (why is not None) is is_restarted
    if why is not None:
        assert "does not release x" in why


def test_the_file_that_ends_triton_is_another_each_time_and_outlives_the_agent(tmp_path: Path) -> None:
    file = RestartFile(tmp_path)
    assert file.seconds_since() is None
    file.ask("again")
    first = file.path.read_text()
    os.utime(file.path, (2**31, 2**31))
    assert file.seconds_since() is None  # the clock has been set back: it asks once more, and no sooner again
    os.utime(file.path, (1000, 1000))
    assert (file.seconds_since() or 0) > 1e6
    RestartFile(tmp_path).ask("again")
    assert 0 <= (RestartFile(tmp_path).seconds_since() or 0) < 60
    assert file.path.read_text().startswith("again (")
    assert file.path.read_text() != first
    assert [entry.name for entry in tmp_path.iterdir()] == [file.path.name]
