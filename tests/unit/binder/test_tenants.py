"""Whose models and whose code a node holds, of pods and of what its report lists."""

from berth.contract.report import Failure, ModelState
from tests.fakes.objects import KEYS
from tests.fakes.tenants import AMONG, APART, OTHERS, Tenants, row
from tests.fakes.values import replace


def test_what_is_on_its_way_counts_and_what_comes_to_nothing_does_not() -> None:
    bench = Tenants()
    bench.nodes("n1")
    bench.pod("a1", code=True, on="n1")
    assert bench.verdict("b1") == {"n1": OTHERS}
    bench.nodes("n1", APART, None, row("a1", "n1", state=ModelState.FAILED, failure=Failure.CAPACITY))
    assert bench.verdict("b1") == bench.verdict("b1", code=True) == {"n1": ""}
    bench.nodes("n1")
    bench.gone("a1")
    assert bench.verdict("b1", code=True) == {"n1": ""}
    self_placed = bench.pod("a2", code=True, on="n1")
    del self_placed["metadata"]["annotations"][KEYS.gpu]  # nothing is ever loaded for it
    bench.tell("pods", self_placed)
    assert bench.verdict("b1", code=True) == {"n1": ""}


def test_nobody_takes_a_shared_node_by_an_edit_of_his_pod() -> None:
    bench = Tenants()
    bench.nodes("n1", APART, None, row("a1", "n1"), row("b1", "n1"))
    bench.pod("a1", on="n1")
    bench.pod("b1", on="n1")
    bench.pod("a1", code=True, on="n1")
    assert bench.verdict("b2") == bench.verdict("c1") == {"n1": ""}
    bench.gone("b1")
    bench.nodes("n1", APART, None, row("a1", "n1"))
    assert bench.verdict("c1") == {"n1": OTHERS}  # alone there, he may have it by real code as well


def test_a_model_whose_namespace_the_report_had_no_room_for_is_somebody_elses() -> None:
    bench = Tenants()
    bench.nodes("n1", APART, None, replace(row("a1", "n1"), namespace="", pod_name=""))
    assert bench.verdict("a2", code=True) == {"n1": AMONG}
    bench.pod("a1", on="n1")  # unless its pod is known
    assert bench.verdict("a2", code=True) == {"n1": ""}
