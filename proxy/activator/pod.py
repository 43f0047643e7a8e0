"""One copy of a model as the activator knows it: whether it serves, and what it has to do.

It is asked by itself whether it serves, from the moment at which it has a place: the cluster's own word of it comes late.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from berth.contract.endpoint import Endpoint
from berth.contract.scaling import PodEndpoint
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set
from proxy.activator.answers import MOST_BYTES, Memory
from proxy.activator.hold import Looks
from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.grpc_head import Keys
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import AnswerReaders, UpstreamConnection
from proxy.upstream.http1 import UpstreamPool
from proxy.upstream.queries import Silent, fetch

log = logging.getLogger(__name__)

# How often one is asked whose door alone is missing, for so many times; one that does not serve yet, at first and after
# a while; and one that does.
_HURRY_SECONDS: Final = 0.01
_HURRY_TIMES: Final = 500
_SOON_SECONDS: Final = 0.05
_SOON_TIMES: Final = 1200
_LATER_SECONDS: Final = 0.2
_OPEN_SECONDS: Final = 1.0
_LISTENS_SECONDS: Final = 1.0
# One that breaks off soon after it has opened is left in peace for a while, and for longer each time.
_STEADY_SECONDS: Final = 5.0
_LONGEST_REST: Final = 2.0
# Of one namespace: so many are asked as often as that.
_OFTEN: Final = 16
# Nothing listens here: connections of a copy that has gone are not kept.
_NOWHERE: Final = UpstreamEndpoint(Endpoint("0.0.0.0", 0), Endpoint("0.0.0.0", 0))  # noqa: S104  # nobody binds it


class Pod:
    """One copy. `is_open`: it serves, as far as anybody knows."""

    def __init__(
        self,
        told: PodEndpoint,
        memory: Memory | None,
        turn: WriteBatch,
        readers: AnswerReaders,
        changed: Callable[["Pod"], None],
        looks: Looks,
    ) -> None:
        """`memory`: of what it tells of its model; None: what it says cannot be read (TLS)."""
        self.told, self._memory, self._looks = told, memory, looks
        self.slots = max(1, told.slots)
        self._has_told = False
        self._turn, self._readers, self._changed = turn, readers, changed
        self._where = UpstreamCluster(
            UpstreamEndpoint(Endpoint(told.address, told.rest_port), Endpoint(told.address, told.grpc_port))
        )
        self.rest = UpstreamPool(self._where)
        # A pod's image is its tenant's: what it says costs the others no more than a little.
        self.questions = UpstreamPool(self._where, most=1, takes_chunked=False)
        self._grpc: UpstreamConnection | None = None
        self._connections: set[UpstreamConnection] = set()
        self.is_open = self._has_served = self._is_asked = False
        self._ask(True)
        self._opened_at = 0.0
        self._rests = Backoff(initial_seconds=_SOON_SECONDS, cap_seconds=_LONGEST_REST)
        # Before it is asked again, whoever waits for it.
        self._rest_seconds = 0.0
        # Connections that are spliced, where it is TLS.
        self.spliced = 0
        # Questions since it opened or closed last, and what is left of those in a hurry. Whoever waits for it renews
        # neither: clients that come and leave would keep them up for ever.
        self._asked, self._hurries_left = 0, _HURRY_TIMES
        self._look = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    @property
    def free(self) -> int:
        """Slots; below 0 where it has more than it takes at once."""
        free = self.slots - self.rest.in_use - self.spliced
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

    def tell(self, told: PodEndpoint) -> None:
        """What is known of it now; its addresses are as they were."""
        if told != self.told:
            self.told, self.slots = told, max(1, told.slots)
            self.look_again()

    def look_again(self) -> None:
        """Now, and then as often as before."""
        self._look.set()

    def could_not_be_reached(self) -> None:
        """By a request."""
        if self.is_open:
            self._set_open(False)
        self._look.set()

    # gRPC.

    def at_hand(self) -> UpstreamConnection | None:
        grpc = self._grpc
        return grpc if grpc is not None and grpc.has_room else None

    def usable(self) -> UpstreamConnection | None:
        grpc = self._grpc
        if grpc is None or not grpc.is_usable or grpc.transport is None:
            self._look.set()
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
            access = self._where.require()
            grpc = UpstreamConnection(access.grpc, Keys({}), self._readers, self._turn, self)
            self._grpc = grpc
            self._connections.add(grpc)
        return grpc.transport is not None or await grpc.connected()

    # Whether it serves.

    async def _follow(self) -> None:
        while True:
            rest, self._rest_seconds = self._rest_seconds, 0.0
            await asyncio.sleep(rest)
            self._look.clear()
            try:
                self._set_open(await self._serves())
                if self.is_open and not self._has_told and self._memory is not None:
                    await self._remember(self._memory)
            except Exception as error:  # of one look
                log.error("a pod could not be asked", exc_info=error, extra=fields(pod=self.told.name))
                self._set_open(False)
            await wait_until_set(self._look, timeout_seconds=self._pause() * random.uniform(0.8, 1.2))

    async def _remember(self, memory: Memory) -> None:
        """What is told of the model when there is no copy."""
        for path in memory.paths if self.told.rest_port else ():
            try:
                answer = await fetch(self.questions, self._where, path, most_bytes=MOST_BYTES)
                memory.remember(path, answer)
            except NotServed:
                return
        self._has_told = True

    def _pause(self) -> float:
        self._asked += 1
        if self.is_open:
            return _OPEN_SECONDS
        if self._is_in_a_hurry():
            self._hurries_left -= 1
            pause = _HURRY_SECONDS
        else:
            pause = _SOON_SECONDS if self._asked < _SOON_TIMES else _LATER_SECONDS
        return pause * max(1.0, self._looks.asked / _OFTEN)

    def _ask(self, is_asked: bool) -> None:
        """Whether it is one of those that do not serve yet."""
        self._looks.asked += is_asked - self._is_asked
        self._is_asked = is_asked

    def _is_in_a_hurry(self) -> bool:
        """Whether it is worth asking without a rest: its next word is that it serves."""
        is_asked = self._memory is not None and self.told.rest_port > 0
        return is_asked and self.told.soon and not self._has_served and self._hurries_left > 0

    async def _serves(self) -> bool:
        if self._memory is None:
            return self.told.ready and await self._listens()
        if not (await self._says_ready(self._memory.ready_path) if self.told.rest_port else self.told.ready):
            return False
        return not self.told.grpc_port or await self._has_grpc()

    async def _listens(self) -> bool:
        """All that can be asked where it is TLS. The cluster's word alone would open one that has just died again and
        again, and whoever waits would find it closed as often."""
        port = self.told.rest_port or self.told.grpc_port
        try:
            async with asyncio.timeout(_LISTENS_SECONDS):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    asyncio.Protocol, self.told.address, port
                )
        except TimeoutError:
            return self.is_open
        except OSError:
            return False
        transport.close()
        return True

    async def _says_ready(self, path: str) -> bool:
        try:
            answer = await fetch(self.questions, self._where, path, most_bytes=MOST_BYTES)
        except Silent:
            return self.is_open
        except NotServed:
            return False
        return answer.status == 200

    def _set_open(self, is_open: bool) -> None:
        if is_open != self.is_open:
            self.is_open = is_open
            self._has_served = True
            self._ask(not is_open)
            self._asked = 0
            self._note_time(time.monotonic())
            self._changed(self)

    def _note_time(self, now: float) -> None:
        if self.is_open:
            self._opened_at = now
        elif now - self._opened_at < _STEADY_SECONDS:
            self._rest_seconds = self._rests.next()
        else:
            self._rests.reset()

    # The end.

    def retire(self) -> None:
        """It gets no more requests; those that it has end there."""
        self._task.cancel()
        self.is_open = False
        self._ask(False)
        self._where.move(_NOWHERE)
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
        self._ask(False)
        await asyncio.gather(self._task, return_exceptions=True)
        for connection in list(self._connections):
            await connection.closed("the activator ends")
        await self.rest.close()
        await self.questions.close()
