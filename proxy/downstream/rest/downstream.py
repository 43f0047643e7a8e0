"""Where REST clients are served: what all clients of a process share, what those of one replica share, and what is answered here.

A head that has been read once is looked up.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from berth.contract.gateway import ReplicaLimits
from proxy.downstream.listener import Clients
from proxy.downstream.rest.answer import TENSORS
from proxy.downstream.rest.checking import Checker
from proxy.policy.infer import is_own
from proxy.policy.routes import (
    COUNTED,
    HIDDEN_EXTENSIONS,
    RestDecision,
    Route,
    Verdict,
    decide_rest,
    hidden_rest,
)
from proxy.request.endpoint import UpstreamCluster, UpstreamEndpoint
from proxy.request.lifecycle import GivenUpRequests
from proxy.request.replica import Replica
from proxy.upstream.http1 import Pool, UpstreamPool
from proxy.upstream.interface import Lost
from proxy.upstream.queries import Answer, fetch
from proxy.wire.http1 import HttpError, RequestHead, read_request, write_start
from proxy.wire.lookup import Lookup

# Of a process: heads as they were read. Of a replica: what was decided about them.
_HEADS, _HEAD_BYTES = 1024, 4096
_KNOWN, _KNOWN_BYTES = 64, 1024
# For a question of a client's: Triton may be busy with another tenant's large JSON.
_QUESTION_SECONDS = 5.0
_ACCEPTS = re.compile(rb"Accept-Encoding:[^\r\n]*\r\n", re.IGNORECASE)
_SUFFIXES: Final[dict[Route | None, str]] = {
    Route.MODEL: "",
    Route.MODEL_READY: "/ready",
    Route.INFER: "/infer",
    Route.GENERATE: "/generate",
    Route.GENERATE_STREAM: "/generate_stream",
    Route.CONFIG: "/config",
    Route.STATS: "/stats",
}


class Connected(Protocol):
    """A client's connection."""

    def tick(self, now: float) -> None: ...

    def end_if_idle(self) -> None: ...

    def abort(self) -> None: ...

    @property
    def is_busy(self) -> bool:
        """A request is under way, or its answer not yet with the client."""
        ...


@dataclass(frozen=True, slots=True)
class RoutedHead:
    """A head as it was read, and what the policy says to it, whichever model it names.

    `has_tensors`: so has its answer, if all goes well.
    """

    head: RequestHead
    decision: RestDecision
    has_tensors: bool


@dataclass(frozen=True, slots=True)
class KnownHead:
    """What was decided about a head: a whole JSON of this length follows, and Triton gets this start of a head."""

    routed: RoutedHead
    length: int
    start: bytes
    is_infer: bool


# Does something in another step of the loop.
Later = Callable[[Callable[[], None]], None]


