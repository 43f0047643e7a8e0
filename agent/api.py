"""The node agent's gRPC API: the contract of protos/berth/v1/node_agent.proto, and no rules of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from agent.access import Access
from agent.api_messages import MAPPED, code_of, progress_of, retry_pause, status_of
from agent.gateway_access import GatewayAccess
from agent.interceptor import CallInterceptor, Context, drain_stream
from agent.limits import CallLimiter, RateLimiter
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.placement import NotPlaced, require_unmoved
from agent.repository import Repository
from agent.serving.lifecycle import Lifecycle
from agent.stage import Requests, Stager
from agent.stage_message import check_stage_message
from berth.contract.endpoint import Endpoint
from berth.contract.gateway import server_name_of
from berth.contract.ids import ModelName, parse_model_name
from berth.contract.report import ModelState
from berth.runtime.grpc_options import listen_on, server_options
from berth.runtime.logs import fields
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 4 * 1024 * 1024
# More than all pods of a node may have open together (limits.OPEN_CALLS each).
_CONCURRENT_CALLS = 2048
# 16 KiB of memory each while idle. gRPC counts them for all callers together only.
_CONNECTIONS = 16384
# The largest token with what else a call says of itself.
_METADATA_BYTES = 24 * 1024
# How long a call that found no change repeats its last message, so that a dead client is noticed.
_WATCH_REPEAT_SECONDS = 30.0
# Refusals a second that are logged, so that no client fills the node's disk with them.
_LOGGED_RATE, _LOGGED_BURST = 2.0, 50.0

T = TypeVar("T")


class NodeAgentApi(NodeAgentServicer):
    """Each call: which pod is it, is the model its own; then the work."""

    def __init__(
        self,
        access: Access,
        models: Models,
        repository: Repository,
        lifecycle: Lifecycle,
        stager: Stager,
        gateway: GatewayAccess,
        metrics: AgentMetrics,
    ) -> None:
        self._access, self._models, self._repository = access, models, repository
        self._lifecycle, self._stager, self._gateway = lifecycle, stager, gateway
        self._metrics = metrics
        self._logged = RateLimiter(rate=_LOGGED_RATE, burst=_LOGGED_BURST)

    def interceptor(self) -> CallInterceptor:
        """The checks before these calls where they come over the network."""
        return CallInterceptor(
            self._access.authenticator,
            CallLimiter(),
            refuse=self._refuse,
            mapped=MAPPED,
            check=check_stage_message,
        )

    async def Stage(self, requests: Requests, context: Context) -> pb.StageResponse:  # noqa: N802
        return await self._answer("Stage", context, _drained(requests, self._stage(requests, context)))

    async def Load(self, request: pb.LoadRequest, context: Context) -> AsyncIterator[pb.LoadProgress]:  # noqa: N802
        model = await self._answer("Load", context, self._loadable(request, context))
        # What was staged is loaded without being asked; if that has failed already, this is its outcome.
        if model.state is ModelState.FAILED and not await self._is_staged(model):
            yield progress_of(model)
            return
        async for _ in self._changes(until=self._lifecycle.start_load(model)):
            yield progress_of(model)

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:  # noqa: N802
        return await self._answer("Unload", context, self._unload(request, context))

    async def WatchModel(  # noqa: N802
        self, request: pb.WatchModelRequest, context: Context
    ) -> AsyncIterator[pb.ModelStatus]:
        model, name = await self._answer("WatchModel", context, self._watched(request, context))
        gateway = self._gateway.of(model)
        async for _ in self._changes(until=None):
            if self._models.get(model.ref.uid) is not model or model.name != name:
                return
            yield status_of(model, gateway, gpu_failure=self._gateway.gpu_failure(model))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        return await self._answer("ListModels", context, self._list(context))

    async def _answer(self, method: str, context: Context, work: Awaitable[T]) -> T:
        """Turn the errors that have a status into it."""
        try:
            answer = await work
        except MAPPED as error:
            _forget_frames(error)
            await self._refuse(method, context, error)
        self._metrics.called(method, "OK")
        return answer

    async def _refuse(self, method: str, context: Context, error: Exception) -> NoReturn:
        code = code_of(error)
        self._metrics.called(method, code.name)
        if not self._logged.take(""):
            log.info("call refused", extra=fields(method=method, code=code.name, reason=error))
        await context.abort(code, str(error)[:1000], retry_pause(error))
        raise AssertionError("abort always raises") from error

    async def _stage(self, requests: Requests, context: Context) -> pb.StageResponse:
        return await self._stager.stage(requests, await self._access.pod(context))

    async def _watched(self, request: pb.WatchModelRequest, context: Context) -> tuple[Model, ModelName]:
        _, model, name = await self._access.owned(request.model_name, context)
        if request.HasField("limits"):
            self._gateway.set_limits(model, request.limits)
        self._models.see_proxy(model)
        return model, name

    async def _loadable(self, request: pb.LoadRequest, context: Context) -> Model:
        pod, model, name = await self._access.owned(request.model_name, context)
        require_unmoved(pod, model)
        staged = await self._is_staged(model)
        # What was staged is loaded without being asked, and a load that fails takes the files away
        # before it is over: to join it is to get its reason.
        if (
            not staged
            and not self._lifecycle.is_loading(model.ref.uid)
            and model.state is not ModelState.FAILED
        ):
            raise NotPlaced(f"model {name!r} has not been staged")
        return model

    async def _is_staged(self, model: Model) -> bool:
        if model.server_name is None:
            return False
        record = await asyncio.to_thread(self._repository.record, model.server_name)
        return record is not None and record.pod.uid == model.ref.uid

    async def _unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        """At an ending pod's request; whether it is ending is the API server's to say."""
        ref = await self._access.caller(context)
        name = parse_model_name(request.model_name)
        model = self._models.get(ref.uid)
        if model is None or model.name != name:
            await self._access.owned(request.model_name, context)  # says why not, if it may not
            return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)
        pod = await self._access.current(ref)
        if pod is None:
            self._models.lose_pod(ref.uid)
        elif self._models.get(ref.uid) is model:
            self._models.see_pod(pod)
        if model.is_wanted:
            return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_KEPT)
        await asyncio.shield(self._lifecycle.start_unload(server_name_of(name, ref.uid)))
        return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)

    async def _list(self, context: Context) -> pb.ListModelsResponse:
        pod = await self._access.pod(context)
        model = self._models.get(pod.ref.uid)
        named = [model] if model is not None and model.name is not None else []
        return pb.ListModelsResponse(models=[status_of(model, None) for model in named])

    async def _changes(self, *, until: "asyncio.Task[None] | None") -> AsyncIterator[None]:
        """Once now and after each change of the table; with `until`, a last time when it is done."""
        while True:
            change = self._models.next_change()
            ended = until is not None and until.done()
            yield
            if ended:
                return
            waiting = {asyncio.ensure_future(change.wait()), *([until] if until is not None else [])}
            try:
                await asyncio.wait(
                    waiting, timeout=_WATCH_REPEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for task in waiting - {until}:
                    task.cancel()


async def serve(api: NodeAgentApi, listen: Endpoint) -> grpc.aio.Server:
    """Start the server. Raises CannotStart when the port is taken."""
    server = grpc.aio.server(
        options=server_options(
            message_bytes=_MESSAGE_BYTES + 64 * 1024,
            metadata_bytes=_METADATA_BYTES,
            connections=_CONNECTIONS,
            every_seconds=30,
            within_seconds=10,
        ),
        interceptors=[api.interceptor()],
        maximum_concurrent_rpcs=_CONCURRENT_CALLS,
    )
    add_NodeAgentServicer_to_server(api, server)  # type: ignore[no-untyped-call]
    await listen_on(server, listen, flag="--listen")
    return server


async def _drained(requests: Requests, work: Awaitable[T]) -> T:
    """Do the work, and drain the sender's stream before the outcome is sent."""
    try:
        answer = await work
    except MAPPED as error:
        _forget_frames(error)
        await drain_stream(requests)
        raise
    await drain_stream(requests)
    return answer


def _forget_frames(error: BaseException | None) -> None:
    """An error that is sent to the caller keeps alive the local variables of the functions that raised it (a whole header) until
    a late collection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
