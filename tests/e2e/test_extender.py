"""The real kube-scheduler with the binder as its extender, beside the binder's own pods."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession

from localcluster.cluster import EXTENDER_PORT
from localcluster.samples import model_pod
from tests.e2e.support import KEYS, User
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXTENDED = {"schedulerName": "trtis-kube-scheduler"}


async def test_kube_scheduler_places_a_model_pod_and_it_serves(user: User, source: str) -> None:
    await user.apply(model_pod("extended", source=source, gpu_mem="1Gi", pod_spec=EXTENDED))
    (pod,) = await user.ready("extended")
    choice = json.loads(pod["metadata"]["annotations"][KEYS.gpu])
    assert choice["bytes"] == 1024**3
    listed = (await user.report(pod["spec"]["nodeName"]))["models"]
    assert [model["gpu"] for model in listed] == [choice["uuid"]]


async def test_what_only_kube_scheduler_decides_works_with_the_extender(user: User, source: str) -> None:
    """A claim that waits for its first consumer: the binder refuses it and says who can."""
    storage = "waits-for-a-pod"
    await user.client.create(
        "/apis/storage.k8s.io/v1/storageclasses",
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": storage},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
    )
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["gpu-2"]}]}]
    await user.client.create(
        "/api/v1/persistentvolumes",
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "on-gpu-2"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": storage,
                "local": {"path": "/tmp"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            },
        },
    )
    claims = "/api/v1/namespaces/default/persistentvolumeclaims"
    await user.client.create(
        claims,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": storage,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    )
    mounted: dict[str, Any] = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    try:
        refused = model_pod("unbound", source=source, gpu_mem="1Gi")
        refused["spec"].setdefault("volumes", []).append(mounted)
        await user.apply(refused)
        message = await user.event(await user.pod("unbound"), "FailedScheduling")
        assert "VolumeClaimNotBound" in message
        assert "extender" in message
        await user.client.delete("/api/v1/namespaces/default/pods/unbound", grace_seconds=0)

        placed = model_pod("bound", source=source, gpu_mem="1Gi", pod_spec=EXTENDED)
        placed["spec"].setdefault("volumes", []).append(mounted)
        await user.apply(placed)

        async def bound() -> None:
            pod = await user.pod("bound")
            assert pod["spec"].get("nodeName") == "gpu-2", pod["status"]
            assert KEYS.gpu in pod["metadata"]["annotations"]

        await eventually(bound, what="a pod on its volume's node")
    finally:
        await user.client.delete("/api/v1/namespaces/default/pods/bound", grace_seconds=0)
        await user.gone_pod("bound")
        await user.client.delete(f"{claims}/data")
        await user.client.delete("/api/v1/persistentvolumes/on-gpu-2")
        await user.client.delete(f"/apis/storage.k8s.io/v1/storageclasses/{storage}")


@pytest.mark.nightly
async def test_both_modes_together_never_give_the_same_bytes_twice(user: User, source: str) -> None:
    """More pods than fit, half of each kind, all at once: what is given out stays within every GPU."""
    names = [f"crowd-{number}" for number in range(10)]
    pods = [
        model_pod(name, source=source, gpu_mem="7Gi", pod_spec=EXTENDED if number % 2 else {})
        for number, name in enumerate(names)
    ]
    await asyncio.gather(*(user.apply(pod) for pod in pods))

    async def full() -> list[dict[str, Any]]:
        found = [await user.pod(name) for name in names]
        placed = [pod for pod in found if pod["spec"].get("nodeName")]
        # 16 GiB hold two of 7 GiB, 8 GiB one and 24 GiB three.
        assert len(placed) == 6, len(placed)
        return placed

    placed = await eventually(full, seconds=90, what="the GPUs full")
    await asyncio.sleep(3)  # nobody slips in late
    placed = await full()
    given: dict[str, int] = {}
    for pod in placed:
        choice = json.loads(pod["metadata"]["annotations"][KEYS.gpu])
        given[choice["uuid"]] = given.get(choice["uuid"], 0) + choice["bytes"]
    totals = {"GPU-1-0": 16, "GPU-2-0": 8, "GPU-2-1": 24}
    assert all(bytes <= totals[uuid] * 1024**3 for uuid, bytes in given.items()), given
    assert {pod["spec"]["schedulerName"] for pod in placed} == {"trtis-scheduler", "trtis-kube-scheduler"}


async def test_a_replica_that_does_not_lead_sends_its_caller_on(user: User) -> None:
    answers = []
    async with ClientSession() as session:
        for index in range(2):
            url = f"http://{user.cluster.binder_address(index)}:{EXTENDER_PORT}/filter"
            async with session.post(url, data=b"[]", allow_redirects=False) as answer:
                answers.append((answer.status, answer.headers.get("Location", "")))
    (refused, _), (moved, where) = sorted(answers)[::-1]
    assert (refused, moved) == (400, 307)
    leader = next(i for i in range(2) if answers[i][0] == 400)
    assert where == f"http://{user.cluster.binder_address(leader)}:{EXTENDER_PORT}/filter"
