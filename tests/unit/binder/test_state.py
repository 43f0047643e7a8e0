"""Who holds memory, and until when."""

import random
from typing import Any

import numpy as np
import pytest

from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, NodeName, PodUid
from berth.contract.report import ModelReport
from binder.cache.cluster_facts import ClusterFacts
from binder.cache.live_nodes import LiveNodes
from binder.cache.state import STALE_MODEL_GRACE_SECONDS, STALE_MODEL_LIMIT_SECONDS, ClusterState
from binder.engine.decision import Decider, Placement
from binder.engine.score import STRATEGIES, make_strategy
from binder.pod.demand import parse_demand
from tests.fakes.objects import GIB, KEYS, gpu, listed, node, pod, report

A = GpuUuid("GPU-a")
N1 = NodeName("n1")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> ClusterState:
    state = ClusterState(KEYS, clock=clock)
    state.set_node(node(says=report()))
    return state


def reserved(state: ClusterState, uuid: GpuUuid = A) -> int:
    return state.view(N1).reserved_on(uuid)


def bound(uid: str = "p1", *, gib: int = 4, **more: Any) -> dict[str, Any]:
    return pod(uid, mem=f"{gib}Gi", on="n1", choice=GpuChoice(A, 0, gib * GIB), **more)


def says(*models: ModelReport, generation: int = 2) -> dict[str, Any]:
    return node(says=report(models=models, generation=generation))


def test_a_bound_pod_holds_what_it_requested(state: ClusterState) -> None:
    state.set_pod(bound())
    assert reserved(state) == 4 * GIB


def test_what_was_measured_counts_when_it_is_more(state: ClusterState) -> None:
    state.set_pod(bound())
    state.set_node(says(listed("p1", requested=4 * GIB, measured=6 * GIB)))
    assert reserved(state) == 6 * GIB
    state.set_node(says(listed("p1", requested=4 * GIB, measured=GIB), generation=3))
    assert reserved(state) == 4 * GIB


def test_an_assumption_holds_at_once_and_is_not_counted_twice_when_seen(state: ClusterState) -> None:
    demand = parse_demand(pod("p1", mem="4Gi"), KEYS)
    state.assume(demand, N1, GpuChoice(A, 0, 4 * GIB))
    assert (reserved(state), state.assumed_count) == (4 * GIB, 1)
    state.set_pod(bound())
    assert (reserved(state), state.assumed_count) == (4 * GIB, 0)


def test_a_forgotten_assumption_holds_nothing(state: ClusterState) -> None:
    state.assume(parse_demand(pod("p1", mem="4Gi"), KEYS), N1, GpuChoice(A, 0, 4 * GIB))
    state.forget(PodUid("p1"))
    assert reserved(state) == 0
    assert state.view(N1).used.get("pods", 0) == 0


def test_a_stale_model_holds_until_a_report_that_had_listed_it_no_longer_does(
    state: ClusterState, clock: Clock
) -> None:
    state.set_pod(bound())
    state.set_node(says(listed("p1", requested=4 * GIB)))
    state.remove_pod(PodUid("p1"))
    clock.now += STALE_MODEL_LIMIT_SECONDS - 1
    assert not state.expire_stale_models()
    assert reserved(state) == 4 * GIB
    state.set_node(says(generation=3))
    assert reserved(state) == 0


def test_a_stale_model_that_is_listed_only_later_is_held_too(state: ClusterState, clock: Clock) -> None:
    state.set_pod(bound())
    state.remove_pod(PodUid("p1"))  # the watch of pods is ahead of the watch of nodes
    state.set_node(says(listed("p1", requested=4 * GIB)))
    clock.now += 1000
    state.expire_stale_models()
    assert reserved(state) == 4 * GIB


def test_a_stale_model_that_no_report_ever_listed_is_held_until_the_node_was_asked_after_its_grace(
    state: ClusterState, clock: Clock
) -> None:
    state.set_pod(bound())
    state.remove_pod(PodUid("p1"))
    clock.now += STALE_MODEL_GRACE_SECONDS - 0.1
    assert not state.unsettled()
    assert not state.settle(N1, asked_at=clock.now)
    clock.now += 0.1
    assert state.unsettled() == {N1}
    assert reserved(state) == 4 * GIB
    assert state.settle(N1, asked_at=clock.now)
    assert reserved(state) == 0


def test_a_watch_that_is_behind_does_not_undo_what_the_node_said_when_it_was_asked(
    state: ClusterState, clock: Clock
) -> None:
    def version(number: int, *models: ModelReport) -> dict[str, Any]:
        found = says(*models, generation=number)
        found["metadata"]["resourceVersion"] = str(number)
        return found

    state.set_pod(bound())
    state.remove_pod(PodUid("p1"))
    clock.now += STALE_MODEL_GRACE_SECONDS
    state.set_node(version(7, listed("p1", requested=4 * GIB)))
    assert not state.settle(N1, asked_at=clock.now)
    state.set_node(version(6))
    assert reserved(state) == 4 * GIB
    state.set_node(version(8))
    assert reserved(state) == 0


