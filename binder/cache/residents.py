"""What bound pods have requested: all that a process which has just started can learn from. Pure."""

import heapq
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from berth.contract.errors import InvalidPod
from berth.contract.keys import Keys
from berth.contract.pod import is_model_pod, node_of
from binder.pod.demand import Demand, parse_demand

JsonObject = dict[str, Any]
# Some tens of milliseconds.
_MOST = 1000


def residents(pods: Iterable[JsonObject], keys: Keys) -> Iterator[Demand]:
    """Of a thousand bound model pods at most: those whose uids come first, which is as good as by chance."""
    bound = (pod for pod in pods if node_of(pod) is not None and is_model_pod(pod, keys))
    for pod in heapq.nsmallest(_MOST, bound, key=lambda pod: str(pod["metadata"]["uid"])):
        with suppress(InvalidPod):
            yield parse_demand(pod, keys)
