"""Small questions to Triton's REST port of the proxy's own: asked, and the whole answer waited for."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.policy.refusal import NotServed
from proxy.request.endpoint import UpstreamCluster
from proxy.request.replica import Replica
from proxy.upstream.http1 import Pool, UpstreamHttp, UpstreamPool
from proxy.wire.http1 import ResponseHead, write_start

ANSWER_SECONDS: Final = 1.0
# Triton may be busy with a tenant's large JSON.
_QUESTION_SECONDS: Final = 5.0
_METADATA_SECONDS: Final = 10.0
_ANSWER_BYTES = 4 * 1024 * 1024


class Silent(NotServed):
    """Triton is there and has not answered in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A small answer of Triton's."""

    status: int
    body: bytes


async def fetch(
    pool: Pool,
    cluster: UpstreamCluster,
    path: str,
    *,
    seconds: float = ANSWER_SECONDS,
    most_bytes: int = _ANSWER_BYTES,
) -> Answer:
    """Ask with GET. Raises NotServed."""
    question = _Question(cluster, path, most_bytes)
    question.begin(pool)
    timer = asyncio.get_running_loop().call_later(seconds, question.too_late, seconds)
    try:
        return await question.answer
    finally:
        timer.cancel()
        question.end()


class _Question:
    """One question, as whose connection's request it is."""

    takes_chunks = False

    def __init__(self, cluster: UpstreamCluster, path: str, most_bytes: int) -> None:
        self._cluster, self._path, self._most_bytes = cluster, path, most_bytes
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._upstream: UpstreamHttp | None = None
        self._status, self._parts, self._size = 0, list[bytes](), 0

    @property
    def whose(self) -> object:
        return self._cluster  # all of these are one party

    @property
    def wants_connection(self) -> bool:
        return not self.answer.done()

    def begin(self, pool: Pool) -> None:
        """Raises NotServed."""
        upstream = pool.take(self)
        if upstream is not None:
            self.connected(upstream)

    def end(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    def too_late(self, seconds: float) -> None:
        self._fail(Silent(f"Triton does not answer within {seconds:g} s"))

    def connected(self, upstream: UpstreamHttp) -> None:
        endpoint = self._cluster.endpoint
        if self.answer.done() or endpoint is None:
            upstream.abort()
            return
        self._upstream = upstream
        upstream.request_done = True
        upstream.write(
            write_start("GET", self._path, str(endpoint.http), b"", endpoint.http_headers) + b"\r\n"
        )

    def answer_began(self, head: ResponseHead, body: bytes, raw: bytes | None) -> None:
        self._status = head.status
        self.answer_data(body)

    def answer_whole(self, head: ResponseHead, data: bytes, start: int) -> None:
        self.answer_began(head, data[start:], None)
        self.answer_ended()

    def answer_data(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._most_bytes:
            self._fail(NotServed(f"Triton's answer is longer than {self._most_bytes} bytes"))

    def answer_ended(self) -> None:
        self._upstream = None
        if not self.answer.done():
            self.answer.set_result(Answer(self._status, b"".join(self._parts)))

    def answer_broke(self, reason: str) -> None:
        self._upstream = None
        self._fail(NotServed(f"Triton does not answer: {reason}"))

    def later(self, do: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(do)

    def upstream_writable(self) -> None:
        """All has been written at once."""

    def _fail(self, error: NotServed) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class TritonQuestions:
    """What gRPC clients ask that is answered here, from Triton's REST port. The server's own is asked once for
    all who ask within a while: it does not change."""

    def __init__(
        self, pool: UpstreamPool, cluster: UpstreamCluster, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._cluster, self._clock = pool, cluster, clock
        self._metadata: Mapping[str, Any] = {}
        self._read_at = -math.inf
        self._asking = asyncio.Lock()

    async def versions(self, replica: Replica) -> list[str]:
        """Raises NotServed."""
        _, data = await self._ask(f"/v2/models/{replica.names.server.decode()}")
        found = data.get("versions")
        return [str(version) for version in found] if isinstance(found, list) else []

    async def server_metadata(self) -> Mapping[str, Any]:
        """Raises NotServed."""
        async with self._asking:
            if self._clock() - self._read_at > _METADATA_SECONDS:
                status, data = await self._ask("/v2")
                if status != 200 or not data:
                    raise NotServed(f"Triton does not tell of itself, but answers {status}")
                self._metadata, self._read_at = data, self._clock()
        return self._metadata

    async def _ask(self, path: str) -> tuple[int, Mapping[str, Any]]:
        answer = await fetch(self._pool, self._cluster, path, seconds=_QUESTION_SECONDS)
        try:
            data = json.loads(answer.body)
        except ValueError as error:
            raise NotServed("Triton does not answer in JSON") from error
        return answer.status, data if isinstance(data, dict) else {}
