"""`berth scaler`: its two forms, which share their flags and nothing else."""

import asyncio
import signal
from collections.abc import Sequence

from berth.runtime.process import run_process
from scaler.config import ScalerOptions
from scaler.replaying import replay_named

SUMMARY = """Scale Deployments of models by their requests, as Knative's autoscaler does, from and to zero. With --replay, answer
JSON lines as its decider would: docs/operating.md describes them; each is answered at once by one line, and the exit code is 1
if one could not be read."""


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth scaler`."""
    return run_process("scaler", SUMMARY, ScalerOptions, main, argv)


async def main(options: ScalerOptions, stop: asyncio.Event) -> None:
    if options.replay is None:
        from scaler import app  # what the one form needs is not loaded by the other

        await app.main(options, stop)
        return
    # Nothing is awaited here: a signal ends what it finds, be it in a read.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    replay_named(options.replay)
