"""Calls to the node agent, under the pod's own projected token."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName
from berth.runtime.grpc_options import channel_options, keepalive
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentStub

# Each is bounded by the agent's own limits; these only catch an agent that is gone without closing its connections.
UNLOAD_TIMEOUT_SECONDS = 150.0
_LONGEST_PAUSE_SECONDS = 60.0

_TRY_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


class AgentError(Exception):
    """Base of all."""


class AgentUnavailable(AgentError):
    """The agent, or what it needs, cannot be reached now; the same call may work later."""


class AgentFull(AgentUnavailable):
    """The agent has more calls than it takes, or its disk is full; the same call may work much later."""


class AgentBusy(AgentUnavailable):
    """The agent has others to serve first; the same call will work, not before `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class AgentRefused(AgentError):
    """The agent answered with a refusal; the same call will not work. `code` is the gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{message} ({code.name})")
        self.code = code


class AgentConnection:
    """One agent, for one pod. Calls raise AgentError."""

    def __init__(self, channel: grpc.aio.Channel, threads: grpc.Channel, token_file: Path | None) -> None:
        self._stub: NodeAgentStub = NodeAgentStub(channel)  # type: ignore[no-untyped-call]
        # gRPC's asyncio client forgets the status of a call that ends while it is writing, as a refused
        # stream of files does (grpc/grpc#36066); its client for threads does not.
        self._threads: NodeAgentStub = NodeAgentStub(threads)  # type: ignore[no-untyped-call]
        self._token_file = token_file

    async def stage(self, requests: Iterable[pb.StageRequest]) -> pb.StageResponse:
        """Send a model's files; the agent takes them as fast as its disk does. Raises what `requests`
        raises, which is asked from another thread."""
        broken: list[Exception] = []

        def watched() -> Iterator[pb.StageRequest]:
            try:
                yield from requests
            except Exception as error:
                broken.append(error)
                raise

        call = self._threads.Stage.future(watched(), metadata=self._metadata())
        try:
            await _ended(call)
        finally:
            call.cancel()  # when our task is cancelled
        if broken:
            raise broken[0]
        with _mapped():
            response: pb.StageResponse = call.result()
            return response

    async def load(self, model: ModelName) -> AsyncIterator[pb.LoadProgress]:
        """Load what was staged; the last message has state READY or FAILED."""
        with _mapped():
            call = self._stub.Load(pb.LoadRequest(model_name=model), metadata=self._metadata())
            async for progress in call:
                yield progress

    async def unload(self, model: ModelName) -> pb.UnloadResponse:
        """Say that this pod is done with its model."""
        with _mapped():
            response: pb.UnloadResponse = await self._stub.Unload(
                pb.UnloadRequest(model_name=model), metadata=self._metadata(), timeout=UNLOAD_TIMEOUT_SECONDS
            )
            return response

    async def watch(
        self, model: ModelName, limits: pb.ReplicaLimits | None = None
    ) -> AsyncIterator[pb.ModelStatus]:
        """The model's status now and after every change. `limits`: what the pod asks of the gateway for it."""
        request = pb.WatchModelRequest(model_name=model, limits=limits)
        with _mapped():
            call = self._stub.WatchModel(request, metadata=self._metadata())
            async for status in call:
                yield status

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The token is read for each call: the kubelet replaces it while the pod lives."""
        if self._token_file is None:
            return ()
        try:
            token = self._token_file.read_text().strip()
        except OSError as error:
            raise AgentRefused(
                grpc.StatusCode.UNAUTHENTICATED, f"--token-file: {self._token_file}: {error.strerror}"
            ) from error
        return (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def connect(agent: Endpoint, token_file: Path | None) -> AsyncIterator[AgentConnection]:
    """Connect lazily: an agent that is away is an error of the first call."""
    options = channel_options(
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        *keepalive(every_seconds=20, within_seconds=10),
    )
    async with grpc.aio.insecure_channel(str(agent), options=options) as channel:
        with grpc.insecure_channel(str(agent), options=options) as threads:
            yield AgentConnection(channel, threads, token_file)


async def _ended(call: "grpc.Future[Any]") -> None:
    """Wait for the end of a call of another thread."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no caller waits
            loop.call_soon_threadsafe(ended.set)

    call.add_done_callback(wake)
    await ended.wait()


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _meaning_of(error) from error


def _meaning_of(error: Any) -> AgentError:
    """`error`: of either of gRPC's clients, which both have a code, details and trailing metadata."""
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    if (pause := _pushback(error)) is not None:
        return AgentBusy(message, pause)
    if code in _TRY_AGAIN:
        return AgentUnavailable(message)
    # gRPC's own answer where too many calls are open, and the agent's for a full disk.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return AgentFull(message)
    return AgentRefused(code, message)


def _pushback(error: Any) -> float | None:
    """The seconds after which the agent wants to be asked again, if it says so."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-retry-pushback-ms":
            with suppress(ValueError):
                return max(0.0, min(int(value) / 1000, _LONGEST_PAUSE_SECONDS))
    return None
