"""Clients of one replica, good and bad, each until an hour that is told. What every call of theirs came to is kept."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from bench.proxy.tools import go_client
from localcluster.data_plane import GRPC_PORT, HTTP_PORT

MIB = 1024**2
# Longer than anything waits here, so that only what hangs meets it.
DEADLINE_SECONDS = 30.0
# Above a call's own deadline: the time in which its end is told.
GRACE_SECONDS = 5.0
_BUSY = {"ResourceExhausted", "Unavailable", "resource_exhausted", "unavailable"}


@dataclass
class Log:
    """By client: how its calls ended. `stalled`: those that did not end when they had to, and what was wrong."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    stalled: list[str] = field(default_factory=list)

    def note(self, client: str, end: str, count: int = 1) -> None:
        self.ended.setdefault(client, Counter())[end] += count


@dataclass(frozen=True)
class Soaked:
    """One replica and its sidecar."""

    model: str
    address: str
    directory: Path
    seconds: float
    log: Log

    def message(self, size: int = 3, **parameters: int) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self.model, raw_input_contents=[bytes(size)])
        request.inputs.add(name="IN", datatype="UINT8", shape=[size])
        for name, value in parameters.items():
            request.parameters[name].int64_param = value
        return request

    async def until_the_end(self, client: str, call: Callable[[], Awaitable[str]], pause: float) -> None:
        """Call after call, each within its deadline."""
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(DEADLINE_SECONDS + GRACE_SECONDS):
                    self.log.note(client, await call())
            except TimeoutError:
                self.log.note(client, "STALLED")
                self.log.stalled.append(f"{client} of {self.address}: no end after its deadline")
            await asyncio.sleep(pause)


async def by_go(one: Soaked, name: str, request: pb.ModelInferRequest, ends: set[str], *flags: str) -> None:
    """`ends`: with which of them its calls may end, beside what a busy server says."""
    body = one.directory / name
    body.write_bytes(request.SerializeToString())
    command = [str(go_client()), f"-body={body}", f"-address={one.address}:{GRPC_PORT}", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, f"-seconds={one.seconds}s", stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(one.seconds + DEADLINE_SECONDS + 2 * GRACE_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        one.log.stalled.append(f"{name} of {one.address}: its program has not ended")
        return
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    told = json.loads(output)
    for code, count in told["codes"].items():
        one.log.note(name, code, count)
    if told["late"]:
        one.log.stalled.append(f"{name} of {one.address}: {told['late']} calls were late")
    if strange := set(told["codes"]) - ends - _BUSY:
        one.log.stalled.append(f"{name} of {one.address}: {sorted(strange)}: {told['errors']}")


def go_clients(one: Soaked) -> list[Coroutine[Any, Any, None]]:
    """`Unknown` is what grpc-go makes of errors that are not gRPC's: of HTTP/2 alone all are."""
    deadline = f"-deadline={DEADLINE_SECONDS}s"
    large = one.message(bytes=5 * MIB)
    any_end = {"OK", "Unknown", "DeadlineExceeded"}
    return [
        by_go(one, "ordinary", one.message(), {"OK"}, deadline, "-traceparent", "-streams=2"),
        by_go(one, "600 KB", one.message(600_000), {"OK"}, "-kind=connect", deadline, "-streams=4"),
        by_go(one, "narrow", large, {"OK"}, "-window=65536", deadline, "-streams=2"),
        by_go(one, "impatient", one.message(sleep_ms=20), any_end, "-deadline=2s", "-jitter", "-streams=3"),
        by_go(one, "leaver", large, any_end, "-kind=http2", "-drop", deadline),
        by_go(one, "dawdler", large, any_end, "-kind=http2", "-delay=20ms", deadline),
    ]


async def rest_client(one: Soaked) -> str:
    """Small and large, whole or given up in the middle, politely or not."""
    kind = random.choice(("small", "large", "reset", "half", "slow"))
    size = 4 * MIB if kind in ("large", "reset") else 100
    head = f'{{"inputs":[{{"name":"IN","datatype":"UINT8","shape":[{size}],"parameters":{{"binary_data_size":{size}}}}}]}}'
    reader, writer = await asyncio.open_connection(one.address, HTTP_PORT)
    with closing(writer):
        writer.write(
            f"POST /v2/models/{one.model}/infer HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + size}\r\n\r\n{head}".encode()
        )
        if kind in ("reset", "half"):
            writer.write(bytes(size // 2))
            await asyncio.sleep(0.02)
            return _leave(writer, abruptly=kind == "reset")
        for piece in range(10 if kind == "slow" else 1):
            await asyncio.sleep(0.02 * (piece > 0))
            writer.write(bytes(size // 10 if kind == "slow" else size))
        answer = await reader.read()
    return f"{kind} {answer[9:12].decode() or 'nothing'}"


def _leave(writer: asyncio.StreamWriter, *, abruptly: bool) -> str:
    if not abruptly:
        return "left"
    there = writer.get_extra_info("socket")
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return "reset"


async def stream_client(one: Soaked, stub: GRPCInferenceServiceStub) -> str:
    """A stream of answers, which is read to its end or cancelled."""
    request = one.message(1)
    request.raw_input_contents[0] = bytes([random.randint(1, 60)])
    leaves = random.random() < 0.5
    call = stub.ModelStreamInfer(iter([request]), timeout=DEADLINE_SECONDS)
    try:
        async for _ in call:
            if leaves:
                call.cancel()
                return "cancelled"
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def faithful_client(one: Soaked, stub: GRPCInferenceServiceStub) -> str:
    """Always the same connection, with more than a window each way."""
    try:
        answer = await stub.ModelInfer(one.message(random.choice((3, 600_000))), timeout=DEADLINE_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK" if answer.raw_output_contents else "nothing"
