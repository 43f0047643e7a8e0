"""Triton's admin API over gRPC, for the one process that owns the server: the agent."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import grpc
import grpc.aio

from berth.contract.endpoint import Address
from berth.contract.ids import ServerName
from berth.runtime.grpc_options import channel_options, metadata
from berth.triton.errors import TritonError, TritonLate, TritonRefused, TritonUnavailable
from berth.triton.keys import TritonKeys
from berth.triton.wire import grpc_service_pb2 as pb
from berth.triton.wire.grpc_service_pb2_grpc import GRPCInferenceServiceStub

CALL_TIMEOUT_SECONDS = 5.0
_METADATA_BYTES = 1024**2


class IndexState(str, Enum):
    """Triton's model states (core, model_lifecycle.h). `UNKNOWN`: in the repository, never loaded."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One model of the repository index. `reason` is Triton's text for a version that is not ready."""

    state: IndexState
    reason: str = ""

    @property
    def is_gone(self) -> bool:
        """No version is served, being loaded or being unloaded."""
        return self.state in (IndexState.UNKNOWN, IndexState.UNAVAILABLE)


GONE = IndexEntry(IndexState.UNKNOWN)


class TritonAdmin(Protocol):
    """What the agent asks of Triton. Every call raises TritonError."""

    async def version(self) -> str | None:
        """The server's version once it is ready, None while it is not."""
        ...

    async def index(self) -> Mapping[ServerName, IndexEntry]:
        """Every model directory of the repository with its state."""
        ...

    async def load(self, name: ServerName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        """Load with `config` (ModelConfig as JSON) in place of config.pbtxt; return when it serves.

        Raises TritonRefused with Triton's reason when the load failed, TritonLate when it goes on.
        """
        ...

    async def unload(self, name: ServerName, *, timeout_seconds: float) -> None:
        """Begin to unload; the model may serve requests in flight for a while after this returns."""
        ...


class GrpcTritonAdmin:
    """The real one."""

    def __init__(self, channel: grpc.aio.Channel, keys: TritonKeys) -> None:
        stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._stub, self._metadata = stub, tuple(keys.admin_grpc_metadata.items())

    async def version(self) -> str | None:
        ready = await self._ask(self._stub.ServerReady, pb.ServerReadyRequest())
        if not ready.ready:
            return None
        metadata = await self._ask(self._stub.ServerMetadata, pb.ServerMetadataRequest())
        return str(metadata.version)

    async def index(self) -> Mapping[ServerName, IndexEntry]:
        answer = await self._ask(self._stub.RepositoryIndex, pb.RepositoryIndexRequest())
        entries: dict[ServerName, IndexEntry] = {}
        for row in answer.models:
            entry = IndexEntry(_state(row.state), row.reason)
            name = ServerName(row.name)
            entries[name] = _busiest(entries.get(name, entry), entry)
        return entries

    async def load(self, name: ServerName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=name)
        request.parameters["config"].string_param = json.dumps(config)
        await self._ask(self._stub.RepositoryModelLoad, request, timeout_seconds)

    async def unload(self, name: ServerName, *, timeout_seconds: float) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = False
        await self._ask(self._stub.RepositoryModelUnload, request, timeout_seconds)

    async def _ask(
        self, method: Callable[..., Awaitable[Any]], request: Any, seconds: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        try:
            return await method(request, metadata=self._metadata, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise _mapped(error) from error


@asynccontextmanager
async def open_admin(endpoint: Address, keys: TritonKeys) -> AsyncIterator[GrpcTritonAdmin]:
    """Connect lazily: a Triton that is away is an error of the first call, not of this one."""
    channel = grpc.aio.insecure_channel(
        str(endpoint),
        options=channel_options(
            ("grpc.max_receive_message_length", -1),
            # It holds why a load has failed: a program's whole output, if it wants.
            *metadata(_METADATA_BYTES),
            # Triton restarts on the same port: try again soon instead of after gRPC's default of up to 2 min.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ),
    )
    async with channel:
        yield GrpcTritonAdmin(channel, keys)


_PRECEDENCE = (
    IndexState.LOADING,
    IndexState.UNLOADING,
    IndexState.READY,
    IndexState.UNAVAILABLE,
    IndexState.UNKNOWN,
)


def _state(text: str) -> IndexState:
    """An unknown state may hold memory and may serve nothing: it counts as LOADING."""
    try:
        return IndexState(text or "UNKNOWN")
    except ValueError:
        return IndexState.LOADING


def _busiest(one: IndexEntry, other: IndexEntry) -> IndexEntry:
    """Of two versions of one model, the state that says most about memory."""
    return min(one, other, key=lambda entry: _PRECEDENCE.index(entry.state))


def _mapped(error: grpc.aio.AioRpcError) -> TritonError:
    status, message = error.code(), error.details() or str(error)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TritonLate(message)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        # A restricted API answers UNAVAILABLE too; that one is ours to mend, not to wait for.
        restricted = "This protocol is restricted" in message
        return TritonRefused(message) if restricted else TritonUnavailable(message)
    return TritonRefused(message)
