"""`berth keys`: make the keys of a node's Triton and the secret of its tickets, once, before it starts.

DIR/admin         opens all of Triton: the agent's
DIR/inference     what requests and probes need: all that the gateway gets
DIR/server-flags  for Triton itself
DIR/tickets       the agent's alone, for with it one makes any pod's ticket: not of Triton's group
"""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from berth.contract.errors import InvalidValue
from berth.contract.gateway import TICKET_BYTES
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart
from berth.runtime.logs import fields
from berth.runtime.process import run_process
from berth.triton.keys import TritonKeys, write_secret

log = logging.getLogger(__name__)

FLAGS_FILE = "server-flags"

# The agent owns it; Triton is of its group. To others a key is none, and so is its name.
_DIRECTORY_MODE = 0o750
TICKETS_FILE, _TICKETS_MODE = "tickets", 0o400
_LOCK_SECONDS, _LOCK_PAUSE_SECONDS = 30.0, 0.05


@dataclass(frozen=True, kw_only=True)
class KeysOptions(opt.CommonOptions):
    """`berth keys --help`."""

    directory: Path = opt.option("where the keys go; existing ones are kept", parse=Path, metavar="DIR")


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth keys`."""
    summary = f"Make Triton's keys, the secret of the gateway's tickets and {FLAGS_FILE}, the tritonserver flags that put them in force, one a line."
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
        # Also those that are there: their maker may have had another group than Triton's.
        keys.write(directory)
        write_secret(directory / FLAGS_FILE, "\n".join(keys.server_flags()) + "\n")
        _keep_ticket_secret(directory / TICKETS_FILE)


def read_ticket_secret(directory: Path) -> bytes:
    """Raises InvalidValue naming the file."""
    path = directory / TICKETS_FILE
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise InvalidValue(f"{path}: {error.strerror}; berth keys makes it") from error
    except ValueError:
        secret = b""
    if len(secret) != TICKET_BYTES:
        raise InvalidValue(f"{path}: not the secret of tickets; berth keys makes one")
    return secret


def _keep_ticket_secret(path: Path) -> None:
    """With another secret the tickets of all pods' proxies would become invalid."""
    try:
        read_ticket_secret(path.parent)
    except InvalidValue:
        write_secret(path, secrets.token_hex(TICKET_BYTES) + "\n", mode=_TICKETS_MODE)


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
