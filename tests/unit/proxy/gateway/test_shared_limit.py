"""A limit of several processes, in the kernel."""

import os

from berth.contract.gateway import ReplicaLimits
from proxy.gateway.shared_limit import UNLIMITED, SharedLimit


def free(descriptor: int) -> int:
    count = 0
    while True:
        try:
            os.eventfd_read(descriptor)
        except BlockingIOError:
            break
        count += 1
    if count:
        os.eventfd_write(descriptor, count)
    return count


def test_a_shared_limit_grows_at_once_and_shrinks_as_it_is_given_back() -> None:
    limit = SharedLimit(ReplicaLimits(container_concurrency=5, queue_depth=7))
    slots, places = limit.descriptors
    assert (free(slots), free(places)) == (5, 7)
    for _ in range(4):
        os.eventfd_read(slots)
    limit.resize(ReplicaLimits(container_concurrency=2, queue_depth=9))
    assert (free(slots), free(places)) == (0, 9)
    assert not limit.is_settled
    limit.resize(ReplicaLimits(container_concurrency=1, queue_depth=9))  # what is owed adds up
    for left in (0, 0, 0, 1):
        os.eventfd_write(slots, 1)
        limit.settle()
        assert free(slots) == left
    assert limit.is_settled
    limit.resize(ReplicaLimits())
    assert free(slots) == UNLIMITED
    limit.close()
