"""The agent's connection to the gateway: the list of replicas, and requests to drain one of them.

The gateway listens. It gets the whole list at each connection and at each change. The agent depends on no answer:
while the gateway is away, no request can reach Triton and nothing has to be drained.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from berth.contract.endpoint import UnixSocket
from berth.contract.gateway import ReplicaSpec
from berth.contract.ids import PodUid
from berth.runtime.logs import fields
from berth.runtime.tasks import wait_until_set

log = logging.getLogger(__name__)

# A gateway that starts again has everything within a second.
_RECONNECT_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
# A gateway that does not read for so long counts as gone.
_WRITE_SECONDS = 5.0
# Triton finishes the requests that it has at an unload, too.
DRAIN_SECONDS = 10.0
_GRACE_SECONDS = 2.0
# The gateway's lines are short; a node has no more suspects than pods.
_LINE_BYTES = 256 * 1024
_MOST_SUSPECTS = 1024

ListReplicas = Callable[[Collection[PodUid]], Sequence[ReplicaSpec]]


class GatewayLink:
    """`list_replicas(excluded)`: all replicas but these. `on_death`: Triton has died with requests of these in it."""

    def __init__(
        self,
        control: UnixSocket,
        list_replicas: ListReplicas,
        on_death: Callable[[Sequence[PodUid]], None],
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._control, self._list, self._on_death = control, list_replicas, on_death
        self._drain_seconds = drain_seconds
        # The list may have changed.
        self.wake = asyncio.Event()
        self.is_up = False
        self._sent: dict[PodUid, ReplicaSpec] = {}
        self._draining: dict[PodUid, asyncio.Event] = {}
        self._requested: set[PodUid] = set()
        # Left out of the list until they may be used again.
        self._drained: set[PodUid] = set()
        self._failure = ""

    async def run(self) -> None:
        """For ever. To be started once the pods are known."""
        while True:
            try:
                await self._connect()
            except (OSError, TimeoutError, ValueError) as error:
                self._note(str(error) or type(error).__name__)
            finally:
                self._lost()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def drain(self, uid: PodUid) -> None:
        """Return when no request of this pod is in Triton any more, or that cannot be known, or after a bounded
        time. It gets no new request until `resume`."""
        if uid in self._sent:
            drained = self._draining.setdefault(uid, asyncio.Event())
            self.wake.set()
            if not await wait_until_set(drained, timeout_seconds=self._drain_seconds + _GRACE_SECONDS):
                log.warning("not drained in time", extra=fields(pod_uid=uid))
            self._draining.pop(uid, None)
        self._drained.add(uid)
        self.wake.set()

    def resume(self, uid: PodUid) -> None:
        """It may be used again, as far as its pod and Triton go."""
        if uid in self._drained:
            self._drained.discard(uid)
            self.wake.set()

    # One connection.

    async def _connect(self) -> None:
        """Raises OSError, TimeoutError, or ValueError where a line is too long."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_unix_connection(self._control.path, limit=_LINE_BYTES)
        self._note("")
        self.is_up = True
        talks = [asyncio.ensure_future(self._receive(reader)), asyncio.ensure_future(self._send(writer))]
        try:
            await asyncio.wait(talks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for talk in talks:
                talk.cancel()
            ends = await asyncio.gather(*talks, return_exceptions=True)
            writer.transport.abort()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        said: Sequence[ReplicaSpec] | None = None
        while True:
            self.wake.clear()
            replicas = self._list(self._drained)
            lines: list[dict[str, object]] = []
            if replicas != said:
                said, self._sent = replicas, {PodUid(one.pod_uid): one for one in replicas}
                lines.append({"replicas": [one.to_json() for one in replicas]})
            lines += self._drain_requests()
            if lines:
                writer.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                async with asyncio.timeout(_WRITE_SECONDS):
                    await writer.drain()
            await self.wake.wait()

    def _drain_requests(self) -> Iterable[dict[str, object]]:
        """Each is sent once on a connection; a replica that the gateway does not have counts as drained."""
        for uid, drained in self._draining.items():
            if uid not in self._sent:
                drained.set()
        new = [uid for uid in self._draining if uid in self._sent and uid not in self._requested]
        self._requested = {uid for uid in self._requested if uid in self._draining}.union(new)
        return [{"drain": uid, "seconds": self._drain_seconds} for uid in new]

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            with suppress(ValueError, RecursionError):  # an unknown line is ignored
                self._apply(json.loads(line))
        raise ConnectionResetError("the gateway has closed the connection")

    def _apply(self, said: object) -> None:
        if not isinstance(said, dict):
            return
        drained = self._draining.get(said["drained"]) if isinstance(said.get("drained"), str) else None
        if drained is not None:
            drained.set()
        died = said.get("tritonDied")
        if isinstance(died, dict) and isinstance(suspects := died.get("suspects"), list):
            self._on_death([PodUid(uid) for uid in suspects[:_MOST_SUSPECTS] if isinstance(uid, str)])

    def _lost(self) -> None:
        """With the connection the gateway forgets its replicas; all that were being drained count as drained."""
        self.is_up = False
        self._sent, self._requested = {}, set()
        for drained in self._draining.values():
            drained.set()

    def _note(self, failure: str) -> None:
        """Say it once, when it changes."""
        if failure != self._failure:
            log.log(
                logging.WARNING if failure else logging.INFO,
                "gateway is " + ("away" if failure else "here"),
                extra=fields(reason=failure) if failure else None,
            )
        self._failure = failure


class NoGateway:
    """A node without a gateway: for local use."""

    async def drain(self, uid: PodUid) -> None:
        return

    def resume(self, uid: PodUid) -> None:
        return
