"""The process kubelet under the real API server: what a real kubelet would do with these pods."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from berth.contract.keys import AGENT_AUDIENCE
from berth.kube.token_review import TokenRefused, review_pod_token
from localcluster.cluster import ClusterSpec, LocalCluster
from localcluster.guard import processes_of
from localcluster.processes import reaping
from tests.e2e.support import User, is_ready
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

Json = dict[str, Any]


def shell(script: str, *, name: str = "main", **more: Any) -> Json:
    return {"name": name, "image": "any", "command": ["sh", "-c", script], **more}


def bound(name: str, *containers: Json, **spec: Any) -> Json:
    """A pod that is bound to a node by hand, as a DaemonSet's would be."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeName": "gpu-1",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "restartPolicy": "Never",
            "containers": list(containers),
            **spec,
        },
    }


async def ended(user: User, name: str, phase: str) -> Json:
    async def check() -> Json:
        found = await user.pod(name)
        assert found["status"]["phase"] == phase, found["status"]
        return found

    return await eventually(check, seconds=30)


def log_of(cluster: LocalCluster, pod: Json, container: str, run: int = 0) -> str:
    directory = cluster.nodes["gpu-1"].directory / "pods" / pod["metadata"]["uid"] / "containers" / container
    return (directory / f"{run}.log").read_text()


async def test_init_containers_run_in_order_and_share_volumes(user: User) -> None:
    mounts = [{"name": "work", "mountPath": "/work"}]
    inits = [shell(f"echo {n} >> /work/order", name=f"init-{n}", volumeMounts=mounts) for n in range(3)]
    main = shell('test "$(cat /work/order | tr -d "\\n")" = 012', volumeMounts=mounts)
    await user.apply(bound("order", main, initContainers=inits, volumes=[{"name": "work", "emptyDir": {}}]))
    done = await ended(user, "order", "Succeeded")
    assert [s["state"]["terminated"]["reason"] for s in done["status"]["initContainerStatuses"]] == [
        "Completed"
    ] * 3


