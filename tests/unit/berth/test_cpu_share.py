"""The admin thread's share of the processor."""

import pytest

from berth.runtime.admin.cpu_share import PIECE_SECONDS, CpuShare


def test_the_thread_works_a_moment_and_rests_for_three() -> None:
    share = CpuShare(10.0)
    assert share.has_time(10.0 + PIECE_SECONDS / 2)
    assert share.rest_seconds(10.0 + PIECE_SECONDS / 2) == 0.0
    assert not share.has_time(10.002)
    assert share.rest_seconds(10.002) == pytest.approx(0.006)
    assert share.rest_seconds(10.002) == 0.0
    assert share.rest_seconds(20.0) == 0.05  # others wait for it
