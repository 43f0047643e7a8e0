"""One replica of a model on a node: whose id counts, and until when."""

from berth.contract.ids import ModelId, ModelName
from tests.fakes.cluster import cluster_of, resident, rule_of
from tests.fakes.objects import KEYS, listed, node, pod, report
from tests.fakes.values import replace


def test_a_model_that_the_report_still_lists_is_there() -> None:
    cluster = cluster_of(node(says=report(models=(listed("old"),))))
    assert rule_of(cluster, pod(annotations={KEYS.model_id: "model-old"})) == "ModelAlreadyOnNode"


def test_a_name_is_nobodys_and_an_id_its_namespaces() -> None:
    same_name = resident("x", "n1", 1, annotations={KEYS.model_id: "other", KEYS.model_name: "m"})
    theirs = resident("y", "n1", 1, annotations={KEYS.model_id: "m"})
    theirs["metadata"]["namespace"] = "elsewhere"
    foreign = replace(listed("z"), namespace="elsewhere", model_id=ModelId("m"), model_name=ModelName("m"))
    asks = pod(annotations={KEYS.model_id: "m"})
    there = node(says=report(models=(foreign,)))
    assert rule_of(cluster_of(there, pods=(same_name, theirs)), asks) is None
    mine = resident("w", "n1", 1, annotations={KEYS.model_id: "m"})
    assert rule_of(cluster_of(there, pods=(same_name, theirs, mine)), asks) == "ModelAlreadyOnNode"
