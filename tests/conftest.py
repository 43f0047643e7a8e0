"""One cluster for all tests that need one: two GPU nodes, one of them with two GPUs, and two binders."""

from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from berth.kube import paths
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.model_server import serving
from localcluster.samples import archive
from tests.e2e.support import User
from tests.fakes.eventually import eventually

# Every model takes what it requested, but for the named ones.
MODELS = 'models: {greedy: 3Gi, "*": requested}\n'
# A Lease of 8 s instead of 40, so that nobody has to wait long for it to end. There are no models here but those with
# code: only so do two namespaces share a node.
AGENT_FLAGS = ("--heartbeat-seconds=2", "--code=any")
NODES = (
    NodeSpec(
        name="gpu-1",
        scenario="gpus:\n  - {uuid: GPU-1-0, product: T4, total: 16Gi}\n" + MODELS,
    ),
    NodeSpec(
        name="gpu-2",
        scenario=(
            "gpus:\n  - {uuid: GPU-2-0, product: A2, total: 8Gi}\n"
            "  - {uuid: GPU-2-1, product: A10, total: 24Gi}\n" + MODELS
        ),
    ),
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(
        ClusterSpec(nodes=NODES, binders=2, kube_scheduler=True, agent_flags=AGENT_FLAGS)
    ) as running:
        await eventually(lambda: all_have_reported(running), what="every agent's report and Lease")
        yield running


async def all_have_reported(cluster: LocalCluster) -> None:
    """Whichever test is the first: it finds a cluster at work, not one that begins."""
    for node in cluster.nodes:
        await User(cluster).report(node)
        await cluster.client.get(paths.lease("berth-system-nodes", f"berth-agent-{node}"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def url() -> AsyncIterator[Callable[[str, bytes], str]]:
    """Stores bytes under a name and gives the URL that a loader can take them from."""
    async with serving() as store:
        yield store


@pytest_asyncio.fixture(loop_scope="session")
async def user(cluster: LocalCluster) -> AsyncIterator[User]:
    """A user whose Deployments and pods are gone, with their models, when the test ends."""
    person = User(cluster)
    yield person
    await person.clean_up()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def source(url: Callable[[str, bytes], str]) -> str:
    """The URL of the sample model."""
    return url("simple.tar.gz", archive())