def _soon(do: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(do)


class RestShared:
    """What all REST clients of a process share, whichever replica they are of."""

    def __init__(self, cluster: UpstreamCluster, *, lost: Lost | None = None) -> None:
        """`lost`: called with the request that Triton had when a connection broke off."""
        self.cluster = cluster
        self.pool = UpstreamPool(cluster, lost=lost)
        self._heads: Lookup[RoutedHead] = Lookup(entries=_HEADS, key_bytes=_HEAD_BYTES)
        self.checker = Checker()

    def read_head(self, raw: bytes) -> RoutedHead:
        """Raises BadRequest."""
        routed = self._heads.get(raw)
        if routed is None:
            head = read_request(raw)
            decision = decide_rest(head.method, head.path)
            routed = RoutedHead(head, decision, decision.route in TENSORS)
            self._heads.remember(raw, routed)
        return routed

    async def close(self) -> None:
        await self.pool.close()
        self.checker.close()


class RestDownstream:
    """Serves REST clients of one replica. What all its connections share."""

    # A client that has said all it wants to, and has closed its half, may still wait for its turn.
    waits_for_half_closed = True
    # The reason for a request that has time left, and has waited for its turn for longer than it may. "": that it took too long.
    overdue = ""
    # So long may take what must be here before a request can ask for its turn; its own time bounds it anyhow.
    arrival_seconds = math.inf

    def __init__(
        self,
        shared: RestShared,
        replica: Replica,
        *,
        later: Later | None = None,
        cluster: UpstreamCluster | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`later`: what a request that had come already waits for, once it is its turn. `where`, `pool`: of this
        replica alone, if not of all."""
        self.shared, self.replica, self.later = shared, replica, later or _soon
        self.cluster: UpstreamCluster = cluster or shared.cluster
        self.pool: Pool = pool or shared.pool
        self.clients: Clients[Connected] = Clients(replica.rest)
        self.is_draining = False
        # While it drains: a client that asks just then would lose its request.
        self.ends_idle = True
        # Requests whose clients have gone, or have timed out, while Triton works on them.
        self.given_up = GivenUpRequests()
        # Heads whose requests go on as they came, good for one way of reaching Triton and for the limits that they passed.
        self.known_heads: Lookup[KnownHead] = Lookup(entries=_KNOWN, key_bytes=_KNOWN_BYTES)
        self.known_for: UpstreamEndpoint | None = None
        self.known_limits: ReplicaLimits | None = None

    def stop_accepting(self) -> None:
        """End the idle connections; each of the others closes once its answer is delivered."""
        self.is_draining = True
        for connection in self.clients:
            connection.end_if_idle()

    def close(self) -> None:
        for connection in self.clients:
            connection.abort()
        self.given_up.close()

    @property
    def busy_connections(self) -> int:
        return sum(connection.is_busy for connection in self.clients)

    def readiness_changed(self) -> None:
        """No REST client watches: one that wants to know asks."""

    def tick(self, now: float) -> None:
        """Called every second."""
        for connection in self.clients:
            connection.tick(now)
        self.given_up.tick(now)

    def remember_head(self, raw: bytes, routed: RoutedHead, limits: ReplicaLimits) -> None:
        """After a request of this head has passed every check of a head, under these limits."""
        head, endpoint = routed.head, self.cluster.endpoint
        if head.length is None or head.encoding != "identity" or head.header_length is not None:
            return
        if head.keeps_alive and not head.expects_continue and endpoint is not None:
            if endpoint is not self.known_for or limits is not self.known_limits:
                self.known_heads.clear()
                self.known_for, self.known_limits = endpoint, limits
            start = self.request_start(routed, endpoint)
            self.known_heads.remember(
                raw, KnownHead(routed, head.length, start, routed.decision.route is Route.INFER)
            )

    def require_route(self, decision: RestDecision) -> None:
        """Raises HttpError where the policy does not offer the route."""
        if decision.verdict is Verdict.BLOCK:
            raise HttpError(403, "this route reaches beyond the model; the proxy does not offer it")
        if decision.verdict is Verdict.DENY:
            if decision.allowed_methods:
                raise HttpError(405, "Method Not Allowed", {"Allow": ", ".join(decision.allowed_methods)})
            raise HttpError(404, "Not Found")
        if decision.verdict is not Verdict.ALLOW:
            return
        is_down = decision.route is Route.MODEL_READY and self.replica.not_ready() is not None
        if is_down or not is_own(decision.model.encode(), self.replica.names.public):
            raise HttpError(*hidden_rest(decision.route, decision.model))

    @staticmethod
    def takes_body(route: Route | None) -> bool:
        return route in COUNTED

    def request_start(self, routed: RoutedHead, endpoint: UpstreamEndpoint) -> bytes:
        """The head for Triton, without its end."""
        decision, names = routed.decision, self.replica.names
        version = f"/versions/{decision.version}" if decision.version else ""
        fields = routed.head.fields
        if not names.are_same:  # what is packed cannot be renamed
            fields = _ACCEPTS.sub(b"", fields)
        return write_start(
            "POST" if self.takes_body(decision.route) else "GET",
            f"/v2/models/{names.server.decode()}{version}{_SUFFIXES[decision.route]}",
            str(endpoint.http),
            fields,
            endpoint.http_headers,
        )

    # Answers of our own.

    def own_answer(self, decision: RestDecision) -> tuple[int, bytes] | None:
        """To a question about the model, where it is not for Triton to answer."""
        return None

    async def index(self, *, only_ready: bool) -> tuple[int, bytes]:
        """The own model's rows, in the words of Triton's index."""
        name = self.replica.names.public.decode()
        if self.replica.is_served:
            rows = [{"name": name, "version": v, "state": "READY"} for v in await self._versions()]
        else:
            rows = [] if only_ready else [{"name": name, "state": "UNAVAILABLE", "reason": "not ready"}]
        return 200, json.dumps(rows).encode()

    async def _versions(self) -> list[str]:
        """Those that Triton serves. Raises NotServed."""
        answer = await self._ask(f"/v2/models/{self.replica.names.server.decode()}")
        data = json.loads(answer.body)
        found = data.get("versions") if isinstance(data, dict) else None
        return [str(version) for version in found] if isinstance(found, list) else []

    async def own_statistics(self) -> tuple[int, bytes]:
        answer = await self._ask(f"/v2/models/{self.replica.names.server.decode()}/stats")
        return answer.status, self.replica.names.to_public(answer.body)

    async def server_metadata(self) -> tuple[int, bytes]:
        """Without the extensions that clients cannot use here."""
        answer = await self._ask("/v2")
        data = json.loads(answer.body)
        if isinstance(data, dict) and isinstance(data.get("extensions"), list):
            data["extensions"] = [e for e in data["extensions"] if e not in HIDDEN_EXTENSIONS]
        return answer.status, json.dumps(data).encode()

    async def _ask(self, path: str) -> Answer:
        """One of the questions that this replica may have with Triton at once. Raises Refusal."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        admission = self.replica.questions.admit(loop.time(), _wake(turn))
        try:
            if admission.is_waiting:
                await turn
            return await fetch(self.pool, self.cluster, path, seconds=_QUESTION_SECONDS)
        finally:
            admission.release(loop.time())


def _wake(turn: "asyncio.Future[None]") -> Callable[[], None]:
    def granted() -> None:
        if not turn.done():
            turn.set_result(None)

    return granted
