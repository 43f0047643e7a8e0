"""node D4, autoscaling D1: what takes Triton long on a GPU is waited for by others for half a minute at most."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.models import Model
from agent.serving.load_queue import SUSPECT_TURN_SECONDS, TURN_SECONDS
from berth.contract.ids import PodUid
from berth.contract.report import CodeRule, ModelState
from berth.triton.admin import IndexState
from tests.fakes import leaping
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

LONG = 500.0
pytestmark = pytest.mark.usefixtures("inline")


def on_a_node(tmp_path: Path, story: Callable[[Node], Awaitable[None]], *, load_seconds: float = 600) -> None:
    async def live() -> None:
        node = Node(tmp_path, load_timeout=load_seconds, unload_timeout=120, code=CodeRule.ANY)
        node.gpus._triton = node.triton
        try:
            await story(node)
        finally:
            await node.lifecycle.close()

    leaping.run(live())


async def begun(node: Node, uid: str) -> Model:
    """A model whose load takes long, and is under way."""
    slow, loading = await node.stage(uid), node.triton.loading
    node.triton.takes[on_server(uid)] = LONG
    node.lifecycle.start_load(slow)
    await until(lambda: node.triton.loading > loading)  # and so it would notice Triton's death
    return slow


async def seconds_to_serve(node: Node, uid: str, *, on: str = "GPU-a") -> tuple[Model, float]:
    began, model = leaping.now(), await node.stage(uid, on=on)
    await node.lifecycle.start_load(model)
    assert model.state is ModelState.READY
    return model, leaping.now() - began


def test_a_load_that_takes_long_holds_its_gpu_for_half_a_minute(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        slow = await begun(node, "p1")
        quick, seconds = await seconds_to_serve(node, "p2")
        assert TURN_SECONDS - 1 < seconds < TURN_SECONDS + 5
        assert (slow.state, quick.measured_bytes) == (ModelState.LOADING, None)  # nobody knows whose it was
        _, at_once = await seconds_to_serve(node, "p3")
        assert at_once < 5
        await node.lifecycle.start_load(slow)
        assert (slow.state, slow.measured_bytes) == (ModelState.READY, None)

    on_a_node(tmp_path, story)


def test_a_load_that_nobody_wants_any_more_holds_its_gpu_for_nobody(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        slow = await begun(node, "p1")
        node.models.lose_pod(slow.ref.uid)
        unload = node.lifecycle.start_unload(on_server("p1"))
        await asyncio.sleep(0.1)
        quick, seconds = await seconds_to_serve(node, "p2")
        assert seconds < 5
        assert quick.measured_bytes is None
        unload.cancel()

    on_a_node(tmp_path, story)


def test_a_pod_that_goes_while_others_wait_lets_them_go_on_at_once(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        slow = await begun(node, "p1")
        waits, began = await node.stage("p2"), leaping.now()
        load = node.lifecycle.start_load(waits)
        await asyncio.sleep(5)
        assert waits.state is ModelState.LOADING
        node.models.lose_pod(slow.ref.uid)
        unload = node.lifecycle.start_unload(on_server("p1"))
        await load
        assert leaping.now() - began < 10
        unload.cancel()

    on_a_node(tmp_path, story)


def test_a_load_that_is_reported_as_failed_holds_its_gpu_no_longer(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        slow = await begun(node, "p1")
        _, seconds = await seconds_to_serve(node, "p2")
        assert 9 < seconds < 15
        # Nor does it begin anew when its pod goes.
        await asyncio.sleep(2 * TURN_SECONDS)
        node.models.lose_pod(slow.ref.uid)
        unload = node.lifecycle.start_unload(on_server("p1"))
        await asyncio.sleep(0.1)
        assert node.slots.busy_gpus() == {GPU.uuid}
        _, seconds = await seconds_to_serve(node, "p3")
        assert seconds < 5
        unload.cancel()

    on_a_node(tmp_path, story, load_seconds=10)


def test_a_finalize_that_takes_long_holds_its_gpu_for_half_a_minute(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        stays, _ = await seconds_to_serve(node, "p1")
        node.triton.stays.add(on_server("p1"))
        node.models.lose_pod(stays.ref.uid)
        unload = node.lifecycle.start_unload(on_server("p1"))
        await until(lambda: node.triton.loaded[on_server("p1")] is IndexState.UNLOADING)
        _, seconds = await seconds_to_serve(node, "p2")
        assert TURN_SECONDS - 5 < seconds < TURN_SECONDS + 5
        unload.cancel()

    on_a_node(tmp_path, story)


def test_a_suspect_that_takes_long_holds_the_node_for_two_minutes(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        slow = await begun(node, "p1")
        node.triton.die()  # and so it is suspect
        await until(lambda: node.triton.loads.count(on_server("p1")) == 2)
        _, seconds = await seconds_to_serve(node, "p2", on="GPU-b")
        assert SUSPECT_TURN_SECONDS - 5 < seconds < SUSPECT_TURN_SECONDS + 5
        assert slow.state is ModelState.LOADING

    on_a_node(tmp_path, story)


@pytest.mark.parametrize("load_seconds", [600.0, 2 * TURN_SECONDS])
def test_one_namespace_leaves_threads_of_triton_to_others(tmp_path: Path, load_seconds: float) -> None:
    """Its ninth load that hangs waits, be it told as failed or not; another namespace's first does not."""

    async def story(node: Node) -> None:
        loads = [await node.stage(f"p{at}") for at in range(12)]
        for model in loads:
            node.triton.takes[on_server(model.ref.uid)] = LONG
            node.lifecycle.start_load(model)
        await asyncio.sleep(10 * TURN_SECONDS)
        assert node.triton.loading == 8
        other = await node.stage("q", namespace="other")
        await asyncio.wait_for(node.lifecycle.start_load(other), TURN_SECONDS + 5)
        assert other.state is ModelState.READY
        assert PodUid("q") in {model.ref.uid for model in node.models}

    on_a_node(tmp_path, story, load_seconds=load_seconds)


