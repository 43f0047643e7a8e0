"""What befalls a node and its pods, and how models come out of it: on a real kubelet and containerd."""

import asyncio
import json
from base64 import urlsafe_b64decode
from contextlib import suppress

import pytest

from berth.kube import paths
from localcluster.node.cluster import NODE, KubectlFailed
from localcluster.samples import model_deployment, model_pod
from tests.e2e.support import KEYS, Json, brief, is_ready
from tests.fakes.eventually import eventually
from tests.node.support import (
    SERVICE,
    SYSTEM,
    NodeUser,
    Served,
    client_pod,
    container_status,
    finished,
    steadily,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]


def restarts(pod: Json, container: str) -> int:
    count: int = container_status(pod, container)["restartCount"]
    return count


async def restarted(user: NodeUser, pod: Json, container: str, *, seconds: float = 60) -> Json:
    """The pod once the container runs anew."""

    async def check() -> Json:
        found = await user.pod(pod["metadata"]["name"], pod["metadata"]["namespace"])
        assert restarts(found, container) > restarts(pod, container), brief(found)
        assert "running" in container_status(found, container)["state"], brief(found)
        return found

    return await eventually(check, seconds=seconds, what=f"{container} to run again")


async def test_a_killed_triton_comes_back_with_its_models(user: NodeUser, simple: Served) -> None:
    server, agent, pod = (
        await user.daemon("berth-server"),
        await user.daemon("berth-agent"),
        await simple.pod(),
    )
    user.kill(server, "triton", "tritonserver")
    await restarted(user, server, "triton")
    again = await simple.answers()
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert restarts(await user.daemon("berth-agent"), "agent") == restarts(agent, "agent")
    assert restarts(again, "proxy") == restarts(pod, "proxy")


async def test_a_killed_gateway_is_back_and_nothing_else_is_started_anew(
    user: NodeUser, simple: Served
) -> None:
    server, pod = await user.daemon("berth-server"), await simple.pod()
    user.kill(server, "gateway", "berth")
    after = await restarted(user, server, "gateway", seconds=60)
    again = await simple.answers(seconds=60)
    assert restarts(after, "triton") == restarts(server, "triton")
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert restarts(again, "proxy") == restarts(pod, "proxy")


async def test_models_serve_on_while_the_agent_is_killed_again_and_again(
    user: NodeUser, simple: Served
) -> None:
    pod, over = await simple.pod(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(steadily(simple, over))
        for _ in range(2):
            agent = await user.daemon("berth-agent")
            user.kill(agent, "agent", "berth")
            await restarted(user, agent, "agent")
        await user.berth_is_ready()
        over.set()
    assert serving.result() > 0
    assert restarts(await simple.pod(), "proxy") == restarts(pod, "proxy")


async def test_an_updated_agent_leaves_models_serving(user: NodeUser, simple: Served) -> None:
    """OnDelete: nothing happens until the pod is deleted; then the agent alone is replaced."""
    server, agent = await user.daemon("berth-server"), await user.daemon("berth-agent")
    patch = {"spec": {"template": {"metadata": {"annotations": {"berth.test/version": "2"}}}}}
    await user.cluster.kubectl("-n", SYSTEM, "patch", "daemonset/berth-agent", "-p", json.dumps(patch))
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(steadily(simple, over))
        await user.client.delete(paths.pod(SYSTEM, agent["metadata"]["name"]))

        async def replaced() -> Json:
            found = await user.daemon("berth-agent")
            assert found["metadata"]["uid"] != agent["metadata"]["uid"]
            assert is_ready(found), brief(found)
            return found

        updated = await eventually(replaced, seconds=90, what="the new agent")
        over.set()
    assert serving.result() > 0
    assert updated["metadata"]["annotations"]["berth.test/version"] == "2"
    same = await user.daemon("berth-server")
    assert same["metadata"]["uid"] == server["metadata"]["uid"]
    assert restarts(same, "triton") == restarts(server, "triton")
    await simple.answers()


async def test_the_kubelet_and_containerd_are_killed_and_models_serve_on(
    user: NodeUser, simple: Served
) -> None:
    pod, cluster = await simple.pod(), user.cluster
    before = {cluster.kubelet.pid, cluster.containerd.pid}
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(steadily(simple, over))
        await cluster.kill_runtime()
        over.set()
    assert serving.result() > 0
    assert before.isdisjoint({cluster.kubelet.pid, cluster.containerd.pid})
    again = await simple.answers()
    assert restarts(again, "proxy") == restarts(pod, "proxy")


async def test_a_rebooted_node_serves_its_models_again(user: NodeUser, simple: Served) -> None:
    pod = await simple.pod()
    agent = await user.daemon("berth-agent")
    await user.cluster.reboot()
    await restarted(user, agent, "agent", seconds=120)
    await user.berth_is_ready()
    again = await simple.answers()
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]


