"""A model on a real node: kubelet, containerd, Berth's own image and `deploy/base`."""

import json
from collections.abc import Callable

import pytest

from berth.contract.gpu_choice import GpuChoice
from localcluster.node.cluster import NODE
from localcluster.samples import SIMPLE_MODEL, model_pod, packed
from tests.e2e.support import KEYS, Json
from tests.node.support import (
    SYSTEM,
    NodeUser,
    Served,
    client_pod,
    command_of,
    container_status,
    finished,
    status_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What a client in another pod does, with what Berth's image has: REST and gRPC, both through the Service.
CLIENT = """
import json, os, urllib.request
import grpc
import numpy as np
from berth.triton.wire import grpc_service_pb2 as messages, grpc_service_pb2_grpc as services

host = os.environ["SERVICE"]
left, right = list(range(16)), [1] * 16
tensors = [{"name": n, "datatype": "INT32", "shape": [16]} for n in ("INPUT0", "INPUT1")]
body = json.dumps({"inputs": [t | {"data": d} for t, d in zip(tensors, (left, right))]}).encode()
with urllib.request.urlopen(f"http://{host}:9000/v2/models/simple/infer", body, timeout=20) as answer:
    outputs = {output["name"]: output["data"] for output in json.load(answer)["outputs"]}
assert outputs["OUTPUT0"] == [n + 1 for n in left] and outputs["OUTPUT1"] == [n - 1 for n in left], outputs

request = messages.ModelInferRequest(
    model_name="simple",
    inputs=[messages.ModelInferRequest.InferInputTensor(**t) for t in tensors],
    raw_input_contents=[np.array(d, dtype=np.int32).tobytes() for d in (left, right)],
)
answer = services.GRPCInferenceServiceStub(grpc.insecure_channel(f"{host}:9001")).ModelInfer(request, timeout=20)
found = {o.name: np.frombuffer(raw, np.int32).tolist() for o, raw in zip(answer.outputs, answer.raw_output_contents)}
assert found == outputs, found
"""
CONFIG = (SIMPLE_MODEL / "config.pbtxt").read_bytes()
BROKEN = (SIMPLE_MODEL / "1" / "model.py").read_bytes() + (
    b"\n    def initialize(self, args):\n        raise RuntimeError('no weights here')\n"
)


async def test_a_model_is_served_to_another_pod_through_its_service(user: NodeUser, simple: Served) -> None:
    service = await user.client.get("/api/v1/namespaces/default/services/simple")
    await user.apply(client_pod("client", CLIENT, SERVICE=service["spec"]["clusterIP"]))
    pod = await finished(user, "client")
    ended = container_status(pod, "client")["state"]["terminated"]
    assert ended["exitCode"] == 0, ended.get("message")


async def test_init_containers_run_one_after_the_other_before_the_others(
    user: NodeUser, simple: Served
) -> None:
    for pod in [*await user.berth_is_ready(), await simple.pod()]:
        before = ""
        for wanted in pod["spec"].get("initContainers") or []:
            ended = container_status(pod, wanted["name"])["state"]["terminated"]
            assert ended["exitCode"] == 0
            assert before <= ended["startedAt"], wanted["name"]
            before = ended["finishedAt"]
        for running in pod["status"]["containerStatuses"]:
            assert before <= running["state"]["running"]["startedAt"], running["name"]
            assert running["restartCount"] == 0, f"it came up at the first attempt: {running}"


async def test_every_container_runs_as_declared(user: NodeUser, simple: Served) -> None:
    pods = [*await user.berth_is_ready(), await simple.pod()]
    checked = [
        check_container(user, pod, container) for pod in pods for container in pod["spec"]["containers"]
    ]
    assert sorted(checked) == ["agent", "binder", "binder", "gateway", "proxy", "triton"]


def check_container(user: NodeUser, pod: Json, container: Json) -> str:
    """Its user, capabilities, seccomp, privileges and file system, as the kernel has them; its name."""
    name, declared = container["name"], (pod["spec"]["securityContext"] | container["securityContext"])
    pids = user.processes(pod, name)
    assert pids
    for pid in pids:
        status = status_of(pid)
        assert set(status["Uid"].split()) == {str(declared["runAsUser"])}, (name, command_of(pid))
        assert set(status["Gid"].split()) == {str(declared["runAsGroup"])}, (name, command_of(pid))
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, (name, command_of(pid))
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), (name, command_of(pid))
    with open(f"/proc/{pids[0]}/mounts") as mounts:
        options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
    assert "ro" in options["/"], name
    for mount in container["volumeMounts"]:
        where = mount["mountPath"].replace("/var/run/", "/run/")  # a link in the image
        assert ("ro" in options[where]) == mount.get("readOnly", False), (name, mount)
    return name


