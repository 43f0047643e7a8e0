"""Triton is away, or is at what another agent has begun."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from berth.contract.ids import PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonError, TritonLate, TritonUnavailable
from tests.fakes.agent_node import Node, on_server
from tests.fakes.eventually import until

NAME, UID = on_server("p1"), PodUid("p1")


async def test_a_triton_that_goes_away_once_is_waited_for(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonUnavailable("connection reset")]
    on_node.triton.restart_seconds = 0.3
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.deaths == 1)
    await asyncio.sleep(0.1)
    assert (model.state, model.resident) == (ModelState.LOADING, False)
    assert "waits for Triton" in model.reason
    await load
    assert (model.state, model.reason) == (ModelState.READY, "")
    assert on_node.events.said == [("ModelLoaded", "Triton serves model-p1")]


@pytest.mark.parametrize("error", [TritonUnavailable("connection reset"), TritonLate("Deadline Exceeded")])
async def test_a_look_at_triton_that_gets_no_answer_fails_no_load(on_node: Node, error: TritonError) -> None:
    model = await on_node.stage()
    on_node.triton.index_errors = [error] * 4
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loads) == (ModelState.READY, [NAME])


async def test_a_triton_that_stays_away_fails_the_load_and_keeps_the_files(
    tmp_path: Path,
) -> None:
    on_node = Node(tmp_path, triton_wait=0.3)
    model = await on_node.stage()
    on_node.triton.restart_seconds = 60
    on_node.triton.die()
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "Triton has not answered for 0.3 s" in model.reason
    assert list(on_node.repository.records()) == [NAME]


async def test_what_triton_is_loading_already_is_waited_for_and_not_loaded_twice(on_node: Node) -> None:
    """As an agent finds it that starts while a load of the one before goes on."""
    model = await on_node.stage()
    on_node.triton.loaded[NAME] = IndexState.LOADING
    load = on_node.lifecycle.start_load(model)
    told = (ModelState.LOADING, "Triton is loading it since before this load")
    await until(lambda: (model.state, model.reason) == told)
    on_node.triton.loaded[NAME] = IndexState.READY
    await load
    assert (model.state, model.resident, model.reason) == (ModelState.READY, True, "")
    assert on_node.triton.loads == []
    record = on_node.repository.record(NAME)
    assert record is not None
    assert record.served


async def test_what_triton_is_unloading_is_loaded_once_it_is_gone(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.loaded[NAME] = IndexState.UNLOADING
    load = on_node.lifecycle.start_load(model)
    await asyncio.sleep(0.1)
    assert on_node.triton.loads == []
    on_node.triton.loaded[NAME] = IndexState.UNAVAILABLE
    await load
    assert (model.state, on_node.triton.loads) == (ModelState.READY, [NAME])


async def test_triton_is_not_asked_without_pause(tmp_path: Path) -> None:
    """While it unloads, while it is away, and while the API server is."""
    node, looks = Node(tmp_path), [0]
    model, index = await node.stage(), node.triton.index

    async def counted() -> Mapping[ServerName, IndexEntry]:
        looks[0] += 1
        return await index()

    node.triton.index = counted  # type: ignore[method-assign]
    await node.lifecycle.start_load(model)
    looks[0], node.triton.unload_seconds = 0, 0.3
    node.models.lose_pod(UID)
    await node.lifecycle.start_unload(NAME)
    assert 2 < looks[0] < 20
    again = await node.stage("p9")
    node.triton.loaded[on_server("p9")] = IndexState.LOADING
    looks[0] = 0
    load = node.lifecycle.start_load(again)
    await asyncio.sleep(0.3)
    assert 1 < looks[0] < 10
    node.triton.loaded[on_server("p9")] = IndexState.READY
    await load
    node.reported.away, waits = True, await node.stage("p2")
    load = node.lifecycle.start_load(waits)
    await asyncio.sleep(0.3)
    assert 1 < len(node.reported.asked) - 2 < 10
    await node.lifecycle.close()
    assert load.done()


async def test_a_triton_that_is_away_at_every_look_is_given_up_at_last(
    tmp_path: Path,
) -> None:
    on_node = Node(tmp_path, triton_wait=0.2)
    model = await on_node.stage()
    on_node.triton.index_errors = [TritonUnavailable("connection reset")] * 300
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "Triton has not answered for 0.2 s" in model.reason
    assert "connection reset" in model.reason
    assert list(on_node.repository.records()) == [NAME]


async def test_a_triton_that_comes_or_goes_is_reported_at_once(on_node: Node) -> None:
    async def is_reported() -> bool:
        change = on_node.models.next_change()
        with suppress(TritonUnavailable):
            await on_node.controller.look()
        return change.is_set()

    assert [await is_reported(), await is_reported()] == [True, False]
    on_node.triton.index_errors = [TritonUnavailable("away")] * 2
    assert [await is_reported() for _ in range(4)] == [True, False, True, False]


async def test_a_triton_that_is_back_by_a_look_that_began_before_it_went_is_reported_too(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_node.controller.look()
    asked, answers, version = asyncio.Event(), asyncio.Event(), on_node.triton.version

    async def late_at_first() -> str | None:
        if not asked.is_set():
            asked.set()
            await answers.wait()
        return await version()

    monkeypatch.setattr(on_node.triton, "version", late_at_first)
    early = asyncio.create_task(on_node.controller.look())
    await asked.wait()
    on_node.triton.index_errors = [TritonUnavailable("away")]
    with pytest.raises(TritonUnavailable):
        await on_node.controller.look()
    change = on_node.models.next_change()
    answers.set()
    await early
    assert (on_node.sync.version, change.is_set()) == ("2.51.0", True)
