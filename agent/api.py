"""The node agent's gRPC API: the contract of protos/berth/v1/node_agent.proto, and nothing of its own."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NoReturn, TypeVar

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
from agent.disk_space import DiskFull, DiskSpace
from agent.gpus import GpuReading, GpusUnknown
from agent.interceptor import CallInterceptor, Context, drain_stream, metadata_of, source_of
from agent.limits import Busy, CallLimiter, MinimumRate, RateLimiter
from agent.metrics import AgentMetrics
from agent.models import IdTaken, Model, Models, OneModelOnly, PodGone
from agent.replicas import Replicas, gpu_trouble, read_limits
from agent.repository import Record, Repository
from agent.serving.lifecycle import Lifecycle
from agent.stage_message import check_stage_message
from agent.stage_queue import StageQueue
from agent.staging import MAX_ENTRIES, BadStream, StagedFiles, TooLarge, WrongDigest, check_path
from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, parse_model_name
from berth.contract.pod import ModelPod, PodRef
from berth.contract.quantity import format_bytes
from berth.contract.report import Failure, ModelState
from berth.kube.errors import KubeError
from berth.runtime.grpc_options import listen_on, server_options
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread
from berth.triton.errors import TritonError
from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server

log = logging.getLogger(__name__)


class SenderGone(Exception):
    """The sender of a stream has fallen silent, or trickles."""


_MESSAGE_BYTES = 4 * 1024 * 1024
# More than all pods of a node may have open together (limits.OPEN_CALLS each).
_CONCURRENT_CALLS = 2048
# 16 KiB of memory each while idle. gRPC counts them for all callers together only.
_CONNECTIONS = 16384
# The largest token with what else a call says of itself.
_METADATA_BYTES = 24 * 1024
# To judge a config.pbtxt of the largest size takes a core about a second.
_JUDGED_AT_ONCE = 2
# A sender that falls silent for this long has died without saying so. It earns the time back at this rate,
# which any disk and any network file system keeps up with; a file counts as so many bytes more.
_SENDER_SECONDS = 30.0
_SENDER_BYTES_PER_SECOND = 1024.0**2
_FILE_WORTH_BYTES = 64 * 1024
# What a message costs the sender of its time, so that nobody sends byte by byte for ever.
_MESSAGE_SECONDS = 0.001
# How long a call that found no change repeats its last message, so that a dead client is noticed.
_WATCH_REPEAT_SECONDS = 30.0

# Refusals a second that are logged, so that nobody fills the node's disk with them.
_LOGGED_RATE, _LOGGED_BURST = 2.0, 50.0

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (OneModelOnly, grpc.StatusCode.PERMISSION_DENIED),
    (PodGone, grpc.StatusCode.PERMISSION_DENIED),
    (NotPlaced, grpc.StatusCode.FAILED_PRECONDITION),
    (CodeRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidModel, grpc.StatusCode.INVALID_ARGUMENT),
    (Busy, grpc.StatusCode.UNAVAILABLE),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (SenderGone, grpc.StatusCode.DEADLINE_EXCEEDED),
    (IdTaken, grpc.StatusCode.ALREADY_EXISTS),
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
_MAPPED = tuple(kind for kind, _ in _CODES)
_STATES = {state: f"MODEL_STATE_{state.name}" for state in ModelState}
_FAILURES: dict[Failure | None, str] = {
    None: "FAILURE_CLASS_UNSPECIFIED",
    **{failure: f"FAILURE_CLASS_{failure.name}" for failure in Failure},
}

T = TypeVar("T")


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
        replicas: Replicas,
        gateway: Endpoint | None,
        on_limits: Callable[[], None],
        metrics: AgentMetrics,
        rules: NodeRules,
        gate: CodeGate,
        max_model_bytes: int,
        keep_free: float = 0.0,
    ) -> None:
        self._authenticator, self._guard = authenticator, guard
        self._models, self._repository, self._lifecycle = models, repository, lifecycle
        self._readings, self._metrics = readings, metrics
        self._replicas, self._gateway, self._on_limits = replicas, gateway, on_limits
        self._rules, self._gate = rules, gate
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._max_model_bytes = max_model_bytes
        self._disk = DiskSpace(repository.models, keep_share=keep_free)
        self._slots = StageQueue()
        self._logged = RateLimiter(rate=_LOGGED_RATE, burst=_LOGGED_BURST)

    def interceptor(self) -> CallInterceptor:
        """What stands before these calls where they come over the network."""
        return CallInterceptor(
            self._authenticator, CallLimiter(), refuse=self._refuse, mapped=_MAPPED, check=check_stage_message
        )

    async def Stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:  # noqa: N802
        return await self._answer("Stage", context, _drained(requests, self._stage(requests, context)))

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
        model, name = await self._answer("WatchModel", context, self._watched(request, context))
        gateway = self._gateway_of(model)
        async for _ in self._changes(until=None):
            if self._models.get(model.ref.uid) is not model or model.name != name:
                return
            yield _status(model, gateway, trouble=gpu_trouble(model, self._readings))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        return await self._answer("ListModels", context, self._list(context))

    async def _answer(self, method: str, context: Context, work: Awaitable[T]) -> T:
        """Turn the errors that have a status into it."""
        try:
            answer = await work
        except _MAPPED as error:
            _forget_frames(error)
            await self._refuse(method, context, error)
        self._metrics.called(method, "OK")
        return answer

    async def _refuse(self, method: str, context: Context, error: Exception) -> NoReturn:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        self._metrics.called(method, code.name)
        if not self._logged.take(""):
            log.info("call refused", extra=fields(method=method, code=code.name, reason=error))
        # A client of gRPC's own retries goes by this, too.
        pause = (
            (("grpc-retry-pushback-ms", f"{error.retry_seconds * 1000:.0f}"),)
            if isinstance(error, Busy)
            else ()
        )
        await context.abort(code, str(error)[:1000], pause)
        raise AssertionError("abort always raises") from error

    async def _watched(self, request: pb.WatchModelRequest, context: Context) -> tuple[Model, ModelName]:
        model, name = await self._own(request.model_name, context)
        if request.HasField("limits") and self._replicas.set_limits(
            model.ref.uid, read_limits(request.limits)
        ):
            self._on_limits()
        self._models.see_proxy(model)
        return model, name

    def _gateway_of(self, model: Model) -> pb.Gateway | None:
        """Only to a pod that has proved which it is, and to nobody else ever."""
        if self._gateway is None:
            return None
        return pb.Gateway(endpoint=str(self._gateway), ticket=self._replicas.ticket(model.ref.uid))

    async def _own(self, text: str, context: Context) -> tuple[Model, ModelName]:
        """Authenticate and authorise. The name is checked last, so that note_unowned learn nothing by it."""
        _, model, name = await self._caller(text, context)
        return model, name

    async def _caller(self, text: str, context: Context) -> tuple[ModelPod, Model, ModelName]:
        pod = await self._guard.admit(await self._ref(context))
        return pod, *self._claimed(pod, text)

    def _claimed(self, pod: ModelPod, text: str) -> tuple[Model, ModelName]:
        ref, name = pod.ref, parse_model_name(text)
        if pod.model_name is not None and pod.model_name != name:
            raise NotAllowed(f"pod {ref} may use model {pod.model_name!r} only")
        self._require_chosen(pod)
        self._models.see_pod(pod)
        if pod.model_name is not None:
            return self._models.claim(ref.uid, name), name
        return self._models.own(ref.uid, name), name

    def _require_chosen(self, pod: ModelPod) -> None:
        if pod.gpu is None and self._models.get(pod.ref.uid) is None:
            raise NotPlaced(f"pod {pod.ref} has no GPU choice; is its schedulerName the binder's?")

    async def _ref(self, context: Context) -> PodRef:
        return await self._authenticator.pod_of(metadata_of(context), source_of(context))

    async def _stage(self, requests: AsyncIterator[pb.StageRequest], context: Context) -> pb.StageResponse:
        pod = await self._guard.admit(await self._ref(context))
        self._require_chosen(pod)
        # With a slot from the first byte on: to read a header and to judge it takes the node's own memory and time,
        # of which nobody may have more than a share.
        async with self._slots.slot(pod.ref):
            model, gpu, known = await self._begun(requests, pod)
            if known is not None:
                return pb.StageResponse(digest=known.digest, already_staged=True)
            staged = self._repository.new_staging()
            try:
                return await self._receive(requests, pod, model, gpu, staged)
            finally:
                await in_thread(self._repository.discard, staged)

    async def _begun(
        self, requests: AsyncIterator[pb.StageRequest], pod: ModelPod
    ) -> tuple[Model, GpuChoice, Record | None]:
        """Whose model it is and where it goes, by the header, which is judged and not kept; and the record of the
        very same files, if they are here."""
        header = (await _next_part(requests, "header", within=_SENDER_SECONDS)).header
        model, name = self._claimed(pod, header.model_name)
        gpu = self._require_placed(pod, model)
        if len(header.files) > MAX_ENTRIES:
            raise TooLarge(f"{len(header.files)} files are announced; a model has at most {MAX_ENTRIES}")
        self._models.claim(pod.ref.uid, name)
        known = await asyncio.to_thread(self._repository.record, server_name_of(name, pod.ref.uid))
        said = (pod.ref.uid, header.digest, gpu)
        if known is not None and (known.pod.uid, known.digest, known.gpu) == said:
            return model, gpu, known
        if header.files:
            await self._judged(model, lambda: _foreseen(header, name, self._rules))
        return model, gpu, None

    async def _receive(
        self,
        requests: AsyncIterator[pb.StageRequest],
        pod: ModelPod,
        model: Model,
        gpu: GpuChoice,
        staged: Path,
    ) -> pb.StageResponse:
        files = StagedFiles(staged, max_bytes=self._max_model_bytes, share=self._disk.reservation())
        try:
            digest = await self._write_parts(requests, files)
        finally:
            await in_thread(files.close)
        assert model.name is not None
        name = model.name
        admitted = await self._judged(model, lambda: admit(staged, name, self._rules))
        await in_thread(write_anew, staged, admitted)
        record = Record(
            pod=pod.ref,
            model_id=pod.model_id,
            name=name,
            gpu=gpu,
            digest=digest,
            code=admitted.has_code,
        )
        await self._lifecycle.publish(model, staged, record)
        self._metrics.staged(files.bytes)
        if admitted.overwritten_name:
            log.info(
                "the name in config.pbtxt is overwritten: the pod's model has another",
                extra=fields(model=name, pod=pod.ref, overwritten=admitted.overwritten_name),
            )
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
        patience = MinimumRate(seconds=_SENDER_SECONDS, bytes_per_second=_SENDER_BYTES_PER_SECOND)
        while True:
            asked = time.monotonic()
            request = await _next_part(requests, "file", "chunk", "commit", within=patience.left_seconds)
            worth = len(request.chunk) if request.HasField("chunk") else _FILE_WORTH_BYTES
            patience.waited(time.monotonic() - asked + _MESSAGE_SECONDS, then_came_bytes=worth)
            match request.WhichOneof("part"):
                case "file":
                    await in_thread(files.begin_file, request.file.path, request.file.size)
                case "chunk":
                    await in_thread(files.write, request.chunk)
                case _:
                    return await in_thread(files.commit, request.commit.digest)

    def _require_placed(self, pod: ModelPod, model: Model) -> GpuChoice:
        """The binder's choice, looked at again: annotations can be written by others, at any time. The
        first that was seen holds. A GPU is its UUID; its index is of the time of the Binding. Raises
        NotPlaced, or GpusUnknown when nobody can tell."""
        _require_unmoved(pod, model)
        gpu = model.gpu
        if gpu is None:
            raise NotPlaced(f"pod {pod.ref} has no GPU choice; is its schedulerName the binder's?")
        if not pod.request_bytes:
            raise NotPlaced(f"pod {pod.ref} asks for no GPU memory; a model has some of its own")
        if gpu.bytes != pod.request_bytes:
            raise NotPlaced(f"pod {pod.ref} asks for {pod.request_bytes} bytes but was given {gpu.bytes}")
        if len(gpu.gpus) != pod.gpu_count:
            raise NotPlaced(f"pod {pod.ref} asks for {pod.gpu_count} GPUs but was given {len(gpu.gpus)}")
        here = {reading.uuid for reading in self._readings()}
        for uuid in gpu.uuids:
            if uuid not in here:
                # Another node may do: the binder goes by the model's state.
                reason = f"GPU {uuid} is not on this node any more"
                self._models.set(model, ModelState.FAILED, reason, failure=Failure.TRANSIENT)
                raise NotPlaced(f"pod {pod.ref} was given GPU {uuid}, which this node does not have")
        return gpu

    async def _loadable(self, request: pb.LoadRequest, context: Context) -> Model:
        pod, model, name = await self._caller(request.model_name, context)
        _require_unmoved(pod, model)
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
        if model.server_name is None:
            return False
        record = await asyncio.to_thread(self._repository.record, model.server_name)
        return record is not None and record.pod.uid == model.ref.uid

    async def _unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        """By an ending pod's own word; whether it is ending is the API server's."""
        ref = await self._ref(context)
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
        await asyncio.shield(self._lifecycle.start_unload(server_name_of(name, ref.uid)))
        return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)

    async def _list(self, context: Context) -> pb.ListModelsResponse:
        ref = await self._ref(context)
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


async def _drained(requests: AsyncIterator[pb.StageRequest], work: Awaitable[T]) -> T:
    """Do the work, and drain the sender's stream before the outcome is sent."""
    try:
        answer = await work
    except _MAPPED as error:
        _forget_frames(error)
        await drain_stream(requests)
        raise
    await drain_stream(requests)
    return answer


