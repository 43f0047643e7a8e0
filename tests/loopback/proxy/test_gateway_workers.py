"""`berth gateway` as processes: one or several, with one limit and one report, until SIGTERM."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from berth.contract.gateway import ReplicaLimits
from localcluster.addresses import free_ports
from proxy.wire.preamble import Kind
from tests.fakes.agent_control import agent_at, replica_of
from tests.fakes.eventually import until
from tests.fakes.sidecars import Refused, connect, reports
from tests.fakes.triton_rest import fake_triton

BODY = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"UINT8","data":[1]}]}'
REQUEST = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


class Running:
    def __init__(self, process: asyncio.subprocess.Process, port: int, admin: int, control: str) -> None:
        self.process, self.port, self.admin, self.control = process, port, admin, control

    async def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.admin}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def gateway(directory: Path, triton_port: int, *flags: str) -> AsyncIterator[Running]:
    (port, admin), control = free_ports("127.0.0.1", 2), str(directory / "control")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "berth.cli",
        "gateway",
        f"--triton-http=127.0.0.1:{triton_port}",
        f"--listen=127.0.0.1:{port}",
        f"--admin-listen=127.0.0.1:{admin}",
        f"--control=unix:{control}",
        *flags,
    )
    try:
        async with asyncio.timeout(30):
            while process.returncode is None:
                try:
                    socket.create_connection(("127.0.0.1", admin)).close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        yield Running(process, port, admin, control)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("workers", [1, 2])
async def test_one_limit_one_report_one_end(tmp_path: Path, workers: int) -> None:
    own = replica_of("a", limits=ReplicaLimits(container_concurrency=8, queue_depth=100))
    async with fake_triton() as there, gateway(tmp_path, there.port, f"--workers={workers}") as one:
        there.may_answer.clear()
        async with agent_at(one.control) as agent:
            agent.tell([own, replica_of("b")])

            async def is_ready() -> bool:
                try:
                    async with reports(one.port, own.ticket) as sidecar:
                        return (await sidecar.next())["notReady"] is None
                except Refused:
                    return False

            await until(is_ready)
            # Later than the replica, as when its sidecar reports its limits.
            agent.tell(
                [
                    replica_of("a", limits=ReplicaLimits(container_concurrency=3, queue_depth=100)),
                    replica_of("b"),
                ]
            )
            await asyncio.sleep(0.3)
            clients = [await connect(one.port, own.ticket, Kind.REST) for _ in range(24)]
            for _, writer in clients:
                writer.write(REQUEST)

            async def all_are_there() -> bool:
                _, text = await one.get("/metrics")
                waiting = re.search(r"berth_proxy_waiting_requests\{[^}]*pod-a[^}]*\} (\d+)", text)
                return waiting is not None and int(waiting[1]) == 21

            await until(all_are_there)
            assert there.most == 3
            async with reports(one.port, own.ticket) as sidecar:
                for _ in range(3):
                    figures = (await sidecar.next())["figures"]
            assert (figures["running"], figures["waiting"]) == (3, 21)
            agent.drain("a", 60)
            await asyncio.sleep(0.2)
            there.may_answer.set()
            for reader, writer in clients:
                async with asyncio.timeout(10):
                    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                writer.close()
            assert await agent.hears() == {"drained": "a"}
            assert there.most == 3
            with pytest.raises(Refused):
                await connect(one.port, own.ticket, Kind.REST)
        one.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            assert await one.process.wait() == 0


async def arrive(port: int, ticket: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """At a worker that may not know the replica yet, though another does."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await connect(port, ticket, Kind.REST)
            except Refused:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_more_rest_requests_are_with_triton_than_it_can_answer(tmp_path: Path, workers: int) -> None:
    """Data-plane D2: Triton loses answers, any model's, of too many; the bound is all workers' together."""
    own, other = replica_of("a", limits=ReplicaLimits(queue_depth=1000)), replica_of("b")
    flags = (f"--workers={workers}", "--triton-rest-requests=64")
    async with (
        fake_triton() as there,
        gateway(tmp_path, there.port, *flags) as one,
        agent_at(one.control) as agent,
    ):
        there.may_answer.clear()
        agent.tell([own, other])

        async def are_ready() -> bool:
            _, text = await one.get("/metrics")
            return len(re.findall(r"berth_proxy_model_ready\{[^}]*\} 1.0", text)) == 2

        await until(are_ready)
        clients = [await arrive(one.port, own.ticket) for _ in range(300)]
        for _, writer in clients:
            writer.write(REQUEST)

        async def all_are_there() -> bool:
            _, text = await one.get("/metrics")
            found = dict(re.findall(r"berth_proxy_(running|waiting)_requests\{[^}]*pod-a[^}]*\} (\d+)", text))
            return sum(map(int, found.values())) == 300

        await until(all_are_there, 60)

        async def are_inside(count: int) -> bool:
            return there.running == count

        # Of three quarters of each worker's part one model has a half, and one.
        await until(lambda: are_inside(24 + workers))
        beside = [await arrive(one.port, other.ticket) for _ in range(5)]
        for _, writer in beside:
            writer.write(REQUEST)
        await until(lambda: are_inside(24 + workers + 5))
        there.may_answer.set()
        for reader, writer in clients + beside:
            async with asyncio.timeout(20):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert there.most <= 64
