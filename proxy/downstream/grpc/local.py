"""The calls that are answered here, without Triton's gRPC port: health, readiness, index, server metadata."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from berth.runtime.logs import fields
from proxy.policy.refusal import Refusal, in_grpc
from proxy.policy.routes import HEALTH, HIDDEN_EXTENSIONS, SERVICE
from proxy.request.grpc_head import CallKind
from proxy.request.messages import framed
from proxy.request.replica import Replica
from proxy.wire import protobuf
from proxy.wire.grpc_status import GrpcError, Status

log = logging.getLogger(__name__)

# A bool field 1 that is true, an enum field 1 of SERVING and NOT_SERVING: whole messages.
_TRUE, _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x01", b"\x08\x02"
_WATCH: Final = f"/{HEALTH}/Watch"


class Questions(Protocol):
    """What must be asked of Triton for it, by another way than gRPC. Both raise Refusal."""

    async def versions(self, replica: Replica) -> list[str]:
        """Those that Triton serves of a replica's model."""
        ...

    async def server_metadata(self) -> Mapping[str, Any]:
        """As JSON: name, version, extensions."""
        ...


class Answerable(Protocol):
    """A call that waits for its answer."""

    kind: CallKind

    def respond(self, message: bytes) -> None: ...

    def respond_part(self, data: bytes) -> None: ...

    def refuse(self, refusal: GrpcError) -> None: ...


class Local(Protocol):
    """What answers calls here. `watchers`: calls that want to hear of each change of readiness."""

    watchers: set[Answerable]

    def takes(self, kind: CallKind) -> bool:
        """Whether a call is to be answered here that may be Triton's."""
        ...

    def answer(self, call: Answerable, message: bytes) -> None: ...

    def tell_watchers(self) -> None: ...

    def close(self) -> None: ...


class LocalAnswers:
    """For the clients of one replica. `watchers`: calls that want to hear of each change of readiness."""

    def __init__(self, replica: Replica, questions: Questions, not_ready: Callable[[], str | None]) -> None:
        self._replica, self._questions, self._not_ready = replica, questions, not_ready
        self.watchers: set[Answerable] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def takes(self, kind: CallKind) -> bool:
        return False

    def answer(self, call: Answerable, message: bytes) -> None:
        method = call.kind.method
        if method == f"/{SERVICE}/ServerLive":
            call.respond(_TRUE)
        elif method == f"/{SERVICE}/ServerReady":
            call.respond(_TRUE if self._not_ready() is None else b"")
        elif method.startswith(f"/{HEALTH}/"):
            self._answer_health(call, message)
        else:
            task = asyncio.get_running_loop().create_task(self._answer_later(call, method, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def tell_watchers(self) -> None:
        """Readiness has changed."""
        for call in list(self.watchers):
            call.respond_part(framed(self._serving()))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _answer_health(self, call: Answerable, message: bytes) -> None:
        """grpc.health.v1: the server as a whole, or Triton's service by name."""
        try:
            service = protobuf.model_name(message)
        except protobuf.BadMessage as error:
            call.refuse(_unreadable(error))
            return
        if service not in (b"", SERVICE.encode()):
            call.refuse(GrpcError(Status.NOT_FOUND, "unknown service"))
        elif call.kind.method == _WATCH:
            self.watchers.add(call)
            call.respond_part(framed(self._serving()))
        else:
            call.respond(self._serving())

    def _serving(self) -> bytes:
        return _SERVING if self._not_ready() is None else _NOT_SERVING

    async def _answer_later(self, call: Answerable, method: str, message: bytes) -> None:
        try:
            if method == f"/{SERVICE}/RepositoryIndex":
                answer = await self._index(message)
            else:
                answer = await self._server_metadata()
        except Refusal as refusal:
            call.refuse(in_grpc(refusal))
        except protobuf.BadMessage as error:
            call.refuse(_unreadable(error))
        except Exception as error:
            log.error("a call broke", exc_info=error, extra=fields(method=method))
            call.refuse(GrpcError(Status.INTERNAL, "the proxy failed"))
        else:
            call.respond(answer)

    async def _index(self, request: bytes) -> bytes:
        """The own model's rows of RepositoryIndexResponse: models=1; name=1, version=2, state=3."""
        name = self._replica.names.public
        if self._replica.is_served:
            versions = await self._questions.versions(self._replica)
            rows = [(name, version.encode(), b"READY") for version in versions]
        else:
            only_ready = any(entry.number == 2 for entry in protobuf.fields(request))
            rows = [] if only_ready else [(name, b"", b"UNAVAILABLE")]
        return b"".join(
            protobuf.encode_bytes(
                1, b"".join(protobuf.encode_bytes(n, part) for n, part in enumerate(row, 1))
            )
            for row in rows
        )

    async def _server_metadata(self) -> bytes:
        """ServerMetadataResponse without what clients cannot use here: name=1, version=2, extensions=3."""
        data = await self._questions.server_metadata()
        extensions = [e for e in data["extensions"] if e not in HIDDEN_EXTENSIONS]
        parts = [(1, data["name"]), (2, data["version"]), *((3, e) for e in extensions)]
        return b"".join(protobuf.encode_bytes(number, text.encode()) for number, text in parts)


def _unreadable(error: protobuf.BadMessage) -> GrpcError:
    return GrpcError(Status.INVALID_ARGUMENT, f"unreadable request: {error}")
