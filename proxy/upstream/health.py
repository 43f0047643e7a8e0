"""A replica's model in the node's Triton: whether it serves now, and what must be known of it.

Triton's own answer, asked every half second, and a nudge when there is reason to believe that the state is
another. Only Triton makes the model ready, so a pod is never ready without its model, and an agent that
restarts makes no pod unready.
"""

import asyncio
import json
import logging
import math
import random
import time

from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.policy.model_facts import ModelFacts
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.replica import Replica
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.queries import Answer, Silent, fetch

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# A model may be replaced by another of its name between two looks, without a word from the agent.
_FACTS_SECONDS = 5.0
# Triton's REST threads are few, and for seconds each is busy with any tenant's large JSON: a model that was
# ready is not gone for that.
_SILENCE_SECONDS = 10.0


class Upstream:
    """What is asked of Triton for one replica. Runs on the event loop alone."""

    def __init__(self, replica: Replica, cluster: UpstreamCluster, pool: UpstreamPool) -> None:
        """`pool`: for these questions alone, so that no client's keep them waiting."""
        self.replica, self.cluster, self._pool = replica, cluster, pool
        self._path = f"/v2/models/{replica.names.server.decode()}"
        self._facts_read = self._answered = -math.inf
        self._nudge = asyncio.Event()

    @property
    def endpoint(self) -> UpstreamEndpoint | None:
        return self.cluster.endpoint

    def nudge(self) -> None:
        """There is reason to believe that the state has changed: ask now."""
        self._nudge.set()

    async def fetch(self, path: str) -> Answer:
        """Ask Triton's REST port. Raises NotServed."""
        return await fetch(self._pool, self.cluster, path)

    async def poll(self) -> None:
        """Ask Triton for ever whether it serves the model, and which."""
        while True:
            self._nudge.clear()
            self._set(await self._why_not_served(time.monotonic()))
            # Many replicas, of which not all ask at once.
            pause = _POLL_SECONDS * random.uniform(0.8, 1.2)
            if await wait_until_set(self._nudge, timeout_seconds=pause):
                self._facts_read = -math.inf

    async def _why_not_served(self, now: float) -> str | None:
        was_served = self.replica.is_served
        try:
            answer = await self.fetch(f"{self._path}/ready")
            self._answered = now
            if answer.status != 200:
                return f"Triton does not serve {self.replica.names.public.decode()} ({answer.status})"
            await self._read_facts(now)
        except Silent as error:
            return None if was_served and now - self._answered < _SILENCE_SECONDS else str(error)
        except NotServed as error:
            return str(error)
        return None

    async def _read_facts(self, now: float) -> None:
        """Raises NotServed while nothing is known of a model that was not ready before."""
        if self.replica.is_served and now - self._facts_read < _FACTS_SECONDS:
            return
        try:
            config = _object(await self.fetch(f"{self._path}/config"))
        except NotServed:
            if not self.replica.is_served:
                raise
        else:
            self.replica.facts, self._facts_read = ModelFacts.of_config(config), now

    def _set(self, reason: str | None) -> None:
        if self.replica.triton_says(reason):
            log.info(
                "model ready" if reason is None else "model not ready",
                extra=fields(model=self.replica.names.server.decode(), reason=reason or "-"),
            )


def _object(answer: Answer) -> dict[str, object]:
    """Raises NotServed."""
    try:
        data = json.loads(answer.body)
    except ValueError as error:
        raise NotServed("Triton does not answer in JSON") from error
    return data if isinstance(data, dict) else {}