async def test_the_first_process_of_berths_containers_is_the_one_that_passes_signals_on(
    user: NodeUser, simple: Served
) -> None:
    proxy, agent, server = (
        await simple.pod(),
        await user.daemon("berth-agent"),
        await user.daemon("berth-server"),
    )
    for pod, name in ((proxy, "proxy"), (agent, "agent"), (server, "gateway")):
        assert command_of(user.processes(pod, name)[0]) == "tini"


async def test_only_the_agent_has_a_token_of_the_api_server(user: NodeUser, simple: Served) -> None:
    server, agent = await user.daemon("berth-server"), await user.daemon("berth-agent")
    token = "run/secrets/kubernetes.io/serviceaccount/token"
    for pod, name, has in (
        (server, "triton", False),
        (server, "gateway", False),
        (agent, "agent", True),
        (await simple.pod(), "proxy", False),
    ):
        first = user.processes(pod, name)[0]
        try:
            with open(f"/proc/{first}/root/{token}") as file:
                found = bool(file.read())
        except FileNotFoundError:
            found = False
        assert found == has, name


async def test_a_failed_load_tells_its_reason_in_the_pods_status(
    user: NodeUser, url: Callable[[str, bytes], str]
) -> None:
    source = url("broken.tar.gz", packed(**{"config.pbtxt": CONFIG, "1/model.py": BROKEN}))
    await user.apply(model_pod("broken", source=source, gpu_mem="1Gi", pod_spec={"restartPolicy": "Never"}))
    ended = container_status(await finished(user, "broken"), "loader")["state"]["terminated"]
    assert ended["exitCode"] == 1
    assert "no weights here" in ended["message"]


async def test_what_the_kubelet_refuses_after_the_bind_holds_no_gpu_memory(
    user: NodeUser, source: str
) -> None:
    """The binder bound it when there were processors yet; somebody else was quicker."""
    most = str(20 * 1024**3)
    pod = model_pod("late", source=source, gpu_mem=most, pod_spec={"schedulerName": "nobody"})
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "1000"
    await user.apply(pod)
    choice = GpuChoice(uuid="GPU-1", index=1, bytes=int(most)).encode()
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "late", "annotations": {KEYS.gpu: choice}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
    }
    binder = f"--as=system:serviceaccount:{SYSTEM}:berth-binder"
    await user.cluster.kubectl(
        *("create", binder, "--raw=/api/v1/namespaces/default/pods/late/binding", "-f", "-"),
        text=json.dumps(binding),
    )
    refused = await finished(user, "late")
    assert refused["status"]["reason"] == "OutOfcpu"
    # Only the GPU of 24 GiB has room for it, and only if nobody counts the other.
    await user.apply(model_pod("next", source=source, gpu_mem=most))
    await user.ready("next")


async def test_a_container_that_needs_more_memory_than_its_limit_is_ended_alone(
    user: NodeUser, simple: Served, source: str
) -> None:
    pod = model_pod("tight", source=source, gpu_mem="1Gi", pod_spec={"restartPolicy": "Never"})
    pod["spec"]["initContainers"][0]["resources"]["limits"] = {"memory": "16Mi"}
    pod["spec"]["initContainers"][0]["resources"]["requests"] = {"memory": "16Mi"}
    await user.apply(pod)
    ended = container_status(await finished(user, "tight"), "loader")["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    await simple.infer()
