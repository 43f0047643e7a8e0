import asyncio
import errno
import shutil
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest

from agent.models import Model
from agent.repository import Record
from agent.serving.reconcile import Plan, plan
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid, ServerName
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import Failure, ModelState
from berth.triton.admin import IndexEntry, IndexState
from berth.triton.errors import TritonRefused, TritonUnavailable
from tests.fakes.agent_node import Node, on_server
from tests.fakes.objects import listed, pod, report
from tests.fakes.values import replace

GPU = GpuChoice(GpuUuid("GPU-a"), 0, 5)
READY, UNLOADING, GONE = (
    IndexEntry(state) for state in (IndexState.READY, IndexState.UNLOADING, IndexState.UNKNOWN)
)


def model(uid: str, *, lives: bool = True, state: ModelState = ModelState.READY, **more: bool) -> Model:
    ref = PodRef("team", uid, PodUid(uid))
    return Model(ref, ModelId(uid), ModelName(uid), GPU, 5, pod_lives=lives, state=state, **more)


def record(uid: str) -> Record:
    return Record(PodRef("team", uid, PodUid(uid)), ModelId(uid), ModelName(uid), GPU, "d")


def planned(
    *models: Model, records: tuple[str, ...] = (), index: dict[str, IndexEntry] | None = None
) -> Plan:
    return plan(
        {one.ref.uid: one for one in models},
        {named(uid): record(uid) for uid in records},
        {named(uid): entry for uid, entry in (index or {}).items()},
    )


def named(uid: str) -> ServerName:
    """What Triton calls the model of this pod, whose name is the pod's uid."""
    return on_server(uid, uid)


S = ModelState


@pytest.mark.parametrize(
    ("models", "records", "index", "expected"),
    [
        # Wanted and served: left alone.
        ([model("a")], "a", {"a": READY}, Plan()),
        # Staged, or not known to a Triton that has restarted: loaded. Not for a pod that is ending.
        ([model("a", state=S.STAGED)], "a", {"a": GONE}, Plan(load=("a",))),
        ([model("a")], "a", {}, Plan(load=("a",))),
        ([model("a", state=S.STAGED, deleting=True)], "a", {}, Plan()),
        # Without a living pod: unloaded, whether there is a directory or Triton holds it.
        ([model("a", lives=False)], "a", {"a": READY}, Plan(unload=(named("a"),))),
        ([], "a", {}, Plan(unload=(named("a"),))),
        ([], "", {"a": READY, "b": UNLOADING, "c": GONE}, Plan(unload=(named("a"), named("b")))),
        # Files that are gone while the pod lives are lost; an earlier agent's, too: its loader has ended long ago.
        ([model("a")], "", {"a": GONE}, Plan(lost=("a",))),
        ([model("a", state=S.STAGED)], "", {}, Plan(lost=("a",))),
        ([model("a", state=S.PENDING, has_served=True)], "", {}, Plan(lost=("a",))),
        # A pod that never had files or is ending has lost none.
        ([model("a", state=S.PENDING)], "", {}, Plan()),
        ([model("a", state=S.FAILED)], "", {}, Plan()),
        ([model("a", state=S.PENDING, has_served=True, deleting=True)], "", {}, Plan()),
        ([model("a", state=S.PENDING, has_served=True, lives=False)], "", {}, Plan(forget=("a",))),
        # Gone with all that it had: forgotten.
        ([model("a", lives=False, state=S.PENDING)], "", {}, Plan(forget=("a",))),
    ],
)
def test_what_is_wanted_is_compared_with_what_is_there(
    models: list[Model], records: str, index: dict[str, IndexEntry], expected: Plan
) -> None:
    assert planned(*models, records=tuple(records), index=index) == expected


def test_a_directory_without_a_record_is_an_orphan() -> None:
    assert plan({}, {ServerName("x"): None}, {}).unload == ("x",)


def test_a_model_of_another_pod_under_the_same_name_is_not_this_pods() -> None:
    """The directory belongs to the old pod, which is gone; the new one has staged nothing yet."""
    new = model("new", state=ModelState.PENDING)
    new.name = ModelName("old")
    outcome = planned(new, model("old", lives=False), records=("old",), index={"old": READY})
    assert (outcome.unload, outcome.load, outcome.lost) == ((named("old"),), (), ())


