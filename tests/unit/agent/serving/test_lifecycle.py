"""Loads and unloads beside a Triton that refuses, goes away, or takes its time."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from berth.contract.ids import PodUid, ServerName
from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexState
from berth.triton.errors import TritonRefused, TritonUnavailable
from tests.fakes.agent_node import GPU, Node, on_server
from tests.fakes.eventually import until

NAME, UID = on_server("p1"), PodUid("p1")


async def test_two_who_ask_join_one_load_and_a_third_finds_it_done(on_node: Node) -> None:
    model = await on_node.stage()
    assert on_node.lifecycle.start_load(model) is on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_load(model)
    assert len(on_node.triton.configs) == 1


BACKEND = TritonRefused("unable to find backend library for backend 'tensorflow9'")


async def test_a_model_at_fault_leaves_nothing_and_tells_tritons_reason(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [BACKEND]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (
        ModelState.FAILED,
        Failure.INVALID_MODEL,
        "unable to find backend library for backend 'tensorflow9'",
    )
    assert on_node.repository.records() == {}
    assert on_node.events.said == [("ModelLoadFailed", model.reason)]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("CUDA out of memory", Failure.CAPACITY),
        ("failed to poll from model repository", Failure.TRANSIENT),
        ("nobody knows", Failure.TRANSIENT),
    ],
)
async def test_files_that_are_not_known_to_be_at_fault_are_kept_and_may_be_loaded_again(
    on_node: Node, text: str, failure: Failure
) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused(text)]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, failure)
    assert text in model.reason
    assert not model.resident
    assert list(on_node.repository.records()) == [NAME]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (ModelState.READY, None, "")


async def test_files_that_have_served_before_are_kept_and_not_at_fault(on_node: Node) -> None:
    model = await on_node.stage(served=True)
    on_node.triton.errors = [BACKEND]
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert list(on_node.repository.records()) == [NAME]


async def test_a_bad_config_never_reaches_triton(on_node: Node) -> None:
    model = await on_node.stage()
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.INVALID_MODEL)
    assert on_node.triton.configs == []


async def test_files_that_have_served_are_kept_though_the_node_takes_them_no_more(on_node: Node) -> None:
    """The rules may be others than when it was let in, and may be mended."""
    model = await on_node.stage(served=True)
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    await on_node.lifecycle.start_load(model)
    assert (model.failure, on_node.triton.configs) == (Failure.INVALID_MODEL, [])
    assert list(on_node.repository.records()) == [NAME]


async def test_what_an_earlier_agent_has_let_in_is_written_anew_before_it_is_loaded(on_node: Node) -> None:
    model, config = await on_node.stage(), on_node.repository.directory(NAME) / "config.pbtxt"
    config.write_text('# nobody has read this\nbackend: "python"\n')
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY
    assert "nobody has read this" not in config.read_text()


async def test_new_files_take_the_place_of_a_model_that_serves(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    await on_node.stage()
    assert (model.state, model.resident) == (ModelState.STAGED, False)
    await on_node.lifecycle.start_load(model)
    assert len(on_node.triton.configs) == 2


async def test_an_unload_is_joined_and_one_that_fails_leaves_the_model_listed_to_be_tried_again(
    on_node: Node,
) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    on_node.triton.index_errors = [TritonUnavailable("connection refused")]
    unload = on_node.lifecycle.start_unload(NAME)
    assert on_node.lifecycle.start_unload(NAME) is unload
    with pytest.raises(TritonUnavailable, match="connection refused"):
        await unload
    assert (list(on_node.models), model.state, model.resident) == ([model], ModelState.UNLOADING, True)
    assert list(on_node.repository.records()) == [NAME]
    assert on_node.slots.busy_gpus() == set()
    await on_node.lifecycle.start_unload(NAME)
    assert list(on_node.models) == []


async def test_an_unload_that_triton_refuses_once_is_asked_for_again(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, unload = [TritonRefused("busy")], on_node.triton.unload

    async def refuses_first(name: ServerName, *, timeout_seconds: float) -> None:
        if refusals:
            raise refusals.pop()
        await unload(name, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(on_node.triton, "unload", refuses_first)
    await on_node.lifecycle.start_load(await on_node.stage())
    on_node.models.lose_pod(UID)
    with pytest.raises(TritonRefused, match="busy"):
        await on_node.lifecycle.start_unload(NAME)
    await on_node.lifecycle.start_unload(NAME)
    assert list(on_node.models) == []


async def test_an_unload_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    node = Node(tmp_path, unload_timeout=0.1)
    model = await node.stage()
    await node.lifecycle.start_load(model)
    node.triton.unload_seconds = 60
    node.models.lose_pod(UID)
    with pytest.raises(TritonUnavailable, match=r"model-p1 is not gone 0\.1 s after its unload"):
        await node.lifecycle.start_unload(NAME)
    assert (model.resident, list(node.repository.records())) == (True, [NAME])
    # The GPU is not held meanwhile.
    await node.lifecycle.start_load(other := await node.stage("p2"))
    assert other.state is ModelState.READY


async def test_what_triton_never_had_is_not_unloaded_there(on_node: Node) -> None:
    await on_node.stage()
    on_node.models.lose_pod(UID)

    async def refused(*_: object, **__: object) -> None:
        raise AssertionError("unloaded what it does not have")

    on_node.triton.unload = refused  # type: ignore[method-assign]
    await on_node.lifecycle.start_unload(NAME)
    assert (list(on_node.models), on_node.repository.records()) == ([], {})


async def test_a_directory_of_nobody_is_removed_and_an_unknown_name_is_no_failure(on_node: Node) -> None:
    (on_node.repository.models / "nobodys").mkdir()
    on_node.triton.loaded[ServerName("nobodys")] = IndexState.READY
    for name in ("nobodys", "unheard"):
        await on_node.lifecycle.start_unload(ServerName(name))
    assert on_node.repository.records() == {}
    assert on_node.triton.loaded[ServerName("nobodys")] is IndexState.UNAVAILABLE


async def test_a_living_pods_model_is_unloaded_only_when_the_pod_is_ending(on_node: Node) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    await on_node.lifecycle.start_unload(NAME)
    assert (model.state, model.resident) == (ModelState.READY, True)
    model.deleting = True
    await on_node.lifecycle.start_unload(NAME)
    assert (model.state, model.resident) == (ModelState.PENDING, False)
    assert on_node.models.get(UID) is model  # until its pod is gone
    assert on_node.repository.records() == {}


async def test_nothing_is_loaded_for_a_pod_that_is_ending(on_node: Node) -> None:
    model = await on_node.stage()
    model.deleting = True
    await on_node.lifecycle.start_load(model)
    assert (model.state, on_node.triton.loads, on_node.events.said) == (ModelState.STAGED, [], [])


async def test_a_model_that_an_agent_before_has_loaded_keeps_what_was_measured_then(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.learn(NAME, measured_bytes=7, served=False)
    on_node.triton.loaded[NAME] = IndexState.READY
    await on_node.lifecycle.start_load(model)
    record = on_node.repository.record(NAME)
    assert record is not None
    assert (record.served, record.measured_bytes) == (True, 7)
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoaded"]  # for the first time


async def test_files_that_somebody_is_putting_there_are_not_lost(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.remove(NAME)
    async with on_node.slots.lock(NAME):
        await on_node.lifecycle.mark_lost(model)
    assert model.state is ModelState.STAGED
    await on_node.lifecycle.mark_lost(model)
    assert model.state is ModelState.LOST
    assert "only a new pod stages them again" in model.reason
    await on_node.lifecycle.start_unload(NAME)  # what is left of it in Triton
    assert model.state is ModelState.LOST


async def test_a_close_waits_for_the_end_of_what_it_cancels(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.load_seconds = 60
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    assert on_node.lifecycle.is_loading(UID)
    assert on_node.slots.busy_gpus() == {GPU.uuid}
    await on_node.lifecycle.close()
    assert load.cancelled()
    await asyncio.sleep(0)
    assert not on_node.lifecycle.is_loading(UID)
    assert on_node.slots.busy_gpus() == set()
    assert on_node.triton.loaded[NAME] is IndexState.LOADING  # it goes on


async def test_a_disk_that_cannot_be_read_fails_the_load_and_keeps_the_files(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage()

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(on_node.repository, "record", broken)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert model.reason == "repository: [Errno 5] Input/output error"
    assert list(on_node.repository.records()) == [NAME]


async def test_a_load_without_files_says_so(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.repository.remove(NAME)
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure, model.reason) == (
        ModelState.FAILED,
        Failure.TRANSIENT,
        "no files are staged",
    )
    # Another pod's files under the name are none of its own.
    await on_node.stage(digest="x")
    record = on_node.repository.record(NAME)
    assert record is not None
    other = replace(record, pod=replace(record.pod, uid=PodUid("p9")))
    (on_node.repository.directory(NAME) / ".berth.json").write_text(other.encode())
    await on_node.lifecycle.start_load(model)
    assert (model.state, model.reason, on_node.triton.loads) == (ModelState.FAILED, "no files are staged", [])


async def test_what_nobody_foresaw_fails_the_load_and_keeps_the_files(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage("a")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nobody foresaw it")

    with monkeypatch.context() as patch:
        patch.setattr(on_node.admission, "rewrite", broken)
        await on_node.lifecycle.start_load(model)
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.TRANSIENT)
    assert "nobody foresaw it" in model.reason
    await on_node.lifecycle.start_load(model)
    assert model.state is ModelState.READY


async def test_files_that_came_after_a_failure_are_not_deleted_for_it(
    on_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage(digest="bad")
    on_node.triton.errors = [BACKEND]
    load = on_node.lifecycle.start_load(model)
    await until(lambda: on_node.triton.loading == 1)
    again = asyncio.ensure_future(on_node.stage(digest="mended"))  # waits for its turn at the name
    await asyncio.gather(load, again)
    record = on_node.repository.record(NAME)
    assert record is not None
    assert record.digest == "mended"