async def test_a_drain_waits_for_the_disruption_budget_and_moves_the_model(
    user: NodeUser, simple: Served
) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "simple", "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "simple"}}},
    }
    await user.apply(budget)
    pod, agent = await simple.pod(), await user.daemon("berth-agent")
    drain = ("drain", NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--namespace=default")
    only = "--pod-selector=app=simple"
    with pytest.raises(KubectlFailed, match="disruption budget"):
        await user.cluster.kubectl(*drain, only, "--timeout=3s")
    await simple.infer()
    await user.cluster.kubectl("delete", "pdb/simple")
    await user.cluster.kubectl(*drain, only, "--timeout=60s")

    async def waits() -> Json:
        found = await simple.pod()
        assert found["metadata"]["uid"] != pod["metadata"]["uid"]
        assert "nodeName" not in found["spec"], brief(found)
        return found

    pending = await eventually(waits, what="the model's next pod to wait")
    assert "Unschedulable" in await user.event(pending, "FailedScheduling")
    assert (await user.daemon("berth-agent"))["metadata"]["uid"] == agent["metadata"]["uid"]
    await user.cluster.kubectl("uncordon", NODE)
    await simple.answers()


# Asks a Service for a while, each time over a new connection.
ROLLING = """
import os, sys, time, urllib.request

url = f"http://{os.environ['SERVICE']}:9000/v2/models/rolling"
answers, failures, until = 0, [], time.monotonic() + float(os.environ["SECONDS"])
while time.monotonic() < until:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            answer.read()
        answers += 1
    except OSError as error:
        failures.append(f"{time.monotonic()}: {error}")
    time.sleep(0.02)
sys.exit(None if answers > 100 and not failures else f"{answers} answers; {failures[:5]}")
"""


async def test_a_rolling_update_loses_no_request(user: NodeUser, source: str) -> None:
    """Without an id two pods of one model may be on a node, each with its own in Triton."""
    # The kube-proxy of a busy machine hears of a pod's end seconds later.
    patient = ("--drain-delay=12",)
    rolling = model_deployment("rolling", source=source, gpu_mem="1Gi", proxy_args=patient)
    template = rolling["spec"]["template"]
    del template["metadata"]["annotations"][KEYS.model_id]
    rolling["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    service = {**SERVICE, "metadata": {"name": "rolling", "namespace": "default"}}
    service["spec"] = {**SERVICE["spec"], "selector": {"app": "rolling"}}
    await user.apply(rolling, service)
    (before,) = await user.ready("rolling")
    address = (await user.client.get("/api/v1/namespaces/default/services/rolling"))["spec"]["clusterIP"]
    await user.apply(client_pod("caller", ROLLING, SERVICE=address, SECONDS="30"))
    await asyncio.sleep(3)
    template["metadata"]["annotations"]["example.com/version"] = "2"
    await user.apply(rolling)
    ended = container_status(await finished(user, "caller"), "client")["state"]["terminated"]
    assert ended["exitCode"] == 0, ended.get("message")
    (after,) = await user.ready("rolling")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_a_pod_ends_in_order(user: NodeUser, source: str) -> None:
    """It serves while its preStop hook runs; then SIGTERM, the drain, the end by itself within its grace."""
    pod = model_pod("ending", source=source, gpu_mem="1Gi")
    pod["metadata"]["labels"] = {"app": "ending"}
    pod["metadata"]["finalizers"] = ["berth.test/keep"]  # what the kubelet wrote at last stays to be read
    pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "4"]}}}
    await user.apply(pod)
    try:
        (running,) = await user.ready("ending")
        other = Served(user, "ending")
        await user.client.delete(paths.pod("default", "ending"))
        await other.infer(running)
        await asyncio.sleep(1)
        await other.infer(running)

        async def ended() -> Json:
            found = await user.pod("ending")
            assert "terminated" in container_status(found, "proxy")["state"], brief(found)
            return found

        found = await eventually(ended, seconds=60, what="the pod to end")
        state = container_status(found, "proxy")["state"]["terminated"]
        assert state["exitCode"] == 0, state

        async def unloaded() -> None:
            assert "ending" not in await user.models_on(NODE)

        await eventually(unloaded, what="its model to be gone")
    finally:
        await user.cluster.kubectl(
            "patch", "pod/ending", "--type=merge", '-p={"metadata":{"finalizers":null}}'
        )


