"""Loads, and what each cost the process under measurement: CPU µs a request."""

import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

from bench.proxy.peers import GRPC, HOST, HTTP
from bench.proxy.processes import Running
from bench.proxy.tools import go_client
from bench.proxy.upstreams import MODEL

REST_BODY = b'{"inputs":[{"name":"IN","shape":[3],"datatype":"UINT8","data":[1,2,3]}],"id":"0123456789"}'
INFER = "/inference.GRPCInferenceService/ModelInfer"
_DONE = re.compile(
    r"requests: \d+ total, \d+ started, \d+ done, (\d+) succeeded, (\d+) failed, (\d+) errored"
)
_WRK = re.compile(r"(\d+) requests in")


def require_tools() -> None:
    """Raises SystemExit with what would help."""
    missing = [tool for tool in ("wrk", "h2load", "nginx") if shutil.which(tool) is None]
    if missing:
        packages = {"h2load": "nghttp2-client", "nginx": "nginx-light"}
        names = " ".join(packages.get(tool, tool) for tool in missing)
        raise SystemExit(f"bench.proxy: {', '.join(missing)} not found; on Debian: apt-get install {names}")


def rest(target: Running, *, connections: int, seconds: float) -> float:
    """wrk: POST infer of 100 bytes of JSON."""
    body, headers = REST_BODY, {"Content-Type": "application/json"}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "body").write_bytes(body)
        script = Path(directory) / "post.lua"
        lines = [
            'wrk.method = "POST"',
            f'local f = io.open("{directory}/body", "rb")',
            'wrk.body = f:read("*a")',
        ]
        lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
        script.write_text("\n".join(lines))
        url = f"http://{HOST}:{HTTP}/v2/models/{MODEL}/infer"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{_whole(seconds)}s", "-s", str(script), url]
        return _measured(target, command, _wrk_count)


def unary(target: Running, *, connections: int, streams: int, seconds: float) -> float:
    """h2load: ModelInfer."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "body").write_bytes(framed(request_of(3)))
        command = [
            *("h2load", "-t1", f"-c{connections}", f"-m{streams}", "-D", _whole(seconds)),
            *("--warm-up-time=0", "-d", f"{directory}/body", "-w", "24", "-W", "24"),
            *("-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{HOST}:{GRPC}{INFER}"),
        ]
        return _measured(target, command, _h2load_count)


def by_go(target: Running, *, connections: int, streams: int, seconds: float) -> float:
    """grpc-go: ModelInfer with a traceparent and a grpc-timeout that no call has had before."""
    with tempfile.TemporaryDirectory() as directory:
        body = Path(directory) / "body"
        body.write_bytes(request_of(3).SerializeToString())
        command = [
            *(str(go_client()), f"-address={HOST}:{GRPC}", f"-body={body}", f"-connections={connections}"),
            *(f"-streams={streams}", f"-seconds={seconds}s", "-traceparent", "-deadline=100s"),
        ]
        return _measured(target, command, _go_count)


def request_of(tensor_bytes: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="IN", datatype="UINT8", shape=[tensor_bytes])
    request.raw_input_contents.append(b"\1" * tensor_bytes)
    return request


def framed(request: pb.ModelInferRequest) -> bytes:
    """As it is in the body of a call: unpacked, its length before it."""
    message: bytes = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4) + message


def _measured(target: Running, command: Sequence[str], count: Callable[[str], int]) -> float:
    before = target.cpu_seconds()
    output = _output(command, timeout_seconds=300)
    return (target.cpu_seconds() - before) / count(output) * 1e6


def _output(command: Sequence[str], *, timeout_seconds: float) -> str:
    """What a client has printed. Raises RuntimeError with what it says is wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_seconds)
    except subprocess.CalledProcessError as error:
        message = (error.stderr or error.stdout)[-500:]
        raise RuntimeError(f"{command[0]} ended with {error.returncode}: {message}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} has not ended after {timeout_seconds:g} s") from error
    return done.stdout


def _whole(seconds: float) -> str:
    """wrk and h2load know no parts of a second."""
    return str(math.ceil(seconds))


def _wrk_count(output: str) -> int:
    if "Non-2xx" in output or (match := _WRK.search(output)) is None:
        raise RuntimeError(output)
    return int(match[1])


def _h2load_count(output: str) -> int:
    match = _DONE.search(output)
    if match is None or int(match[1]) == 0:
        raise RuntimeError(output)
    return int(match[1])


def _go_count(output: str) -> int:
    result = json.loads(output)
    if set(result["codes"]) != {"OK"}:
        raise RuntimeError(output)
    return int(result["done"])
