"""Loads wait for the report, for their turn and for Triton, with a bound."""

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.models import Model
from berth.contract.ids import PodUid, ServerName
from berth.contract.report import CodeRule, Failure, ModelState
from berth.triton.admin import IndexState
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.eventually import until
from tests.fakes.objects import GIB

NAME, UID = on_server("p1"), PodUid("p1")


async def test_models_of_one_gpu_load_one_after_another_and_of_two_side_by_side(on_node: Node) -> None:
    same = [await on_node.stage(uid) for uid in ("p1", "p2")]
    await asyncio.gather(*(on_node.lifecycle.start_load(model) for model in same))
    assert on_node.triton.most_loading == 1
    on_node.triton.load_seconds = 60
    for model in (await on_node.stage("p3"), await on_node.stage("p4", on="GPU-b")):
        on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 2)
    await on_node.lifecycle.close()


async def test_namespaces_take_turns_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, goes_on = Node(tmp_path, code=CodeRule.ANY), asyncio.Event()
    models = [await node.stage(uid, namespace=team) for uid, team in (("p1", "a"), ("p2", "a"), ("p3", "b"))]
    load = node.triton.load

    async def held_up(name: ServerName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        await goes_on.wait()
        await load(name, config, timeout_seconds=timeout_seconds)

    def is_waiting(model: Model, reason: str) -> bool:
        return bool(node.slots.busy_gpus()) and reason in model.reason

    monkeypatch.setattr(node.triton, "load", held_up)
    loads = []
    for model, reason in zip(models, ("", "on its GPU", "on its GPU"), strict=True):
        loads.append(node.lifecycle.start_load(model))
        await until(functools.partial(is_waiting, model, reason))
    goes_on.set()
    await asyncio.gather(*loads)
    assert node.triton.loads == [on_server("p1"), on_server("p3"), on_server("p2")]


async def test_a_long_load_holds_up_no_files_of_another_model_and_what_waits_for_it_says_so(
    on_node: Node,
) -> None:
    slow = await on_node.stage("p1")
    on_node.triton.takes[NAME] = 60
    loading = on_node.lifecycle.start_load(slow)
    await until(lambda: on_node.triton.loading == 1)
    async with asyncio.timeout(20):
        waits = await on_node.stage("p2")
        goes = await on_node.stage("p3")
        on_node.models.lose_pod(goes.ref.uid)
        await on_node.lifecycle.start_unload(on_server("p3"))
    then = on_node.lifecycle.start_load(waits)
    await until(lambda: "on its GPU" in waits.reason)
    assert (waits.state, slow.state) == (ModelState.LOADING, ModelState.LOADING)
    on_node.triton.takes.clear()
    on_node.triton.die()  # sooner than waiting for the end of it
    await asyncio.gather(loading, then)
    assert [(m.state, m.reason) for m in (slow, waits)] == [(ModelState.READY, "")] * 2


async def test_a_load_that_triton_never_ends_is_waited_for_with_a_bound(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, load_timeout=0.2)
    model = await node.stage()
    node.triton.loaded[NAME] = IndexState.LOADING
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "still LOADING after 0.2 s" in model.reason
    assert node.triton.loads == []


async def test_a_load_that_comes_too_late_is_not_begun_again(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, load_timeout=0.2)
    model, behind = await node.stage(), await node.stage("p2")
    node.triton.load_seconds = 0.5
    await node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "has been loading it for 0.2 s" in model.reason
    assert list(node.repository.records()) == [NAME, on_server("p2")]
    node.triton.load_seconds = 0.01
    await node.lifecycle.start_load(behind)  # the GPU is not held meanwhile
    assert behind.state is ModelState.READY
    await until(lambda: node.triton.loaded[NAME] is IndexState.READY)
    await node.lifecycle.start_load(model)
    assert (model.state, model.resident) == (ModelState.READY, True)
    assert node.triton.loads.count(NAME) == 1


async def test_an_api_server_that_is_away_fails_no_load_and_deletes_nothing(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.reported.away = True
    load = on_node.lifecycle.start_load(model)
    await until(lambda: len(on_node.reported.asked) > 3)
    assert not load.done()
    assert (model.state, model.failure) == (ModelState.LOADING, None)
    assert "report" in model.reason
    assert list(on_node.repository.records()) == [NAME]
    assert on_node.triton.loads == []
    on_node.reported.away = False
    await load
    assert (model.state, model.reason) == (ModelState.READY, "")
    assert on_node.events.said == [("ModelLoaded", "Triton serves model-p1")]


async def test_a_load_that_waits_for_the_api_server_holds_nobody_up_and_ends_with_its_pod(
    on_node: Node,
) -> None:
    model, served = await on_node.stage(), await on_node.stage("p2")
    await on_node.lifecycle.start_load(served)
    on_node.reported.away = True
    load = on_node.lifecycle.start_load(model)
    await until(lambda: model.reason != "")
    on_node.models.lose_pod(PodUid("p2"))
    await on_node.lifecycle.start_unload(on_server("p2"))  # on the same GPU
    on_node.models.lose_pod(UID)
    await on_node.lifecycle.start_unload(NAME)
    await load
    assert list(on_node.models) == []
    assert on_node.repository.records() == {}
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"]


async def test_a_load_that_does_not_fit_is_refused_with_the_figures_and_one_that_just_fits_is_not(
    on_node: Node,
) -> None:
    """Whoever has placed the pods: two that were promised the same memory do not both get it."""
    first, exact, one_too_many = (
        await on_node.stage("p1", gib=3),
        await on_node.stage("p2", gib=13),
        await on_node.stage("p3", gib=1),
    )
    # The last one asks first: those that were placed before it have their memory all the same.
    await on_node.lifecycle.start_load(one_too_many)
    assert (one_too_many.state, one_too_many.failure) == (ModelState.FAILED, Failure.CAPACITY)
    assert f"{GIB} bytes do not fit on GPU GPU-a: 0 are free of {16 * GIB}" in one_too_many.reason
    await asyncio.gather(on_node.lifecycle.start_load(exact), on_node.lifecycle.start_load(first))
    assert (first.state, exact.state) == (ModelState.READY, ModelState.READY)
    assert on_server("p3") in on_node.repository.records()
    assert on_node.triton.loads.count(on_server("p3")) == 0


async def test_a_pod_that_requests_no_memory_gets_none(on_node: Node) -> None:
    model = await on_node.stage()
    model.requested_bytes = 0  # placed by its owner, with an annotation of its own
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.loads) == (Failure.CAPACITY, [])
    assert "requests no GPU memory" in model.reason


async def test_a_load_that_hangs_holds_up_neither_unloads_nor_loads_of_its_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, load_timeout=2)
    hangs, served, behind = await node.stage("p1"), await node.stage("p2"), await node.stage("p3")
    await node.lifecycle.start_load(served)
    node.triton.takes[NAME] = 60
    load = node.lifecycle.start_load(hangs)
    await until(lambda: node.triton.loading == 1)
    node.models.lose_pod(PodUid("p2"))
    await node.lifecycle.start_unload(on_server("p2"))
    assert not load.done()
    await load
    assert (hangs.state, hangs.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    await node.lifecycle.start_load(behind)
    assert (behind.state, behind.measured_bytes) == (ModelState.READY, None)  # nobody knows whose it was
    assert hangs.resident  # its memory counts with what its pod requested
    assert node.models.taken_on(GPU.uuid) == 2 * GIB


async def test_a_pod_that_goes_during_its_load_is_waited_for_by_nobody(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.takes[NAME] = 2
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    on_node.models.lose_pod(UID)
    unload = on_node.lifecycle.start_unload(NAME)
    await load
    assert on_node.triton.loaded[NAME] is IndexState.LOADING
    await unload
    assert on_node.triton.loaded[NAME] is IndexState.UNAVAILABLE
    assert (list(on_node.models), on_node.repository.records()) == ([], {})


async def test_a_pod_that_ends_while_its_load_waits_for_its_turn_gets_none(on_node: Node) -> None:
    first, ends = await on_node.stage(), await on_node.stage("p2")  # on one GPU
    on_node.triton.takes[NAME] = 3
    loads = [on_node.lifecycle.start_load(first)]
    await until(lambda: on_node.triton.loaded.get(NAME) is IndexState.LOADING)
    loads.append(on_node.lifecycle.start_load(ends))
    await until(lambda: "on its GPU" in ends.reason)
    ends.deleting = True  # it keeps its files until it is gone
    await asyncio.gather(*loads)
    assert (first.state, ends.state, ends.reason) == (ModelState.READY, ModelState.STAGED, "")
    assert on_node.triton.loads == [NAME]


async def test_models_of_known_size_come_back_side_by_side(on_node: Node) -> None:
    models = [await on_node.stage(f"p{n}", on="GPU-a" if n % 2 else "GPU-b") for n in range(6)]
    for model in models:
        await on_node.lifecycle.start_load(model)
    on_node.triton.load_seconds = 60
    on_node.triton.die()
    await on_node.controller.look()
    await until(lambda: on_node.triton.loading == 6)
    on_node.triton.load_seconds = 0.01
    on_node.triton.die()
    await until(lambda: all(model.state is ModelState.READY for model in models))
    assert {model.measured_bytes for model in models} == {3 * GIB}


async def test_a_triton_that_dies_while_a_replica_is_drained_is_not_asked_to_unload_what_comes_next(
    on_node: Node,
) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.gateway.seconds, unloads = 0.5, []
    unload = on_node.triton.unload

    async def noted(name: ServerName, *, timeout_seconds: float) -> None:
        unloads.append(name)
        await unload(name, timeout_seconds=timeout_seconds)

    on_node.triton.unload = noted  # type: ignore[method-assign]
    staging = asyncio.ensure_future(on_node.stage(digest="another"))
    await until(lambda: not on_node.gateway.drained and on_node.triton.loaded == {NAME: IndexState.READY})
    await asyncio.sleep(0.05)
    on_node.triton.die()
    model = await staging
    await on_node.lifecycle.start_load(model)
    await until(lambda: bool(on_node.gateway.drained))
    await asyncio.sleep(0.05)
    assert (model.state, unloads) == (ModelState.READY, [])
