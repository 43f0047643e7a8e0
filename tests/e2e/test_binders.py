"""Two binders at once: one places pods, and the other takes over when it dies."""

import pytest

from localcluster.cluster import BINDER_ADMIN_PORT
from localcluster.samples import model_deployment
from tests.e2e.support import User, get

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.nightly
async def test_one_leads_and_the_standby_takes_over_from_a_leader_that_is_killed(
    user: User, source: str
) -> None:
    first = await user.leader()
    for index in range(2):
        status, _ = await get(f"http://{user.cluster.binder_address(index)}:{BINDER_ADMIN_PORT}/readyz")
        assert status == 200  # the standby is ready: it can take over
    leader = user.cluster.binders[first]
    await leader.stop(grace_seconds=0)  # SIGKILL: it cannot let go of its Lease
    try:
        await user.apply(model_deployment("orphaned", source=source, gpu_mem="1Gi"))
        await user.ready("orphaned")
        assert await user.leaders() == [1 - first]
    finally:
        await leader.start()
