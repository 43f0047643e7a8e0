"""Whether a bound pod is replaced, and why not: one row for each reason."""

import pytest

from berth.contract.ids import GpuUuid, NodeName
from berth.contract.report import Failure, GpuReport, ModelState
from binder.loop.verdict import BoundPod, Cause, cause_of, gpu_failure, verdict
from tests.fakes.objects import GIB, KEYS, gpu, listed, pod
from tests.fakes.values import replace

NAME = "trtis-scheduler"
POD = BoundPod(NodeName("n1"), NAME, server=None, has_controller=True, is_initialized=True)
OTHER, PINNED = replace(POD, scheduler_name="kube"), replace(POD, server="pool-a")
BARE, LOADING = replace(POD, has_controller=False), replace(POD, is_initialized=False)
LOAD, LOST, BROKEN = Cause.LOAD_FAILED, Cause.FILES_LOST, Cause.GPU_BROKEN

# The pod, the cause and the class of the failed load; part of why it stays, whether its owner is told.
VERDICTS: list[tuple[BoundPod, Cause, Failure | None, str, bool]] = [
    (POD, LOAD, Failure.CAPACITY, "", True),
    (POD, LOAD, Failure.TRANSIENT, "", True),
    (POD, LOAD, Failure.INVALID_MODEL, "fail on every node", True),
    (POD, LOAD, Failure.QUARANTINED, "kubectl annotate node n1 seldon.io/trtis-lift-quarantine=all", True),
    (POD, LOAD, None, "fail on every node", True),
    (OTHER, LOAD, Failure.CAPACITY, "scheduler kube placed it", False),
    (OTHER, LOAD, Failure.INVALID_MODEL, "fail on every node", False),
    (PINNED, LOAD, Failure.CAPACITY, "pinned to server pool-a", True),
    (BARE, LOAD, Failure.CAPACITY, "no controller", True),
    (LOADING, LOAD, Failure.CAPACITY, "", True),
    (POD, LOST, None, "", True),
    (OTHER, LOST, None, "", True),
    (PINNED, LOST, None, "", True),
    (BARE, LOST, None, "no controller", True),
    (POD, BROKEN, None, "", True),
    (PINNED, BROKEN, None, "", True),
    (OTHER, BROKEN, None, "scheduler kube placed it", True),
    (BARE, BROKEN, None, "no controller", True),
]


@pytest.mark.parametrize(("bound", "cause", "failure", "stays", "reported"), VERDICTS)
def test_a_verdict(
    bound: BoundPod, cause: Cause, failure: Failure | None, stays: str, reported: bool
) -> None:
    found = verdict(bound, cause, failure, keys=KEYS, scheduler_name=NAME)
    assert stays in found.stays
    assert bool(found.stays) == bool(stays)
    assert (found.is_reported, found.waits) == (reported, False)
    assert found.next_step.startswith(
        "it stays here: " if stays else ("the binder evicts", "what a broken GPU")
    )


def test_lost_files_wait_for_the_pod_s_own_loader() -> None:
    for bound in (LOADING, replace(LOADING, has_controller=False)):
        found = verdict(bound, LOST, None, keys=KEYS, scheduler_name=NAME)
        assert (found.waits, found.stays, found.next_step) == (True, "", "")


def test_what_of_a_pod_decides() -> None:
    one = pod(on="n1", annotations={KEYS.server: "s"})
    one["metadata"]["ownerReferences"] = [{"uid": "rs", "controller": True}]
    one["status"] = {"conditions": [{"type": "Initialized", "status": "True"}]}
    assert BoundPod.of(one, server="s") == replace(POD, server="s")
    assert BoundPod.of(pod(on="n1", schedulerName=None), server=None) == replace(
        BARE, scheduler_name="", is_initialized=False
    )


CAUSES = {
    **dict.fromkeys(ModelState),
    ModelState.FAILED: LOAD,
    ModelState.LOST: LOST,
    **dict.fromkeys((ModelState.PENDING, ModelState.STAGED, ModelState.LOADING, ModelState.READY), BROKEN),
}


@pytest.mark.parametrize(("state", "cause"), CAUSES.items())
def test_the_cause_of_a_model_on_a_broken_gpu(state: ModelState, cause: Cause | None) -> None:
    uuid = GpuUuid("GPU-a")
    model = replace(listed("p1", on=uuid), state=state)
    broken = gpu(uuid, healthy=False, broken=True)
    assert cause_of(model, {uuid: broken}) is cause
    for gpus in ({uuid: replace(broken, broken=False)}, {}, {GpuUuid("GPU-b"): broken}):
        assert cause_of(model, gpus) is (None if cause is BROKEN else cause)


FAILURES: list[tuple[GpuReport | None, int | None, str, str]] = [
    (None, None, "GPULost", "GPU GPU-a is not on node n1 any more"),
    (
        gpu(healthy=False, reason="XID 79"),
        0,
        "GPUUnhealthy",
        "GPU 0 (GPU-a) of node n1 is not healthy: XID 79",
    ),
    (gpu(healthy=False), 0, "GPUUnhealthy", "no reason is reported"),
    (gpu(), -GIB, "GPUOvercommitted", "GPU 0 (GPU-a) of node n1 is 1 GiB over its memory"),
]


@pytest.mark.parametrize(("reported", "free", "reason", "words"), FAILURES)
def test_a_failure_of_a_gpu(reported: GpuReport | None, free: int | None, reason: str, words: str) -> None:
    found = gpu_failure(GpuUuid("GPU-a"), reported, "n1", free_bytes=free)
    assert found is not None
    assert found.reason == reason
    assert words in found.message


@pytest.mark.parametrize("free", [None, 0, GIB])
def test_a_gpu_that_is_well(free: int | None) -> None:
    assert gpu_failure(GpuUuid("GPU-a"), gpu(), "n1", free_bytes=free) is None
