"""A report that the API server refuses: others have filled the annotations of the Node."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from berth.kube import paths
from binder.cli import top
from localcluster.cluster import LocalCluster
from tests.e2e.support import KEYS
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

NODE = "gpu-1"
LEASE = paths.lease("berth-system-nodes", f"berth-agent-{NODE}")
ANNOTATIONS_LIMIT = 256 * 1024
FILLER = "example.com/filler"


@pytest_asyncio.fixture(loop_scope="session")
async def full_node(cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Not a byte more goes into the annotations of one Node, and there is news to tell of it."""
    scenario = cluster.nodes[NODE].scenario
    before = scenario.read_text()

    async def filled() -> None:
        node = await cluster.client.get(paths.node(NODE))
        there = node["metadata"]["annotations"]
        room = ANNOTATIONS_LIMIT - sum(len(k) + len(v) for k, v in there.items()) - len(FILLER)
        patch = {"metadata": {"annotations": {FILLER: "x" * room}}}
        await cluster.client.patch(paths.node(NODE), patch)

    await filled()
    scenario.write_text(before.replace("total: 16Gi", "total: 16Gi, other_use: 5Gi"))
    yield cluster
    await cluster.client.patch(paths.node(NODE), {"metadata": {"annotations": {FILLER: None}}})
    scenario.write_text(before)


async def lease(cluster: LocalCluster) -> tuple[str, str | None]:
    """When it was renewed, and why the report is behind."""
    found: dict[str, Any] = await cluster.client.get(LEASE)
    annotations = found["metadata"].get("annotations") or {}
    return found["spec"]["renewTime"], annotations.get(KEYS.report_behind)


async def problem(cluster: LocalCluster) -> str:
    view = await top.collect(cluster.client, KEYS, "berth-system")
    return next(node.problem for node in view.nodes if node.name == NODE)


async def test_the_heartbeat_goes_on_and_says_that_the_facts_are_stale(full_node: LocalCluster) -> None:
    async def told() -> str:
        renewed, behind = await lease(full_node)
        assert behind is not None
        assert "Too long" in behind
        return renewed

    first = await eventually(told, what="the Lease to say that the report is behind")
    assert await problem(full_node) == "StaleNodeFacts"

    async def beats() -> None:
        assert await told() > first

    await eventually(beats, what="another heartbeat")
    await full_node.client.patch(paths.node(NODE), {"metadata": {"annotations": {FILLER: None}}})

    async def mended() -> None:
        assert (await lease(full_node))[1] is None
        assert await problem(full_node) == ""

    await eventually(mended, what="the report to be current again")
