"""Which models are about to be loaded, and on which GPUs: what another load would have to wait for. Pure.

An agent loads a model that it has not measured before alone on its GPU, and others up to four side by side. Of
a model whose files are complete the report tells. Before that there are only pods that have just been given a
node, perhaps by a decision that no report can know of yet.
"""

from collections.abc import Collection, Mapping

from berth.contract.ids import GpuUuid, PodUid
from berth.contract.report import ModelReport, ModelState
from binder.cache.reservations import Reservation, place_of

# A pod whose files have not come by then takes its time (a large download, a loader that fails again and again), and its
# GPU is free for others' loads meanwhile. It counts anew once its files are there.
EXPECTED_SECONDS = 120.0
_UNDER_WAY = (ModelState.STAGED, ModelState.LOADING)


class ExpectedLoads:
    """Pods that have a node, and whose models were not there when they got it."""

    def __init__(self) -> None:
        # Since when, the oldest first: a pod's time never begins anew.
        self._since: dict[PodUid, float] = {}

    def note(self, uid: PodUid, now: float) -> None:
        self._since.setdefault(uid, now)

    def forget(self, uid: PodUid) -> bool:
        """True if it was expected."""
        return self._since.pop(uid, None) is not None

    def take_overdue(self, now: float) -> list[PodUid]:
        """Those that are expected no more."""
        overdue = []
        for uid, since in self._since.items():
            if since + EXPECTED_SECONDS > now:
                break
            overdue.append(uid)
        for uid in overdue:
            del self._since[uid]
        return overdue

    def among(self, pods: Mapping[PodUid, Reservation]) -> Collection[PodUid]:
        return self._since.keys() & pods.keys() if self._since else ()


def loads_by_gpu(
    reservations: Mapping[PodUid, Reservation],
    listed: Mapping[PodUid, ModelReport],
    gpus: frozenset[GpuUuid],
    expected: Collection[PodUid],
) -> dict[GpuUuid, int]:
    """How many loads are under way or to come on each GPU. `expected`: some of the reservations. A load of which no report
    can tell the GPU is not counted."""
    coming = [uid for uid, model in listed.items() if model.state in _UNDER_WAY]
    coming += [uid for uid in expected if _is_to_come(listed.get(uid))]
    loads: dict[GpuUuid, int] = {}
    for uid in coming:
        on, _ = place_of(reservations.get(uid), listed.get(uid), gpus)
        for gpu in on:
            loads[gpu] = loads.get(gpu, 0) + 1
    return loads


def _is_to_come(model: ModelReport | None) -> bool:
    return model is None or model.state is ModelState.PENDING
