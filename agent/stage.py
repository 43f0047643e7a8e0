"""Takes a model's files from a stream: judged before they come, written as they come, judged again, published."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from agent.access import Access
from agent.admission import (
    Admission,
    Admitted,
    CodeGate,
    CodeRefused,
    InvalidModel,
    ModelFiles,
    write_anew,
)
from agent.disk_space import DiskSpace
from agent.limits import MinimumRate
from agent.metrics import AgentMetrics
from agent.models import Model, Models
from agent.repository import Record, Repository
from agent.serving.lifecycle import Lifecycle
from agent.stage_queue import StageQueue
from agent.staging import MAX_ENTRIES, BadStream, StagedFiles, TooLarge, check_path
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import ModelName
from berth.contract.pod import ModelPod
from berth.contract.quantity import format_bytes
from berth.contract.report import Failure
from berth.runtime.logs import fields
from berth.runtime.tasks import in_thread
from berth.v1 import node_agent_pb2 as pb

log = logging.getLogger(__name__)

# To judge a config.pbtxt of the largest size takes a core about a second.
_JUDGED_AT_ONCE = 2
# A sender that falls silent for this long has died without saying so. It earns the time back at this rate,
# which any disk and any network file system keeps up with; a file counts as so many bytes more.
_SENDER_SECONDS = 30.0
_SENDER_BYTES_PER_SECOND = 1024.0**2
_FILE_WORTH_BYTES = 64 * 1024
# What a message costs the sender of its time, so that no stream goes on byte by byte for ever.
_MESSAGE_SECONDS = 0.001

Requests = AsyncIterator[pb.StageRequest]


class SenderGone(Exception):
    """The sender of a stream has fallen silent, or trickles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """`keep_free`: the share of the disk, 0 to 1, that is never filled."""

    max_model_bytes: int
    keep_free: float = 0.0


class Stager:
    """`stage` is one stream. It raises what `api_messages` maps to a status."""

    def __init__(
        self,
        access: Access,
        lifecycle: Lifecycle,
        repository: Repository,
        models: Models,
        *,
        admission: Admission,
        gate: CodeGate,
        metrics: AgentMetrics,
        limits: StageLimits,
    ) -> None:
        self._access, self._lifecycle, self._repository = access, lifecycle, repository
        self._models, self._admission, self._gate, self._metrics = models, admission, gate, metrics
        self._max_model_bytes = limits.max_model_bytes
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._queue = StageQueue()
        self._disk = DiskSpace(repository.models, keep_share=limits.keep_free)

    async def stage(self, requests: Requests, pod: ModelPod) -> pb.StageResponse:
        self._access.require_chosen(pod)
        # With a slot from the first byte on: to read a header and to judge it takes the node's own memory and time,
        # of which no pod may have more than a share.
        async with self._queue.slot(pod.ref):
            model, gpu, known = await self._begun(requests, pod)
            if known is not None:
                return pb.StageResponse(digest=known.digest, already_staged=True)
            staged = self._repository.new_staging()
            try:
                return await self._receive(requests, pod, model, gpu, staged)
            finally:
                await in_thread(self._repository.discard, staged)

    async def _begun(self, requests: Requests, pod: ModelPod) -> tuple[Model, GpuChoice, Record | None]:
        """Whose model it is and where it goes, by the header, which is judged and not kept; and the record of the
        very same files, if they are here."""
        header = (await _next_part(requests, "header", within=_SENDER_SECONDS)).header
        model, name = self._access.claim(pod, header.model_name)
        gpu = self._access.placed(pod, model)
        if len(header.files) > MAX_ENTRIES:
            raise TooLarge(f"{len(header.files)} files are announced; a model has at most {MAX_ENTRIES}")
        self._models.claim(pod.ref.uid, name)
        known = await asyncio.to_thread(self._repository.record, server_name_of(name, pod.ref.uid))
        said = (pod.ref.uid, header.digest, gpu)
        if known is not None and (known.pod.uid, known.digest, known.gpu) == said:
            return model, gpu, known
        if header.files:
            await self._judged(model, lambda: _foreseen(header, name, self._admission))
        return model, gpu, None

    async def _receive(
        self,
        requests: Requests,
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
        admitted = await self._judged(model, lambda: self._admission.admit(staged, name))
        await in_thread(
            write_anew, staged, admitted
        )  # not while others wait to be judged: it waits for the disk
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
            self._lifecycle.reject(model, str(error), Failure.INVALID_MODEL)
            raise
        except CodeRefused as error:
            self._lifecycle.reject(model, str(error), Failure.CAPACITY)
            raise
        return admitted

    async def _write_parts(self, requests: Requests, files: StagedFiles) -> str:
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


def _foreseen(header: pb.StageHeader, name: ModelName, admission: Admission) -> Admitted:
    """Judge what a sender says it will send. Raises BadStream, InvalidModel or CodeRefused."""
    last = None
    for file in header.files:
        check_path(file.path, after=last)
        last = file.path
    files = ModelFiles({file.path: file.size for file in header.files})
    return admission.foresee(header.config if header.HasField("config") else None, files, name)


async def _next_part(requests: Requests, *expected: str, within: float) -> pb.StageRequest:
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
