"""One cluster with a real node for all tests here, and Berth on it as `deploy/base` has it.

Where the machine cannot run a node, the tests are skipped with the reason; in CI that is a failure.
"""

import os
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from localcluster import images
from localcluster.model_server import serving
from localcluster.node import probe, settings
from localcluster.node.cluster import RealCluster
from localcluster.samples import archive, model_deployment
from tests.node.support import SERVICE, NodeUser, Served

MODEL_SERVER_PORT = 8080


@pytest.fixture(scope="session")
def able() -> None:
    """Nothing where a node can run; else the test is skipped, or fails where it must not be."""
    reason = probe.lacking()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no real node here: {reason}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(able: None) -> AsyncIterator[RealCluster]:
    async with RealCluster(await images.images()) as running:
        await running.deploy()
        await NodeUser(running).berth_is_ready()
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def url(cluster: RealCluster) -> AsyncIterator[Callable[[str, bytes], str]]:
    """Stores bytes under a name and gives the URL that a pod can take them from."""
    listening = await cluster.namespaces.listen(settings.ADDRESS, MODEL_SERVER_PORT)
    async with serving(listening) as store:
        yield store


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def source(url: Callable[[str, bytes], str]) -> str:
    """The URL of the sample model."""
    return url("simple.tar.gz", archive())


@pytest_asyncio.fixture(loop_scope="session")
async def user(cluster: RealCluster) -> AsyncIterator[NodeUser]:
    """A user whose pods are gone, with their models, when the test ends; `simple` stays."""
    person = NodeUser(cluster)
    yield person
    await person.clean_up()


@pytest_asyncio.fixture(loop_scope="session")
async def simple(user: NodeUser, source: str) -> Served:
    """The sample model, served with its Service. One for all tests: whatever they do to it, it comes back."""
    if not await user.pods("simple"):
        await user.apply(model_deployment("simple", source=source, gpu_mem="400Mi"), SERVICE)
    served = Served(user)
    await served.answers()
    return served