def test_a_second_directory_of_a_pod_is_an_orphan() -> None:
    """As agents left them that took several models of one pod."""
    mine = model("a")
    records = {
        named("a"): record("a"),
        on_server("a", "more"): replace(record("a"), name=ModelName("more")),
    }
    found = plan({mine.ref.uid: mine}, records, {named("a"): READY})
    assert found == Plan(unload=(on_server("a", "more"),))


def seen(uid: str, **more: object) -> ModelPod:
    return parse_model_pod(pod(uid, on="n1", choice=GPU, **more), Keys())  # type: ignore[arg-type]


_WORK = ("load ", "unload ", "call ", "watch")


class Agent(Node):
    """A node's inside with its reconciler, and a clock of its own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, clock=lambda: self.now)
        self.now = 1000.0

    async def settle(self) -> None:
        """A pass, and then the ends of what it has begun."""
        await self.reconciler.step()
        while begun := [task for task in asyncio.all_tasks() if task.get_name().startswith(_WORK)]:
            await asyncio.gather(*begun, return_exceptions=True)

    async def restart(self) -> "Agent":
        """The agent dies and is started anew; its Triton and its disk stay."""
        await self.lifecycle.close()
        after = Agent(self.repository.models.parent)
        after.triton.loaded, after.triton.configs = self.triton.loaded, self.triton.configs
        await after.reconciler.adopt_repository()
        return after


@pytest.fixture
def on_node(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


NAME, UID = on_server("p1"), PodUid("p1")


async def test_a_restarted_agent_knows_whose_code_its_triton_holds(on_node: Agent) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    after = await on_node.restart()
    assert after.gate.report().namespace == "team"
    theirs = await after.stage("p2", namespace="other")
    await after.lifecycle.start_load(theirs)
    assert (theirs.state, theirs.failure) == (ModelState.FAILED, Failure.CAPACITY)
    after.models.lose_pod(UID)
    await after.lifecycle.start_unload(NAME)
    await after.lifecycle.start_load(theirs)
    assert theirs.state is ModelState.READY
    assert after.gate.report().namespace == "other"


async def test_a_model_that_triton_has_lost_is_in_nobodys_way(on_node: Agent) -> None:
    model = await on_node.stage()
    await on_node.lifecycle.start_load(model)
    on_node.models.lose_pod(UID)
    on_node.triton.die()
    await on_node.settle()
    assert on_node.gate.report().namespace is None


async def test_a_failed_load_is_tried_again_after_growing_pauses(on_node: Agent) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused("nobody knows")] * 30
    tried = []
    for _ in range(3600):
        await on_node.settle()
        if len(on_node.triton.loads) > len(tried):
            tried.append(on_node.now)
        on_node.now += 1
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert 13 <= pauses[0] <= 19
    assert all(1.4 * one < other for one, other in pairwise(pauses[:4]))
    assert all(265 <= pause <= 335 for pause in pauses[5:])
    assert len(tried) > 12
    assert (model.state, list(on_node.repository.records())) == (ModelState.FAILED, [NAME])
    on_node.triton.errors = []
    on_node.now += 400
    await on_node.settle()
    assert (model.state, model.reason) == (ModelState.READY, "")
    # Having served, it begins anew with a short pause.
    on_node.triton.loaded.clear()
    on_node.triton.errors = [TritonRefused("nobody knows")]
    await on_node.settle()
    assert model.state is ModelState.FAILED
    await on_node.settle()
    on_node.now += 20
    await on_node.settle()
    assert model.state is ModelState.READY


async def test_what_is_at_fault_itself_is_not_tried_again_before_other_files_come(on_node: Agent) -> None:
    model = await on_node.stage(served=True)
    (on_node.repository.directory(NAME) / "config.pbtxt").write_text("nonsense {")
    for _ in range(10):
        await on_node.settle()
        on_node.now += 1000
    assert (model.state, model.failure) == (ModelState.FAILED, Failure.INVALID_MODEL)
    assert len(on_node.events.said) == 1
    await on_node.stage(digest="mended")
    await on_node.settle()
    assert model.state is ModelState.READY


async def test_a_model_that_triton_has_lost_is_loaded_again_and_its_memory_is_free_meanwhile(
    on_node: Agent,
) -> None:
    model = await on_node.stage()
    await on_node.settle()
    on_node.triton.die()
    await on_node.reconciler.step()
    assert (model.resident, model.measured_bytes) == (False, None)
    await on_node.settle()
    assert (model.state, model.resident) == (ModelState.READY, True)


async def test_a_pass_without_triton_says_so_and_changes_nothing(on_node: Agent) -> None:
    model = await on_node.stage()
    await on_node.settle()
    assert on_node.sync.version == "2.51.0"
    on_node.triton.restart_seconds = 60
    on_node.triton.die()
    with pytest.raises(TritonUnavailable):
        await on_node.reconciler.step()
    assert on_node.sync.version is None
    assert (model.state, model.resident) == (ModelState.READY, True)


async def test_a_new_agent_adopts_what_is_there_and_waits_for_what_triton_is_at(on_node: Agent) -> None:
    on_node.triton.load_seconds = 0.3
    await on_node.stage("p1")
    await on_node.stage("p2", on="GPU-b")
    await on_node.settle()
    await on_node.lifecycle.close()
    on_node.triton.loaded[NAME] = IndexState.LOADING
    after = await on_node.restart()
    assert {model.ref.uid: model.resident for model in after.models} == {"p1": True, "p2": True}
    for uid in ("p1", "p2"):
        after.models.see_pod(seen(uid))
    await after.reconciler.step()
    async with asyncio.timeout(20):
        while {model.ref.uid: model.state for model in after.models} != {
            "p1": ModelState.LOADING,
            "p2": ModelState.READY,
        }:
            await asyncio.sleep(0.005)
    after.triton.loaded[NAME] = IndexState.READY
    await after.settle()
    assert {model.state for model in after.models} == {ModelState.READY}
    assert after.triton.loads == []


async def test_a_new_agent_unloads_what_no_pod_wants_any_more(on_node: Agent) -> None:
    await on_node.stage()
    await on_node.settle()
    after = await on_node.restart()
    await after.settle()
    await after.settle()
    assert (after.repository.records(), list(after.models)) == ({}, [])
    assert after.triton.loaded[NAME] is IndexState.UNAVAILABLE


async def test_an_unload_that_fails_is_reported_once_however_many_passes_waited_for_it(
    on_node: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    model = await on_node.stage()
    await on_node.settle()
    on_node.triton.unload_seconds = 60
    on_node.models.lose_pod(UID)
    for _ in range(5):
        await on_node.reconciler.step()
        await asyncio.sleep(0.02)
    assert model.state is ModelState.UNLOADING
    on_node.triton.restart_seconds = 60
    on_node.triton.die()
    begun = [task for task in asyncio.all_tasks() if task.get_name().startswith("unload ")]
    await asyncio.gather(*begun, return_exceptions=True)
    await asyncio.sleep(0)
    assert [line.message for line in caplog.records if "not unloaded" in line.message] == [
        "orphan not unloaded yet"
    ]


async def test_a_pod_that_served_and_whose_files_went_with_the_agent_is_lost_until_it_stages(
    on_node: Agent,
) -> None:
    model = await on_node.stage()
    await on_node.settle()
    said = report(models=(model.report(), replace(listed("p2"), state=ModelState.STAGED)))
    shutil.rmtree(on_node.repository.models / NAME)
    after = await on_node.restart()
    after.models.remember(said)
    for uid in ("p1", "p2"):
        after.models.see_pod(seen(uid))
    await after.settle()
    states = {one.ref.uid: one.state for one in after.models}
    assert states == {"p1": ModelState.LOST, "p2": ModelState.PENDING}  # p2's loader is still at it
    lost = after.models.get(UID)
    assert lost is not None
    assert "files are gone" in lost.reason
    # It stays so over another start, and heals if somebody does stage.
    again = await after.restart()
    again.models.remember(report(models=(lost.report(),)))
    again.models.see_pod(seen("p1"))
    await again.settle()
    assert [one.state for one in again.models] == [ModelState.LOST]
    healed = await again.stage()
    await again.settle()
    assert healed.state is ModelState.READY


async def test_files_that_are_wiped_under_a_served_model_are_lost_and_nobody_else_is(on_node: Agent) -> None:
    model, other = await on_node.stage(), await on_node.stage("p2")
    await on_node.settle()
    shutil.rmtree(on_node.repository.models / NAME)
    for _ in range(3):
        await on_node.settle()
        assert (model.state, other.state) == (ModelState.LOST, ModelState.READY)
    assert (model.resident, on_node.triton.loaded[NAME]) == (False, IndexState.UNAVAILABLE)


async def test_after_a_wipe_a_new_pod_is_served_by_its_own_files(on_node: Agent) -> None:
    """Not by what Triton had loaded from the old ones, of which it tells nothing."""
    old = await on_node.stage()
    await on_node.settle()
    shutil.rmtree(on_node.repository.models)
    on_node.models.lose_pod(old.ref.uid)
    on_node.models.drop(old)
    on_node.repository.restore()
    await on_node.stage("p9", name="same")
    await on_node.settle()
    assert on_node.triton.loads == [NAME, on_server("p9", "same")]


async def test_a_directory_that_somebody_deletes_is_made_again(on_node: Agent) -> None:
    model = await on_node.stage()
    await on_node.settle()
    shutil.rmtree(on_node.repository.models)
    shutil.rmtree(on_node.repository.models.parent / "staging")
    for _ in range(3):
        await on_node.settle()
    assert model.state is ModelState.LOST
    await on_node.stage("p2")


async def test_files_that_are_put_there_during_a_pass_are_not_lost(
    on_node: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass has looked at the disk before the rename and at the table after it."""
    model = await on_node.stage()
    monkeypatch.setattr(on_node.repository, "records", dict)
    await on_node.settle()
    assert model.state is not ModelState.LOST
    assert list(on_node.repository.models.iterdir()) != []
    shutil.rmtree(on_node.repository.models / NAME)
    await on_node.settle()
    assert model.state is ModelState.LOST


