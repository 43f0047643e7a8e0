"""`berth scaler`: its two forms, which share their flags and nothing else."""

import asyncio
import signal
from collections.abc import Sequence

from berth.runtime.process import run_process
from scaler.config import ScalerOptions
from scaler.replaying import replay_named

SUMMARY = """Scale Deployments of models by their requests, equal to Knative's autoscaler, from and to zero; or, with
--replay, answer what its decider would: the lines are told in docs/operating.md, each is answered by one line at once, exit
code 1 if one of them could not be read."""


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth scaler`."""
    return run_process("scaler", SUMMARY, ScalerOptions, main, argv)


async def main(options: ScalerOptions, stop: asyncio.Event) -> None:
    if options.replay is None:
        from scaler import app  # what the one form needs, nobody pays for with the other

        await app.main(options, stop)
        return
    # Nothing is awaited here: a signal ends what it finds, be it in a read.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
    replay_named(options.replay)
