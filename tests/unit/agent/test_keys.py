import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.keys import FLAGS_FILE, KeysOptions, main, make_keys, run
from berth.runtime.errors import CannotStart
from berth.triton.keys import TritonKeys


def test_keys_are_made_once_and_the_flags_follow_them(tmp_path: Path) -> None:
    make_keys(tmp_path)
    first = TritonKeys.read(tmp_path)
    make_keys(tmp_path)  # the agent's pod has restarted: Triton goes on with the same
    assert TritonKeys.read(tmp_path) == first
    flags = (tmp_path / FLAGS_FILE).read_text().split()
    assert flags == first.server_flags()
    assert len(flags) == 4
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o440 for path in tmp_path.iterdir())


@pytest.fixture
def owned() -> Iterator[Path]:
    """A directory of a user for whom read-only files are read-only, as the container's is."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() == 0:
            os.chown(directory, 65532, 65532)
            os.seteuid(65532)
            try:
                yield Path(directory)
            finally:
                os.seteuid(0)
        else:
            yield Path(directory)


@pytest.mark.parametrize("after", range(1, 4))
def test_who_was_killed_between_two_files_is_no_hindrance(
    owned: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    written, replace = [], Path.replace

    def killed(self: Path, target: Path) -> Path:
        if len(written) == after - 1:
            raise Killed
        written.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        make_keys(owned)
    monkeypatch.undo()
    make_keys(owned)
    flags = (owned / FLAGS_FILE).read_text().split()
    assert flags == TritonKeys.read(owned).server_flags()


def test_keys_of_which_one_is_missing_are_made_anew(owned: Path) -> None:
    make_keys(owned)
    (owned / "inference").unlink()
    (owned / FLAGS_FILE).unlink()
    make_keys(owned)
    assert (owned / FLAGS_FILE).read_text().split() == TritonKeys.read(owned).server_flags()


async def test_the_command_makes_them_and_says_where_it_cannot(tmp_path: Path) -> None:
    await main(KeysOptions(directory=tmp_path), asyncio.Event())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["admin", "inference", FLAGS_FILE]
    assert (tmp_path / FLAGS_FILE).read_text().endswith("\n")
    with pytest.raises(CannotStart, match=r"--directory: .*/missing: No such file or directory"):
        await main(KeysOptions(directory=tmp_path / "missing"), asyncio.Event())


def test_the_command_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "berth keys: --directory" in capsys.readouterr().err
