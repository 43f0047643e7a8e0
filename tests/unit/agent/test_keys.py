import stat
from pathlib import Path

from agent.keys import FLAGS_FILE, make_keys
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
