"""The agent's line to the gateway: which copies there are, and the wish that one of them drains.

The gateway listens. It is told everything at each connection and at each change, and nothing it says is
needed: where it is away, there is nobody whom anything could be drained of.
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
# One that does not read what it is told is no gateway any more.
_WRITE_SECONDS = 5.0
# Triton lets what it has at an unload come to its end, too.
DRAIN_SECONDS = 10.0
_GRACE_SECONDS = 2.0
# What the gateway says is short; of suspects a node has no more than pods.
_LINE_BYTES = 256 * 1024
_MOST_SUSPECTS = 1024

Told = Callable[[Collection[PodUid]], Sequence[ReplicaSpec]]


class GatewayLink:
    """`told(but)`: the copies there are but these. `on_death`: Triton has died with requests of these in it."""

    def __init__(
        self,
        control: UnixSocket,
        told: Told,
        on_death: Callable[[Sequence[PodUid]], None],
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._control, self._told, self._on_death = control, told, on_death
        self._drain_seconds = drain_seconds
        # Something is to be said, perhaps.
        self.wake = asyncio.Event()
        self.is_up = False
        self._said: dict[PodUid, ReplicaSpec] = {}
        self._draining: dict[PodUid, asyncio.Event] = {}
        self._asked: set[PodUid] = set()
        # Left out of what is told until they may be used again.
        self._drained: set[PodUid] = set()
        self._trouble = ""

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
        """Return when nothing of this pod's is in Triton any more, or nobody can tell, or after a while. It
        takes nothing new until `resume`."""
        if uid in self._said:
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
        talks = [asyncio.ensure_future(self._hear(reader)), asyncio.ensure_future(self._tell(writer))]
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

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        said: Sequence[ReplicaSpec] | None = None
        while True:
            self.wake.clear()
            copies = self._told(self._drained)
            lines: list[dict[str, object]] = []
            if copies != said:
                said, self._said = copies, {PodUid(copy.pod_uid): copy for copy in copies}
                lines.append({"replicas": [copy.to_json() for copy in copies]})
            lines += self._wishes()
            if lines:
                writer.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                async with asyncio.timeout(_WRITE_SECONDS):
                    await writer.drain()
            await self.wake.wait()

    def _wishes(self) -> Iterable[dict[str, object]]:
        """Each once on a connection; what the gateway does not have is drained."""
        for uid, drained in self._draining.items():
            if uid not in self._said:
                drained.set()
        new = [uid for uid in self._draining if uid in self._said and uid not in self._asked]
        self._asked = {uid for uid in self._asked if uid in self._draining}.union(new)
        return [{"drain": uid, "seconds": self._drain_seconds} for uid in new]

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            with suppress(ValueError, RecursionError):  # what is not understood is left aside
                self._take(json.loads(line))
        raise ConnectionResetError("the gateway has closed the connection")

    def _take(self, said: object) -> None:
        if not isinstance(said, dict):
            return
        drained = self._draining.get(said["drained"]) if isinstance(said.get("drained"), str) else None
        if drained is not None:
            drained.set()
        died = said.get("tritonDied")
        if isinstance(died, dict) and isinstance(suspects := died.get("suspects"), list):
            self._on_death([PodUid(uid) for uid in suspects[:_MOST_SUSPECTS] if isinstance(uid, str)])

    def _lost(self) -> None:
        """With the connection ends what the gateway knows; whom it drained is drained."""
        self.is_up = False
        self._said, self._asked = {}, set()
        for drained in self._draining.values():
            drained.set()

    def _note(self, trouble: str) -> None:
        """Say it once, when it changes."""
        if trouble != self._trouble:
            log.log(
                logging.WARNING if trouble else logging.INFO,
                "gateway is " + ("away" if trouble else "here"),
                extra=fields(reason=trouble) if trouble else None,
            )
        self._trouble = trouble


class NoGateway:
    """Nobody to be told: for local use."""

    async def drain(self, uid: PodUid) -> None:
        return

    def resume(self, uid: PodUid) -> None:
        return
