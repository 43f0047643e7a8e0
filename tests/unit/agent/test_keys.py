import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import agent.keys
from agent.keys import FLAGS_FILE, TICKETS_FILE, KeysOptions, main, make_keys, read_ticket_secret, run
from berth.contract.errors import InvalidValue
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
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes.pop(TICKETS_FILE) == 0o400  # no group's: Triton is of the other files'
    assert set(modes.values()) == {0o440}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


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


@pytest.mark.parametrize("after", range(1, 5))
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


def test_two_pods_that_make_them_at_once_have_the_same(owned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def slowly(self: Path, target: Path) -> Path:
        time.sleep(0.005)  # whoever comes meanwhile finds one key of two
        return replace(self, target)

    def both() -> TritonKeys:
        make_keys(owned)
        return TritonKeys.read(owned)

    monkeypatch.setattr(Path, "replace", slowly)
    with ThreadPoolExecutor(4) as pods:
        found = {future.result() for future in [pods.submit(both) for _ in range(4)]}
    assert len(found) == 1
    assert (owned / FLAGS_FILE).read_text().split() == found.pop().server_flags()
    assert len(list(owned.iterdir())) == 4


@pytest.mark.parametrize("after", range(1, 5))
def test_who_is_killed_holds_nobody_up(tmp_path: Path, after: int) -> None:
    program = f"""
import os, signal
from pathlib import Path
from agent.keys import make_keys
left, replace = [{after}], Path.replace
def killed(self, target):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = killed
make_keys(Path({str(tmp_path)!r}))
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    make_keys(tmp_path)
    keys = TritonKeys.read(tmp_path)
    make_keys(tmp_path)
    assert TritonKeys.read(tmp_path) == keys
    assert (tmp_path / FLAGS_FILE).read_text().split() == keys.server_flags()


async def test_one_that_hangs_is_reported_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.keys, "_LOCK_SECONDS", 0.01)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(CannotStart, match="another berth keys has been at it"):
        await main(KeysOptions(directory=tmp_path), asyncio.Event())
    os.close(other)
    await main(KeysOptions(directory=tmp_path), asyncio.Event())


def test_a_key_that_is_garbage_is_made_anew(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "admin").chmod(0o600)
    (tmp_path / "admin").write_bytes(b"\xff\xfe")
    make_keys(tmp_path)
    assert (tmp_path / FLAGS_FILE).read_text().split() == TritonKeys.read(tmp_path).server_flags()


def test_the_secret_of_the_tickets_outlives_those_who_make_the_keys(tmp_path: Path) -> None:
    make_keys(tmp_path)
    first = read_ticket_secret(tmp_path)
    (tmp_path / "admin").unlink()  # Triton's keys are made anew; every pod's ticket stays what it is
    make_keys(tmp_path)
    assert read_ticket_secret(tmp_path) == first
    assert first.hex() not in (tmp_path / FLAGS_FILE).read_text()


@pytest.mark.parametrize("text", [b"", b"00ff\n", b"x" * 64, b"\xff\xfe"])
def test_a_secret_of_tickets_that_is_none_is_reported_and_made_anew(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InvalidValue, match=f"{TICKETS_FILE}: No such file or directory; berth keys makes it"):
        read_ticket_secret(tmp_path)
    (tmp_path / TICKETS_FILE).write_bytes(text)
    with pytest.raises(InvalidValue, match=f"{TICKETS_FILE}: not the secret of tickets"):
        read_ticket_secret(tmp_path)
    make_keys(tmp_path)
    assert len(read_ticket_secret(tmp_path)) == 32


async def test_the_command_makes_them_and_says_where_it_cannot(tmp_path: Path) -> None:
    await main(KeysOptions(directory=tmp_path), asyncio.Event())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "admin",
        "inference",
        FLAGS_FILE,
        TICKETS_FILE,
    ]
    assert (tmp_path / FLAGS_FILE).read_text().endswith("\n")
    with pytest.raises(CannotStart, match=r"--directory: .*/missing: No such file or directory"):
        await main(KeysOptions(directory=tmp_path / "missing"), asyncio.Event())


def test_the_command_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "berth keys: --directory" in capsys.readouterr().err


def test_keys_that_are_right_are_left_alone_and_others_are_replaced(tmp_path: Path) -> None:
    """The pods of Triton and of the agent make them, perhaps at once: a kubelet that mounts one by subPath must find
    the file that it has resolved."""
    make_keys(tmp_path)
    files = sorted(path for path in tmp_path.iterdir() if path.is_file())
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in files}
    make_keys(tmp_path)
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in files} == before
    inference = tmp_path / "inference"
    inference.chmod(0o400)  # its maker was of another group than Triton's
    make_keys(tmp_path)
    assert stat.S_IMODE(inference.stat().st_mode) == 0o440
    assert inference.read_bytes() == before[inference][1]
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == files