async def test_what_was_staged_since_an_orphan_was_seen_is_left_alone(on_node: Agent) -> None:
    """A directory of nobody, and a pod that puts its model in its place before it is removed."""
    async with on_node.slots.lock(NAME):
        unload = on_node.lifecycle.start_unload(NAME)
        await asyncio.sleep(0.01)
    model = await on_node.stage()
    await unload
    assert (model.state, list(on_node.repository.records())) == (ModelState.STAGED, [NAME])


async def test_a_disk_that_cannot_be_read_now_makes_nobody_an_orphan(
    on_node: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await on_node.stage()
    await on_node.settle()

    def broken(self: Path, *_: object) -> IO[Any]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        with pytest.raises(OSError, match="Too many open files"):
            await on_node.reconciler.step()
    await on_node.settle()
    assert (model.state, list(on_node.repository.records())) == (ModelState.READY, [NAME])


@pytest.mark.parametrize("state", [IndexState.LOADING, IndexState.UNLOADING, IndexState.UNAVAILABLE])
def test_a_model_that_triton_does_not_serve_now_is_to_be_loaded(state: IndexState) -> None:
    """Whoever loads it waits for what Triton is at."""
    assert planned(model("a"), records=("a",), index={"a": IndexEntry(state)}).load == ("a",)


def test_a_model_that_triton_serves_and_that_is_not_known_to_serve_is_taken_for_loaded_by_a_load() -> None:
    for state in (ModelState.STAGED, ModelState.FAILED, ModelState.LOADING):
        assert planned(model("a", state=state), records=("a",), index={"a": READY}).load == ("a",)


def test_each_model_is_planned_for_once_and_in_order() -> None:
    outcome = planned(
        model("a", state=ModelState.STAGED),
        model("b", lives=False),
        model("c", lives=False),
        model("d"),
        model("e"),
        records=("e", "c", "b", "a"),
        index={"e": READY, "c": READY},
    )
    assert outcome == Plan(
        unload=(named("b"), named("c")), load=(PodUid("a"),), lost=(PodUid("d"),), forget=()
    )


def test_a_pod_that_is_gone_is_remembered_while_anything_of_it_is_left() -> None:
    gone = model("a", lives=False)
    assert planned(gone, records=("a",)).forget == ()
    # Without files, too: Triton holds its memory.
    for entry in (READY, UNLOADING):
        assert planned(gone, index={"a": entry}) == Plan(unload=(named("a"),))
    assert planned(gone, index={"a": GONE, "b": GONE}) == Plan(forget=(PodUid("a"),))
    nameless = model("a", lives=False)
    nameless.name = None
    assert planned(nameless).forget == ("a",)


async def test_a_triton_that_is_not_ready_yet_is_waited_for(
    on_node: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await on_node.stage()

    async def not_yet() -> None:
        return None

    with monkeypatch.context() as patch:
        patch.setattr(on_node.triton, "version", not_yet)
        await on_node.settle()
        assert (on_node.sync.version, on_node.triton.loads) == (None, [])
    await on_node.settle()
    assert (on_node.sync.version, on_node.triton.loads) == ("2.51.0", [NAME])


async def test_directories_of_nobody_are_not_adopted(on_node: Agent) -> None:
    (on_node.repository.models / "nobodys").mkdir()
    await on_node.reconciler.adopt_repository()
    assert list(on_node.models) == []


async def test_memory_of_a_model_whose_files_and_pod_are_gone_is_held_until_triton_has_let_go(
    on_node: Agent,
) -> None:
    model = await on_node.stage()
    await on_node.settle()
    shutil.rmtree(on_node.repository.models / NAME)
    on_node.models.lose_pod(UID)
    await on_node.reconciler.step()
    await asyncio.sleep(0.03)
    assert (list(on_node.models), model.resident) == ([model], True)
    assert on_node.triton.loaded[NAME] is IndexState.UNLOADING
    await on_node.settle()
    await on_node.settle()
    assert list(on_node.models) == []


async def test_a_pod_that_is_gone_without_a_trace_is_forgotten(on_node: Agent) -> None:
    on_node.models.see_pod(seen("p1"))
    on_node.models.lose_pod(UID)
    await on_node.settle()
    assert list(on_node.models) == []


async def test_an_unload_that_fails_is_said_and_tried_again(
    on_node: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    await on_node.stage()
    on_node.models.lose_pod(UID)
    on_node.triton.index_errors = []
    step = on_node.reconciler.step
    await step()
    on_node.triton.index_errors = [TritonUnavailable("connection refused")]
    begun = [task for task in asyncio.all_tasks() if task.get_name() == "unload model-p1"]
    await asyncio.gather(*begun, return_exceptions=True)
    assert "orphan not unloaded yet" in caplog.text
    await on_node.settle()
    assert (list(on_node.models), on_node.repository.records()) == ([], {})


async def test_what_is_being_loaded_is_left_to_its_load(on_node: Agent) -> None:
    """Triton's index says nothing of its memory yet, and its files are in use."""
    model = await on_node.stage()
    on_node.triton.load_seconds = 0.1
    load = on_node.lifecycle.start_load(model)
    while not on_node.triton.loading:
        await asyncio.sleep(0.001)
    on_node.triton.loaded.pop(NAME)  # an index that is behind
    shutil.rmtree(on_node.repository.models / NAME)
    on_node.models.set_resident(model, True)
    await on_node.reconciler.step()
    assert (model.state, model.resident) == (ModelState.LOADING, True)
    await load


async def test_a_model_that_is_being_unloaded_is_not_loaded(on_node: Agent) -> None:
    model = await on_node.stage()
    await on_node.settle()
    model.deleting, on_node.triton.unload_seconds = True, 60
    unload = on_node.lifecycle.start_unload(NAME)
    while on_node.triton.loaded[NAME] is not IndexState.UNLOADING:
        await asyncio.sleep(0.001)
    on_node.triton.die()
    await on_node.settle()
    await unload
    assert (on_node.triton.loads, on_node.repository.records()) == ([NAME], {})


async def test_what_an_older_agent_has_left_under_its_models_names_is_unloaded_and_removed(
    on_node: Agent,
) -> None:
    """It knew no names of the server's own; the pod's proxy of then cannot reach the model any more."""
    model = await on_node.stage()
    old = ServerName("model-p1")
    (on_node.repository.models / NAME).rename(on_node.repository.models / old)
    on_node.triton.loaded = {old: IndexState.READY}
    after = await on_node.restart()
    after.models.remember(report(models=(replace(listed("p1"), state=ModelState.READY),)))
    after.models.see_pod(seen("p1"))
    for _ in range(3):
        await after.settle()
    (found,) = after.models
    assert after.triton.loaded == {old: IndexState.UNAVAILABLE}
    assert after.repository.records() == {}
    assert (found.state, found.ref, found.resident) == (ModelState.LOST, model.ref, False)
    assert "only a new pod stages them again" in found.reason
