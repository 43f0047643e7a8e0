"""Load, and what it cost the process under measurement."""

import http.client
import json
import math
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb

from bench.proxy.peers import GRPC, HOST, HTTP
from bench.proxy.processes import Running
from bench.proxy.tools import go_client
from bench.proxy.upstreams import EVENTS, MODEL

INFER = "/inference.GRPCInferenceService/ModelInfer"
_DONE = re.compile(
    r"requests: \d+ total, \d+ started, \d+ done, (\d+) succeeded, (\d+) failed, (\d+) errored"
)
_WRK = re.compile(r"(\d+) requests in")


@dataclass(frozen=True)
class Cost:
    """CPU of the proxy's processes over one load. `units`: requests, messages, events or GiB."""

    cpu_seconds: float
    units: float
    seconds: float

    @property
    def micros(self) -> float:
        """CPU µs for each unit."""
        return self.cpu_seconds / self.units * 1e6

    @property
    def rate(self) -> float:
        return self.units / self.seconds


def require_tools() -> None:
    """Raises SystemExit with what would help."""
    missing = [tool for tool in ("wrk", "h2load", "nginx") if shutil.which(tool) is None]
    if missing:
        packages = {"h2load": "nghttp2-client", "nginx": "nginx-light"}
        names = " ".join(packages.get(tool, tool) for tool in missing)
        raise SystemExit(f"bench.proxy: {', '.join(missing)} not found; on Debian: apt-get install {names}")


def rest(target: Running, *, tensor_bytes: int, connections: int, seconds: float) -> Cost:
    """wrk: POST infer, JSON for a small tensor, binary for a large one."""
    body, headers = rest_body(tensor_bytes)
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


def rest_body(tensor_bytes: int) -> tuple[bytes, dict[str, str]]:
    if tensor_bytes < 1000:
        text = b'{"inputs":[{"name":"IN","shape":[3],"datatype":"UINT8","data":[1,2,3]}],"id":"0123456789"}'
        return text, {"Content-Type": "application/json"}
    tensor = {"name": "IN", "shape": [tensor_bytes], "datatype": "UINT8"}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": tensor_bytes}}]}).encode()
    length = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return head + b"\1" * tensor_bytes, length


def unary(target: Running, *, tensor_bytes: int, connections: int, streams: int, seconds: float) -> Cost:
    """h2load: ModelInfer."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "body").write_bytes(framed_request(tensor_bytes))
        command = [
            *("h2load", "-t1", f"-c{connections}", f"-m{streams}", "-D", _whole(seconds)),
            *("--warm-up-time=0", "-d", f"{directory}/body", "-w", "24", "-W", "24"),
            *("-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{HOST}:{GRPC}{INFER}"),
        ]
        return _measured(target, command, _h2load_count)


def by_go(
    target: Running, *, connections: int, streams: int, seconds: float, answer_bytes: int = 0, calls: int = 0
) -> Cost:
    """grpc-go: ModelInfer with a traceparent and a grpc-timeout that no call has had before.

    `answer_bytes`: of each answer, in place of what was sent; the units are then GiB.
    """
    request = request_of(3)
    if answer_bytes:
        request.parameters["bytes"].int64_param = answer_bytes
    with tempfile.TemporaryDirectory() as directory:
        body = Path(directory) / "body"
        body.write_bytes(request.SerializeToString())
        command = [
            *(str(go_client()), f"-address={HOST}:{GRPC}", f"-body={body}", f"-connections={connections}"),
            *(
                f"-streams={streams}",
                f"-calls={calls}",
                f"-seconds={seconds}s",
                "-traceparent",
                "-deadline=100s",
            ),
        ]
        return _measured(target, command, _go_gib if answer_bytes else _go_count)


def stream(target: Running, *, messages: int, streams: int) -> Cost:
    """ModelStreamInfer by gRPC's own client: each stream sends its messages and reads their answers."""
    request = pb.ModelInferRequest.FromString(framed_request(3)[5:])
    before, began = target.cpu_seconds(), time.monotonic()
    with grpc.insecure_channel(f"{HOST}:{GRPC}") as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        for _ in range(streams):
            answers = sum(1 for _ in call(iter([request] * messages), timeout=120))
            assert answers == messages, f"{answers} answers to {messages} messages"
    return Cost(target.cpu_seconds() - before, streams * messages, time.monotonic() - began)


def events(target: Running, *, streams: int) -> Cost:
    """Server-sent events of generate_stream."""
    before, began, count = target.cpu_seconds(), time.monotonic(), 0
    for _ in range(streams):
        count += sum(1 for line in _event_lines() if line.startswith(b"data:"))
    assert count == streams * EVENTS, count
    return Cost(target.cpu_seconds() - before, count, time.monotonic() - began)


def _event_lines() -> Iterator[bytes]:
    connection = http.client.HTTPConnection(HOST, HTTP, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v2/models/{MODEL}/generate_stream", b'{"text_input":"x"}', headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    yield from answer
    connection.close()


def latency(port: int, *, grpc_call: bool, per_second: int, seconds: float) -> tuple[float, float]:
    """p50 and p99 in µs of requests at a fixed rate, by h2load's log."""
    with tempfile.TemporaryDirectory() as directory:
        body, headers = rest_body(3)
        if grpc_call:
            body, headers = framed_request(3), {"content-type": "application/grpc", "te": "trailers"}
        (Path(directory) / "body").write_bytes(body)
        path = INFER if grpc_call else f"/v2/models/{MODEL}/infer"
        command = [
            *("h2load", "-t1", "-c4", "-m1", f"--rps={per_second / 4:g}", "-D", _whole(seconds)),
            *("--warm-up-time=0", "-d", f"{directory}/body", f"--log-file={directory}/log"),
            *([] if grpc_call else ["--h1"]),
            *(word for name, value in headers.items() for word in ("-H", f"{name}: {value}")),
            f"http://{HOST}:{port}{path}",
        ]
        _output(command, timeout_seconds=seconds + 60)
        lines = (Path(directory) / "log").read_text().splitlines()
    micros = sorted(int(line.split("\t")[2]) for line in lines if line.split("\t")[1] == "200")
    return statistics.median(micros), micros[int(len(micros) * 0.99)]


def framed_request(tensor_bytes: int) -> bytes:
    return framed(request_of(tensor_bytes))


def request_of(tensor_bytes: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="IN", datatype="UINT8", shape=[tensor_bytes])
    request.raw_input_contents.append(b"\1" * tensor_bytes)
    return request


def framed(request: pb.ModelInferRequest) -> bytes:
    """As it is in the body of a call: unpacked, its length before it."""
    message: bytes = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4) + message


def _measured(target: Running, command: Sequence[str], count: Callable[[str], float]) -> Cost:
    before, began = target.cpu_seconds(), time.monotonic()
    told = _output(command, timeout_seconds=300)
    seconds = time.monotonic() - began
    return Cost(target.cpu_seconds() - before, count(told), seconds)


def _output(command: Sequence[str], *, timeout_seconds: float) -> str:
    """What a client has printed. Raises RuntimeError with what it says is wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_seconds)
    except subprocess.CalledProcessError as error:
        told = (error.stderr or error.stdout)[-500:]
        raise RuntimeError(f"{command[0]} ended with {error.returncode}: {told}") from error
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
    told = json.loads(output)
    if set(told["codes"]) != {"OK"}:
        raise RuntimeError(output)
    return int(told["done"])


def _go_gib(output: str) -> float:
    _go_count(output)
    return float(json.loads(output)["bytes"]) / 1024**3