def test_a_namespace_with_many_slow_loads_is_one_in_the_line(tmp_path: Path) -> None:
    """node D4: each ends within its turn, and a neighbour that came after all of them waits for two, not for all."""

    async def story(node: Node) -> None:
        node.gpus.readings = [replace(gpu, total_bytes=1024 * GIB) for gpu in node.gpus.readings]
        crowd = [await node.stage(f"slow{n}", namespace="crowd") for n in range(6)]
        for slow in crowd:
            node.triton.takes[on_server(slow.ref.uid)] = TURN_SECONDS - 5
            node.lifecycle.start_load(slow)
        await until(lambda: sum("waits" in slow.reason for slow in crowd) == 5)
        _, first = await seconds_to_serve(node, "p1")
        assert first < TURN_SECONDS
        _, again = await seconds_to_serve(node, "p2")
        assert again < 2 * TURN_SECONDS
        for slow in crowd:
            await node.lifecycle.start_load(slow)
            assert slow.state is ModelState.READY

    on_a_node(tmp_path, story)


def test_a_namespace_does_not_leave_the_line_and_come_back_before_others(tmp_path: Path) -> None:
    """node D4: a model whose pod goes as soon as it has been loaded has had its namespace's turn all the same."""

    async def story(node: Node) -> None:
        node.gpus.readings = [replace(gpu, total_bytes=1024 * GIB) for gpu in node.gpus.readings]
        crowd = [await node.stage(f"slow{n}", namespace="crowd") for n in range(3)]
        for slow in crowd:
            node.triton.takes[on_server(slow.ref.uid)] = TURN_SECONDS - 5
            node.lifecycle.start_load(slow)
        await until(lambda: sum("waits" in slow.reason for slow in crowd) == 2)
        asking = asyncio.create_task(seconds_to_serve(node, "p1"))
        await until(lambda: len(node.lifecycle._loads) == 4)
        await node.lifecycle.start_load(crowd[0])
        node.models.lose_pod(PodUid("slow0"))
        await node.lifecycle.start_unload(on_server("slow0"))
        assert (await asking)[1] < TURN_SECONDS

    on_a_node(tmp_path, story)


def test_turns_of_namespaces_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    async def story(node: Node) -> None:
        for n in range(3):
            model = await node.stage(f"p{n}", namespace=f"team{n}")
            await node.lifecycle.start_load(model)
            node.models.lose_pod(model.ref.uid)
            await node.lifecycle.start_unload(on_server(f"p{n}"))
        assert len(node.controller._queue._last_turns) == 1

    on_a_node(tmp_path, story)
