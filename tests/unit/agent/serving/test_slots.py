"""Who holds memory on a node."""

import asyncio
from pathlib import Path

import pytest

from agent.gpus import GpuReading
from berth.contract.ids import PodUid
from berth.contract.report import CodeRule, Failure, ModelState
from berth.triton.admin import IndexState
from berth.triton.errors import TritonUnavailable
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

NAME, UID = on_server("p1"), PodUid("p1")


async def test_memory_is_held_until_the_model_is_gone(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    on_node.triton.stays = {NAME}
    unload = on_node.lifecycle.start_unload(NAME)
    await until(lambda: on_node.triton.loaded[NAME] is IndexState.UNLOADING)
    assert (model.state, model.resident) == (ModelState.UNLOADING, True)
    assert on_node.models.get(UID) is model
    assert on_node.slots.busy_gpus() == {GPU.uuid}
    on_node.triton._unloaded(NAME)
    await unload
    assert on_node.models.get(UID) is None
    assert on_node.repository.records() == {}


async def test_memory_is_held_from_tritons_answer_on(on_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the load is measured: it may fail by that, and Triton holds the model all the same."""
    model, is_read, read = await on_node.stage(), asyncio.Event(), on_node.gpus.read_now

    async def read_now() -> tuple[GpuReading, ...]:
        if on_node.triton.loads:
            await is_read.wait()
        return await read()

    monkeypatch.setattr(on_node.gpus, "read_now", read_now)
    load = on_node.lifecycle.start_load(model)
    await until(lambda: model.resident)
    assert model.state is ModelState.LOADING
    is_read.set()
    await load
    assert (model.state, model.resident) == (ModelState.READY, True)


async def test_a_model_that_is_held_counts_with_its_code_until_it_is_released(on_node: Node) -> None:
    model, slot = await on_node.stage(), on_node.slots.of(NAME)
    slot.model, slot.record = model, on_node.repository.record(NAME)
    on_node.slots.hold(slot)
    assert on_node.gate.report().namespace == "team"
    on_node.slots.release(model)
    assert (on_node.gate.counts(UID), model.resident) == (False, False)


async def test_code_of_two_namespaces_is_never_loaded_together(on_node: Node) -> None:
    """Also where both were staged before either was loaded."""
    first, second = await on_node.stage("p1"), await on_node.stage("p2", namespace="other", on="GPU-b")
    await on_node.lifecycle.start_load(first)
    await on_node.lifecycle.start_load(second)
    assert (second.failure, on_node.triton.loads) == (Failure.CAPACITY, [NAME])
    assert "of another namespace" in second.reason


async def test_what_an_earlier_agent_has_held_and_triton_does_not_is_released(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.models.set_resident(model, True)
    on_node.gate.hold(UID, "team", has_code=True)
    await on_node.controller.look()
    assert (on_node.gate.counts(UID), model.resident) == (False, False)


async def test_of_two_that_want_the_same_memory_the_one_that_was_placed_first_gets_it(on_node: Node) -> None:
    first, second = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9)
    loads = on_node.lifecycle.start_load(second), on_node.lifecycle.start_load(first)
    await asyncio.gather(*loads)
    assert (first.state, second.failure) == (ModelState.READY, Failure.CAPACITY)


async def test_memory_of_a_model_that_is_being_loaded_is_nobodys(on_node: Node) -> None:
    """Whoever was placed first: its load has failed, and another has begun meanwhile."""
    first, second = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9)
    for name in (NAME, on_server("p2")):  # of known size: they may be loaded side by side
        on_node.repository.learn(name, measured_bytes=GIB, served=False)
    on_node.models.set(first, ModelState.FAILED, "connection refused", failure=Failure.TRANSIENT)
    on_node.triton.takes[on_server("p2")] = 60
    on_node.lifecycle.start_load(second)
    await until(lambda: on_node.triton.loading == 1)
    await on_node.lifecycle.start_load(first)
    assert (second.state, first.failure) == (ModelState.LOADING, Failure.CAPACITY)
    assert on_node.triton.loads == [on_server("p2")]
    await on_node.lifecycle.close()


async def test_who_has_served_keeps_its_memory_before_who_was_placed_first(on_node: Node) -> None:
    first, served = await on_node.stage("p1", gib=9), await on_node.stage("p2", gib=9, served=True)
    await asyncio.gather(on_node.lifecycle.start_load(first), on_node.lifecycle.start_load(served))
    assert (served.state, first.failure) == (ModelState.READY, Failure.CAPACITY)


async def test_a_load_takes_the_larger_of_what_was_promised_and_what_is_requested(on_node: Node) -> None:
    model = await on_node.stage(gib=17)
    model.requested_bytes = GIB
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.loads) == (Failure.CAPACITY, [])


async def test_memory_of_a_model_that_triton_does_not_let_go_of_is_nobodys(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    gone, later = await node.stage("p1", gib=9), await node.stage("p2", gib=9, on="GPU-b")
    await node.lifecycle.start_load(gone)
    node.triton.stays.add(NAME)
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable, match="is not gone"):
        await node.lifecycle.start_unload(NAME)
    await node.lifecycle.start_load(later)
    assert later.state is ModelState.READY
    beside = await node.stage("p3", gib=9)
    await node.lifecycle.start_load(beside)
    assert beside.failure is Failure.CAPACITY


async def test_two_pods_serve_models_of_one_name_and_of_one_content(tmp_path: Path) -> None:
    on_node = Node(tmp_path, code=CodeRule.ANY)
    one = await on_node.stage("p1", name="net", digest="same")
    other = await on_node.stage("p2", name="net", namespace="other", digest="same", on="GPU-b")
    for model in (one, other):
        await on_node.lifecycle.start_load(model)
    assert [model.state for model in (one, other)] == [ModelState.READY] * 2
    on_node.models.lose_pod(UID)
    await on_node.lifecycle.start_unload(on_server("p1", "net"))
    assert on_node.triton.loaded[on_server("p2", "net")] is IndexState.READY
    assert other.state is ModelState.READY
    assert list(on_node.repository.records()) == [on_server("p2", "net")]
