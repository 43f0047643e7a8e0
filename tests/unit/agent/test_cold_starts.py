"""Where a replica's first seconds on its node go."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.cold_starts import ColdStarts
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from berth.contract.ids import PodUid
from berth.contract.keys import Keys
from berth.contract.pod import parse_model_pod
from berth.contract.report import ModelState
from tests.fakes.objects import pod

PENDING, STAGED, LOADING, READY = (
    ModelState.PENDING,
    ModelState.STAGED,
    ModelState.LOADING,
    ModelState.READY,
)


class Node:
    """Looked at after each change, as the agent does."""

    def __init__(self) -> None:
        self.models, self.observed = Models(), list[tuple[str, float]]()
        self.starts = ColdStarts(lambda phase, seconds: self.observed.append((phase, round(seconds, 3))))

    def see(self, uid: str = "p") -> Model:
        self.models.see_pod(parse_model_pod(pod(uid, on="n1"), Keys()))
        model = self.models.get(PodUid(uid))
        assert model is not None
        return model

    def go(self, model: Model, *steps: tuple[ModelState | str, float]) -> None:
        for step, at in steps:
            if isinstance(step, ModelState):
                self.models.set(model, step)
            elif step == "proxy":
                self.models.see_proxy(model)
            self.starts.look(self.models, at)


@pytest.fixture
def node() -> Node:
    one = Node()
    one.starts.look(one.models, 0.0)
    return one


def test_its_phases_follow_one_another_and_add_up(node: Node) -> None:
    model = node.see()
    node.go(model, (PENDING, 10.0), (STAGED, 11.5), (LOADING, 11.75), (READY, 15.5))
    assert node.observed == []  # nobody can ask it yet
    node.go(model, ("proxy", 15.75), (READY, 20.0), (LOADING, 21.0), (READY, 22.0))
    assert node.observed == [("download", 1.5), ("load", 4.0), ("proxy", 0.25), ("all", 5.75)]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        # What fails is tried again, and staged anew: it is not here before it is here to stay.
        (
            [(PENDING, 1.0), (STAGED, 2.0), (ModelState.FAILED, 3.0), (PENDING, 4.0), (LOADING, 5.0), (READY, 7.0), ("proxy", 8.0)],
            [("download", 1.0), ("load", 5.0), ("proxy", 1.0), ("all", 7.0)],
        ),
        # A proxy that is there already, as after its container was started before the loader's last word.
        ([(PENDING, 1.0), ("proxy", 2.0), (READY, 4.0)], [("download", 3.0), ("load", 0.0), ("proxy", 0.0), ("all", 3.0)]),
        # Whose files were here when it was first seen: an agent that starts goes on with them.
        ([(STAGED, 1.0), (READY, 2.0), ("proxy", 3.0)], []),
        ([(PENDING, 1.0), (STAGED, 2.0)], []),
    ],
)  # fmt: skip
def test_only_what_was_seen_from_its_beginning_to_its_end_counts(
    node: Node, steps: list[Any], found: list[Any]
) -> None:
    node.go(node.see(), *steps)
    assert node.observed == found


def test_of_what_was_there_before_it_looked_nothing_is_known() -> None:
    node = Node()
    model = node.see()
    node.go(model, (PENDING, 1.0), (STAGED, 2.0), (READY, 3.0), ("proxy", 4.0))
    assert node.observed == []


def test_what_an_earlier_agent_has_served_is_no_cold_start(node: Node) -> None:
    model = node.see()
    model.has_served = True
    node.go(model, (PENDING, 1.0), (STAGED, 2.0), (READY, 3.0), ("proxy", 4.0))
    assert node.observed == []


def test_who_has_gone_is_forgotten(node: Node) -> None:
    model = node.see()
    node.go(model, (PENDING, 1.0))
    node.models.lose_pod(model.ref.uid)
    node.models.drop(model)
    node.starts.look(node.models, 2.0)
    assert node.starts._ends == {}


def test_the_metric_has_all_phases_from_the_beginning() -> None:
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    name = "berth_cold_start_seconds"
    for phase in ("download", "load", "proxy", "all"):
        assert registry.get_sample_value(f"{name}_count", {"phase": phase}) == 0
    metrics.cold_start("load", 3.0)
    assert registry.get_sample_value(f"{name}_sum", {"phase": "load"}) == 3.0
