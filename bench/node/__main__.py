"""What a node does about deaths of its Triton, on a real one.

    python -m bench.node

Ratios and counts of one run: they survive a noisy machine better than seconds.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.node.idle import idle
from bench.node.node import GPUS, running
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelName, PodUid
from berth.contract.report import Failure, ModelReport, ModelState, NodeReport, TritonReport

SLOW, KILLS = "time.sleep(0.5)", "time.sleep(0.2); os.kill(os.getppid(), signal.SIGKILL)"
IDLE_MODELS, CORE_TARGET, RSS_TARGET_MIB = 50, 0.01, 80
RECOVERY_TARGET, DEATHS_TARGET, STORY_TARGET_SECONDS, REPORT_TARGET_BYTES = 1.3, 2, 60.0, 64 * 1024


def main(argv: Sequence[str]) -> int:
    """Non-zero where a target is missed."""
    if argv:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        met = [
            asyncio.run(recovery(Path(directory) / "recovery")),
            asyncio.run(poison(Path(directory) / "poison")),
            report_size(),
            asyncio.run(idle_agent(Path(directory) / "idle")),
        ]
    return 0 if all(met) else 1


async def recovery(directory: Path) -> bool:
    """20 slow models on 2 GPUs: first loaded and measured, ten on each GPU one after another; then Triton is
    killed."""
    async with running(directory) as node:
        warm = await node.stage("warm", on=GPUS[0], work="pass")
        await node.until_served(warm)
        models = [await node.stage(f"slow-{n}", on=GPUS[n % 2], work=SLOW) for n in range(20)]
        ten_loads = await node.until_served(*models)
        pid = node.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        gone = await node.until(lambda: not any(model.state is ModelState.READY for model in models))
        back = await node.until(lambda: node.sync.version is not None)
        loaded = await node.until_served(warm, *models)
    total = gone + back + loaded
    print(
        f"recovery of 20 models (0.5 s each) on 2 GPUs: {total:.1f} s from the death on, of which {loaded:.1f} s loads;"
        f" 10 loads one after another: {ten_loads:.1f} s; ratio {total / ten_loads:.2f} (target {RECOVERY_TARGET})"
    )
    return total / ten_loads <= RECOVERY_TARGET


async def poison(directory: Path) -> bool:
    """Ten innocents, five of them new, and a model that kills Triton whenever it is loaded."""
    async with running(directory) as node:
        served = [await node.stage(f"served-{n}", on=GPUS[n % 2], work="pass") for n in range(5)]
        await node.until_served(*served)
        bad = await node.stage("poison", on=GPUS[0], work=KILLS)
        fresh = [await node.stage(f"fresh-{n}", on=GPUS[n % 2], work=SLOW) for n in range(5)]
        story = await node.until(lambda: bad.failure is Failure.QUARANTINED)
        story += await node.until_served(*served, *fresh)
        deaths = node.deaths
    print(
        f"a poisonous model among 10 innocents: {deaths} deaths of Triton, {deaths - 1} after the first"
        f" (target {DEATHS_TARGET}); all innocents serve after {story:.1f} s (target {STORY_TARGET_SECONDS:g})"
    )
    return deaths - 1 <= DEATHS_TARGET and story <= STORY_TARGET_SECONDS


async def idle_agent(directory: Path) -> bool:
    core, mib = await idle(directory, models=IDLE_MODELS, settle_seconds=15, seconds=20)
    print(
        f"idle agent with {IDLE_MODELS} models: {core:.2%} of a core (target {CORE_TARGET:.0%}),"
        f" {mib:.1f} MiB resident (target {RSS_TARGET_MIB})"
    )
    return core <= CORE_TARGET and mib <= RSS_TARGET_MIB


def report_size() -> bool:
    """500 models, each failed with a long reason."""
    choice = GpuChoice(GpuUuid("GPU-00000000-0000-0000-0000-000000000000"), 0, 1)
    models = tuple(
        ModelReport(
            pod_uid=PodUid(f"{n:08d}-0000-0000-0000-000000000000"),
            namespace="team",
            pod_name=f"model-{n}-5d59d67564-abcde",
            model_id=None,
            model_name=ModelName(f"model-{n}"),
            gpu=choice.uuid,
            requested_bytes=10**9,
            measured_bytes=None,
            state=ModelState.FAILED,
            reason="\N{SKULL}" * 512,
            failure=Failure.TRANSIENT,
        )
        for n in range(500)
    )
    report = NodeReport(
        server="triton", capabilities=(), triton=TritonReport(True, "2.51.0"), gpus=(), models=models
    )
    size = len(report.encode())
    print(f"report of 500 failed models: {size} bytes (target {REPORT_TARGET_BYTES})")
    return size <= REPORT_TARGET_BYTES


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
