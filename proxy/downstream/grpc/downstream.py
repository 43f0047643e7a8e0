"""Where gRPC clients of one replica of a model are served: what all its clients' connections share.

What is a process' (Triton, the turn, the deadlines, what is known of header blocks) is in `GrpcCommon`, so
that a replica more costs next to nothing.
"""

import math
from collections.abc import Callable
from typing import Protocol

from proxy.downstream.grpc.local import Local, LocalAnswers, Questions
from proxy.downstream.listener import Clients
from proxy.policy.routes import Verdict, unknown_model
from proxy.request.endpoint import UpstreamCluster
from proxy.request.grpc_head import MOST_LIST_BYTES, CallKind, CallPolicy, DroppedPolicy
from proxy.request.lifecycle import GivenUpRequests
from proxy.request.messages import (
    INFER,
    STATISTICS,
    STREAM_INFER,
    AnyGuard,
    Guard,
    InferGuard,
    ModelFields,
    NameGuard,
)
from proxy.request.replica import Replica
from proxy.transport.deadlines import Deadlines
from proxy.transport.write_batch import WriteBatch
from proxy.upstream.grpc import TritonGrpc, Upstreams
from proxy.upstream.interface import Lost
from proxy.wire.grpc_status import GrpcError, Status
from proxy.wire.h2.fields import FieldReader

# Does something in another step of the loop.
Later = Callable[[Callable[[], None]], None]


class GrpcCommon:
    """What all gRPC clients of a process share."""

    def __init__(
        self,
        cluster: UpstreamCluster,
        questions: Questions,
        *,
        lost: Lost | None = None,
        batch: WriteBatch | None = None,
    ) -> None:
        """`lost`: called with the requests that Triton had when it died."""
        self.cluster = cluster
        self.batch, self.deadlines, self.questions = batch or WriteBatch(), Deadlines(), questions
        self.triton = TritonGrpc(cluster, self.batch, lost=lost)
        self.heads: FieldReader[CallKind] = FieldReader(CallPolicy())
        self.trailers: FieldReader[None] = FieldReader(DroppedPolicy(), is_trailers=True)

    def tick(self, now: float) -> None:
        """Called every second."""
        self.triton.tick(now)

    async def close(self) -> None:
        await self.triton.close()


class Connection(Protocol):
    """A client's."""

    @property
    def is_busy(self) -> bool: ...

    def tick(self, now: float) -> None: ...

    def ask_to_leave(self) -> None: ...

    def abort(self, reason: str) -> None: ...

    def end(self, reason: str) -> None: ...


class GrpcDownstream:
    """Serves one replica's gRPC clients: `GrpcConnection(downstream)` for each."""

    # The reason for a request that has time left, and has waited for its turn for longer than it may. "": that it took too long.
    overdue = ""
    # So long may take what must be here before a unary call can ask for its turn; its own time bounds it anyhow.
    arrival_seconds = math.inf

    def __init__(
        self,
        replica: Replica,
        common: GrpcCommon,
        *,
        later: Later | None = None,
        triton: Upstreams | None = None,
        local: Local | None = None,
    ) -> None:
        """`later`: what has come and was too much to be taken at once waits for its next turn. `triton`, `local`:
        who serves and answers for this replica alone, if not for all."""
        self.replica, self.common = replica, common
        self.later: Later = later or common.batch.then
        self.batch, self.deadlines = common.batch, common.deadlines
        self.triton: Upstreams = triton or common.triton
        self.most_list_bytes = MOST_LIST_BYTES
        self.own = ModelFields(replica.names)
        self.infer_guard = InferGuard(self.own, lambda: replica.facts)
        self._named = NameGuard(self.own, _not_found)
        self._statistics = NameGuard(self.own, _not_available, fill=True)
        self._any = AnyGuard()
        self.local: Local = local or LocalAnswers(replica, common.questions, replica.not_ready)
        self.watchers = self.local.watchers
        self.clients: Clients[Connection] = Clients(replica.grpc)
        self.given_up = GivenUpRequests()

    @property
    def timeout_seconds(self) -> float:
        return self.replica.limits.request_timeout_seconds

    def guard(self, kind: CallKind) -> Guard:
        """What the messages of a call must be."""
        if kind.verdict is not Verdict.ALLOW:
            return self._any
        if kind.method in (INFER, STREAM_INFER):
            return self.infer_guard
        return self._statistics if kind.method == STATISTICS else self._named

    @property
    def busy_connections(self) -> int:
        return sum(connection.is_busy for connection in self.clients)

    def tick(self, now: float) -> None:
        """Called every second: what has waited too long ends."""
        for connection in self.clients:
            connection.tick(now)
        self.given_up.tick(now)

    def readiness_changed(self) -> None:
        """Clients that watch are notified."""
        self.local.tell_watchers()

    def stop_accepting(self) -> None:
        """Every client gets a GOAWAY for its next call; what is on its way is taken, and connections end
        with their last call."""
        for connection in self.clients:
            connection.ask_to_leave()

    def close(self) -> None:
        for connection in self.clients:
            connection.end("the proxy ends")
        self.given_up.close()
        self.local.close()


def _not_found(name: bytes) -> GrpcError:
    return GrpcError(Status.NOT_FOUND, unknown_model(name.decode(errors="replace")))


def _not_available(name: bytes) -> GrpcError:
    shown = name.decode(errors="replace")
    return GrpcError(Status.INVALID_ARGUMENT, f"requested model '{shown}' is not available")
