"""One cluster for all tests of scaling: five GPU nodes, two scalers and two activators, of which one leads and both hold."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from bench.proxy import upstreams
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec
from localcluster.samples import packed
from tests.conftest import all_have_reported
from tests.fakes.eventually import eventually
from tests.scaling.support import Owner

NODES = tuple(
    NodeSpec(
        name=f"gpu-{number}",
        scenario=f'gpus:\n  - {{uuid: GPU-{number}-0, product: T4, total: 16Gi}}\nmodels: {{"*": requested}}\n',
    )
    for number in range(1, 6)
)
AGENT_FLAGS = ("--heartbeat-seconds=2", "--code=any")


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each scaler writes what its deciders see."""
    return tmp_path_factory.mktemp("records")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(records: Path) -> AsyncIterator[LocalCluster]:
    spec = ClusterSpec(
        nodes=NODES,
        binders=1,
        scalers=2,
        activators=2,
        agent_flags=AGENT_FLAGS,
        scaler_flags=(f"--record={records}/$(POD_IP)",),
    )
    async with LocalCluster(spec) as running:
        await eventually(lambda: all_have_reported(running), what="every agent's report and Lease")
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def owner(cluster: LocalCluster) -> AsyncIterator[Owner]:
    """One whose models and Services are gone when the test ends."""
    person = Owner(cluster)
    yield person
    await person.clean_up()


@pytest_asyncio.fixture(loop_scope="session")
async def pod_address(owner: Owner) -> str:
    """Of a pod in the namespace of the models. It goes with them when the test ends."""
    return await owner.client_pod("default")


@pytest.fixture(scope="session")
def echo(url: Callable[[str, bytes], str]) -> str:
    """Where a loader finds ECHO."""
    return url("echo.tar.gz", packed(**upstreams.model_files(upstreams.ECHO)))


@pytest.fixture(scope="session")
def count(url: Callable[[str, bytes], str]) -> str:
    """Where a loader finds COUNT."""
    return url("count.tar.gz", packed(**upstreams.model_files(upstreams.COUNT)))
