"""A real Triton with two replicas of one model's name and a stream of answers, and the ways to them."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from bench.proxy.upstreams import COUNT, ECHO, triton_with
from berth.contract.endpoint import Endpoint
from berth.contract.gateway import ReplicaLimits
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.data_plane import (
    ADMIN_PORT,
    GRPC_PORT,
    HTTP_PORT,
    berth,
    node,
    replica_of,
    until_ready,
)
from localcluster.processes import end, spawn

LIMITS = ReplicaLimits(container_concurrency=4, queue_depth=100, max_request_bytes=256 * 1024**2)
ECHO_REPLICA = replica_of("echo", "echo-1", limits=LIMITS)
COUNT_REPLICA = replica_of("count", "count-1", limits=LIMITS)
# Of another namespace: the same public name on the same node.
OTHER_REPLICA = replica_of("echo", "echo-2", limits=LIMITS)
# More than the longest answer here takes, so that no region has to grow: this server has been seen to end in its python
# backend's shared memory while long answers were made (it looked like triton-inference-server/server#8882).
_SHM_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Served:
    """Where a client reaches one model each."""

    echo: str
    count: str

    @property
    def rest(self) -> str:
        return f"{self.echo}:{HTTP_PORT}"

    @property
    def grpc(self) -> str:
        return f"{self.echo}:{GRPC_PORT}"


@dataclass(frozen=True)
class Behind:
    """A Triton, and what its data plane needs to know."""

    network: str
    directory: Path

    @property
    def http(self) -> Endpoint:
        return Endpoint(f"{self.network}.0.1", triton.HTTP_PORT)

    @property
    def grpc(self) -> Endpoint:
        return Endpoint(f"{self.network}.0.1", triton.GRPC_PORT)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def behind(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Behind]:
    directory = tmp_path_factory.mktemp("clients")
    models = {"echo": ECHO, "count": COUNT}
    models |= {one.server_name: ECHO for one in (ECHO_REPLICA, OTHER_REPLICA)} | {
        COUNT_REPLICA.server_name: COUNT
    }
    with cluster_network() as network:
        # The stand-alone proxy brings no key, so Triton has none here; that one is asked for is tested elsewhere.
        async with triton_with(directory, models, address=f"{network}.0.1", shm_bytes=_SHM_BYTES):
            yield Behind(network, directory)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["alone", "door and gateway"])
async def served(request: pytest.FixtureRequest, behind: Behind) -> AsyncIterator[Served]:
    async with ways(request.param, behind) as way:
        yield way


@asynccontextmanager
async def ways(kind: str, behind: Behind) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        if kind == "alone":
            addresses = [
                await _alone(stack, behind, number, name) for number, name in enumerate(("echo", "count"))
            ]
        else:
            running = await stack.enter_async_context(
                node(
                    behind.network,
                    behind.directory,
                    [ECHO_REPLICA, OTHER_REPLICA, COUNT_REPLICA],
                    http=behind.http,
                    grpc=behind.grpc,
                    more=[f"--most-request-bytes={LIMITS.max_request_bytes}"],
                )
            )
            addresses = [await running.sidecar(replica) for replica in (ECHO_REPLICA, COUNT_REPLICA)]
        yield Served(*addresses)


async def _alone(stack: AsyncExitStack, behind: Behind, number: int, model: str) -> str:
    address = f"{behind.network}.2.{number + 1}"
    log = behind.directory / f"{model}.log"
    command = berth(
        *("proxy", "--model", model, "--triton-http", behind.http, "--triton-grpc", behind.grpc),
        *("--http-listen", f"{address}:{HTTP_PORT}", "--grpc-listen", f"{address}:{GRPC_PORT}"),
        *("--admin-listen", f"{address}:{ADMIN_PORT}", "--log-level", "warning"),
        *("--container-concurrency", LIMITS.container_concurrency, "--queue-depth", LIMITS.queue_depth),
    )
    process = await spawn(command, log=log, env=os.environ)
    stack.push_async_callback(end, process, grace_seconds=0)
    await until_ready(process, Endpoint(address, ADMIN_PORT), log)
    return address
