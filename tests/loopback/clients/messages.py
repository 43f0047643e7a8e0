"""Requests to the models of these tests, and what has come of a run of the Go client."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from bench.proxy.tools import go_client
from localcluster.processes import reaping


def message(model: str, data: bytes, **parameters: int) -> pb.ModelInferRequest:
    """`parameters`: `bytes` for an answer of another size, `sleep_ms` for a slow one."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[data])
    request.inputs.add(name="IN", datatype="UINT8", shape=[len(data)])
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request


async def ask_by_go(directory: Path, request: pb.ModelInferRequest, *flags: object) -> dict[str, Any]:
    """What the Go client tells of its calls."""
    body = directory / "message"
    body.write_bytes(request.SerializeToString())
    command = [str(go_client()), f"-body={body}", *map(str, flags)]
    return json.loads(await run(*command))


async def run(*command: str, seconds: float = 120, **more: Any) -> str:
    """The output of a program that must succeed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, **more)
    async with reaping(process), asyncio.timeout(seconds):
        output, errors = await process.communicate()
    assert process.returncode == 0, f"{command}: {errors.decode()[-2000:]}\n{output.decode()[-2000:]}"
    return output.decode()