def _forget_frames(error: BaseException | None) -> None:
    """An error that is sent to the caller keeps alive what the functions held that raised it (a whole header) until
    a late collection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _next_part(
    requests: AsyncIterator[pb.StageRequest], *expected: str, within: float
) -> pb.StageRequest:
    try:
        if within <= 0:  # a message that is there already would be taken before any timeout
            raise TimeoutError
        async with asyncio.timeout(within):
            request = await anext(requests)
    except StopAsyncIteration:
        raise BadStream("the stream ended without a commit; nothing was kept") from None
    except TimeoutError:
        raise SenderGone(
            f"the sender kept the agent waiting for more than {_SENDER_SECONDS:g} s beyond what it has sent at"
            f" {format_bytes(int(_SENDER_BYTES_PER_SECOND))}/s; nothing was kept"
        ) from None
    part = request.WhichOneof("part")
    if part not in expected:
        raise BadStream(f"{part or 'an empty message'} came where {' or '.join(expected)} was expected")
    return request


def _require_unmoved(pod: ModelPod, model: Model) -> None:
    """Raises NotPlaced where the pod's GPU choice has been changed since it was first seen."""
    if model.gpu is None or (pod.gpu is not None and _place(pod.gpu) == _place(model.gpu)):
        return
    now = "it is gone" if pod.gpu is None else f"it says {pod.gpu.encode()}"
    raise NotPlaced(
        f"pod {pod.ref}: its GPU choice was {model.gpu.encode()} and holds, but now {now[:300]};"
        " only the binder chooses: delete the pod, and its owner makes one that is placed anew"
    )


def _place(gpu: GpuChoice) -> tuple[tuple[GpuUuid, ...], int]:
    return gpu.uuids, gpu.bytes


def _progress(model: Model) -> pb.LoadProgress:
    return pb.LoadProgress(
        state=_STATES[model.state], reason=model.reason, failure_class=_FAILURES[model.failure]
    )


def _status(model: Model, gateway: pb.Gateway | None, *, trouble: str = "") -> pb.ModelStatus:
    """`trouble`: what is wrong with its GPU. Triton may go on with it there; nobody is to ask it."""
    return pb.ModelStatus(
        model_name=model.name or "",
        state=_STATES[ModelState.FAILED if trouble else model.state],
        reason=trouble or model.reason,
        gpu_uuid="" if model.gpu is None else model.gpu.uuid,
        requested_bytes=model.requested_bytes,
        measured_bytes=model.measured_bytes,
        gateway=gateway,
    )
