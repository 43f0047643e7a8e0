"""Seconds in buckets, as Prometheus reads them."""

from itertools import pairwise

import pytest

from proxy.activator.histogram import BUCKETS, Histogram


def test_buckets_reach_from_a_decision_to_the_loading_of_a_large_model() -> None:
    assert (BUCKETS[0], BUCKETS[-1]) == (0.05, 600.0)
    assert all(1 < after / before <= 3 for before, after in pairwise(BUCKETS))


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, "0.05"), (0.05, "0.05"), (0.051, "0.1"), (601.0, "+Inf")]
)
def test_a_bucket_counts_what_is_at_most_its_bound(seconds: float, bucket: str) -> None:
    counted = Histogram()
    counted.observe(seconds)
    told = counted.cumulative()
    assert next(bound for bound, count in told if count) == bucket
    assert told[-1] == ("+Inf", 1.0)
    assert len(told) == len(BUCKETS) + 1
    assert counted.total == seconds
