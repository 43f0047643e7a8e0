"""`berth keys`: make the keys of a node's Triton, once, before it starts."""

import asyncio
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from berth.contract.errors import InvalidValue
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.triton.keys import TritonKeys, write_secret

log = logging.getLogger(__name__)

FLAGS_FILE = "server-flags"

# The agent owns it; Triton is of its group. To others a key is none, and so is its name.
_DIRECTORY_MODE = 0o750
_LOCK_SECONDS, _LOCK_PAUSE_SECONDS = 30.0, 0.05


@dataclass(frozen=True, kw_only=True)
class KeysOptions(opt.CommonOptions):
    """`berth keys --help`."""

    directory: Path = opt.option("where the keys go; existing ones are kept", parse=Path, metavar="DIR")


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth keys`."""
    summary = (
        f"Make Triton's keys and {FLAGS_FILE}, the tritonserver flags that put them in force, one a line."
    )
    return run_process("keys", summary, KeysOptions, main, argv)


async def main(options: KeysOptions, _: asyncio.Event) -> None:
    directory = options.directory
    try:
        await asyncio.to_thread(make_keys, directory)
    except OSError as error:
        raise CannotStart(f"--directory: {directory}: {error.strerror}") from error
    log.info("keys are ready", extra=fields(directory=directory))


def make_keys(directory: Path) -> None:
    """Keep the keys that are there: the agent and Triton restart on their own and must agree. Both pods make
    them, perhaps at once: the first makes them for both. Raises OSError."""
    with _alone_in(directory) as descriptor:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, _DIRECTORY_MODE)
        try:
            keys = TritonKeys.read(directory)
        except InvalidValue:
            keys = TritonKeys.generate()
        # Also those that are there: whoever made them may have been of another group than Triton's.
        keys.write(directory)
        write_secret(directory / FLAGS_FILE, "\n".join(keys.server_flags()) + "\n")


@contextmanager
def _alone_in(directory: Path) -> Iterator[int]:
    """Hold the directory's lock, which ends with its holder, however that ends. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f"another berth keys has been at it for {_LOCK_SECONDS:g} s"
                    ) from None
            time.sleep(_LOCK_PAUSE_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)
