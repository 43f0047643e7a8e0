"""A real Triton for the tests of the agent, and the files of models for it."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from berth.contract.endpoint import Endpoint
from berth.contract.report import CodeRule
from berth.triton.admin import IndexState, TritonAdmin, open_admin
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.processes import end, spawn, tail
from tests.fakes.agent_node import Node, on_server

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "I" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
# Each load leaves a line in the file that its first line names.
PYTHON = """
import time
class TritonPythonModel:
    def initialize(self, args):
        open({journal!r}, "a").write("loaded\\n")
        {work}
    def execute(self, requests):
        return []
    def finalize(self):
        time.sleep({finalize})
"""


@dataclass
class Served:
    """A Triton and the directory of its repository."""

    directory: Path
    admin: TritonAdmin
    address: str
    keys: TritonKeys
    pid: int

    def node(self, *, load_timeout_seconds: float = 60, code: CodeRule = CodeRule.ANY) -> Node:
        """An agent's parts. Its Triton holds models of tests before, which under the rule `namespace` keep
        every other away: this agent does not know whose they are."""
        node = Node(self.directory, triton=self.admin, load_timeout=load_timeout_seconds, code=code)
        node.gpus.instance_kind = "KIND_CPU"
        return node

    def files(
        self, uid: str, *, work: str = "pass", finalize: float = 0, config: str = CONFIG
    ) -> dict[str, str]:
        journal = str(self.directory / f"{uid}.journal")
        source = PYTHON.format(journal=journal, work=work, finalize=finalize)
        return {"config.pbtxt": config, "1/model.py": source}

    def loads(self, uid: str) -> int:
        journal = self.directory / f"{uid}.journal"
        return len(journal.read_text().splitlines()) if journal.exists() else 0

    async def state(self, uid: str) -> IndexState:
        return (await self.admin.index())[on_server(uid)].state

    async def until(self, uid: str, state: IndexState) -> None:
        async with asyncio.timeout(30):
            while await self.state(uid) is not state:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Served]:
    """A Triton with the repository `directory`/models."""
    keys = TritonKeys.generate()
    (directory / "models").mkdir(parents=True)
    backends = triton.prepare_backends(directory / "backends")
    with cluster_network() as network:
        address, prefix = f"{network}.0.1", f"berth-{os.getpid()}-{network.replace('.', '-')}"
        command = triton.command(
            address=address, models=directory / "models", backends=backends, keys=keys, shm_prefix=prefix
        )
        process = await spawn(command, log=directory / "log", env=triton.environment(os.environ))
        try:
            async with open_admin(Endpoint(address, triton.GRPC_PORT), keys) as admin:
                await answers(admin, directory / "log")
                yield Served(directory, admin, address, keys, process.pid)
        finally:
            await end(process, grace_seconds=5)
            triton.remove_shared_memory(prefix)


async def answers(admin: TritonAdmin, log: Path) -> None:
    for _ in range(200):
        try:
            if await admin.version():
                return
        except TritonError:
            pass
        await asyncio.sleep(0.1)
    pytest.fail(tail(log))
