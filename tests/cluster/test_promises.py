"""What may be placed, asked of two real binders over a real API server: by the scaler's own token and nobody else's,
through a standby, after the leader's end; and what is promised is bound, with no pod left over."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from berth.contract.keys import agent_lease_namespace
from berth.contract.scaling import SchedulableAnswer, SchedulableModel, SchedulableRequest
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.times import micro_time
from berth.runtime.options import parse_options
from binder import app
from binder.config import BinderOptions
from localcluster.addresses import cluster_network
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import ControlPlane
from scaler.schedulable import BinderClient
from tests.fakes.eventually import until
from tests.fakes.objects import KEYS, gpu, node, report

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
SYSTEM = "berth-system"
LEASE = f"{paths.leases(SYSTEM)}/berth-binder"
NODES = ("n1", "n2", "n3")


class World:
    """An API server with three nodes of 16 GiB each, and who asks there."""

    def __init__(
        self, client: KubeClient, host: str, kubeconfig: Path, session: aiohttp.ClientSession
    ) -> None:
        self.client, self.host, self.kubeconfig, self.session = client, host, kubeconfig, session

    async def begin(self) -> None:
        for name in (SYSTEM, agent_lease_namespace(SYSTEM), "team"):
            await self.client.create(paths.NAMESPACES, {"metadata": {"name": name}})
        for name in NODES:
            made = node(name, says=report(gpu(f"{name}-0")))
            del made["metadata"]["uid"]
            await self.client.create(paths.NODES, made)
            await self.client.patch(f"{paths.node(name)}/status", {"status": made["status"]})
            # Admission has tainted it as not ready; no controller is here to take that away.
            await self.client.patch(paths.node(name), {"spec": {"taints": []}})
            await self.client.create(
                paths.leases(agent_lease_namespace(SYSTEM)),
                {
                    "metadata": {"name": f"berth-agent-{name}"},
                    "spec": {"renewTime": micro_time(datetime.now(UTC)), "leaseDurationSeconds": 600},
                },
            )
        for account in ("berth-scaler", "somebody"):
            await self.client.create(
                f"/api/v1/namespaces/{SYSTEM}/serviceaccounts", {"metadata": {"name": account}}
            )

    async def token(self, account: str = "berth-scaler", audience: str = "berth-binder") -> str:
        """Bound to a pod, as a kubelet would ask for it."""
        container = {"name": "main", "image": "any"}
        pod = await self.client.create(
            paths.pods(SYSTEM),
            {
                "metadata": {"generateName": account},
                "spec": {"serviceAccountName": account, "containers": [container]},
            },
        )
        meta = pod["metadata"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "boundObjectRef": bound},
        }
        made = await self.client.create(f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{account}/token", asked)
        return str(made["status"]["token"])

    @asynccontextmanager
    async def binder(self, port: int) -> AsyncIterator[Callable[[], None]]:
        """One replica, until the block's end; the value ends it sooner."""
        stop, origin = asyncio.Event(), f"{self.host}:{port}"
        argv = ["--kubeconfig", str(self.kubeconfig), "--admin-listen", f"{self.host}:0"]
        argv += ["--schedulable-listen", origin, "--schedulable-url", f"http://{origin}"]
        options = parse_options(BinderOptions, process="binder", summary="", argv=argv, environ={})
        task = asyncio.create_task(app.main(options, stop))
        try:
            yield stop.set
        finally:
            stop.set()
            async with asyncio.timeout(30):
                await task

    async def leader(self) -> str:
        try:
            return str((await self.client.get(LEASE))["spec"].get("holderIdentity") or "")
        except Exception:  # there is none yet
            return ""

    async def create(self, asks: SchedulableModel) -> str:
        pod = {
            "metadata": {"generateName": asks.model.name, **asks.template["metadata"]},
            "spec": asks.template["spec"],
        }
        made = await self.client.create(paths.pods("team"), pod)
        return str(made["metadata"]["name"])

    async def nodes_of(self, names: list[str]) -> list[str | None]:
        found = [await self.client.get(paths.pod("team", name)) for name in names]
        return [one["spec"].get("nodeName") for one in found]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-schedulable-")))
        host = f"{stack.enter_context(cluster_network())}.0.1"
        plane = ControlPlane(
            directory,
            host=host,
            binaries=await asyncio.to_thread(control_plane_directory),
            users=[],
            env={},
            api_flags=["--disable-admission-plugins=ServiceAccount"],
            controllers=False,
        )
        stack.push_async_callback(plane.stop)
        await plane.start()
        kubeconfig = plane.kubeconfig(plane.admin, directory / "kubeconfig")
        client = await stack.enter_async_context(open_client(str(kubeconfig)))
        made = World(client, host, kubeconfig, await stack.enter_async_context(aiohttp.ClientSession()))
        await made.begin()
        yield made


