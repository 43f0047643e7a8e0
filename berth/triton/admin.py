"""Triton's admin API over gRPC, for the one process that owns the server: the agent."""

import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.triton.errors import TritonError, TritonLate, TritonRefused, TritonUnavailable
from berth.triton.keys import TritonKeys

CALL_TIMEOUT_SECONDS = 5.0


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

    async def index(self) -> Mapping[ModelName, IndexEntry]:
        """Every model directory of the repository with its state."""
        ...

    async def load(self, name: ModelName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        """Load with `config` (ModelConfig as JSON) in place of config.pbtxt; return when it serves.

        Raises TritonRefused with Triton's reason when the load failed, TritonLate when it goes on.
        """
        ...

    async def unload(self, name: ModelName, *, timeout_seconds: float) -> None:
        """Begin to unload; the model may serve requests in flight for a while after this returns."""
        ...


class GrpcTritonAdmin:
    """The real one."""

    def __init__(self, client: InferenceServerClient, keys: TritonKeys) -> None:
        self._client, self._headers = client, keys.admin_grpc_metadata

    async def version(self) -> str | None:
        if not await _answer(
            self._client.is_server_ready(headers=self._headers, client_timeout=CALL_TIMEOUT_SECONDS)
        ):
            return None
        metadata = await _answer(
            self._client.get_server_metadata(headers=self._headers, client_timeout=CALL_TIMEOUT_SECONDS)
        )
        return str(metadata.version)

    async def index(self) -> Mapping[ModelName, IndexEntry]:
        answer = await _answer(
            self._client.get_model_repository_index(
                headers=self._headers, client_timeout=CALL_TIMEOUT_SECONDS
            )
        )
        entries: dict[ModelName, IndexEntry] = {}
        for row in answer.models:
            entry = IndexEntry(_state(row.state), row.reason)
            name = ModelName(row.name)
            entries[name] = _busiest(entries.get(name, entry), entry)
        return entries

    async def load(self, name: ModelName, config: Mapping[str, Any], *, timeout_seconds: float) -> None:
        await _answer(
            self._client.load_model(
                name, headers=self._headers, config=json.dumps(config), client_timeout=timeout_seconds
            )
        )

    async def unload(self, name: ModelName, *, timeout_seconds: float) -> None:
        await _answer(self._client.unload_model(name, headers=self._headers, client_timeout=timeout_seconds))


@asynccontextmanager
async def open_admin(endpoint: Endpoint, keys: TritonKeys) -> AsyncIterator[GrpcTritonAdmin]:
    """Connect lazily: a Triton that is away is an error of the first call, not of this one."""
    client = InferenceServerClient(
        str(endpoint),
        channel_args=[
            ("grpc.max_receive_message_length", -1),
            # Triton restarts on the same port: try again soon instead of after gRPC's default of up to 2 min.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A node's Triton is never reached through a web proxy, whatever the environment says.
            ("grpc.enable_http_proxy", 0),
        ],
    )
    try:
        yield GrpcTritonAdmin(client, keys)
    finally:
        await client.close()


_PRECEDENCE = (
    IndexState.LOADING,
    IndexState.UNLOADING,
    IndexState.READY,
    IndexState.UNAVAILABLE,
    IndexState.UNKNOWN,
)


def _state(text: str) -> IndexState:
    """A state that nobody knows holds memory, perhaps, and serves nothing, perhaps: as one in between."""
    try:
        return IndexState(text or "UNKNOWN")
    except ValueError:
        return IndexState.LOADING


def _busiest(one: IndexEntry, other: IndexEntry) -> IndexEntry:
    """Of two versions of one model, the state that says most about memory."""
    return min(one, other, key=lambda entry: _PRECEDENCE.index(entry.state))


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except InferenceServerException as error:
        raise _mapped(error) from error


def _mapped(error: InferenceServerException) -> TritonError:
    status, message = error.status() or "", error.message() or str(error)
    if status == "StatusCode.DEADLINE_EXCEEDED":
        return TritonLate(message)
    if status in {"StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"}:
        # A restricted API answers UNAVAILABLE too; that one is ours to mend, not to wait for.
        restricted = "This protocol is restricted" in message
        return TritonRefused(message) if restricted else TritonUnavailable(message)
    return TritonRefused(message)
