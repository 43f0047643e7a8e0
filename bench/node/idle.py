"""What an agent costs that has nothing to do: a real process, with peers that answer and no more.

What Triton holds behind its answers is none of the agent's cost, so that no Triton is needed.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from agent.repository import Record, Repository
from bench.node.node import CONFIG, GIB
from berth.contract.gateway import server_name_of
from berth.contract.gpu_choice import GpuChoice
from berth.contract.ids import GpuUuid, ModelId, ModelName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.triton.wire import grpc_service_pb2 as pb
from berth.triton.wire.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from localcluster.addresses import free_port
from localcluster.processes import end, spawn, tail

Json = dict[str, Any]
GPU, HOST, NODE = GpuUuid("GPU-a"), "127.0.0.1", "bench"
SCENARIO = f'gpus: [{{uuid: {GPU}, product: bench, total: 4Ti}}]\nmodels: {{"*": requested}}\n'
_TICKS = os.sysconf("SC_CLK_TCK")


async def idle(directory: Path, *, models: int, settle_seconds: float, seconds: float) -> tuple[float, float]:
    """Share of a core, and resident MiB, once all models have been taken for loaded."""
    names = [f"model-{n}" for n in range(models)]
    _put_models(directory / "repository", names)
    (directory / "gpus.yaml").write_text(SCENARIO)
    async with _triton(names) as triton, _api_server(directory, names) as kubeconfig:
        log = directory / "agent.log"
        listen, admin = (f"{HOST}:{free_port(HOST)}" for _ in range(2))
        process = await spawn(
            [
                *(str(Path(sys.executable).with_name("berth")), "agent", f"--node-name={NODE}"),
                *("--auth=none", "--code=any"),
                *(f"--repository={directory / 'repository'}", f"--nvml=mock:{directory / 'gpus.yaml'}"),
                *(f"--triton-grpc={triton}", f"--kubeconfig={kubeconfig}"),
                *(f"--listen={listen}", f"--admin-listen={admin}"),
            ],
            log=log,
            env=dict(os.environ),
        )
        try:
            await asyncio.sleep(settle_seconds)
            if log.read_text().count("model loaded") < models:
                raise RuntimeError(f"the agent has not taken up its models:\n{tail(log)}")
            before = _cpu_seconds(process.pid)
            await asyncio.sleep(seconds)
            return (_cpu_seconds(process.pid) - before) / seconds, _rss_mib(process.pid)
        finally:
            await end(process, grace_seconds=5)


def _put_models(directory: Path, names: list[str]) -> None:
    directory.mkdir(parents=True)
    repository = Repository(directory)
    repository.open()
    for name in names:
        staged = repository.new_staging()
        (staged / "1").mkdir(parents=True)
        (staged / "config.pbtxt").write_text(CONFIG)
        (staged / "1" / "model.py").write_text("")
        ref = PodRef("bench", name, PodUid(name))
        choice = GpuChoice(GPU, 0, GIB)
        repository.publish(staged, Record(ref, ModelId(name), ModelName(name), choice, f"{name:0<64}"))


class _Triton(GRPCInferenceServiceServicer):
    def __init__(self, names: list[str]) -> None:
        served = (server_name_of(name, name) for name in names)  # a pod's uid is its name here
        rows = [pb.RepositoryIndexResponse.ModelIndex(name=n, version="1", state="READY") for n in served]
        self._index = pb.RepositoryIndexResponse(models=rows)

    async def ServerReady(self, *_: Any) -> pb.ServerReadyResponse:  # noqa: N802
        return pb.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, *_: Any) -> pb.ServerMetadataResponse:  # noqa: N802
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    async def RepositoryIndex(self, *_: Any) -> pb.RepositoryIndexResponse:  # noqa: N802
        return self._index


@asynccontextmanager
async def _triton(names: list[str]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_GRPCInferenceServiceServicer_to_server(_Triton(names), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def _api_server(directory: Path, names: list[str]) -> AsyncIterator[Path]:
    """One Node with its pods; what is written is taken and forgotten, but for the Node's annotations."""
    node: Json = {"metadata": {"name": NODE, "uid": NODE, "resourceVersion": "1", "annotations": {}}}
    pods = {"metadata": {"resourceVersion": "1"}, "items": [_pod(name) for name in names]}

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            stream = web.StreamResponse()
            await stream.prepare(request)
            await asyncio.Event().wait()
            return stream
        if request.path.endswith("/pods"):
            return web.json_response(pods)
        body = await request.json() if request.can_read_body else {}
        if request.path.endswith(f"/nodes/{NODE}"):
            node["metadata"]["annotations"] |= body.get("metadata", {}).get("annotations", {})
            return web.json_response(node)
        return web.json_response({**body, "metadata": {"name": "written", **body.get("metadata", {})}})

    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # 0 is without end
    await runner.setup()
    port = free_port(HOST)
    await web.TCPSite(runner, HOST, port).start()
    try:
        yield _kubeconfig(directory / "kubeconfig", f"http://{HOST}:{port}")
    finally:
        await runner.cleanup()


def _kubeconfig(path: Path, server: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": {"server": server}}],
        "users": [{"name": "bench", "user": {"token": "bench"}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "current-context": "bench",
    }
    path.write_text(json.dumps(config))
    return path


def _pod(name: str) -> Json:
    keys = Keys()
    return {
        "metadata": {
            "name": name,
            "namespace": "bench",
            "uid": name,
            "resourceVersion": "1",
            "annotations": {keys.model_id: name, keys.gpu: GpuChoice(GPU, 0, GIB).encode()},
        },
        "spec": {
            "nodeName": NODE,
            "schedulerName": "trtis-scheduler",
            "containers": [{"name": "main", "resources": {"limits": {keys.gpu_mem: "1Gi"}}}],
        },
        "status": {"phase": "Running"},
    }


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads (proc(5), fields 14 and 15 of stat)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS


def _rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
