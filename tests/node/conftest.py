"""One cluster with a real node for all tests here, and Berth on it as `deploy/base` has it.

Where the machine cannot run a node, the tests are skipped with the reason; in CI that is a failure.
"""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from localcluster import images
from localcluster.model_server import serving
from localcluster.node import probe, settings
from localcluster.node.cluster import RealCluster
from localcluster.samples import archive
from tests.node.support import NodeUser

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
async def source(cluster: RealCluster) -> AsyncIterator[str]:
    """The URL of the sample model, on the node's address."""
    listening = await cluster.namespaces.listen(settings.ADDRESS, MODEL_SERVER_PORT)
    async with serving(listening) as store:
        yield store("simple.tar.gz", archive())


@pytest_asyncio.fixture(loop_scope="session")
async def user(cluster: RealCluster) -> AsyncIterator[NodeUser]:
    """A user whose Deployments and pods are gone, with their models, when the test ends."""
    person = NodeUser(cluster)
    yield person
    await person.clean_up()