def model(name: str, wanted: int, gib: int, *, running: int = 0, priority: int = 0) -> SchedulableModel:
    container = {"name": "proxy", "image": "any", "resources": {"limits": {KEYS.gpu_mem: f"{gib}Gi"}}}
    return SchedulableModel(
        name=f"team/{name}",
        desired=wanted,
        running=running,
        starting=0,
        priority=priority,
        template={
            "metadata": {"annotations": {KEYS.model_id: name}, "labels": {"app": name}},
            "spec": {"schedulerName": "trtis-scheduler", "containers": [container]},
        },
        template_hash=f"{name} {gib}",
    )


async def asked(
    binder: BinderClient, *models: SchedulableModel, idle: tuple[str, ...] = ()
) -> SchedulableAnswer:
    """As a scaler asks: again, until it is answered."""
    async with asyncio.timeout(30):
        while (answer := await binder.ask(SchedulableRequest(models=models, idle=idle))) is None:
            await asyncio.sleep(0.1)
    return answer


async def test_what_two_binders_promise_is_bound_and_no_pod_is_left_over(
    world: World, unused_tcp_port_factory: Callable[[], int]
) -> None:
    first, second = unused_tcp_port_factory(), unused_tcp_port_factory()
    token, wrong, other = (
        await world.token(),
        await world.token(audience="berth-agent"),
        await world.token("somebody"),
    )
    async with world.binder(first) as end_first:
        await until(world.leader)
        async with world.binder(second):
            binder = BinderClient(world.session, f"http://{world.host}:{second}", lambda: token)

            # Two models compete for three nodes; each takes a node once, and both fit beside each other on one only.
            a, b = model("a", 5, 8), model("b", 4, 12, priority=1)
            answer = await asked(binder, a, b)
            found = {key.name: one for key, one in answer.models.items()}
            assert (found["b"].now, found["b"].never) == (3, 1), found["b"].reason
            assert (found["a"].now, found["a"].never) == (0, 2)
            assert found["a"].reason == "0/3 nodes: 3 GPUMemoryInsufficient (4 GiB short on the best GPU)"

            answer = await asked(binder, model("a", 2, 8), model("b", 4, 8))
            replicas = [
                await world.create(model(key.name, 1, 8))
                for key, one in answer.models.items()
                for _ in range(one.now)
            ]
            assert len(replicas) == 5
            await until(lambda: _all(world.nodes_of(replicas)))
            full = await asked(binder, model("a", 3, 8, running=2), model("b", 4, 8, running=3))
            assert [one.now for one in full.models.values()] == [1, 0]

            # Somebody is idle, and would have to go for a third model.
            idle = tuple(f"team/{name}" for name in replicas[:1])
            (room,) = (await asked(binder, model("c", 2, 12), idle=idle)).models.values()
            assert (room.now, room.if_idle_go) == (
                0,
                (),
            )  # one alone makes no room for 12 GiB beside another's 8
            idle = tuple(f"team/{name}" for name in replicas)
            (room,) = (await asked(binder, model("c", 2, 12), idle=idle)).models.values()
            assert room.now == 0
            assert len(room.if_idle_go) == 1, "on the node with one copy alone"

            # Nobody else is answered.
            question = SchedulableRequest(models=(a,))
            for port in (first, second):
                for bad in (wrong, other, "forged"):
                    stranger = BinderClient(world.session, f"http://{world.host}:{port}", lambda bad=bad: bad)  # type: ignore[misc]
                    assert await stranger.ask(question) is None

            # The leader ends; the same client finds the next one.
            end_first()
            await until(lambda: _is_led_by(world, second))
            (again,) = (await asked(binder, model("a", 3, 8, running=2))).models.values()
            assert again.now == 1
            replicas.append(await world.create(model("a", 1, 8)))
            await until(lambda: _all(world.nodes_of(replicas)))
            (no_more,) = (await asked(binder, model("a", 4, 8, running=3))).models.values()
            assert (no_more.now, no_more.never) == (0, 1)
            left_over = await world.create(model("a", 1, 8))
            await until(lambda: _is_refused(world, left_over))


async def _all(nodes: Any) -> bool:
    return all(await nodes)


async def _is_led_by(world: World, port: int) -> bool:
    return f":{port}" in await world.leader()


async def _is_refused(world: World, name: str) -> bool:
    """One more than was promised."""
    pod = await world.client.get(paths.pod("team", name))
    said = {one["type"]: one["status"] for one in pod["status"].get("conditions") or ()}
    return said.get("PodScheduled") == "False" and not pod["spec"].get("nodeName")
