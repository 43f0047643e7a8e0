"""The REST front end: the port, what all its clients share, and what is answered here.

A head that has been read once is looked up.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from proxy.codecs.http1 import (
    HttpRefused,
    RequestHead,
    write_start,
)
from proxy.codecs.lookup import Lookup
from proxy.exchange.breaker import Breaker
from proxy.exchange.policy import COUNTED, HIDDEN_EXTENSIONS, Route, Verdict, hidden_rest, is_own
from proxy.exchange.traffic import Traffic
from proxy.fronts.listener import Listener
from proxy.fronts.rest.client import RestConnection
from proxy.fronts.rest.upstream import UpstreamPool
from proxy.upstream import Access, Upstream

_HEADS, _HEAD_BYTES = 1024, 4096
# Bodies to be checked, of all clients together: so many of the largest at once.
_LARGEST_BODIES = 16
_SUFFIXES: dict[Route | None, str] = {
    Route.MODEL: "",
    Route.MODEL_READY: "/ready",
    Route.INFER: "/infer",
    Route.GENERATE: "/generate",
    Route.GENERATE_STREAM: "/generate_stream",
    Route.CONFIG: "/config",
    Route.STATS: "/stats",
}


@dataclass(frozen=True, slots=True)
class Usual:
    """What was decided about a head: a whole JSON of this length follows, and Triton gets this start of a head."""

    head: RequestHead
    length: int
    start: bytes
    is_infer: bool


class RestFront:
    """Serves REST clients. What all its connections share."""

    def __init__(
        self,
        upstream: Upstream,
        breaker: Breaker,
        traffic: Traffic,
        *,
        max_json_bytes: int,
        timeout_seconds: float,
        not_ready: Callable[[], str | None],
    ) -> None:
        self.upstream, self.breaker, self.traffic = upstream, breaker, traffic
        self.max_json_bytes, self.timeout_seconds, self.not_ready = max_json_bytes, timeout_seconds, not_ready
        self.held_bytes, self.max_held_bytes = 0, _LARGEST_BODIES * max_json_bytes
        self.pool = UpstreamPool()
        self.is_draining = False
        self.heads: Lookup[RequestHead] = Lookup(entries=_HEADS, key_bytes=_HEAD_BYTES)
        # Requests whose clients have gone while Triton works on them.
        self.abandoned: set[RestConnection] = set()
        # Heads whose requests go on as they came, good for one way of reaching Triton.
        self.usual: Lookup[Usual] = Lookup(entries=_HEADS, key_bytes=_HEAD_BYTES)
        self.heads_for: Access | None = None
        self.clients: Listener[RestConnection] = Listener(
            lambda: RestConnection(self), traffic, what="--http-listen"
        )

    async def stop_accepting(self) -> None:
        """Close the port and the idle connections; each of the others closes once its answer is delivered."""
        self.is_draining = True
        await self.clients.stop()
        for connection in self.clients:
            connection.end_if_idle()

    async def close(self) -> None:
        await self.clients.stop()
        for connection in self.clients:
            connection.abort()
        await self.pool.close()

    def tick(self, now: float) -> None:
        """Called every second."""
        for connection in [*self.clients, *self.abandoned]:
            connection.tick(now)

    def remember_usual(self, raw: bytes, head: RequestHead, start: bytes) -> None:
        """After a request of this head has passed every check of a head."""
        if head.length is None or head.encoding != "identity" or head.header_length is not None:
            return
        if head.keeps_alive and not head.expects_continue:
            self.usual.remember(raw, Usual(head, head.length, start, head.decision.route is Route.INFER))

    def require_route(self, head: RequestHead) -> None:
        """Raises HttpRefused where the policy does not offer the route."""
        decision = head.decision
        if decision.verdict is Verdict.BLOCK:
            raise HttpRefused(403, "this route reaches beyond the model; the proxy does not offer it")
        if decision.verdict is Verdict.DENY:
            if decision.allowed_methods:
                raise HttpRefused(405, "Method Not Allowed", {"Allow": ", ".join(decision.allowed_methods)})
            raise HttpRefused(404, "Not Found")
        if decision.verdict is not Verdict.ALLOW:
            return
        is_down = decision.route is Route.MODEL_READY and self.not_ready() is not None
        if is_down or not is_own(decision.model, self.upstream.model):
            raise HttpRefused(*hidden_rest(decision.route, decision.model))

    @staticmethod
    def takes_body(route: Route | None) -> bool:
        return route in COUNTED

    def request_start(self, head: RequestHead, access: Access) -> bytes:
        """The head for Triton, without its end."""
        if access is not self.heads_for:
            self.usual.clear()
            self.heads_for = access
            self.pool.aim(access.http)
        decision = head.decision
        version = f"/versions/{decision.version}" if decision.version else ""
        return write_start(
            "POST" if self.takes_body(decision.route) else "GET",
            f"/v2/models/{self.upstream.model}{version}{_SUFFIXES[decision.route]}",
            str(access.http),
            head.fields,
            access.http_headers,
        )

    async def index(self, *, only_ready: bool) -> tuple[int, bytes]:
        """The own model's rows, in the words of Triton's index."""
        name = str(self.upstream.model)
        if self.upstream.is_ready:
            rows = [{"name": name, "version": v, "state": "READY"} for v in await self.upstream.versions()]
        else:
            rows = [] if only_ready else [{"name": name, "state": "UNAVAILABLE", "reason": "not ready"}]
        return 200, json.dumps(rows).encode()

    async def own_statistics(self) -> tuple[int, bytes]:
        answer = await self.upstream.fetch(f"/v2/models/{self.upstream.model}/stats")
        return answer.status, answer.body

    async def server_metadata(self) -> tuple[int, bytes]:
        """Without the extensions that clients cannot use here."""
        answer = await self.upstream.fetch("/v2")
        data = json.loads(answer.body)
        if isinstance(data, dict) and isinstance(data.get("extensions"), list):
            data["extensions"] = [e for e in data["extensions"] if e not in HIDDEN_EXTENSIONS]
        return answer.status, json.dumps(data).encode()
