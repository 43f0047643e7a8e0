"""Models that kill a real Triton, or hang in it, and what becomes of the others."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.aio import InferenceServerClient, InferInput

from agent.models import Model
from agent.serving.reconcile import Reconciler
from berth.contract.endpoint import Endpoint
from berth.contract.report import Failure, ModelState
from berth.triton.admin import open_admin
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.processes import Supervised
from tests.fakes.agent_node import Node, on_server
from tests.loopback.agent.served import CONFIG, answers

MODEL = """
import os, signal, time
class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    def execute(self, requests):
        {execute}
        return []
    def finalize(self):
        {finalize}
"""
KILLS = "time.sleep(0.3); os.kill(os.getppid(), signal.SIGKILL)"
HANGS = "time.sleep(3600)"


def files(*, initialize: str = "pass", execute: str = "pass", finalize: str = "pass") -> dict[str, str]:
    source = MODEL.format(initialize=initialize, execute=execute, finalize=finalize)
    return {"config.pbtxt": CONFIG, "1/model.py": source}


@dataclass
class Living:
    """A node whose Triton comes back when it dies, and is ended by the agent's file, as by a kubelet."""

    node: Node
    reconciler: Reconciler
    triton: Supervised
    address: str
    keys: TritonKeys
    deaths: int = 0

    async def loop(self) -> None:
        while True:
            with suppress(TritonError):
                await self.reconciler.step()
            await asyncio.sleep(0.5)

    async def probe(self) -> None:
        file, pid, started = (
            self.node.repository.models.parent / "restart-triton",
            self.triton.pid,
            time.time(),
        )
        while True:
            await asyncio.sleep(0.1)
            if self.triton.pid != pid:
                self.deaths += self.triton.pid is None
                pid, started = self.triton.pid, time.time()
            if pid is not None and file.exists() and file.stat().st_mtime > started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def comes(self, uid: str, *, on: str = "GPU-a", **how: str) -> Model:
        return await self.node.stage(uid, on=on, files=files(**how))

    async def until(self, check: Callable[[], bool], seconds: float = 120) -> None:
        async with asyncio.timeout(seconds):
            while not check():
                await asyncio.sleep(0.05)

    async def goes(self, model: Model) -> None:
        self.node.models.lose_pod(model.ref.uid)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[InferenceServerClient]:
        client = InferenceServerClient(f"{self.address}:{triton.GRPC_PORT}")
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def living(directory: Path, *, load_timeout_seconds: float = 60) -> AsyncIterator[Living]:
    keys = TritonKeys.generate()
    (directory / "models").mkdir(parents=True)
    backends = triton.prepare_backends(directory / "backends")
    with cluster_network() as network:
        address, prefix = f"{network}.0.1", f"berth-{os.getpid()}-{network.replace('.', '-')}"
        command = triton.command(
            address=address, models=directory / "models", backends=backends, keys=keys, shm_prefix=prefix
        )
        server = Supervised(
            "triton",
            command,
            log=directory / "log",
            env=triton.environment(os.environ),
            before=lambda: triton.remove_shared_memory(prefix),
        )
        await server.start()
        tasks: list[asyncio.Task[Any]] = []
        node: Node | None = None
        try:
            async with open_admin(Endpoint(address, triton.GRPC_PORT), keys) as admin:
                await answers(admin, directory / "log")
                node = Node(
                    directory,
                    triton=admin,
                    load_timeout=load_timeout_seconds,
                    unload_timeout=3,
                )
                node.gpus.instance_kind = "KIND_CPU"
                here = Living(node, node.reconciler, server, address, keys)
                tasks = [asyncio.ensure_future(work) for work in (here.loop(), here.probe())]
                yield here
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if node is not None:
                await node.lifecycle.close()
            await server.stop(grace_seconds=0)
            triton.remove_shared_memory(prefix)


async def test_a_poisonous_model_among_innocents(tmp_path: Path) -> None:
    async with living(tmp_path) as here:
        served = [await here.comes(f"s{n}", on=("GPU-a", "GPU-b")[n % 2]) for n in range(2)]
        await here.until(lambda: all(model.state is ModelState.READY for model in served))
        poison = await here.comes("poison", initialize=KILLS)
        fresh = [
            await here.comes(f"f{n}", on=("GPU-a", "GPU-b")[n % 2], initialize="time.sleep(0.5)")
            for n in range(4)
        ]
        await here.until(
            lambda: (
                all(model.state is ModelState.READY for model in [*served, *fresh])
                and poison.failure is Failure.QUARANTINED
            ),
            seconds=200,
        )
        assert 2 <= here.deaths <= 3
        again = await here.node.stage("again", files=files(initialize=KILLS), digest="poison")
        assert again.failure is Failure.QUARANTINED
        assert here.deaths <= 3


async def test_loads_that_hang_hold_up_nobody_and_end_with_a_restart(tmp_path: Path) -> None:
    async with living(tmp_path, load_timeout_seconds=3) as here:
        served = await here.comes("served")
        await here.until(lambda: served.state is ModelState.READY)
        hang = [await here.comes(f"h{n}", initialize=HANGS) for n in range(6)]
        await here.until(lambda: all(model.state is ModelState.FAILED for model in hang))
        assert all(model.resident for model in hang)
        after = await here.comes("after")  # on the same GPU, in a Triton with six loads that never end
        await here.until(lambda: after.state is ModelState.READY, seconds=60)
        await here.goes(served)  # and is unloaded there
        await here.until(lambda: here.node.models.get(served.ref.uid) is None, seconds=60)
        await here.goes(after)
        await here.until(lambda: here.node.models.get(after.ref.uid) is None, seconds=60)
        for model in hang:
            await here.goes(model)
        # Nobody is served, and nothing else rids Triton of them.
        await here.until(lambda: list(here.node.models) == [])
        assert here.deaths == 1
        count = here.node.registry.get_sample_value
        assert count("berth_agent_quarantined_models") == 0


@pytest.mark.parametrize("kind", ["finalize", "execute"])
async def test_an_unload_that_never_ends_holds_up_nobody_and_ends_with_a_restart(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.serving.restart.NEEDED_SECONDS", 5.0)
    async with living(tmp_path) as here:
        stuck = await here.comes("stuck", **{kind: HANGS})
        other = await here.comes("other")
        await here.until(lambda: {stuck.state, other.state} == {ModelState.READY})
        async with here.client() as client:
            call = None
            if kind == "execute":
                tensor = InferInput("I", [1], "INT32")
                tensor.set_data_from_numpy(np.zeros(1, np.int32))
                headers = here.keys.inference_grpc_metadata
                call = asyncio.ensure_future(client.infer(on_server("stuck"), [tensor], headers=headers))
                await asyncio.sleep(0.5)
            await here.goes(stuck)
            await here.until(lambda: stuck.state is ModelState.UNLOADING)
            await asyncio.sleep(3.5)
            assert stuck.resident
            beside = await here.comes("beside")
            await here.until(lambda: beside.state is ModelState.READY, seconds=60)
            assert here.deaths == 0
            # The others are back in a moment, so Triton need not wait long.
            await here.until(lambda: here.node.models.get(stuck.ref.uid) is None, seconds=100)
            await here.until(lambda: {other.state, beside.state} == {ModelState.READY})
            assert here.deaths == 1
            if call is not None:
                await asyncio.gather(call, return_exceptions=True)