def test_a_pod_that_ended_is_treated_like_one_that_is_gone(state: ClusterState) -> None:
    state.set_pod(bound())
    state.set_node(says(listed("p1", requested=4 * GIB)))
    assert state.set_pod(bound(phase="Failed"))
    assert reserved(state) == 4 * GIB
    assert state.view(N1).used.get("pods", 0) == 0  # CPU and the rest are free at once
    state.set_node(says(generation=3))
    assert reserved(state) == 0


def test_what_a_report_lists_is_held_although_its_pod_was_never_seen(state: ClusterState) -> None:
    state.set_node(says(listed("stranger", requested=5 * GIB, measured=7 * GIB)))
    assert reserved(state) == 7 * GIB


def test_a_tampered_choice_is_counted_on_every_gpu(state: ClusterState) -> None:
    state.set_node(node(says=report(gpu("GPU-a"), gpu("GPU-b", index=1))))
    state.set_pod(pod("p1", mem="4Gi", on="n1", choice="{}"))
    state.set_pod(pod("p2", mem="2Gi", on="n1", choice=""))
    for uuid in ("GPU-a", "GPU-b"):
        assert reserved(state, GpuUuid(uuid)) == 6 * GIB


def test_a_pod_and_its_report_that_name_different_gpus_are_counted_on_both(state: ClusterState) -> None:
    two = (gpu("GPU-a"), gpu("GPU-b", index=1))
    state.set_pod(bound())
    state.set_node(node(says=report(*two, models=(listed("p1", on="GPU-b", requested=4 * GIB),))))
    assert (reserved(state), reserved(state, GpuUuid("GPU-b"))) == (4 * GIB, 4 * GIB)


@pytest.mark.parametrize("written", [1, 10**15])
def test_what_is_held_is_what_was_requested_whatever_the_annotation_says(
    state: ClusterState, written: int
) -> None:
    state.set_pod(pod("p1", mem="4Gi", on="n1", choice=GpuChoice(A, 0, written)))
    assert reserved(state) == 4 * GIB


def test_a_pod_that_requests_no_memory_still_keeps_its_model_to_itself(state: ClusterState) -> None:
    state.set_pod(pod("p1", mem=None, on="n1", choice=GpuChoice(A, 0, 0)))
    assert ("team", "model-p1") in state.view(N1).model_ids


def test_a_node_that_says_the_same_again_wakes_nobody(state: ClusterState) -> None:
    assert not state.set_node(node(says=report()))
    assert not state.set_node(says(generation=9))
    assert state.set_node(node(says=report(gpu(total=17 * GIB), generation=10)))


def test_a_node_that_is_gone_takes_its_stale_models_along(state: ClusterState) -> None:
    state.set_pod(bound())
    state.remove_pod(PodUid("p1"))
    state.remove_node(N1)
    state.set_node(node(says=report()))
    assert reserved(state) == 0


def test_a_pod_that_is_seen_again_after_its_end_is_counted_once(state: ClusterState) -> None:
    state.set_pod(bound())
    state.remove_pod(PodUid("p1"))
    state.set_pod(bound())
    assert reserved(state) == 4 * GIB
    state.set_node(says(listed("p1", requested=4 * GIB)))
    state.remove_pod(PodUid("p1"))
    state.set_node(says(generation=3))
    assert reserved(state) == 0


def test_a_report_that_unlists_a_model_before_its_pod_is_seen_gone_leaves_no_stale_model(
    state: ClusterState, clock: Clock
) -> None:
    state.set_pod(bound())
    state.set_node(says(listed("p1", requested=4 * GIB)))
    state.set_node(says(generation=3))
    state.remove_pod(PodUid("p1"))  # the watch of nodes is ahead of the watch of pods
    assert reserved(state) == 0


def test_an_edited_choice_of_a_gpu_that_is_not_there_frees_nothing(state: ClusterState) -> None:
    state.set_pod(pod("p1", mem="4Gi", on="n1", choice=GpuChoice(GpuUuid("GPU-nowhere"), 0, 4 * GIB)))
    assert reserved(state) == 4 * GIB


