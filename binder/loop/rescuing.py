"""Replaces pods whose model is on a GPU that is broken, or gone, while another GPU has room for them.

What they serve is not to be trusted, and their proxies are not ready (the agent sees to that); but a GPU that
is reset is whole again, so it must have lasted. One pod goes after the other: its successor is placed before
the room for the next one is counted. Where nothing would replace a pod, its owner is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.contract.report import ModelReport, ModelState
from berth.kube.errors import KubeError
from berth.kube.events import EventRecorder
from berth.runtime.logs import fields
from binder.cache.view import NodeView
from binder.loop.evict import evict
from binder.loop.fenced import FencedClient
from binder.loop.replacing import pod_of_row
from binder.pod.demand import Demand

log = logging.getLogger(__name__)

# As long as an operator needs to reset a GPU; and what flaps is left alone.
BROKEN_SECONDS = 60.0
# Between two evictions.
PAUSE_SECONDS = 5.0
# After an eviction that a budget refused, and for room on another GPU.
_AGAIN_SECONDS = 30.0
_TICK_SECONDS = 1.0
# Each costs a call and a decision, and where a whole cluster is in trouble none of them helps.
_MOST_LOOKS = 20
# What has failed or is lost is the replacer's.
_STRANDED = (ModelState.PENDING, ModelState.STAGED, ModelState.LOADING, ModelState.READY)


@dataclass(slots=True)
class _Stranded:
    """A model on a broken GPU. `next_look`: when its pod may go."""

    node: NodeName
    model: ModelReport
    trouble: str
    next_look: float
    is_settled: bool = False


class Rescuer:
    """`look_at` takes what the reports tell, on a standby too; only `run` acts on it.

    `fits`: whether any GPU would take the pod, were it made anew.
    """

    def __init__(
        self,
        client: FencedClient,
        keys: Keys,
        scheduler_name: str,
        events: EventRecorder,
        *,
        fits: Callable[[Demand], bool],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._client, self._keys, self._name = client, keys, scheduler_name
        self._events, self._fits, self._clock, self._sleep = events, fits, clock, sleep
        # No more than the last reports name.
        self._stranded: dict[NodeName, dict[PodUid, _Stranded]] = {}
        self._next_eviction = float("-inf")

    def look_at(self, view: NodeView) -> None:
        """Take note of the models on GPUs that the node's report calls broken."""
        node, report = view.facts.name, view.facts.report
        before, now = self._stranded.pop(node, {}), dict[PodUid, _Stranded]()
        broken = {gpu.uuid: gpu for gpu in view.gpus if gpu.broken}
        if report is None or not broken:
            return
        for model in report.models:
            gpu = next((broken[uuid] for uuid in sorted(model.gpus) if uuid in broken), None)
            # A report that had no room for a pod's name tells it another time.
            if gpu is None or not model.pod_name or model.state not in _STRANDED:
                continue
            trouble = f"GPU {gpu.index} ({gpu.uuid}): {gpu.reason}"
            now[model.pod_uid] = before.get(model.pod_uid) or _Stranded(
                node, model, trouble, self._clock() + BROKEN_SECONDS
            )
        if now:
            self._stranded[node] = now

    def forget(self, node: NodeName) -> None:
        """The node is gone."""
        self._stranded.pop(node, None)

    async def run(self) -> None:
        """Look after them for ever."""
        while True:
            await self.step()
            await self._sleep(_TICK_SECONDS)

    async def step(self) -> None:
        """Let one pod go, if it is time for one."""
        if self._clock() < self._next_eviction:
            return
        now = self._clock()
        waiting = [one for of_node in self._stranded.values() for one in of_node.values()]
        due = [one for one in waiting if not one.is_settled and one.next_look <= now]
        for one in sorted(due, key=lambda one: one.next_look)[:_MOST_LOOKS]:
            one.next_look = self._clock() + _AGAIN_SECONDS
            if await self._tried(one):
                self._next_eviction = self._clock() + PAUSE_SECONDS
                return

    async def _tried(self, one: _Stranded) -> bool:
        """True if an eviction was asked for, or the API server is in trouble: a pause is due."""
        try:
            return await self._replace(one)
        except KubeError as error:  # a budget, most likely
            log.warning("pod on a broken gpu not replaced", extra=fields(gpu=one.trouble, error=error))
            return True
        except Exception as error:  # what breaks over one pod must not stop the others
            log.error("rescue broke", extra=fields(pod=one.model.pod_name), exc_info=error)
            one.is_settled = True
            return False

    async def _replace(self, one: _Stranded) -> bool:
        found = await pod_of_row(self._client, self._keys, one.model, one.node)
        if found is None:
            one.is_settled = True
            return False
        pod, demand = found
        ref = demand.model.ref
        if demand.owner is None or pod["spec"].get("schedulerName") != self._name:
            self._settle(one, ref, "nothing would replace the pod")
            return False
        if not self._fits(demand):
            return False
        await evict(self._client, ref)
        self._settle(one, ref, "replaced")
        log.info("replaced a pod on a broken gpu", extra=fields(pod=ref, node=one.node, gpu=one.trouble))
        return True

    def _settle(self, one: _Stranded, ref: PodRef, outcome: str) -> None:
        one.is_settled = True
        self._events.record(ref, "Warning", "ModelOnBrokenGPU", f"{one.trouble}; {outcome}")
