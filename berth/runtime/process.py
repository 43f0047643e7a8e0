"""The life of one process: options, logs, signals, exit code."""

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import (
    EXIT_BAD_CONFIG,
    EXIT_CANNOT_START,
    EXIT_CRASH,
    CannotStart,
    ConfigError,
    Failed,
)
from berth.runtime.logs import configure_logging, fields
from berth.runtime.options import CommonOptions, parse_options

log = logging.getLogger(__name__)

O = TypeVar("O", bound=CommonOptions)  # noqa: E741
Main = Callable[[O, asyncio.Event], Awaitable[None]]


def run_process(
    process: str,
    summary: str,
    options: type[O],
    main: "Main[O]",
    argv: Sequence[str],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run `main(options, stop)` until it returns; `stop` is set by SIGTERM or SIGINT.

    Returns the exit code of docs/architecture.md: 0 done, 1 crash, 2 bad configuration, 3 cannot start.
    A second signal ends the process at once.
    """
    try:
        parsed = parse_options(options, process=process, summary=summary, argv=argv, environ=os.environ)
    except ConfigError as error:
        return fail(process, str(error), EXIT_BAD_CONFIG)
    configure_logging(format=parsed.log_format, level=parsed.log_level)
    log.info("starting", extra=fields(process=process, options=_described(parsed)))
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_until_stopped(main, parsed))
    except KeyboardInterrupt:
        return EXIT_CRASH
    except BaseException as error:  # the process boundary: every way to die gets its exit code
        return _exit_code(process, error)
    log.info("stopped", extra=fields(process=process))
    return 0


def fail(process: str, message: str, code: int) -> int:
    """Say one line on stderr and return the exit code."""
    print(f"berth {process}: {message}", file=sys.stderr)
    return code


@contextmanager
def starting(what: str, endpoint: Endpoint) -> Iterator[None]:
    """Turn a listener's OSError into CannotStart: `starting("--listen", endpoint)`."""
    try:
        yield
    except OSError as error:
        raise CannotStart(f"{what}: cannot listen on {endpoint}: {error.strerror or error}") from error


async def _until_stopped(main: "Main[O]", options: O) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop)
    await main(options, stop)


def _on_signal(number: signal.Signals, stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(128 + number)
    log.info("stopping", extra=fields(signal=number.name))
    stop.set()


def _exit_code(process: str, error: BaseException) -> int:
    for leaf in _leaves(error):
        if isinstance(leaf, ConfigError):
            return fail(process, str(leaf), EXIT_BAD_CONFIG)
        if isinstance(leaf, CannotStart):
            return fail(process, str(leaf), EXIT_CANNOT_START)
        if isinstance(leaf, Failed):
            return fail(process, str(leaf), EXIT_CRASH)
        if isinstance(leaf, SystemExit) and isinstance(leaf.code, int):
            return leaf.code
    log.critical("crashed", exc_info=error)
    return EXIT_CRASH


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _described(options: CommonOptions) -> str:
    return " ".join(f"{field.name}={getattr(options, field.name)}" for field in dataclasses.fields(options))


def spare_the_collector() -> None:
    """What has been mirrored stays: to look through all of it for cycles again and again, half a second
    for fifty thousand pods, finds nothing and makes all else wait."""
    gc.collect()
    gc.freeze()