async def test_a_pod_that_is_evicted_for_memory_leaves_no_model_behind(
    user: NodeUser, simple: Served
) -> None:
    pod = await simple.pod()
    # A soft threshold is not taken off what the node may give to pods, as a hard one would be.
    await user.cluster.restart_kubelet(
        evictionSoft={"memory.available": "99.9%"},
        evictionSoftGracePeriod={"memory.available": "1s"},
        evictionMaxPodGracePeriod=5,
    )
    try:

        async def evicted() -> None:
            with suppress(Exception):
                found = await user.pod(pod["metadata"]["name"])
                assert found["status"].get("reason") == "Evicted", brief(found)

        await eventually(evicted, seconds=60, what="the eviction")

        async def unloaded() -> None:
            assert "simple" not in await user.models_on(NODE)

        await eventually(unloaded, seconds=60, what="the evicted pod's model to be gone")
    finally:
        await user.cluster.restart_kubelet()
    await user.berth_is_ready()
    await user.client.delete(paths.pod("default", pod["metadata"]["name"]))
    await simple.answers()


async def test_berth_comes_up_on_a_node_where_it_ran_before(user: NodeUser, simple: Served) -> None:
    pod = await simple.pod()
    for kind in ("daemonset/berth-agent", "daemonset/berth-server", "deployment/berth-binder"):
        await user.cluster.kubectl("-n", SYSTEM, "delete", kind)

    async def gone() -> None:
        assert (await user.client.get(paths.pods(SYSTEM)))["items"] == []

    await eventually(gone, seconds=90, what="Berth to be gone")
    await user.cluster.deploy()
    await user.berth_is_ready()
    again = await simple.answers()
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]


def identity(token: str) -> str:
    """Which token it is: the API server's audit log names it so."""
    claims = token.split(".")[1]
    jti: str = json.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["jti"]
    return jti


async def test_berths_processes_take_the_token_that_the_kubelet_has_renewed(
    user: NodeUser, simple: Served
) -> None:
    """The kubelet renews at four fifths of a token's life, eight minutes at least; one that starts renews at once."""
    agent = await user.daemon("berth-agent")
    first = user.processes(agent, "agent")[0]
    path = f"/proc/{first}/root/run/secrets/kubernetes.io/serviceaccount/token"

    def current() -> str:
        with open(path) as file:
            return identity(file.read())

    before = current()
    await user.cluster.restart_kubelet()

    async def renewed() -> None:
        assert current() != before

    await eventually(renewed, seconds=90, what="a new token in the agent's container")

    async def used() -> None:
        assert current() in user.cluster.tokens_seen()

    await eventually(used, seconds=90, what="the agent to come with its new token")
    assert (await user.daemon("berth-agent"))["metadata"]["uid"] == agent["metadata"]["uid"]
