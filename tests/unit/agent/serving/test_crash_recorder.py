"""Which models are charged with a crash of Triton, on a node."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.serving.journal import Journal
from berth.contract.ids import PodUid
from berth.contract.report import CodeRule, Failure, ModelState
from berth.kube.times import utc_now
from berth.triton.admin import IndexState
from berth.triton.errors import TritonRefused
from tests.fakes.agent_node import Node, on_server
from tests.fakes.eventually import until

NAME, UID = on_server("p1"), PodUid("p1")


async def test_files_that_take_triton_down_alone_are_quarantined_and_others_are_not(on_node: Node) -> None:
    model, other = await on_node.stage(), await on_node.stage("p2")
    on_node.triton.deadly = {NAME}
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.QUARANTINED)
    assert on_node.triton.deaths == 2  # a Triton that is stopped during one load has not died of it
    assert NAME in on_node.repository.records()
    assert (
        "the files p1 took Triton 2.51.0 with backend python down while they were loaded alone at 20"
        in model.reason
    )
    assert "set the annotation seldon.io/trtis-lift-quarantine=p1 on the Node" in model.reason
    assert on_node.events.said[-1] == ("ModelQuarantined", model.reason)
    assert on_node.registry.get_sample_value("berth_agent_quarantined_models") == 1
    died = on_node.registry.get_sample_value("berth_agent_triton_restarts_total", {"reason": "died"})
    assert died == 2
    # Whoever brings these files again, be it for another pod, is told; Triton lives, and others load.
    await on_node.lifecycle.start_load(model)
    assert "quarantined" in model.reason
    again = await on_node.stage("p3", digest="p1")
    assert (again.state, again.failure) == (ModelState.FAILED, Failure.QUARANTINED)  # at once
    await on_node.lifecycle.start_load(again)
    assert again.failure is Failure.QUARANTINED
    await on_node.lifecycle.start_load(other)
    assert other.state is ModelState.READY
    assert on_node.triton.deaths == 2
    on_node.triton.deadly = set()
    await on_node.stage("p1", digest="mended")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.reason) == (ModelState.READY, "")


async def test_the_mark_of_a_load_is_on_disk_before_triton_is_asked_and_gone_after_it(on_node: Node) -> None:
    """Whatever the load takes down with it, agent and node included, is known as a suspect afterwards."""
    model, load = await on_node.stage(), on_node.triton.load
    on_disk: list[tuple[str, bool]] = []

    def marks() -> list[tuple[str, bool]]:
        ledger = Journal(on_node.directory).read()
        return [(mark.digest, mark.open) for mark in ledger.open]

    async def looked(*args: Any, **more: Any) -> None:
        on_disk.extend(marks())
        await load(*args, **more)

    on_node.triton.load = looked  # type: ignore[method-assign]
    await on_node.lifecycle.start_load(model)
    assert on_disk == [("p1", True)]
    await until(lambda: marks() == [])
    on_node.triton.errors = [TritonRefused("nobody knows")]
    refused = await on_node.stage("p2", on="GPU-b")
    await on_node.lifecycle.start_load(refused)
    assert on_disk[1:] == [("p2", True)]
    await until(lambda: marks() == [])


async def test_what_cannot_be_marked_is_not_loaded(on_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = await on_node.stage()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "No space left on device" in model.reason
    assert on_node.triton.loads == []
    assert list(on_node.repository.records()) == [NAME]
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_a_death_of_triton_is_on_disk_before_the_next_load(on_node: Node) -> None:
    on_node.triton.deadly = {NAME}
    model, load = await on_node.stage(), on_node.triton.load
    deaths: list[bool] = []

    async def looked(*args: Any, **more: Any) -> None:
        deaths.append(Journal(on_node.directory).read().is_suspect("p1"))
        await load(*args, **more)

    on_node.triton.load = looked  # type: ignore[method-assign]
    await on_node.lifecycle.start_load(model)
    assert deaths == [False, True]


async def test_of_two_loads_during_a_death_of_triton_only_the_one_that_kills_it_fails(on_node: Node) -> None:
    on_node.triton.load_seconds = 60
    bad, good = await on_node.stage("p1"), await on_node.stage("p2", on="GPU-b")
    loads = on_node.lifecycle.start_load(bad), on_node.lifecycle.start_load(good)
    await until(lambda: on_node.triton.loading == 2)
    on_node.triton.load_seconds, on_node.triton.deadly = 0.01, {NAME}
    on_node.triton.die()
    await asyncio.gather(*loads)
    assert on_node.triton.deaths == 2
    assert bad.failure is Failure.QUARANTINED
    await until(lambda: good.state is ModelState.READY)  # loaded again, if it had served before the second


async def test_a_model_that_waits_while_triton_dies_of_others_is_not_charged(on_node: Node) -> None:
    on_node.triton.load_seconds = 0.05
    bad, waiting = await on_node.stage("p1"), await on_node.stage("p2")  # on one GPU
    on_node.triton.deadly, on_node.triton.restart_seconds = {NAME}, 0.1
    load = on_node.lifecycle.start_load(bad)
    await until(lambda: on_node.triton.loading == 1)
    await asyncio.gather(load, on_node.lifecycle.start_load(waiting))
    assert bad.failure is Failure.QUARANTINED
    await until(lambda: waiting.state is ModelState.READY)
    # The suspect is tried once nobody else is to be loaded; then what it has taken down comes again.
    assert on_node.triton.loads == [NAME, on_server("p2"), NAME, on_server("p2")]


async def test_quarantine_is_known_to_the_next_agent_and_ends_when_it_is_lifted(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    before = Node(tmp_path)
    bad = await before.stage(digest=digest)
    before.triton.deadly = {NAME}
    await before.lifecycle.start_load(bad)
    await before.lifecycle.close()
    after = Node(tmp_path)
    again = await after.stage("p2", digest=digest)
    await after.controller.look()
    await after.lifecycle.start_load(again)
    assert (again.failure, after.triton.loads) == (Failure.QUARANTINED, [])
    assert not await after.crashes.lift("0123")
    assert after.lifecycle.is_quarantined(again)
    assert await after.crashes.lift(digest[:12])
    assert not after.lifecycle.is_quarantined(again)
    assert Journal(tmp_path).read().all_quarantined(utc_now()) == []
    await after.lifecycle.start_load(again)
    assert again.state is ModelState.READY
    assert after.registry.get_sample_value("berth_agent_quarantined_models") == 0


async def test_a_triton_that_dies_of_what_it_serves_makes_nobody_suspect(on_node: Node) -> None:
    models = [await on_node.stage(), await on_node.stage("p2", on="GPU-b")]
    for model in models:
        await on_node.lifecycle.start_load(model)
    for _ in range(5):
        on_node.triton.die()
        await on_node.controller.look()
        await until(lambda: all(model.state is ModelState.READY for model in models))
    assert on_node.registry.get_sample_value("berth_agent_quarantined_models") == 0
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"] * 12


async def test_a_model_that_is_loaded_while_others_kill_triton_by_their_end_is_not_charged_alone(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, note = [], on_node.crashes.note_restart

    async def noting(*, was_unloading: bool) -> None:
        noted.append(was_unloading)
        await note(was_unloading=was_unloading)

    monkeypatch.setattr(on_node.crashes, "note_restart", noting)
    on_node.triton.load_seconds, on_node.triton.takes[NAME] = 0.01, 2
    leavers = [await on_node.stage(f"q{n}", on="GPU-b") for n in range(3)]
    for leaver in leavers:
        await on_node.lifecycle.start_load(leaver)
    on_node.triton.kills_at_its_end = {on_server(f"q{n}") for n in range(3)}
    innocent = await on_node.stage()
    load = on_node.lifecycle.start_load(innocent)
    for leaver in leavers:
        await until(lambda: on_node.triton.loaded.get(NAME) is IndexState.LOADING)
        on_node.models.lose_pod(leaver.ref.uid)
        await on_node.lifecycle.start_unload(on_server(leaver.ref.uid))
    await load
    assert on_node.triton.deaths == 3
    assert sum(noted) >= 3
    assert (innocent.state, innocent.reason) == (ModelState.READY, "")


async def test_a_suspect_is_not_loaded_beside_one_that_kills_triton_once_it_serves(on_node: Node) -> None:
    """Or it would be charged with what that one does."""
    killer, innocent = await on_node.stage("p2", on="GPU-b"), await on_node.stage()
    on_node.triton.takes[NAME] = 2
    on_node.triton.kills_later = {on_server("p2"): 0.1}
    await on_node.lifecycle.start_load(killer)
    load = on_node.lifecycle.start_load(innocent)
    await until(lambda: on_node.triton.deaths == 3)
    assert innocent.failure is None
    on_node.triton.kills_later = {}
    await load
    assert innocent.state is ModelState.READY


async def test_whose_requests_were_in_a_triton_that_died_is_reported_and_counted(on_node: Node) -> None:
    models = [await on_node.stage(uid, on=on) for uid, on in (("p1", "GPU-a"), ("p2", "GPU-b"))]
    for model in models:
        await on_node.lifecycle.start_load(model)
    count = on_node.registry.get_sample_value
    on_node.events.said.clear()
    for suspects in ([UID], [UID, PodUid("p2"), PodUid("gone")], []):
        on_node.triton.die()
        on_node.crashes.note_requests(suspects)
        await on_node.controller.look()
        await until(lambda: all(model.state is ModelState.READY for model in models))
    said = [message for reason, message in on_node.events.said if reason == "TritonDied"]
    assert said == [
        "Triton has died, and of all models only model-p1 had requests in it",
        "Triton has died with requests of 3 models in it, model-p1 among them",
        "Triton has died with requests of 3 models in it, model-p2 among them",
    ]
    assert count("berth_agent_triton_deaths_total", {"reason": "requests"}) == 2
    assert count("berth_agent_triton_deaths_total", {"reason": "unknown"}) == 1


async def test_requests_in_a_triton_that_is_restarted_on_request_make_nobody_suspect(on_node: Node) -> None:
    await on_node.stage()
    on_node.crashes.expect_restart()
    on_node.crashes.note_requests([UID])
    assert "TritonDied" not in [reason for reason, _ in on_node.events.said]
    for _ in range(2):  # the requested restart, and a crash after it
        await on_node.crashes.note_restart(was_unloading=False)
    count = on_node.registry.get_sample_value
    assert count("berth_agent_triton_restarts_total", {"reason": "stuck"}) == 1
    assert count("berth_agent_triton_deaths_total", {"reason": "unknown"}) == 1


async def test_a_triton_that_dies_over_and_over_fills_nobodys_events(on_node: Node) -> None:
    await on_node.stage()
    for _ in range(50):
        on_node.crashes.note_requests([UID])
    assert [reason for reason, _ in on_node.events.said].count("TritonDied") == 3


async def test_a_tenant_has_a_neighbours_files_refused_by_no_death_that_it_can_bring_about(
    tmp_path: Path,
) -> None:
    """node D5: it loads the files that a neighbour will bring, and its other model kills Triton meanwhile."""
    node, public = Node(tmp_path, code=CodeRule.ANY, quiet=0.05), "f" * 64
    node.triton.takes[NAME] = 1
    killer, bait = await node.stage("p2", on="GPU-b"), await node.stage(digest=public)
    await node.lifecycle.start_load(killer)
    load = node.lifecycle.start_load(bait)
    for deaths in range(6):
        if bait.failure is Failure.QUARANTINED:
            break
        await until(lambda: node.triton.loaded.get(NAME) is IndexState.LOADING or load.done())
        node.triton.die()
        await until(lambda deaths=deaths: node.triton.deaths > deaths and killer.state is ModelState.READY)  # type: ignore[misc]
    await load
    assert bait.failure is Failure.QUARANTINED
    assert "for namespace team" in bait.reason
    neighbour = await node.stage("p3", digest=public, namespace="another", on="GPU-b")
    await node.lifecycle.start_load(neighbour)
    assert (neighbour.state, neighbour.failure) == (ModelState.READY, None)
    await node.lifecycle.close()
