"""The main job on the real parts: place, load, serve, isolate, explain, unload."""

import json
from collections.abc import Callable

import pytest

from berth.contract.gpu_choice import GpuChoice
from localcluster.cluster import LocalCluster
from localcluster.inference import infer_grpc, infer_rest, is_hidden
from localcluster.samples import SIMPLE_MODEL, model_deployment, model_pod, packed
from tests.e2e.support import KEYS, User, berth, get
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_model_is_placed_loaded_served_and_unloaded(user: User, source: str) -> None:
    await user.apply(model_deployment("resnet", source=source, gpu_mem="11Gi"))
    (pod,) = await user.ready("resnet")
    choice = GpuChoice.decode(pod["metadata"]["annotations"][KEYS.gpu])
    assert choice.bytes == 11 * 1024**3
    ip = pod["status"]["podIP"]
    await infer_rest(f"{ip}:9000", "resnet")
    await infer_grpc(f"{ip}:9001", "resnet")
    node = pod["spec"]["nodeName"]
    (model,) = (await user.report(node))["models"]
    assert (model["state"], model["gpu"], model["measuredBytes"]) == ("ready", choice.uuid, 11 * 1024**3)
    assert "GPU" in await user.event(pod, "Scheduled")
    await user.delete_deployment("resnet")
    await user.gone("resnet")

    async def unloaded() -> None:
        assert await user.models_on(node) == {}

    await eventually(unloaded, what="the model to be unloaded")
    assert user.repository(node) == []


async def test_files_from_a_directory_and_a_pod_without_an_id(user: User) -> None:
    pod = model_pod("anonymous", source=f"file://{SIMPLE_MODEL}", gpu_mem="1Gi")
    del pod["metadata"]["annotations"][KEYS.model_id]
    await user.apply(pod)
    (ready,) = await user.ready("anonymous")
    await infer_rest(f"{ready['status']['podIP']}:9000", "anonymous")


async def test_a_name_in_the_config_is_overwritten_by_the_pods_own(
    user: User, url: Callable[[str, bytes], str]
) -> None:
    """Ecosystem A5."""
    files = {name: (SIMPLE_MODEL / name).read_bytes() for name in ("config.pbtxt", "1/model.py")}
    files["config.pbtxt"] = b'name: "resnet"\n' + files["config.pbtxt"]
    await user.apply(model_pod("renamed", source=url("renamed.tar.gz", packed(**files)), gpu_mem="1Gi"))
    (ready,) = await user.ready("renamed")
    await infer_rest(f"{ready['status']['podIP']}:9000", "renamed")


async def test_one_model_once_per_node_and_replicas_on_several(user: User, source: str) -> None:
    await user.apply(model_deployment("twin", source=source, gpu_mem="1Gi", replicas=3))
    pods = await user.ready("twin", count=2)
    assert {pod["spec"]["nodeName"] for pod in pods} == {"gpu-1", "gpu-2"}
    (pending,) = [pod for pod in await user.pods("twin") if not pod["spec"].get("nodeName")]
    assert "2 ModelAlreadyOnNode" in await user.event(pending, "FailedScheduling")


async def test_too_big_waits_with_its_reason_and_is_placed_when_there_is_room(
    user: User, source: str
) -> None:
    await user.apply(model_deployment("big", source=source, gpu_mem="20Gi"))
    (big,) = await user.ready("big")
    assert big["spec"]["nodeName"] == "gpu-2"
    await user.apply(model_deployment("huge", source=source, gpu_mem="20Gi"))

    async def refused() -> str:
        pod = await user.pod_of("huge")
        said = [
            c["message"] for c in pod["status"].get("conditions", []) if c.get("reason") == "Unschedulable"
        ]
        assert said
        return str(said[0])

    message = await eventually(refused)
    assert message.startswith("0/2 nodes: 2 GPUMemoryInsufficient (")
    assert "short on the best GPU" in message
    await user.delete_deployment("big")
    (huge,) = await user.ready("huge")
    await infer_rest(f"{huge['status']['podIP']}:9000", "huge")


async def test_a_proxy_reaches_its_own_model_and_nothing_else(
    user: User, source: str, cluster: LocalCluster
) -> None:
    only_node = {"nodeSelector": {"kubernetes.io/hostname": "gpu-2"}}
    for name in ("mine", "theirs"):
        await user.apply(model_deployment(name, source=source, gpu_mem="1Gi", pod_spec=only_node))
    (mine,), (theirs,) = await user.ready("mine"), await user.ready("theirs")
    ip = mine["status"]["podIP"]
    for other in ("theirs", "missing"):
        assert await is_hidden(f"{ip}:9000", f"{ip}:9001", other)
    _, hidden = await get(f"http://{ip}:9000/v2/models/theirs")
    _, missing = await get(f"http://{ip}:9000/v2/models/missing")
    assert hidden.replace("theirs", "missing") == missing
    await infer_rest(f"{theirs['status']['podIP']}:9000", "theirs")


async def test_memory_that_a_model_takes_beyond_its_request_is_counted(user: User, source: str) -> None:
    await user.apply(model_deployment("greedy", source=source, gpu_mem="1Gi"))
    (pod,) = await user.ready("greedy")
    (model,) = (await user.report(pod["spec"]["nodeName"]))["models"]
    assert (model["requestedBytes"], model["measuredBytes"]) == (1024**3, 3 * 1024**3)
    code, out, _ = await berth("top", f"--kubeconfig={user.cluster.kubeconfig}", "--output=json")
    assert code == 0
    gpus = [gpu for node in json.loads(out)["nodes"] for gpu in node["gpus"]]
    assert 3 * 1024**3 in [gpu["reservedBytes"] for gpu in gpus]


async def test_top_and_why_tell_people_and_programs(user: User, source: str) -> None:
    await user.apply(model_deployment("shown", source=source, gpu_mem="2Gi"))
    await user.apply(model_deployment("stuck", source=source, gpu_mem="90Gi"))
    (shown,) = await user.ready("shown")
    kubeconfig = f"--kubeconfig={user.cluster.kubeconfig}"
    code, out, err = await berth("why", shown["metadata"]["name"], kubeconfig, "-o", "json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["stage"], answer["details"]) == ("ready", [])
    assert {"created", "scheduled", "loader started", "loaded"} <= answer["times"].keys()
    code, out, err = await berth("top", kubeconfig)
    assert (code, err) == (0, "")
    assert "gpu-1" in out
    assert "shown" in out
    stuck = await eventually(lambda: user.pod_of("stuck"))
    code, out, err = await berth("why", stuck["metadata"]["name"], kubeconfig)
    assert (code, err) == (0, "")
    for expected in ("gpu-1", "gpu-2", "GPUMemoryInsufficient", "short"):
        assert expected in out
    code, _, err = await berth("why", "nobody", kubeconfig)
    assert code == 1
    assert "nobody" in err


async def test_requirements_and_server_are_honoured(user: User, source: str) -> None:
    wants = {KEYS.requirements: "python,no-such-backend"}
    await user.apply(model_deployment("picky", source=source, gpu_mem="1Gi", annotations=wants))
    await user.apply(
        model_deployment("pinned", source=source, gpu_mem="1Gi", annotations={KEYS.server: "other"})
    )
    picky = await eventually(lambda: user.pod_of("picky"))
    pinned = await eventually(lambda: user.pod_of("pinned"))
    assert "2 MissingCapabilities" in await user.event(picky, "FailedScheduling")
    assert "2 WrongServer" in await user.event(pinned, "FailedScheduling")
