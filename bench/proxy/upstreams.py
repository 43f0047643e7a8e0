"""What stands behind the proxies: nginx with a constant answer, and a real Triton."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from agent.admission import NodeRules, admit
from bench.proxy.processes import started
from berth.contract.endpoint import Endpoint
from berth.contract.ids import ModelName, ServerName
from berth.contract.report import CodeRule
from berth.triton.admin import open_admin
from berth.triton.errors import TritonError
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.processes import end, spawn

MODEL = "mine"
# On one address, because queue-proxy knows no other.
HOST = "127.0.0.1"
NGINX_PORT = 18000
ANSWER = (
    '{"model_name":"$m","model_version":"1","outputs":'
    '[{"name":"OUT","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'
)

_NGINX = """
worker_processes 1; daemon off; pid {dir}/upstream.pid; error_log {dir}/upstream.err;
events {{ worker_connections 8192; }}
http {{ access_log off; client_max_body_size 0; client_body_buffer_size 16m; keepalive_requests 1000000000;
  server {{ listen {host}:{port} backlog=4096;
    location ~ "^/v2/models/(?<m>[^/]+)" {{ default_type application/json; return 200 '{answer}'; }}
    location / {{ default_type application/json; return 200 '{{}}'; }} }} }}
"""
# The identity of bytes, unless a parameter of the request wants another size, or some time.
ECHO = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        wanted = json.loads(request.parameters() or "{}")
        time.sleep(int(wanted.get("sleep_ms", 0)) / 1000)
        data = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if "bytes" in wanted:
            data = np.ones(int(wanted["bytes"]), np.uint8)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", data)])
"""
# As many answers as the input's first byte says, each of one byte more than the one before.
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])):
                out = pb_utils.Tensor("OUT", np.arange(number + 1, dtype=np.uint8))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """
backend: "python"
max_batch_size: 0
input [{name: "IN", data_type: TYPE_UINT8, dims: [-1]}]
output [{name: "OUT", data_type: TYPE_UINT8, dims: [-1]}]
"""
_STREAMS = "model_transaction_policy {decoupled: true}\n"


def model_files(source: str) -> dict[str, bytes]:
    """ECHO or COUNT as a model's directory."""
    config = _CONFIG + _STREAMS * (source == COUNT)
    return {"config.pbtxt": config.encode(), "1/model.py": source.encode()}


@contextmanager
def constant(directory: Path) -> Iterator[None]:
    """nginx: takes any body and answers the same."""
    config = directory / "upstream.conf"
    config.write_text(_NGINX.format(dir=directory, host=HOST, port=NGINX_PORT, answer=ANSWER))
    with started(["nginx", "-c", str(config)], log=directory / "upstream.log", ports=[(HOST, NGINX_PORT)]):
        yield


@asynccontextmanager
async def triton_with(
    directory: Path,
    models: Mapping[str, str],
    *,
    address: str = HOST,
    keys: TritonKeys | None = None,
    instances: int = 1,
    shm_bytes: int = 64 * 1024**2,
) -> AsyncIterator[None]:
    """A real Triton with models by their names, each of them ECHO or COUNT.

    `keys`: None leaves it open, for peers that could not send them; `shm_bytes`: what an instance has at once to
    exchange tensors with its model.
    """
    for name, source in models.items():
        (directory / "models" / name / "1").mkdir(parents=True)
        for path, content in model_files(source).items():
            (directory / "models" / name / path).write_bytes(content)
    prefix = f"berth-bench-{os.getpid()}-{address}-"
    words = triton.command(
        address=address,
        models=directory / "models",
        backends=triton.prepare_backends(directory / "backends"),
        keys=keys or TritonKeys.generate(),
        shm_prefix=prefix,
    )
    command = [word for word in words if "default-byte-size" not in word]
    command.append(f"--backend-config=python,shm-default-byte-size={shm_bytes}")
    if keys is None:
        command = [word for word in command if "restricted" not in word]
    process = await spawn(command, log=directory / "triton.log", env=triton.environment(os.environ))
    try:
        await _load(directory / "models", models, Endpoint(address, triton.GRPC_PORT), keys, instances)
        yield
    finally:
        await end(process, grace_seconds=5)
        triton.remove_shared_memory(prefix)
        shutil.rmtree(directory / "models", ignore_errors=True)


async def _load(
    directory: Path, models: Mapping[str, str], server: Endpoint, keys: TritonKeys | None, instances: int
) -> None:
    async with open_admin(server, keys or TritonKeys.generate()) as admin:
        for _ in range(200):
            try:
                if await admin.version():
                    break
            except TritonError:
                await asyncio.sleep(0.1)
        for name in models:
            admitted = admit(
                directory / name, ModelName(name), NodeRules(frozenset({"python"}), CodeRule.ANY)
            )
            config = {
                **admitted.for_gpus([], kind="KIND_CPU"),
                "instance_group": [{"kind": "KIND_CPU", "count": instances}],
            }
            await admin.load(ServerName(name), config, timeout_seconds=60)