async def test_a_failed_init_container_fails_the_pod_and_nothing_follows(
    user: User, cluster: LocalCluster
) -> None:
    await user.apply(
        bound(
            "broken",
            shell("echo never"),
            initContainers=[
                shell("echo why >&2; exit 3", name="init", terminationMessagePolicy="FallbackToLogsOnError")
            ],
        )
    )
    done = await ended(user, "broken", "Failed")
    (status,) = done["status"]["initContainerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 3
    assert status["state"]["terminated"]["message"] == "why"
    assert "waiting" in done["status"]["containerStatuses"][0]["state"]


async def test_environment_fields_and_a_termination_message(user: User) -> None:
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    await user.apply(bound("fields", shell("echo $(IP) $NODE > /dev/termination-log", env=env)))
    done = await ended(user, "fields", "Succeeded")
    message = done["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert message == f"{done['status']['podIP']} gpu-1\n"
    assert done["status"]["podIP"].startswith(done["status"]["hostIP"].rpartition(".")[0])


async def test_a_projected_token_is_the_pods_own_and_for_its_audience(
    user: User, cluster: LocalCluster
) -> None:
    volume = {
        "name": "token",
        "projected": {"sources": [{"serviceAccountToken": {"path": "token", "audience": AGENT_AUDIENCE}}]},
    }
    main = shell("cat /tok/token; sleep 60", volumeMounts=[{"name": "token", "mountPath": "/tok"}])
    await user.apply(bound("holder", main, volumes=[volume]))

    async def written() -> str:
        found = log_of(cluster, await user.pod("holder"), "main")
        assert found.count(".") == 2
        return found

    token = await eventually_file(written)
    reviewed = await review_pod_token(user.client, token, audience=AGENT_AUDIENCE)
    assert reviewed.ref.uid == (await user.pod("holder"))["metadata"]["uid"]
    with pytest.raises(TokenRefused):
        await review_pod_token(user.client, token, audience="another")


async def said_by(user: User, name: str, words: str) -> Json:
    """The pod, once its container `main` has said that."""

    async def check() -> Json:
        pod = await user.pod(name)
        assert words in log_of(user.cluster, pod, "main")
        return pod

    found: Json = await eventually_file(check)
    return found


async def eventually_file(check: Any) -> Any:
    async def there() -> Any:
        try:
            return await check()
        except FileNotFoundError as error:
            raise AssertionError(str(error)) from error

    return await eventually(there, seconds=30)


async def test_probes_make_ready_and_liveness_restarts(user: User, cluster: LocalCluster) -> None:
    mounts = [{"name": "work", "mountPath": "/work"}]
    main = shell(
        "touch /work/ready; sleep 60",
        volumeMounts=mounts,
        readinessProbe={"exec": {"command": ["test", "-e", "/work/ready"]}, "periodSeconds": 1},
        livenessProbe={
            "exec": {"command": ["test", "!", "-e", "/work/sick"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
    )
    await user.apply(
        bound("probed", main, restartPolicy="Always", volumes=[{"name": "work", "emptyDir": {}}])
    )

    async def ready() -> Json:
        found = await user.pod("probed")
        assert is_ready(found)
        return found

    pod = await eventually(ready, seconds=30)
    work = cluster.nodes["gpu-1"].directory / "pods" / pod["metadata"]["uid"] / "volumes" / "work"
    (work / "ready").unlink()

    async def unready() -> None:
        assert not is_ready(await user.pod("probed"))

    await eventually(unready, seconds=30)
    (work / "sick").touch()

    async def restarted() -> None:
        (status,) = (await user.pod("probed"))["status"]["containerStatuses"]
        assert status["restartCount"] >= 1
        assert status["lastState"]["terminated"]["exitCode"] == 143

    await eventually(restarted, seconds=30)


async def test_restart_policies(user: User) -> None:
    await user.apply(bound("onfailure", shell("exit 0"), restartPolicy="OnFailure"))
    await ended(user, "onfailure", "Succeeded")
    await user.apply(bound("always", shell("exit 0"), restartPolicy="Always"))

    async def again() -> None:
        (status,) = (await user.pod("always"))["status"].get("containerStatuses") or [{}]
        assert status.get("restartCount", 0) >= 1

    await eventually(again, seconds=30)


async def test_termination_is_prestop_then_sigterm_then_sigkill(user: User, cluster: LocalCluster) -> None:
    main = shell(
        "trap 'echo got TERM' TERM; echo started; while true; do sleep 0.1; done",
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.3"]}}},
    )
    await user.apply(bound("stubborn", main, terminationGracePeriodSeconds=2))
    pod = await said_by(user, "stubborn", "started")

    async def its_pid() -> int:
        try:
            return cluster.pid_of("default", "stubborn", "main")
        except ProcessLookupError as error:  # it may speak before its kubelet knows that it runs
            raise AssertionError(str(error)) from error

    pid = await eventually(its_pid)
    began = time.monotonic()
    await user.client.delete("/api/v1/namespaces/default/pods/stubborn")
    await user.gone_pod("stubborn")
    assert 1.5 < time.monotonic() - began < 10
    assert not Path(f"/proc/{pid}").exists()
    assert "got TERM" in log_of(cluster, pod, "main")


async def test_a_container_beyond_its_memory_limit_is_killed_and_says_so(user: User) -> None:
    """node D2: as a kubelet reports it, and started again with its back-off."""
    grows = f"exec {sys.executable} -c 'import time; kept = bytearray(200 * 1024**2); time.sleep(1000)'"
    main = shell(grows, resources={"limits": {"memory": "100Mi"}})
    await user.apply(bound("greedy", main, restartPolicy="Always"))

    async def killed_twice() -> None:
        statuses = (await user.pod("greedy"))["status"].get("containerStatuses", [])
        status = statuses[0] if statuses else {}
        last = status.get("lastState", {}).get("terminated", {})
        assert (last.get("reason"), last.get("exitCode")) == ("OOMKilled", 137), status
        assert status["restartCount"] >= 1
        assert status["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff", status

    await eventually(killed_twice, seconds=60)


async def test_a_host_path_is_the_nodes_own(user: User, cluster: LocalCluster) -> None:
    volume = {"name": "host", "hostPath": {"path": "/var/lib/probe", "type": "DirectoryOrCreate"}}
    mounts = [{"name": "host", "mountPath": "/data", "subPath": "sub"}]
    main = shell("echo here > /data/file", volumeMounts=mounts)
    await user.apply(bound("hostpath", main, volumes=[volume]))
    await ended(user, "hostpath", "Succeeded")
    assert cluster.nodes["gpu-1"].kubelet.host_path("/var/lib/probe/sub/file").read_text() == "here\n"
    assert not Path("/var/lib/probe").exists()


async def test_a_pod_with_a_host_port_has_the_nodes_address(user: User, cluster: LocalCluster) -> None:
    main = shell("true", ports=[{"containerPort": 7777, "hostPort": 7777}])
    await user.apply(bound("hostport", main))
    status = (await ended(user, "hostport", "Succeeded"))["status"]
    assert status["podIP"] == status["hostIP"] == cluster.nodes["gpu-1"].address


async def test_berths_own_pods_are_placed_by_the_real_controllers(cluster: LocalCluster) -> None:
    """DaemonSet controller, Deployment controller and kube-scheduler; no process of Berth's is started otherwise."""
    pods = (await cluster.client.get("/api/v1/namespaces/berth-system/pods"))["items"]
    owners = {
        (
            pod["metadata"]["ownerReferences"][0]["kind"],
            pod["metadata"]["labels"]["app.kubernetes.io/name"],
        ): 0
        for pod in pods
    }
    for pod in pods:
        owner = pod["metadata"]["ownerReferences"][0]["kind"]
        owners[(owner, pod["metadata"]["labels"]["app.kubernetes.io/name"])] += 1
        assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert owners == {
        ("DaemonSet", "berth-agent"): 2,
        ("DaemonSet", "berth-server"): 2,
        ("ReplicaSet", "berth-binder"): 2,
    }


async def test_a_part_that_is_stopped_stays_away_and_one_that_is_killed_comes_back(
    cluster: LocalCluster,
) -> None:
    agent = cluster.nodes["gpu-2"].agent
    await agent.stop()
    assert agent.pid is None
    await asyncio.sleep(2)
    assert agent.pid is None
    await agent.start()
    before = agent.pid
    agent.kill()

    async def another() -> None:
        assert agent.pid not in (None, before)

    await eventually(another, seconds=30)


async def test_what_cannot_run_is_refused_with_an_event(user: User) -> None:
    await user.apply(bound("foreign", {"name": "main", "image": "nginx"}))
    refused = await ended(user, "foreign", "Failed")
    assert "cannot be pulled here" in refused["status"]["message"]
    assert "cannot be pulled here" in await user.event(refused, "CannotRun")


async def test_a_pod_deleted_before_it_started_leaves_nothing(user: User) -> None:
    await user.apply(bound("brief", shell("sleep 60")))
    await user.client.delete("/api/v1/namespaces/default/pods/brief", grace_seconds=0)

    async def nothing() -> None:
        kubelet = user.cluster.nodes["gpu-1"].kubelet
        assert "brief" not in [runner.ref.name for runner in kubelet.runners()]

    await eventually(nothing, seconds=30)


PARENT = """
import asyncio, sys
from localcluster.cluster import ClusterSpec, LocalCluster, NodeSpec

async def main():
    spec = ClusterSpec(nodes=[NodeSpec("n", "gpus: []")], binders=1)
    async with LocalCluster(spec) as cluster:
        pod = {pod!r}
        await cluster.apply([pod])
        while True:
            try:
                cluster.pid_of("default", "sleeper", "main")
                break
            except (KeyError, ProcessLookupError):
                await asyncio.sleep(0.05)
        print(cluster.id, cluster.directory, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_kill_9_of_the_cluster_leaves_no_process_behind() -> None:
    """Beside the tests' own cluster, which also shows that two live side by side."""
    pod = bound("sleeper", shell("setsid sh -c 'sleep 3600' & sleep 3600"))
    pod["spec"]["nodeName"] = "n"
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT.format(pod=pod),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "."},
    )
    async with reaping(parent):  # by SIGKILL
        assert parent.stdout is not None
        async with asyncio.timeout(60):
            cluster_id, directory = (await parent.stdout.readline()).decode().split()
        assert len(processes_of(cluster_id)) >= 7

    async def gone() -> None:
        assert processes_of(cluster_id) == []
        assert not Path(directory).exists()
        assert not list(Path("/dev/shm").glob(f"*{cluster_id}*"))

    await eventually(gone, seconds=15)


async def test_a_cluster_without_nodes_starts_and_ends() -> None:
    async with LocalCluster(ClusterSpec(binders=0)) as small:
        assert (await small.client.get("/version"))["gitVersion"].startswith("v1.")
        directory = small.directory
    assert not directory.exists()
