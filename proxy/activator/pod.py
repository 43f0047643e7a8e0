"""One replica's pod as the activator knows it: whether it serves, and what it has under way."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from berth.contract.activation import ReplicaEndpoint
from berth.contract.endpoint import Endpoint
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.activator.bounds import ProbeLoad
from proxy.activator.local_answers import MOST_BYTES, LastAnswers
from proxy.activator.probe_schedule import ProbeSchedule
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.grpc_head import Keys
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders, UpstreamConnection
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.queries import Silent, fetch

log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 1.0
# Nothing listens here: connections of a pod that has gone are not kept.
_NOWHERE: Final = UpstreamEndpoint(Endpoint("0.0.0.0", 0), Endpoint("0.0.0.0", 0))  # noqa: S104  # never bound


@dataclass(frozen=True, slots=True)
class PodParts:
    """What all pods of a model share. `answers`: what the model's pods say of it; None: that cannot be read (TLS)."""

    answers: LastAnswers | None
    batch: WriteBatch
    readers: AnswerReaders
    probe_load: ProbeLoad


class Pod:
    """`is_open`: it serves, as far as is known."""

    def __init__(self, endpoint: ReplicaEndpoint, parts: PodParts, changed: Callable[["Pod"], None]) -> None:
        """`changed`: called when it serves from now on, or no more."""
        self.endpoint, self._parts, self._changed = endpoint, parts, changed
        self._cluster = UpstreamCluster(
            UpstreamEndpoint(
                Endpoint(endpoint.address, endpoint.rest_port), Endpoint(endpoint.address, endpoint.grpc_port)
            )
        )
        self.rest = UpstreamPool(self._cluster)
        # A pod's image is its tenant's: what it answers costs the others no more than a little.
        self.queries = UpstreamPool(self._cluster, most=1, takes_chunked=False)
        self._grpc: UpstreamConnection | None = None
        self._connections: set[UpstreamConnection] = set()
        # Clients that are joined to it, where it is TLS.
        self.tunnels = 0
        self.is_open = self._has_answered = False
        self._schedule = ProbeSchedule(parts.probe_load)
        self._probe_now = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._probe_forever())

    @property
    def slots(self) -> int:
        return max(1, self.endpoint.slots)

    @property
    def free(self) -> int:
        """Slots; below 0 where it has more than it takes at once."""
        free = self.slots - self.rest.in_use - self.tunnels
        for connection in self._connections:
            free -= len(connection.codec.streams)
        return free

    @property
    def room(self) -> int:
        """As `free`, but for those that have been computed: a long answer gives its slot back before it is here."""
        room = self.free + self.rest.answering
        for connection in self._connections:
            room += sum(one.begun and one.local_done for one in connection.codec.streams.values())
        return room

    def update(self, endpoint: ReplicaEndpoint) -> None:
        """What is known of it now; its addresses are as they were."""
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            self.probe_now()

    def probe_now(self) -> None:
        """And then as often as before."""
        self._probe_now.set()

    def could_not_be_reached(self) -> None:
        """By a request."""
        if self.is_open:
            self._set_open(False)
        self.probe_now()

    # gRPC.

    def at_hand(self) -> UpstreamConnection | None:
        grpc = self._grpc
        return grpc if grpc is not None and grpc.has_room else None

    def usable(self) -> UpstreamConnection | None:
        grpc = self._grpc
        if grpc is None or not grpc.is_usable or grpc.transport is None:
            self.probe_now()
            return None
        return grpc

    def connection_over(self, connection: UpstreamConnection, replicas: list[object]) -> None:
        self._connections.discard(connection)
        if connection is self._grpc:
            self._grpc = None
            self.could_not_be_reached()

    async def _has_grpc(self) -> bool:
        grpc = self._grpc
        if grpc is None or not grpc.is_usable:
            if grpc is not None:
                grpc.retire()
            address = self._cluster.require().grpc
            grpc = UpstreamConnection(address, Keys({}), self._parts.readers, self._parts.batch, self)
            self._grpc = grpc
            self._connections.add(grpc)
        return grpc.transport is not None or await grpc.connected()

    # Whether it serves.

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._schedule.take_rest())
            self._probe_now.clear()
            try:
                self._set_open(await self._serves())
                if self.is_open and not self._has_answered and self._parts.answers is not None:
                    await self._remember(self._parts.answers)
            except Exception as error:  # of one probe
                log.error("a pod could not be probed", exc_info=error, extra=fields(pod=self.endpoint.name))
                self._set_open(False)
            # Its next answer is that it serves: it is worth asking without a rest.
            nearly_ready = (
                self._parts.answers is not None and self.endpoint.rest_port > 0 and self.endpoint.nearly_ready
            )
            pause = self._schedule.pause(is_open=self.is_open, nearly_ready=nearly_ready)
            await wait_until_set(self._probe_now, timeout_seconds=pause * random.uniform(0.8, 1.2))

    async def _remember(self, answers: LastAnswers) -> None:
        """What is answered of the model while it has no replica."""
        for path in answers.paths if self.endpoint.rest_port else ():
            try:
                answer = await fetch(self.queries, self._cluster, path, most_bytes=MOST_BYTES)
                answers.remember(path, answer)
            except NotServed:
                return
        self._has_answered = True

    async def _serves(self) -> bool:
        answers, endpoint = self._parts.answers, self.endpoint
        if answers is None:
            return endpoint.ready and await self._listens()
        if not (await self._is_ready(answers.ready_path) if endpoint.rest_port else endpoint.ready):
            return False
        return not self.endpoint.grpc_port or await self._has_grpc()

    async def _listens(self) -> bool:
        """All that can be asked where it is TLS. By the cluster's word alone a pod that has just died would be used again and
        again, and each request that waits would find it closed."""
        port = self.endpoint.rest_port or self.endpoint.grpc_port
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, self.endpoint.address, port
                )
        except TimeoutError:
            return self.is_open
        except OSError:
            return False
        transport.close()
        return True

    async def _is_ready(self, path: str) -> bool:
        try:
            answer = await fetch(self.queries, self._cluster, path, most_bytes=MOST_BYTES)
        except Silent:
            return self.is_open
        except NotServed:
            return False
        return answer.status == 200

    def _set_open(self, is_open: bool) -> None:
        if is_open != self.is_open:
            self.is_open = is_open
            self._schedule.changed(is_open=is_open, now=time.monotonic())
            self._changed(self)

    # The end.

    def retire(self) -> None:
        """It gets no more requests; those that it has end there."""
        self._task.cancel()
        self.is_open = False
        self._schedule.end()
        self._cluster.move(_NOWHERE)
        grpc, self._grpc = self._grpc, None
        if grpc is not None:
            grpc.retire()

    @property
    def is_idle(self) -> bool:
        return not self.rest.in_use and not self._connections

    def tick(self, now: float) -> None:
        for connection in list(self._connections):
            connection.tick(now)

    async def close(self) -> None:
        self._task.cancel()
        self._schedule.end()
        await asyncio.gather(self._task, return_exceptions=True)
        for connection in list(self._connections):
            await connection.closed("the activator ends")
        await self.rest.close()
        await self.queries.close()
