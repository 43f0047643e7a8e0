"""`berth keys`: make the keys of a node's Triton, once, before it starts."""

import asyncio
import logging
from collections.abc import Sequence
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
        make_keys(directory)
    except OSError as error:
        raise CannotStart(f"--directory: {directory}: {error.strerror}") from error
    log.info("keys are ready", extra=fields(directory=directory))


def make_keys(directory: Path) -> None:
    """Keep the keys that are there: the agent and Triton restart on their own and must agree."""
    try:
        keys = TritonKeys.read(directory)
    except InvalidValue:
        keys = TritonKeys.generate()
        keys.write(directory)
    write_secret(directory / FLAGS_FILE, "\n".join(keys.server_flags()) + "\n")
