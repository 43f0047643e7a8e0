"""The proxy as its users run it: one command, its ports, its signals."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from localcluster.addresses import free_ports
from localcluster.processes import reaping
from tests.fakes.certificates import Authority
from tests.fakes.eventually import until
from tests.fakes.triton_rest import BODY, FakeTriton, fake_triton

LIVE = "/inference.GRPCInferenceService/ServerLive"


class Proxy:
    def __init__(self, process: asyncio.subprocess.Process, ports: list[int], log: Path) -> None:
        self.process, (self.http, self.grpc, self.admin), self.log = process, ports, log

    async def get(self, port: int, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def infer(self, session: aiohttp.ClientSession) -> int:
        url = f"http://127.0.0.1:{self.http}/v2/models/m/infer"
        async with session.post(url, data=json.dumps(BODY)) as answer:
            return answer.status


@asynccontextmanager
async def running(directory: Path, *flags: str) -> AsyncIterator[tuple[Proxy, FakeTriton]]:
    async with fake_triton() as upstream, proxy_of(directory, str(upstream.endpoint), *flags) as proxy:
        yield proxy, upstream


@asynccontextmanager
async def proxy_of(directory: Path, triton: str, *flags: str) -> AsyncIterator[Proxy]:
    ports, log = free_ports("127.0.0.1", 3), directory / "log"
    names = ("--http-listen", "--grpc-listen", "--admin-listen")
    listen = [word for name, port in zip(names, ports, strict=True) for word in (name, f"127.0.0.1:{port}")]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth.cli", "proxy", "--model", "m"),
            *("--triton-http", triton, "--triton-grpc", triton, *listen, "--drain-delay", "0", *flags),
            stdout=output,
            stderr=output,
        )
    proxy = Proxy(process, ports, log)
    try:
        await until(lambda: is_ready(proxy))
        yield proxy
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def is_ready(proxy: Proxy) -> bool:
    assert proxy.process.returncode is None, proxy.log.read_text()
    try:
        return (await proxy.get(proxy.admin, "/readyz"))[0] == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("workers", [1, 3])
async def test_one_limit_and_one_report_whatever_the_number_of_workers(tmp_path: Path, workers: int) -> None:
    flags = ("--container-concurrency", "2", "--queue-depth", "3", "--workers", str(workers))
    async with running(tmp_path, *flags) as (proxy, upstream):
        upstream.may_answer.clear()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            asked = [asyncio.create_task(proxy.infer(session)) for _ in range(12)]

            async def full() -> bool:
                return sum(task.done() for task in asked) >= 7

            await until(full)
            done, waiting = await asyncio.wait(asked, timeout=2.5)
            assert [task.result() for task in done] == [503] * 7
            stat = json.loads((await proxy.get(proxy.admin, "/stat"))[1])
            assert stat["averageConcurrentRequests"] == pytest.approx(5, abs=0.2)

            async def refused_are_told() -> bool:
                assert await proxy.infer(session) == 503
                return bool(json.loads((await proxy.get(proxy.admin, "/stat"))[1])["requestCount"] > 0)

            assert stat["requestCount"] == 0  # those twelve have come long ago
            refused = 7 + await until(refused_are_told)
            upstream.may_answer.set()
            assert [await task for task in waiting] == [200] * 5
        assert upstream.most == 2

        async def counted() -> bool:
            _, text = await proxy.get(proxy.admin, "/metrics")
            return (
                'berth_proxy_requests_total{code="200",protocol="rest"} 5.0' in text
                and f'berth_proxy_requests_total{{code="503",protocol="rest"}} {refused}.0' in text
                and "berth_proxy_running_requests 0.0" in text
            )

        await until(counted)


@pytest.mark.parametrize("workers", [1, 2])
async def test_sigterm_lets_what_is_in_flight_finish(tmp_path: Path, workers: int) -> None:
    async with running(tmp_path, "--workers", str(workers)) as (proxy, upstream):
        upstream.may_answer.clear()
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(proxy.infer(session))

            async def arrived() -> bool:
                return upstream.running == 1

            await until(arrived)  # no worker has reported it yet
            proxy.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(1)
            assert not asked.done()
            with pytest.raises(aiohttp.ClientError):
                await proxy.get(proxy.http, "/v2/health/live")
            upstream.may_answer.set()
            assert await asked == 200
        assert await asyncio.wait_for(proxy.process.wait(), 10) == 0


async def test_an_answer_on_its_way_to_a_slow_client_is_delivered_before_the_end(tmp_path: Path) -> None:
    """Triton is done with it long before, and after a while only the system has it still."""
    size = 2_000_000
    async with running(tmp_path) as (proxy, upstream):
        upstream.answer = b"x" * size
        # A small window: what the client has not read is at the other end.
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            client.connect(("127.0.0.1", proxy.http))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET /v2/models/m/config HTTP/1.1\r\nHost: h\r\n\r\n")
            received = await loop.sock_recv(client, 1024)
            assert str(size).encode() in received
            proxy.process.send_signal(signal.SIGTERM)
            body = len(received.partition(b"\r\n\r\n")[2])
            for _ in range(15):
                await asyncio.sleep(0.1)
                body += len(await loop.sock_recv(client, 8192))
            assert proxy.process.returncode is None  # it could not be delivered by now
            while chunk := await loop.sock_recv(client, 65536):
                body += len(chunk)
            assert body == size
        assert await asyncio.wait_for(proxy.process.wait(), 10) == 0


async def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (proxy, upstream):
        upstream.may_answer.clear()
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(proxy.infer(session))

            async def arrived() -> bool:
                return upstream.running == 1

            async def ending() -> bool:
                try:
                    await proxy.get(proxy.http, "/v2/health/live")
                except aiohttp.ClientError:
                    return True
                return False

            for reached in (arrived, ending):
                await until(reached)
                proxy.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(proxy.process.wait(), 20) == 128 + signal.SIGTERM
            with pytest.raises(aiohttp.ClientError):
                await asked


async def test_a_worker_that_dies_takes_the_proxy_along(tmp_path: Path) -> None:
    async with running(tmp_path, "--workers", "2") as (proxy, _):
        children = Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert await asyncio.wait_for(proxy.process.wait(), 30) == 1

        async def gone() -> bool:
            return not any(Path(f"/proc/{child}").exists() for child in children[1:])

        await until(gone)


async def test_tls_with_clients_certificates_and_a_renewal(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    client_cert, client_key = authority.issue("client")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.file))
    async with running(tmp_path, *flags) as (proxy, _):
        context = ssl.create_default_context(cafile=str(authority.file))
        context.load_cert_chain(client_cert, client_key)
        url = f"https://127.0.0.1:{proxy.http}/v2/models/m/infer"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, data=json.dumps(BODY), ssl=context) as answer:
                assert answer.status == 200
            stranger = ssl.create_default_context(cafile=str(authority.file))
            with pytest.raises(aiohttp.ClientError):
                async with session.post(url, data=json.dumps(BODY), ssl=stranger) as answer:
                    await answer.read()
        credentials = grpc.ssl_channel_credentials(
            authority.file.read_bytes(), client_key.read_bytes(), client_cert.read_bytes()
        )
        async with grpc.aio.secure_channel(f"127.0.0.1:{proxy.grpc}", credentials) as channel:
            assert await channel.unary_unary(LIVE)(b"") == b"\x08\x01"
        before = await serial_of(proxy.http, context)
        authority.issue("server")

        async def renewed() -> bool:
            return await serial_of(proxy.http, context) != before

        await until(renewed)


async def serial_of(port: int, context: ssl.SSLContext) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    serial = str(writer.get_extra_info("peercert")["serialNumber"])
    writer.close()
    del reader
    return serial


async def test_wrong_flags_are_named(tmp_path: Path) -> None:
    for flags, text in (
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-client-ca", "x.pem"], "--tls-client-ca needs"),
        (["--tls-cert", "/missing.pem", "--tls-key", "/missing.key"], "--tls-cert /missing.pem"),
        (["--workers", "0"], "--workers"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth.cli", "proxy", "--model", "m", *flags),
            *("--triton-http", "127.0.0.1:1", "--triton-grpc", "127.0.0.1:1"),
            stderr=asyncio.subprocess.PIPE,
        )
        async with reaping(process), asyncio.timeout(20):
            _, stderr = await process.communicate()
        assert process.returncode == 2, stderr
        assert text in stderr.decode().splitlines()[-1]


async def test_many_connections_opened_and_dropped_leave_nothing(tmp_path: Path) -> None:
    """10 000, some in the middle of a head, a body or a preface."""
    async with running(tmp_path) as (proxy, _):
        starts = [b"", b"POST /v2/models/m/infer HTTP/1.1\r\nHost", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
        starts.append(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")

        async def drop(number: int) -> None:
            port = proxy.grpc if number % 2 else proxy.http
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(starts[number % len(starts)])
            if number % 3:
                writer.transport.abort()
            else:
                writer.close()

        for batch in range(0, 10_000, 250):
            await asyncio.gather(*(drop(number) for number in range(batch, batch + 250)))

        async def settled() -> bool:
            _, text = await proxy.get(proxy.admin, "/metrics")
            open_ones = [
                line for line in text.splitlines() if line.startswith("berth_proxy_client_connections{")
            ]
            assert "berth_proxy_running_requests 0.0" in text
            return all(line.endswith(" 0.0") for line in open_ones)

        await until(settled, 30)
        assert len(os.listdir(f"/proc/{proxy.process.pid}/fd")) < 60
        async with aiohttp.ClientSession() as session:
            assert await proxy.infer(session) == 200