@pytest.mark.parametrize("marks", [{KEYS.gpu: ""}, {KEYS.gpu: "{"}, {KEYS.gpu: "{", KEYS.requirements: ",,"}])
def test_a_choice_that_nobody_can_read_holds_no_gpu_but_the_one_that_the_report_names(
    state: ClusterState, marks: dict[str, str]
) -> None:
    eight = tuple(gpu(f"GPU-{i}", index=i, total=80 * GIB) for i in range(8))
    edited = pod("p1", mem="70Gi", on="n1", annotations=marks)
    state.set_pod(edited)
    state.set_node(node(says=report(*eight)))
    assert [reserved(state, one.uuid) for one in eight] == [
        70 * GIB
    ] * 8  # on one of them, and who knows on which
    state.set_node(node(says=report(*eight, models=(listed("p1", on="GPU-3", requested=70 * GIB),))))
    assert [reserved(state, one.uuid) // GIB for one in eight] == [0, 0, 0, 70, 0, 0, 0, 0]
    state.remove_pod(PodUid("p1"))
    assert [reserved(state, one.uuid) // GIB for one in eight] == [0, 0, 0, 70, 0, 0, 0, 0]


def test_a_pod_that_nobody_has_given_a_gpu_holds_none(state: ClusterState) -> None:
    """Its owner wrote the node into it: its agent loads nothing for it, and it closes no GPU to others."""
    state.set_pod(pod("p1", mem="10Ti", on="n1", requests={"cpu": "500m"}))
    view = state.view(N1)
    assert reserved(state) == 0
    assert (view.used["pods"], view.used["cpu"]) == (1, 500)
    state.set_node(says(listed("p1", requested=4 * GIB)))
    assert reserved(state) == 4 * GIB  # what its node tells of counts, whoever is to blame


def test_a_damaged_model_pod_still_counts_all_that_can_be_read_of_it(state: ClusterState) -> None:
    damaged = {KEYS.model_id: "iris", KEYS.requirements: "a,,b", KEYS.gpu: "{"}
    state.set_pod(pod("p1", mem="4Gi", on="n1", annotations=damaged, requests={"cpu": "500m"}))
    view = state.view(N1)
    assert reserved(state) == 4 * GIB
    assert (view.used["pods"], view.used["cpu"]) == (1, 500)
    assert ("team", "iris") in view.model_ids


@pytest.mark.parametrize("seed", range(25))
def test_no_sequence_of_events_puts_a_gpu_over_its_memory(seed: int) -> None:
    """The binder beside an honest agent, with watches that lag: what is really in use never exceeds a GPU."""
    rng, clock = random.Random(seed), Clock()
    state = ClusterState(KEYS, clock=clock)
    gpus = [gpu("GPU-a", total=10 * GIB), gpu("GPU-b", total=6 * GIB, index=1)]
    by = make_strategy(rng.choice(STRATEGIES), np.random.default_rng(seed))
    decider = Decider(LiveNodes(state), ClusterFacts(state=state, clock=lambda: 0.0), by)
    decider.table.beat(N1, 1.0)
    on_node: dict[str, tuple[GpuChoice, str]] = {}  # what Triton really holds: uid to choice and model id
    living: dict[str, dict[str, Any]] = {}
    events: list[Any] = []  # what the watches have yet to deliver, per kind in order
    node_events: list[Any] = []

    def write_report() -> None:
        models = tuple(
            listed(uid, on=choice.uuid, requested=choice.bytes) for uid, (choice, _) in on_node.items()
        )
        node_events.append(node(says=report(*gpus, models=models, generation=rng.randrange(10**9))))

    write_report()
    state.set_node(node_events.pop(0))
    for step in range(300):
        action = rng.random()
        clock.now += rng.random()
        if action < 0.35:
            uid = f"p{step}"
            asks = pod(uid, mem=f"{rng.randint(1, 5)}Gi", annotations={KEYS.model_id: f"m{rng.randrange(4)}"})
            outcome = decider.decide(parse_demand(asks, KEYS))
            if isinstance(outcome, Placement):
                state.assume(parse_demand(asks, KEYS), outcome.node, outcome.gpu)
                living[uid] = bound_replica = {**asks, "spec": {**asks["spec"], "nodeName": "n1"}}
                bound_replica["metadata"] = {
                    **asks["metadata"],
                    "annotations": {**asks["metadata"]["annotations"], KEYS.gpu: outcome.gpu.encode()},
                }
                events.append(("set", bound_replica))
                on_node[uid] = (outcome.gpu, asks["metadata"]["annotations"][KEYS.model_id])
                write_report()  # before the load: the agent's rule
        elif action < 0.5 and living:
            uid = rng.choice(sorted(living))
            events.append(("gone", living.pop(uid)))
        elif action < 0.65:
            for uid in [u for u in on_node if u not in living][:1]:
                del on_node[uid]  # unloaded; only then the report drops it
                write_report()
        elif action < 0.85 and events:
            kind, one = events.pop(0)
            if kind == "set":
                state.set_pod(one)
            else:
                state.remove_pod(PodUid(one["metadata"]["uid"]))
        elif node_events:
            state.set_node(node_events.pop(0))
        for one in gpus:
            used = sum(choice.bytes for choice, _ in on_node.values() if choice.uuid == one.uuid)
            assert used <= (one.total_bytes or 0)
        ids = [model_id for _, model_id in on_node.values()]
        assert len(ids) == len(set(ids))


def test_a_stale_model_ends_at_last_and_what_is_still_listed_is_held_by_the_report(
    state: ClusterState, clock: Clock
) -> None:
    state.set_pod(bound())
    state.set_node(says(listed("p1", requested=4 * GIB)))
    state.remove_pod(PodUid("p1"))
    clock.now += STALE_MODEL_LIMIT_SECONDS
    assert state.expire_stale_models()
    assert state.stale_model_count == 0
    assert reserved(state) == 4 * GIB
