"""The table of a node's models: who has which name, what is reported, and who is told of a change."""

from typing import Any

import pytest

from agent.models import IdTaken, Model, Models, OneModelOnly, PodGone, Retry
from agent.repository import Record
from berth.contract.gpu_choice import GpuChoice, GpuRef
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.contract.report import Failure, ModelState
from berth.runtime.backoff import Backoff
from tests.fakes.agent_node import on_server
from tests.fakes.objects import listed, pod, report
from tests.fakes.values import replace

A, B = GpuUuid("GPU-a"), GpuUuid("GPU-b")
GPU = GpuChoice(A, 0, 5)
BOTH = GpuChoice(A, 0, 5, others=(GpuRef(B, 1),))


def seen(uid: str, *, choice: GpuChoice = GPU, **more: Any) -> ModelPod:
    return parse_model_pod(pod(uid, on="n1", choice=choice, **more), Keys())


def anonymous(uid: str) -> ModelPod:
    return seen(uid, annotations={Keys().model_id: None})


def record(uid: str, **more: Any) -> Record:
    ref = PodRef("team", uid, PodUid(uid))
    return Record(ref, ModelId(uid), ModelName(f"model-{uid}"), GPU, "d", **more)


def of(models: Models, uid: str) -> Model:
    model = models.get(PodUid(uid))
    assert model is not None
    return model


def test_a_pod_is_reported_whole() -> None:
    models = Models()
    models.see_pod(seen("p1", mem="2Gi", choice=BOTH))
    model = of(models, "p1")
    assert (model.is_wanted, model.state, model.resident, model.has_served) == (
        True,
        ModelState.PENDING,
        False,
        False,
    )
    said = model.report()
    assert said == replace(
        listed("p1", requested=1024**3), state=ModelState.PENDING, other_gpus=(B,), reason="", failure=None
    )
    models.set(model, ModelState.FAILED, "x" * 600, failure=Failure.CAPACITY)
    said = model.report()
    assert (said.state, said.reason, said.failure) == (ModelState.FAILED, "x" * 512, Failure.CAPACITY)
    models.see_pod(replace(anonymous("p2"), gpu=None))
    said = of(models, "p2").report()
    assert (said.model_name, said.model_id, said.gpu, said.other_gpus) == (None, None, None, ())


def test_memory_is_charged_to_each_gpu_while_triton_holds_the_model() -> None:
    models = Models()
    for pod_ in (seen("p1", mem="2Gi", choice=BOTH), seen("p2"), anonymous("p3")):
        models.see_pod(pod_)
    p1, p2, p3 = (of(models, uid) for uid in ("p1", "p2", "p3"))
    p1.measured_bytes, p2.measured_bytes, p3.measured_bytes = 3, 4, 0
    assert (models.taken_on(A), list(models.residents())) == (0, [])
    for model in (p1, p2, p3):
        models.set_resident(model, True)
    assert (models.taken_on(A), models.taken_on(B), models.taken_on(GpuUuid("other"))) == (7, 3, 0)
    assert {(one.name, one.gpu) for one in models.residents()} == {
        ("model-p1", A),
        ("model-p1", B),
        ("model-p2", A),
    }
    assert {one.requested_bytes for one in models.residents()} == {1024**3}
    p2.measured_bytes = None  # not known: what it requested
    assert models.taken_on(A) == 3 + 1024**3
    before = models.residency
    models.set_resident(p1, True)  # nothing new
    assert models.residency == before
    models.set_resident(p1, False)
    assert (models.residency, models.taken_on(B), p1.measured_bytes) == (before + 1, 0, None)


def test_what_was_measured_before_is_kept_and_what_is_known_better_is_not_overwritten() -> None:
    models = Models()
    model = models.adopt(record("p1", measured_bytes=7))
    assert (model.measured_bytes, model.requested_bytes, model.state) == (7, 5, ModelState.STAGED)
    assert models.adopt(record("p1", measured_bytes=9)) is model
    assert model.measured_bytes == 7
    models.set(model, ModelState.READY)
    models.adopt(record("p1"))
    assert (model.state, model.measured_bytes) == (ModelState.READY, 7)


def test_a_pod_that_was_seen_first_takes_its_record() -> None:
    models = Models()
    models.see_pod(replace(anonymous("p1"), gpu=None))
    model = models.adopt(record("p1"))
    assert (model.name, model.gpu, model.state) == ("model-p1", GPU, ModelState.STAGED)
    models.see_pod(replace(anonymous("p1"), gpu=BOTH))
    assert model.gpu == GPU  # where its files were placed


