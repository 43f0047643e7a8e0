import pytest

from agent.models import Model, Models, NameTaken
from agent.reconcile import Plan, plan
from agent.repository import Record
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import ModelState
from berth.triton.admin import IndexEntry, IndexState
from tests.fakes.objects import pod

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
        {ModelName(uid): record(uid) for uid in records},
        {ModelName(name): entry for name, entry in (index or {}).items()},
    )


def test_what_is_wanted_and_served_is_left_alone() -> None:
    assert planned(model("a"), records=("a",), index={"a": READY}) == Plan()


def test_a_staged_model_is_loaded() -> None:
    assert planned(model("a", state=ModelState.STAGED), records=("a",), index={"a": GONE}).load == ("a",)


def test_a_model_that_a_restarted_triton_does_not_know_is_loaded_again() -> None:
    assert planned(model("a"), records=("a",)).load == ("a",)


def test_nothing_is_loaded_for_a_pod_that_is_ending() -> None:
    ending = model("a", state=ModelState.STAGED, deleting=True)
    assert planned(ending, records=("a",)) == Plan()


def test_orphans_are_unloaded() -> None:
    assert planned(model("a", lives=False), records=("a",), index={"a": READY}).unload == ("a",)
    assert planned(records=("a",)).unload == ("a",)  # a directory whose pod nobody knows
    assert planned(index={"a": READY, "b": UNLOADING, "c": GONE}).unload == ("a", "b")
    nobodys = plan({}, {ModelName("x"): None}, {})
    assert nobodys.unload == ("x",)


def test_a_model_of_another_pod_under_the_same_name_is_not_this_pods() -> None:
    """The directory belongs to the old pod, which is gone; the new one has staged nothing yet."""
    new = model("new", state=ModelState.PENDING)
    new.name = ModelName("old")
    outcome = planned(new, model("old", lives=False), records=("old",), index={"old": READY})
    assert (outcome.unload, outcome.load, outcome.lost) == (("old",), (), ())


def test_files_that_are_gone_while_the_pod_lives_are_lost() -> None:
    assert planned(model("a"), index={"a": GONE}).lost == ("a",)
    assert planned(model("a", state=ModelState.PENDING)) == Plan()
    assert planned(model("a", state=ModelState.FAILED)) == Plan()


def test_a_pod_that_is_gone_with_all_it_had_is_forgotten() -> None:
    assert planned(model("a", lives=False, state=ModelState.PENDING)).forget == ("a",)


def seen(uid: str, **more: object) -> ModelPod:
    return parse_model_pod(pod(uid, on="n1", choice=GPU, **more), Keys())  # type: ignore[arg-type]


async def test_a_name_belongs_to_the_pod_that_had_it_first() -> None:
    models = Models()
    models.see_pod(seen("a", annotations={Keys().model_id: "same"}))
    models.see_pod(seen("b", annotations={Keys().model_id: "same"}))
    assert models.claim(PodUid("a"), ModelName("same")).ref.uid == "a"
    with pytest.raises(NameTaken, match="belongs to pod team/a"):
        models.claim(PodUid("b"), ModelName("same"))
    models.drop(next(m for m in models if m.ref.uid == "a"))
    assert models.claim(PodUid("b"), ModelName("same")).name == "same"


async def test_an_adopted_directory_counts_before_its_pod_is_seen() -> None:
    models = Models()
    models.set_resident(models.adopt(record("a")), True)
    (only,) = models
    assert (only.pod_lives, only.state, only.requested_bytes) == (False, ModelState.STAGED, 5)
    models.see_pod(seen("a"))
    assert only.pod_lives
    assert models.residency == 1


async def test_every_change_is_told() -> None:
    models = Models()
    change = models.next_change()
    models.see_pod(seen("a"))
    assert change.is_set()
    change = models.next_change()
    models.see_pod(seen("a"))
    assert not change.is_set()
    models.lose_pod(PodUid("a"))
    assert change.is_set()
