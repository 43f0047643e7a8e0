"""When Triton is restarted, and the file that says so."""

import os
from pathlib import Path

import pytest

from agent.serving.journal import Journal
from agent.serving.restart import (
    LEAST_SECONDS_BETWEEN,
    NEEDED_SECONDS,
    PATIENCE_SECONDS,
    Other,
    RestartFile,
    Stuck,
    why_restart,
)
from berth.contract.ids import PodUid, ServerName
from berth.triton.errors import TritonUnavailable
from tests.fakes.agent_node import Node, on_server
from tests.fakes.eventually import until

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


NAME, UID = on_server("p1"), PodUid("p1")


async def test_triton_is_restarted_where_it_does_not_let_go_of_a_model_and_nobody_is_charged(
    tmp_path: Path,
) -> None:
    # The first unload takes all of its time, the second has to end within it, on a busy machine as well.
    node = Node(tmp_path, load_timeout=0.1, unload_timeout=4.0)
    hangs = await node.stage()
    node.triton.takes[NAME] = 60
    await node.lifecycle.start_load(hangs)
    await node.restarts.step()
    assert not (tmp_path / "restart-triton").exists()  # its pod lives: another node may be tried first
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable):
        await node.lifecycle.start_unload(NAME)
    await node.restarts.step()
    assert "does not release model-p1" in (tmp_path / "restart-triton").read_text()
    assert "TritonRestarted" in [reason for reason, _ in node.events.said]
    node.triton.die()  # as its kubelet does
    await node.controller.look()  # as the reconciler does: nothing else waits for a model that is stuck
    await node.lifecycle.start_unload(NAME)
    assert list(node.models) == []
    count = node.registry.get_sample_value
    assert count("berth_agent_triton_restarts_total", {"reason": "stuck"}) == 1
    assert count("berth_agent_triton_restarts_total", {"reason": "died"}) == 0
    await until(
        lambda: Journal(tmp_path).read().open == []
    )  # written in the background: nor at the next death


async def test_triton_is_not_restarted_while_another_model_is_being_loaded(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    stays, loads = await node.stage(), await node.stage("p2", on="GPU-b")
    await node.lifecycle.start_load(stays)
    node.triton.stays = {NAME}
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable):
        await node.lifecycle.start_unload(NAME)
    node.triton.load_seconds = 60
    node.lifecycle.start_load(loads)
    await until(lambda: node.triton.loading == 1)
    await node.restarts.step()
    assert not (tmp_path / "restart-triton").exists()
    await node.lifecycle.close()
