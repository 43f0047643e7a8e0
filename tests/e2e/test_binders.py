"""Two binders at once: one places pods, and the other takes over when it dies."""

import pytest

from localcluster.cluster import BINDER_ADMIN_PORT
from localcluster.samples import model_deployment
from tests.e2e.support import User, eventually, get

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def leaders(user: User) -> list[int]:
    """The replicas that say that they lead."""
    leading = []
    for index in range(len(user.cluster.binders)):
        try:
            _, metrics = await get(f"http://{user.cluster.binder_address(index)}:{BINDER_ADMIN_PORT}/metrics")
        except OSError:
            continue
        if "berth_binder_leader 1.0" in metrics:
            leading.append(index)
    return leading


async def test_one_leads_and_the_standby_takes_over_from_a_leader_that_is_killed(
    user: User, source: str
) -> None:
    async def one_leads() -> int:
        found = await leaders(user)
        assert len(found) == 1, found
        return found[0]

    first = await eventually(one_leads)
    for index in range(2):
        status, _ = await get(f"http://{user.cluster.binder_address(index)}:{BINDER_ADMIN_PORT}/readyz")
        assert status == 200  # the standby is ready: it can take over
    leader = user.cluster.binders[first]
    await leader.stop(grace_seconds=0)  # SIGKILL: it cannot let go of its Lease
    try:
        await user.apply(model_deployment("orphaned", source=source, gpu_mem="1Gi"))
        await user.ready("orphaned")
        assert await leaders(user) == [1 - first]
    finally:
        await leader.start()
