"""What the tests on a real node share."""

from berth.kube import paths
from localcluster.node.cluster import RealCluster
from tests.e2e.support import Json, User, brief, eventually, is_ready

SYSTEM = "berth-system"


class NodeUser(User):
    """A person with kubectl and a Triton client, on the node's side of the network where need be."""

    cluster: RealCluster

    def __init__(self, cluster: RealCluster) -> None:
        super().__init__(cluster)

    async def berth_is_ready(self, seconds: float = 120) -> list[Json]:
        """Berth's own pods, once each wanted one is Ready."""

        async def check() -> list[Json]:
            daemons = (await self.client.get(f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets"))["items"]
            assert daemons
            for daemon in daemons:
                status = daemon["status"]
                assert status.get("numberReady", 0) == status["desiredNumberScheduled"] > 0, status
            pods: list[Json] = (await self.client.get(paths.pods(SYSTEM)))["items"]
            assert len(pods) >= len(daemons) + 2, "two binders"
            assert all(is_ready(pod) for pod in pods), [brief(pod) for pod in pods]
            return pods

        return await eventually(check, seconds=seconds, what="Berth")

    async def door(self, pod: Json, port: int) -> str:
        """HOST:PORT on this side of the network for a port of a pod."""
        return await self.cluster.reach(pod["status"]["podIP"], port)
