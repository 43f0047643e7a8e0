"""What a quiet model waits while another one of the same gateway is flooded.

    python -m bench.proxy.fairness [SECONDS]

One copy at 10 requests a second, alone and then beside another copy's 64 connections, which each have 16
requests on their way all the time. nginx answers in Triton's place; the flood comes from a process of its own.
"""

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from bench.proxy.processes import started
from bench.proxy.upstreams import HOST, NGINX_PORT, constant
from berth.contract.gateway import Copy, server_name_of, ticket_of
from proxy.codecs.preamble import ACCEPTED, Kind, Preamble

PORT, ADMIN_PORT = 18020, 18021
CONNECTIONS, PIPELINED, QUIET_PER_SECOND = 64, 16, 10
_BODY = b'{"inputs":[{"name":"IN","shape":[3],"datatype":"UINT8","data":[1,2,3]}]}'


def copy_of(uid: str) -> Copy:
    return Copy(
        ticket=ticket_of(b"bench", uid),
        namespace="bench",
        pod=uid,
        pod_uid=uid,
        model="mine",
        server_name=str(server_name_of("mine", uid)),
    )


def request() -> bytes:
    return b"POST /v2/models/mine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(_BODY),
        _BODY,
    )


class Client(asyncio.Protocol):
    """Keeps so many requests on their way."""

    def __init__(self, uid: str) -> None:
        self._preamble = Preamble(Kind.REST, copy_of(uid).ticket).to_bytes()
        self.answers = 0
        self.answered = asyncio.Event()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.write(self._preamble)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"HTTP/1.1 200")
        self.answers += count
        if count:
            self.on_answers(count)

    def on_answers(self, count: int) -> None:
        self.answered.set()


class Flood(Client):
    def on_answers(self, count: int) -> None:
        self.transport.write(request() * count)


async def flood() -> None:
    """Until it is killed."""
    loop, clients = asyncio.get_running_loop(), []
    for _ in range(CONNECTIONS):
        _, client = await loop.create_connection(lambda: Flood("flood"), HOST, PORT)
        client.transport.write(request() * PIPELINED)
        clients.append(client)
    while True:
        before = sum(client.answers for client in clients)
        await asyncio.sleep(1)
        print(sum(client.answers for client in clients) - before, "requests/s of the flood", flush=True)


async def quiet(seconds: float) -> list[float]:
    """What its requests took, in order of size."""
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client("quiet"), HOST, PORT)
    took = []
    for _ in range(int(seconds * QUIET_PER_SECOND)):
        client.answered.clear()
        began = time.perf_counter()
        client.transport.write(request())
        async with asyncio.timeout(30):
            await client.answered.wait()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(1 / QUIET_PER_SECOND)
    client.transport.close()
    return sorted(took)


@asynccontextmanager
async def told(directory: Path) -> AsyncIterator[None]:
    """As the agent would."""
    import json

    reader, writer = await asyncio.open_unix_connection(str(directory / "control"))
    copies = [copy_of(uid).to_json() for uid in ("quiet", "flood")]
    writer.write(json.dumps({"copies": copies}).encode() + b"\n")
    await asyncio.sleep(2)  # until they are ready
    yield
    writer.close()
    del reader


def shown(what: str, took: list[float]) -> str:
    p50, p99 = (1000 * took[int(len(took) * share)] for share in (0.5, 0.99))
    return f"{what:20} p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   ({len(took)} requests)"


async def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        gateway = [
            *(sys.executable, "-m", "berth.cli", "gateway", f"--triton-http={HOST}:{NGINX_PORT}"),
            *(f"--listen={HOST}:{PORT}", f"--admin-listen={HOST}:{ADMIN_PORT}"),
            f"--control=unix:{directory / 'control'}",
        ]
        with constant(directory), started(gateway, log=directory / "log", ports=[(HOST, ADMIN_PORT)]):
            async with told(directory):
                alone = await quiet(seconds)
                print(shown("alone", alone))
                command = [sys.executable, "-m", "bench.proxy.fairness", "flood"]
                log = directory / "flood"
                with started(command, log=log, ports=[]):
                    await asyncio.sleep(1)
                    beside = await quiet(seconds)
                print(log.read_text().splitlines()[-1:])
                print(shown("beside a flood", beside))
                ratio = beside[int(len(beside) * 0.99)] / alone[int(len(alone) * 0.99)]
                print(f"{ratio:.2f} x the p99 of alone")
                assert ACCEPTED


if __name__ == "__main__":
    if sys.argv[1:] == ["flood"]:
        uvloop.run(flood())
    else:
        uvloop.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 20))
