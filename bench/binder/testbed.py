"""A control plane without controllers, for the length of a block. Nothing of it outlives the block, nor the
process."""

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.binder.api import Api, Bindings, open_api, watching
from bench.binder.schedulers import Site
from berth.contract.keys import agent_lease_namespace
from berth.kube.options import KubeOptions
from localcluster.addresses import cluster_network
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import ControlPlane
from localcluster.processes import CLUSTER_ID_VARIABLE

NAMESPACE = "bench"
# It would taint every node as not ready, and there is no controller to take that back.
_API_FLAGS = ("--disable-admission-plugins=TaintNodesByCondition",)


@dataclass(frozen=True, slots=True)
class Testbed:
    """An API server with our namespaces and no nodes yet."""

    api: Api
    bindings: Bindings
    site: Site


@asynccontextmanager
async def testbed() -> AsyncIterator[Testbed]:
    """Raises localcluster.processes.StartFailed."""
    cluster_id = secrets.token_hex(8)
    env = {k: v for k, v in os.environ.items() if not k.startswith("BERTH_") and k != "KUBECONFIG"}
    env[CLUSTER_ID_VARIABLE] = cluster_id
    async with AsyncExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="berth-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        await stack.enter_async_context(_guarded(cluster_id, directory))
        host = f"{stack.enter_context(cluster_network())}.0.1"
        binaries = await asyncio.to_thread(control_plane_directory)
        plane = ControlPlane(
            directory,
            host=host,
            binaries=binaries,
            users=(),
            env=env,
            api_flags=_API_FLAGS,
            controllers=False,
        )
        stack.push_async_callback(plane.stop)
        await plane.start()
        kubeconfig = plane.kubeconfig(plane.admin, directory / "kubeconfig")
        api = await stack.enter_async_context(open_api(plane))
        await _make_namespaces(api)
        bindings = await stack.enter_async_context(watching(api, NAMESPACE))
        yield Testbed(api, bindings, Site(directory, host, binaries, kubeconfig, env))


@asynccontextmanager
async def _guarded(cluster_id: str, directory: Path) -> AsyncIterator[None]:
    """Also after `kill -9` of this process nothing is left: see localcluster.guard."""
    command = (sys.executable, "-m", "localcluster.guard", cluster_id, str(directory))
    guard = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        await guard.wait()


async def _make_namespaces(api: Api) -> None:
    system = KubeOptions.system_namespace
    for name in (NAMESPACE, system, agent_lease_namespace(system)):
        await api.create(
            "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
    # Its controller is not here, and admission wants it.
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await api.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
