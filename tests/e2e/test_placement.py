"""What needs more than one decision: preemption, a second node after a failed load, and the questions
that people ask before they create a pod."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from berth.kube.errors import NotFound
from localcluster.samples import SIMPLE_MODEL, model_deployment, model_pod, packed
from tests.e2e.support import KEYS, User, berth
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A model that finds too little memory on one node, whatever was promised.
FAILS_ON_GPU_1 = b"""
    def initialize(self, args):
        if "gpu-1" in args["model_repository"]:
            raise RuntimeError("CUDA out of memory")
"""
ON_GPU_1 = {"nodeSelector": {"kubernetes.io/hostname": "gpu-1"}}


def prefers(node: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    preferred = [{"weight": 1, "preference": term}]
    return {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}


@pytest.fixture
def picky(url: Callable[[str, bytes], str]) -> str:
    """The URL of a model that loads on every node but gpu-1."""
    model = (SIMPLE_MODEL / "1" / "model.py").read_bytes() + FAILS_ON_GPU_1
    config = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
    return url("picky.tar.gz", packed(**{"config.pbtxt": config, "1/model.py": model}))


async def test_a_load_that_failed_for_want_of_memory_is_tried_on_another_node(user: User, picky: str) -> None:
    await user.apply(model_deployment("picky", source=picky, gpu_mem="1Gi", pod_spec=prefers("gpu-1")))
    (pod,) = await user.ready("picky")
    assert pod["spec"]["nodeName"] == "gpu-2"


async def test_a_pinned_pod_stays_and_its_condition_says_why(user: User, picky: str) -> None:
    pinned = model_deployment(
        "pinned", source=picky, gpu_mem="1Gi", pod_spec=ON_GPU_1, annotations={KEYS.server: "triton"}
    )
    await user.apply(pinned)

    async def told() -> dict[str, Any]:
        pod = await user.pod_of("pinned")
        conditions = {c["type"]: c for c in pod["status"].get("conditions") or []}
        assert KEYS.loaded_condition in conditions, conditions
        return conditions[KEYS.loaded_condition]  # type: ignore[no-any-return]

    condition = await eventually(told)
    assert condition["status"] == "False"
    assert "out of memory" in condition["message"]
    assert "pinned to server triton" in condition["message"]


@pytest_asyncio.fixture(loop_scope="session")
async def important(user: User) -> str:
    name = "berth-important"
    try:
        await user.client.get(f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}")
    except NotFound:
        body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        await user.client.create("/apis/scheduling.k8s.io/v1/priorityclasses", {**body, "value": 1000})
    return name


@pytest.mark.nightly
async def test_a_pod_of_higher_priority_takes_the_place_of_others_within_their_budgets(
    user: User, source: str, important: str
) -> None:
    for name in ("kept", "spent"):
        await user.apply(model_deployment(name, source=source, gpu_mem="7Gi", pod_spec=ON_GPU_1))
        await user.ready(name)
    budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    await user.client.create(
        budgets,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "kept"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}},
        },
    )
    try:
        (kept,) = await user.pods("kept")
        spec = {**ON_GPU_1, "priorityClassName": important}
        await user.apply(model_pod("vip", source=source, gpu_mem="7Gi", pod_spec=spec))
        await user.ready("vip")
        assert [pod["metadata"]["uid"] for pod in await user.pods("kept")] == [kept["metadata"]["uid"]]
        assert "Preempted" in {event["reason"] for event in await user.events_of("spent")}
        (spent,) = await user.pods("spent")
        assert spent["spec"].get("nodeName") is None
    finally:
        await user.client.delete(f"{budgets}/kept")


async def test_would_fit_answers_for_a_pod_that_does_not_exist(
    user: User, source: str, tmp_path: Path
) -> None:
    kubeconfig = f"--kubeconfig={user.cluster.kubeconfig}"
    document = tmp_path / "pod.yaml"
    document.write_text(yaml.safe_dump(model_deployment("asked", source=source, gpu_mem="20Gi")))
    code, out, err = await berth("would-fit", "-f", str(document), kubeconfig, "-o", "json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["fits"]
    assert {node["node"]: node["reason"] for node in answer["nodes"]} == {
        "gpu-1": "GPUMemoryInsufficient",
        "gpu-2": None,
    }
    document.write_text(yaml.safe_dump(model_deployment("asked", source=source, gpu_mem="40Gi")))
    code, out, err = await berth("would-fit", "-f", str(document), kubeconfig)
    assert (code, err) == (1, "")
    assert "no GPU is large enough: 40 GiB asked" in out
    document.write_text("kind: ConfigMap")
    code, _, err = await berth("would-fit", "-f", str(document), kubeconfig)
    assert code == 2
    assert "--filename" in err
