"""What a binder that starts anew learns from: bound pods of models that can be read, a thousand at most."""

from binder.cache.residents import residents
from tests.fakes.objects import KEYS, pod


def test_bound_model_pods_that_can_be_read_count_and_a_thousand_at_most() -> None:
    there = [pod("bound", on="n1"), pod("b", mem="1.5.2", on="n1"), pod("waits")]
    there.append(pod("plain", mem=None, on="n1", annotations={KEYS.model_id: None}))
    assert [demand.model.ref.uid for demand in residents(there, KEYS)] == ["bound"]
    many = [pod(f"{number:04}", on="n1") for number in reversed(range(1500))]
    assert [demand.model.ref.uid for demand in residents(many, KEYS)] == [f"{n:04}" for n in range(1000)]
