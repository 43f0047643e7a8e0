"""`berth loader`: fetch, stage, load, and end: 0 when Triton serves the model, else with the reason.

The reason is the last thing on stderr, so that a pod with `terminationMessagePolicy:
FallbackToLogsOnError` shows it in its status.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from berth.contract.quantity import format_bytes
from berth.contract.text import one_line
from berth.nodeagent.client import (
    AgentBusy,
    AgentConnection,
    AgentFull,
    AgentRefused,
    AgentUnavailable,
    connect,
)
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart, ConfigError, Failed
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.v1 import node_agent_pb2 as pb
from loader.config import LoaderOptions
from loader.download import Bounds
from loader.send import ModelFile, digest_of, list_files, stage_requests
from loader.sources import Request, fetched, from_path, scheme_of

log = logging.getLogger(__name__)

# A kubelet takes the last 2048 bytes of the log for the pod's status: the reason must fit in it.
_REASON_CHARACTERS = 400
# A node that is busy takes this model later; a kubelet would only restart the whole download.
_QUEUE_SECONDS = 3600.0

SUMMARY = "Download a model, send its files to the node's agent and wait until Triton serves it."


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth loader`."""
    return run_process("loader", SUMMARY, LoaderOptions, main, argv)


async def main(options: LoaderOptions, stop: asyncio.Event) -> None:
    if (options.uri is None) == (options.model_src is None):
        raise ConfigError("--uri or --model-src is required, and not both")
    if options.uri is not None:
        scheme_of(options.uri)
    working = asyncio.create_task(_load(options))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        # The agent drops a stream that breaks off; nothing half-done stays.
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise Failed("stopped before the model was loaded")
    working.result()


async def _load(options: LoaderOptions) -> None:
    started = time.monotonic()
    async with _directory(options) as directory, connect(options.agent, options.token_file) as agent:
        files = await asyncio.to_thread(list_files, directory)
        digest = await asyncio.to_thread(digest_of, files)
        size = format_bytes(sum(file.size for file in files))
        log.info("sending", extra=fields(model=options.model, files=len(files), size=size))
        await _while_agent_is_away(lambda: _stage_and_load(agent, options, files, digest), options)
    log.info(
        "model is served", extra=fields(model=options.model, seconds=round(time.monotonic() - started, 1))
    )


@asynccontextmanager
async def _directory(options: LoaderOptions) -> AsyncIterator[Path]:
    if options.model_src is not None:
        if not options.model_src.is_dir():
            raise ConfigError(f"--model-src: {options.model_src}: no such directory")
        yield await from_path(options.model_src, options.work_dir, sha256=None, source=str(options.model_src))
        return
    assert options.uri is not None
    request = Request(
        options.uri,
        options.sha256,
        Bounds(
            idle_seconds=options.idle_timeout,
            total_seconds=options.download_timeout,
            most_bytes=options.max_download_bytes,
        ),
    )
    async with fetched(request, options.work_dir) as directory:
        yield directory


async def _stage_and_load(
    agent: AgentConnection, options: LoaderOptions, files: list[ModelFile], digest: str
) -> None:
    staged = await agent.stage(stage_requests(options.model, files, digest))
    log.info("staged", extra=fields(model=options.model, digest=staged.digest, already=staged.already_staged))
    last = pb.LoadProgress()
    async for last in agent.load(options.model):
        log.info("loading", extra=fields(state=_word(last.state), reason=last.reason or "-"))
    if last.state == pb.MODEL_STATE_READY:
        return
    if last.state == pb.MODEL_STATE_FAILED:
        reason = one_line(last.reason, limit=_REASON_CHARACTERS)
        raise Failed(f"Triton does not load {options.model}: {reason}")
    raise AgentUnavailable(f"the agent's progress for {options.model} broke off at {_word(last.state)}")


async def _while_agent_is_away(work: Callable[[], Awaitable[None]], options: LoaderOptions) -> None:
    """Try until it works: the agent's pod may be replaced at any moment. The pauses are bounded in sum."""
    pauses = _Pauses(options)
    while True:
        try:
            await work()
            return
        except AgentRefused as error:
            raise Failed(f"the agent refuses: {error}") from error
        except OSError as error:
            raise Failed(f"the model's files cannot be read any more: {error}") from error
        except AgentUnavailable as error:
            await asyncio.sleep(pauses.after(error))


class _Pauses:
    """How long to wait after each failure, and when it has been enough."""

    def __init__(self, options: LoaderOptions) -> None:
        self._options = options
        self._away = Backoff(initial_seconds=0.5, cap_seconds=5.0)
        # To a full disk a large model would be sent in vain again and again.
        self._full = Backoff(initial_seconds=5.0, cap_seconds=60.0)
        # Added to the pause that the agent names, so that waiting loaders do not retry all at once.
        self._busy = Backoff(initial_seconds=0.5, cap_seconds=10.0, jitter=0.9)
        self._waited = self._queued = 0.0

    def after(self, error: AgentUnavailable) -> float:
        """Say why, and the seconds to wait. Raises CannotStart."""
        match error:
            case AgentBusy():
                delay, said = error.retry_seconds + self._busy.next(), "waiting: the node is busy"
                self._queued += delay
            case AgentFull():
                delay, said = self._full.next(), "waiting: the node's disk or its agent is full"
                self._waited += delay
            case _:
                delay, said = self._away.next(), "waiting: the agent is away"
                self._waited += delay
        if self._waited > self._options.agent_timeout or self._queued > _QUEUE_SECONDS:
            limit = (
                self._options.agent_timeout if self._waited > self._options.agent_timeout else _QUEUE_SECONDS
            )
            raise CannotStart(
                f"--agent {self._options.agent}: not to be had for {limit:g} s: {error}"
            ) from error
        log.warning(said, extra=fields(reason=error, retry_seconds=round(delay, 1)))
        return delay


def _word(state: int) -> str:
    return pb.ModelState.Name(state).removeprefix("MODEL_STATE_").lower()
