"""A model on a real node: kubelet, containerd, Berth's own image and `deploy/base`."""

import pytest

from localcluster.inference import infer_grpc, infer_rest
from localcluster.samples import model_deployment
from tests.node.support import NodeUser

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_model_is_served(user: NodeUser, source: str) -> None:
    await user.apply(model_deployment("simple", source=source, gpu_mem="400Mi"))
    (pod,) = await user.ready("simple")
    await infer_rest(await user.door(pod, 9000), "simple")
    await infer_grpc(await user.door(pod, 9001), "simple")
