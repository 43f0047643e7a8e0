"""The node agent's gRPC API: the contract of protos/berth/v1/node_agent.proto, and nothing of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from agent.admission import (
    Admitted,
    CodeGate,
    CodeRefused,
    InvalidModel,
    ModelFiles,
    NodeRules,
    admit,
    judge,
    write_anew,
)
from agent.auth import Authenticator, NotAllowed, NotPlaced, PodGuard, Unauthenticated
from agent.gpus import GpuReading, GpusUnknown
from agent.metrics import AgentMetrics
from agent.models import Model, Models, NameTaken, OneModelOnly, PodGone
from agent.repository import Record, Repository
from agent.serving.lifecycle import Lifecycle
from agent.staging import BadStream, StagedFiles, TooLarge, WrongDigest, check_path
from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.ids import ModelName, parse_model_name
from berth.contract.pod import ModelPod
from berth.contract.report import Failure, ModelState
from berth.kube.errors import KubeError
from berth.runtime.logs import fields
from berth.runtime.process import starting
from berth.runtime.tasks import in_thread
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 4 * 1024 * 1024
# A node's pods, each with a watch, a stage or a load: more than a kubelet would ever run.
_CONCURRENT_CALLS = 1000
_STAGES_AT_ONCE = 4
# To judge a config.pbtxt of the largest size takes a core about a second.
_JUDGED_AT_ONCE = 2
# A sender that falls silent for this long has died without saying so.
_STAGE_IDLE_SECONDS = 60.0
# How long a call that found no change repeats its last message, so that a dead client is noticed.
_WATCH_REPEAT_SECONDS = 30.0

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (OneModelOnly, grpc.StatusCode.PERMISSION_DENIED),
    (PodGone, grpc.StatusCode.PERMISSION_DENIED),
    (NotPlaced, grpc.StatusCode.FAILED_PRECONDITION),
    (CodeRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidModel, grpc.StatusCode.INVALID_ARGUMENT),
    (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    (TooLarge, grpc.StatusCode.OUT_OF_RANGE),
    (WrongDigest, grpc.StatusCode.DATA_LOSS),
    (BadStream, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidValue, grpc.StatusCode.INVALID_ARGUMENT),
    (TritonError, grpc.StatusCode.UNAVAILABLE),
    (KubeError, grpc.StatusCode.UNAVAILABLE),
    (GpusUnknown, grpc.StatusCode.UNAVAILABLE),
    # A full or broken disk; the message is the system's.
    (OSError, grpc.StatusCode.RESOURCE_EXHAUSTED),
)
_STATES = {state: f"MODEL_STATE_{state.name}" for state in ModelState}
_FAILURES: dict[Failure | None, str] = {
    None: "FAILURE_CLASS_UNSPECIFIED",
    **{failure: f"FAILURE_CLASS_{failure.name}" for failure in Failure},
}

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]


class NodeAgentApi(NodeAgentServicer):
    """Each call: who is it, does its pod live here, is the model its own; then the work."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        guard: PodGuard,
        models: Models,
        repository: Repository,
        lifecycle: Lifecycle,
        readings: Callable[[], tuple[GpuReading, ...]],
        access: pb.TritonAccess,
        metrics: AgentMetrics,
        rules: NodeRules,
        gate: CodeGate,
        max_model_bytes: int,
    ) -> None:
        self._authenticator, self._guard = authenticator, guard
        self._models, self._repository, self._lifecycle = models, repository, lifecycle
        self._readings, self._access, self._metrics = readings, access, metrics
        self._rules, self._gate = rules, gate
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._max_model_bytes = max_model_bytes
        self._stage_slots = asyncio.Semaphore(_STAGES_AT_ONCE)

    async def Stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:  # noqa: N802
        return await self._answer("Stage", context, self._stage(requests, context))

    async def Load(self, request: pb.LoadRequest, context: Context) -> AsyncIterator[pb.LoadProgress]:  # noqa: N802
        model = await self._answer("Load", context, self._loadable(request, context))
        # What was staged is loaded without being asked; if that has failed already, this is its outcome.
        if model.state is ModelState.FAILED and not await self._is_staged(model):
            yield _progress(model)
            return
        async for _ in self._changes(until=self._lifecycle.start_load(model)):
            yield _progress(model)

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:  # noqa: N802
        return await self._answer("Unload", context, self._unload(request, context))

    async def WatchModel(  # noqa: N802
        self, request: pb.WatchModelRequest, context: Context
    ) -> AsyncIterator[pb.ModelStatus]:
        model, name = await self._answer("WatchModel", context, self._own(request.model_name, context))
        async for _ in self._changes(until=None):
            if self._models.get(model.ref.uid) is not model or model.name != name:
                return
            yield _status(model, self._access)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        return await self._answer("ListModels", context, self._list(context))

    async def _answer(self, method: str, context: Context, work: Awaitable[T]) -> T:
        """Turn the errors that callers are told of into their status."""
        try:
            answer = await work
        except tuple(kind for kind, _ in _CODES) as error:
            code = next(code for kind, code in _CODES if isinstance(error, kind))
            self._metrics.called(method, code.name)
            log.info("call refused", extra=fields(method=method, code=code.name, reason=error))
            await context.abort(code, str(error)[:1000])
            raise AssertionError("abort always raises") from error
        self._metrics.called(method, "OK")
        return answer

    async def _own(self, text: str, context: Context) -> tuple[Model, ModelName]:
        """Authenticate and authorise. The name is checked last, so that strangers learn nothing by it."""
        _, model, name = await self._caller(text, context)
        return model, name

    async def _caller(self, text: str, context: Context) -> tuple[ModelPod, Model, ModelName]:
        ref = await self._authenticator.pod_of(_metadata(context))
        pod = await self._guard.admit(ref)
        name = parse_model_name(text)
        if pod.model_name is not None and pod.model_name != name:
            raise NotAllowed(f"pod {ref} may use model {pod.model_name!r} only")
        self._models.see_pod(pod)
        if pod.model_name is not None:
            return pod, self._models.claim(ref.uid, name), name
        return pod, self._models.own(ref.uid, name), name

    async def _stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:
        await self._authenticator.pod_of(_metadata(context))
        header = await _next_part(requests, "header")
        pod, model, name = await self._caller(header.header.model_name, context)
        self._require_placed(pod)
        self._models.claim(pod.ref.uid, name)
        known = await asyncio.to_thread(self._repository.record, name)
        if known is not None and (known.pod.uid, known.digest, known.gpu) == (
            pod.ref.uid,
            header.header.digest,
            pod.gpu,
        ):
            return pb.StageResponse(digest=known.digest, already_staged=True)
        if header.header.files:
            await self._judged(model, lambda: _foreseen(header.header, name, self._rules))
        async with self._stage_slots:
            staged = self._repository.new_staging()
            try:
                return await self._receive(requests, pod, model, staged)
            finally:
                await in_thread(self._repository.discard, staged)

    async def _receive(
        self, requests: AsyncIterator[pb.StageRequest], pod: ModelPod, model: Model, staged: Path
    ) -> pb.StageResponse:
        files = StagedFiles(staged, max_bytes=self._max_model_bytes)
        try:
            digest = await self._write_parts(requests, files)
        finally:
            files.close()
        assert pod.gpu is not None
        assert model.name is not None
        name = model.name
        admitted = await self._judged(model, lambda: admit(staged, name, self._rules))
        await in_thread(write_anew, staged, admitted)
        record = Record(
            pod=pod.ref,
            model_id=pod.model_id,
            name=name,
            gpu=pod.gpu,
            digest=digest,
            code=admitted.has_code,
        )
        await self._lifecycle.publish(model, staged, record)
        self._metrics.staged(files.bytes)
        log.info(
            "model staged",
            extra=fields(model=model.name, pod=pod.ref, files=files.files, bytes=files.bytes),
        )
        return pb.StageResponse(digest=digest, files=files.files, bytes=files.bytes)

    async def _judged(self, model: Model, judge: Callable[[], Admitted]) -> Admitted:
        """What may be loaded, and could be now. A refusal is the model's state too, so that the binder and
        the pod's owner learn of it. `judge` blocks. Raises InvalidModel or CodeRefused."""
        try:
            async with self._judging:
                admitted = await in_thread(judge)
            self._gate.check(model.ref.uid, model.ref.namespace, has_code=admitted.has_code)
        except InvalidModel as error:
            self._lifecycle.refuse(model, str(error), Failure.INVALID_MODEL)
            raise
        except CodeRefused as error:
            self._lifecycle.refuse(model, str(error), Failure.CAPACITY)
            raise
        return admitted

    async def _write_parts(self, requests: AsyncIterator[pb.StageRequest], files: StagedFiles) -> str:
        """Write until the commit. The next message is read only when this one is on its way to disk."""
        while True:
            request = await _next_part(requests, "file", "chunk", "commit")
            match request.WhichOneof("part"):
                case "file":
                    await in_thread(files.begin_file, request.file.path, request.file.size)
                case "chunk":
                    await in_thread(files.write, request.chunk)
                case _:
                    return await in_thread(files.commit, request.commit.digest)

    def _require_placed(self, pod: ModelPod) -> None:
        """The binder's choice, looked at again: annotations can be written by others. A GPU is its UUID;
        its index is of the time of the Binding. Raises NotPlaced, or GpusUnknown when nobody can tell."""
        if pod.gpu is None:
            raise NotPlaced(f"pod {pod.ref} has no GPU choice; is its schedulerName the binder's?")
        if pod.gpu.bytes != pod.request_bytes:
            raise NotPlaced(f"pod {pod.ref} asks for {pod.request_bytes} bytes but was given {pod.gpu.bytes}")
        if len(pod.gpu.gpus) != pod.gpu_count:
            raise NotPlaced(f"pod {pod.ref} asks for {pod.gpu_count} GPUs but was given {len(pod.gpu.gpus)}")
        here = {gpu.uuid for gpu in self._readings()}
        for uuid in pod.gpu.uuids:
            if uuid not in here:
                # Another node may do: the binder goes by the model's state.
                if model := self._models.get(pod.ref.uid):
                    reason = f"GPU {uuid} is not on this node any more"
                    self._models.set(model, ModelState.FAILED, reason, failure=Failure.TRANSIENT)
                raise NotPlaced(f"pod {pod.ref} was given GPU {uuid}, which this node does not have")

    async def _loadable(self, request: pb.LoadRequest, context: Context) -> Model:
        model, name = await self._own(request.model_name, context)
        staged = await self._is_staged(model)
        # What was staged is loaded without being asked, and a load that fails takes the files away
        # before it is over: to join it is to hear why.
        if (
            not staged
            and not self._lifecycle.is_loading(model.ref.uid)
            and model.state is not ModelState.FAILED
        ):
            raise NotPlaced(f"model {name!r} has not been staged")
        return model

    async def _is_staged(self, model: Model) -> bool:
        if model.name is None:
            return False
        record = await asyncio.to_thread(self._repository.record, model.name)
        return record is not None and record.pod.uid == model.ref.uid

    async def _unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        """By an ending pod's own word; whether it is ending is the API server's."""
        ref = await self._authenticator.pod_of(_metadata(context))
        name = parse_model_name(request.model_name)
        model = self._models.get(ref.uid)
        if model is None or model.name != name:
            await self._own(request.model_name, context)  # says why not, if it may not
            return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)
        pod = await self._guard.current(ref)
        if pod is None:
            self._models.lose_pod(ref.uid)
        elif self._models.get(ref.uid) is model:
            self._models.see_pod(pod)
        if model.is_wanted:
            return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_KEPT)
        await asyncio.shield(self._lifecycle.start_unload(name))
        return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)

    async def _list(self, context: Context) -> pb.ListModelsResponse:
        ref = await self._authenticator.pod_of(_metadata(context))
        await self._guard.admit(ref)
        model = self._models.get(ref.uid)
        named = [model] if model is not None and model.name is not None else []
        return pb.ListModelsResponse(models=[_status(model, None) for model in named])

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