def test_who_is_told_of_what() -> None:
    models = Models()

    def is_notified(act: Any) -> bool:
        change = models.next_change()
        act()
        return change.is_set()

    assert is_notified(lambda: models.see_pod(seen("p1")))
    assert not is_notified(lambda: models.see_pod(seen("p1")))
    model = of(models, "p1")
    ending = replace(seen("p1"), deleting=True)
    assert is_notified(lambda: models.see_pod(ending))
    assert (model.pod_lives, model.is_wanted) == (True, False)
    assert is_notified(lambda: models.see_pod(replace(ending, ended=True)))
    assert not model.pod_lives
    assert is_notified(lambda: models.set(model, ModelState.FAILED, "why"))
    assert not is_notified(lambda: models.set(model, ModelState.FAILED, "why"))
    assert is_notified(lambda: models.set(model, ModelState.FAILED, "another"))
    assert is_notified(lambda: models.set(model, ModelState.FAILED, "another", failure=Failure.CAPACITY))
    assert not is_notified(lambda: models.lose_pod(PodUid("p1")))  # which was known
    assert not is_notified(lambda: models.lose_pod(PodUid("nobody")))
    assert is_notified(lambda: models.drop(model))
    assert not is_notified(lambda: models.drop(model))
    assert is_notified(lambda: models.adopt(record("p2")))
    models.see_pod(anonymous("p3"))
    assert is_notified(lambda: models.claim(PodUid("p3"), ModelName("x")))
    assert not is_notified(lambda: models.claim(PodUid("p3"), ModelName("x")))
    assert is_notified(lambda: models.lose_pod(PodUid("p3")))


def test_an_id_has_one_holder_and_a_pod_one_name() -> None:
    models = Models()
    for uid in ("p1", "p2"):
        models.see_pod(seen(uid, annotations={Keys().model_id: "same"}))
    assert (of(models, "p1").name, of(models, "p2").name) == ("same", None)
    with pytest.raises(IdTaken, match="model id 'same' on this node belongs to pod team/p1"):
        models.claim(PodUid("p2"), ModelName("same"))
    with pytest.raises(OneModelOnly, match="pod team/p1 has model 'same'; it cannot have 'other' as well"):
        models.own(PodUid("p1"), ModelName("other"))
    assert models.own(PodUid("p2"), ModelName("any")).name is None  # to ask is not to take
    assert models.served_as(on_server("p1", "same")) is of(models, "p1")
    assert models.served_as(on_server("p2", "same")) is None
    models.drop(of(models, "p1"))
    assert models.claim(PodUid("p2"), ModelName("same")).name == "same"


def test_a_name_is_anybodys_and_so_is_an_id_in_another_namespace() -> None:
    models = Models()
    models.see_pod(seen("p1", annotations={Keys().model_id: "one", Keys().model_name: "net"}))
    models.see_pod(seen("p2", annotations={Keys().model_id: "two", Keys().model_name: "net"}))
    theirs = seen("p3", annotations={Keys().model_id: "one"})
    models.see_pod(replace(theirs, ref=replace(theirs.ref, namespace="other")))
    models.see_pod(anonymous("p4"))
    models.claim(PodUid("p4"), ModelName("net"))
    assert [of(models, uid).name for uid in ("p1", "p2", "p3", "p4")] == ["net", "net", "one", "net"]
    assert len({of(models, uid).server_name for uid in ("p1", "p2", "p3", "p4")}) == 4


def test_a_model_that_was_dropped_is_not_its_successor_of_the_same_pod() -> None:
    models = Models()
    models.see_pod(seen("p1"))
    old = of(models, "p1")
    models.require_listed(old)
    models.drop(old)
    models.see_pod(seen("p1"))
    with pytest.raises(PodGone, match="pod team/p1 is gone"):
        models.require_listed(old)


@pytest.mark.parametrize("state", list(ModelState))
def test_only_what_was_served_is_missed_later(state: ModelState) -> None:
    models = Models()
    models.remember(report(models=(replace(listed("p1"), state=state),)))
    for uid in ("p1", "p2"):
        models.see_pod(seen(uid))
    assert of(models, "p1").has_served is (state in (ModelState.READY, ModelState.LOST))
    assert not of(models, "p2").has_served


def test_a_failed_load_is_due_once_after_each_pause_and_pauses_grow() -> None:
    retry = Retry(Backoff(initial_seconds=15, cap_seconds=40, jitter=0), after=100.0)
    due = [now for now in range(100, 260) if retry.is_due(float(now))]
    assert due == [115, 145, 185, 225]


def test_an_answer_that_is_older_than_the_pods_end_does_not_bring_it_back() -> None:
    models = Models()
    models.lose_pod(PodUid("p1"))  # by the watch, while the API server's answer was on its way
    models.see_pod(seen("p1"))
    assert list(models) == []
    with pytest.raises(PodGone, match="p1 is gone"):
        models.claim(PodUid("p1"), ModelName("model-p1"))


async def test_an_adopted_directory_counts_before_its_pod_is_seen() -> None:
    models = Models()
    models.set_resident(models.adopt(record("a")), True)
    (only,) = models
    assert (only.pod_lives, only.state, only.requested_bytes) == (False, ModelState.STAGED, 5)
    models.see_pod(seen("a"))
    assert only.pod_lives
    assert models.residency == 1