def _foreseen(header: pb.StageHeader, name: ModelName, rules: NodeRules) -> Admitted:
    """Judge what a sender says it will send. Raises BadStream, InvalidModel or CodeRefused."""
    last = None
    for file in header.files:
        check_path(file.path, after=last)
        last = file.path
    files = ModelFiles({file.path: file.size for file in header.files})
    return judge(header.config if header.HasField("config") else None, files, name, rules)


def make_access(*, host: str, http: Endpoint, grpc_: Endpoint, keys: TritonKeys | None) -> pb.TritonAccess:
    """How a proxy of this node reaches Triton."""
    return pb.TritonAccess(
        http_endpoint=str(Endpoint(host, http.port)),
        grpc_endpoint=str(Endpoint(host, grpc_.port)),
        http_headers={} if keys is None else keys.inference_http_headers,
        grpc_metadata={} if keys is None else keys.inference_grpc_metadata,
    )


async def serve(api: NodeAgentApi, listen: Endpoint) -> grpc.aio.Server:
    """Start the server. Raises CannotStart when the port is taken."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", _MESSAGE_BYTES + 64 * 1024),
            ("grpc.so_reuseport", 0),  # two agents on one port are a mistake, not a load balancer
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ],
        maximum_concurrent_rpcs=_CONCURRENT_CALLS,
    )
    add_NodeAgentServicer_to_server(api, server)  # type: ignore[no-untyped-call]
    with starting("--listen", listen):
        try:
            bound = server.add_insecure_port(str(listen))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if not bound:
            raise OSError("address in use")
    await server.start()
    return server


async def _next_part(requests: AsyncIterator[pb.StageRequest], *expected: str) -> pb.StageRequest:
    try:
        async with asyncio.timeout(_STAGE_IDLE_SECONDS):
            request = await anext(requests)
    except StopAsyncIteration:
        raise BadStream("the stream ended without a commit; nothing was kept") from None
    except TimeoutError:
        raise BadStream(f"nothing came for {_STAGE_IDLE_SECONDS:g} s; nothing was kept") from None
    part = request.WhichOneof("part")
    if part not in expected:
        raise BadStream(f"{part or 'an empty message'} came where {' or '.join(expected)} was expected")
    return request


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _progress(model: Model) -> pb.LoadProgress:
    return pb.LoadProgress(
        state=_STATES[model.state], reason=model.reason, failure_class=_FAILURES[model.failure]
    )


def _status(model: Model, access: pb.TritonAccess | None) -> pb.ModelStatus:
    return pb.ModelStatus(
        model_name=model.name or "",
        state=_STATES[model.state],
        reason=model.reason,
        gpu_uuid="" if model.gpu is None else model.gpu.uuid,
        requested_bytes=model.requested_bytes,
        measured_bytes=model.measured_bytes,
        triton=access,
    )
