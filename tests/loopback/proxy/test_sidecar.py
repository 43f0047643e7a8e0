"""`berth proxy --agent` as its users run it, between a real agent's API and a gateway."""

import asyncio
import contextlib
import json
import re
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from berth.v1 import node_agent_pb2 as pb
from berth.v1.node_agent_pb2_grpc import NodeAgentServicer, add_NodeAgentServicer_to_server
from localcluster.addresses import free_ports
from proxy.wire.preamble import Kind
from tests.fakes.certificates import Authority
from tests.fakes.eventually import until
from tests.fakes.gateway import TICKET, FakeGateway, gateway

LIVE = "/inference.GRPCInferenceService/ServerLive"


class Agent(NodeAgentServicer):
    """The agent's API over gRPC's own server."""

    def __init__(self) -> None:
        self.status = pb.ModelStatus(model_name="m", state=pb.MODEL_STATE_READY)
        self.changed = asyncio.Event()
        self.asked: list[Any] = []
        self.tokens: list[str] = []
        self.busy = False

    def send_status(self, target: FakeGateway | None) -> None:
        if target is not None:
            self.status.gateway.endpoint, self.status.gateway.ticket = str(target.endpoint), target.ticket
        self.changed.set()
        self.changed = asyncio.Event()

    async def WatchModel(self, request: Any, context: Any) -> AsyncIterator[pb.ModelStatus]:  # noqa: N802
        self._note(request, context)
        while True:
            change = self.changed
            yield self.status
            await change.wait()

    async def Unload(self, request: Any, context: Any) -> pb.UnloadResponse:  # noqa: N802
        self._note(request, context)
        return pb.UnloadResponse(outcome=pb.UnloadResponse.OUTCOME_UNLOADED)

    def _note(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))


@asynccontextmanager
async def agent(port: int = 0) -> AsyncIterator[tuple[Agent, int]]:
    one, server = Agent(), grpc.aio.server()
    add_NodeAgentServicer_to_server(one, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield one, port
    finally:
        await server.stop(0)


class Sidecar:
    def __init__(self, process: asyncio.subprocess.Process, ports: list[int], log: Path) -> None:
        self.process, (self.http, self.grpc, self.admin), self.log = process, ports, log

    async def get(self, path: str, port: int | None = None, **headers: str) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{port or self.admin}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            return answer.status, await answer.read()

    async def is_ready(self) -> bool:
        assert self.process.returncode is None, self.log.read_text()
        with contextlib.suppress(aiohttp.ClientError):
            return (await self.get("/readyz"))[0] == 200
        return False

    async def why_not(self) -> str:
        status, text = await self.get("/readyz")
        return text.decode().strip() if status == 503 else ""

    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1])


@asynccontextmanager
async def running(directory: Path, agent_port: int, *flags: str) -> AsyncIterator[Sidecar]:
    ports, log = free_ports("127.0.0.1", 3), directory / "log"
    names = ("--http-listen", "--grpc-listen", "--admin-listen")
    listen = [word for name, port in zip(names, ports, strict=True) for word in (name, f"127.0.0.1:{port}")]
    token = directory / "token"
    token.write_text("secret\n")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth.cli", "proxy", "--model", "m"),
            *("--agent", f"127.0.0.1:{agent_port}", "--token-file", str(token)),
            *(*listen, "--drain-delay", "0", *flags),
            stdout=output,
            stderr=output,
        )
    sidecar = Sidecar(process, ports, log)
    try:
        await until(lambda: listens(sidecar), 60)
        yield sidecar
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listens(sidecar: Sidecar) -> bool:
    assert sidecar.process.returncode is None, sidecar.log.read_text()
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", sidecar.grpc)
        writer.close()
        return True
    return False


async def test_it_asks_with_its_token_and_limits_and_reports_what_the_gateway_reports(tmp_path: Path) -> None:
    flags = ("--container-concurrency", "3", "--queue-depth", "0", "--max-request-bytes", "1Mi")
    async with agent() as (fake, port), gateway() as target, running(tmp_path, port, *flags) as sidecar:
        await until(lambda: fake.asked)
        request, token = fake.asked[0], fake.tokens[0]
        assert (request.model_name, token) == ("m", "Bearer secret")
        limits = request.limits
        assert (limits.container_concurrency, limits.queue_depth, limits.HasField("queue_depth")) == (
            3,
            0,
            True,
        )
        assert (limits.request_timeout_seconds, limits.max_request_bytes) == (300.0, 1024**2)
        assert limits.max_json_bytes == 16 * 1024**2
        assert "has not named the node's gateway yet" in await sidecar.why_not()
        target.not_ready = "Triton does not serve m"
        fake.send_status(target)
        await until(lambda: Kind.REPORT in target.heard)
        await until(lambda: says(sidecar, "Triton does not serve m"))
        target.not_ready = None
        target.figures.rest.answered("200", 0.003)
        target.figures.average_concurrency, target.figures.requests_per_second = 2.5, 7.0
        target.tell()
        await until(sidecar.is_ready)
        text = (await sidecar.get("/metrics"))[1].decode()
        assert 'berth_proxy_requests_total{code="200",protocol="rest"} 1.0' in text
        assert "berth_proxy_model_ready 1.0" in text
        stat = json.loads((await sidecar.get("/stat"))[1])
        assert (stat["averageConcurrentRequests"], stat["requestCount"]) == (2.5, 7.0)
        packed = (await sidecar.get("/stat", Accept="application/protobuf"))[1]
        assert packed.startswith(bytes([0x0A, len(stat["podName"])]) + stat["podName"].encode())
        (tmp_path / "token").write_text("renewed")
        fake.status.state, fake.status.reason = pb.MODEL_STATE_FAILED, "GPU 0: XID 79"
        fake.send_status(target)
        await until(lambda: says(sidecar, "GPU 0: XID 79"))
        fake.status.state = pb.MODEL_STATE_READY
        fake.send_status(target)
        await until(sidecar.is_ready)
        target.is_silent = True
        await until(lambda: says(sidecar, "no gateway: it has said nothing for 3 s"))
        assert (await sidecar.get("/stat"))[0] == 503
        text = (await sidecar.get("/metrics"))[1].decode()
        assert "berth_proxy_model_ready 0.0" in text
        assert "queue_average_concurrent_requests" not in text
        assert 'berth_proxy_requests_total{code="200",protocol="rest"} 1.0' in text
        sidecar.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(sidecar.process.wait(), 10) == 0
        assert fake.asked[-1] == pb.UnloadRequest(model_name="m")
        assert fake.tokens[-1] == "Bearer renewed"
        assert "secret" not in sidecar.log.read_text()
        assert TICKET.hex() not in sidecar.log.read_text()


async def says(sidecar: Sidecar, why: str) -> bool:
    return why in await sidecar.why_not()


async def test_it_goes_on_while_the_agent_is_away_and_finds_a_gateway_that_restarts(tmp_path: Path) -> None:
    async with gateway() as target:
        (agent_port,) = free_ports("127.0.0.1", 1)
        async with running(tmp_path, agent_port) as sidecar:
            async with agent(agent_port) as (fake, _):
                fake.send_status(target)
                await until(sidecar.is_ready)
            await asyncio.sleep(0.3)
            assert await sidecar.is_ready()
            assert await echoed(sidecar, b"hello")
            await target.stop()
            await until(lambda: says(sidecar, "no gateway"))
            assert (await sidecar.get("/v2/health/ready", sidecar.http))[0] == 503
            await target.start()
            began = time.monotonic()
            await until(sidecar.is_ready)
            assert time.monotonic() - began < 3
            assert await echoed(sidecar, b"hello")


async def echoed(sidecar: Sidecar, text: bytes) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.http)
    writer.write(text)
    answer = await asyncio.wait_for(reader.readexactly(len(text)), 30)
    writer.close()
    return answer == text


@pytest.mark.parametrize("tls", [False, True])
async def test_without_a_gateway_real_clients_hear_503_and_unavailable(tmp_path: Path, tls: bool) -> None:
    flags: list[str] = []
    if tls:
        authority = Authority(tmp_path)
        cert, key = authority.issue("localhost")
        flags = ["--tls-cert", str(cert), "--tls-key", str(key)]
    async with agent() as (_, port), running(tmp_path, port, *flags) as sidecar:
        scheme = ["--cacert", str(authority.file)] if tls else []
        url = f"http{'s' if tls else ''}://127.0.0.1:{sidecar.http}/v2/models/m/infer"
        body = tmp_path / "body"
        body.write_bytes(bytes(3 * 1024**2))
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "-i", "-m", "60", *scheme, "-H", "Expect:", "--data-binary", f"@{body}", url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await curl.communicate()
        assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\n"), said
        assert b"Retry-After: 1\r\n" in said
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"].startswith("the agent has not named")
        target = f"127.0.0.1:{sidecar.grpc}"
        if tls:
            credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
            channel = grpc.aio.secure_channel(target, credentials)
        else:
            channel = grpc.aio.insecure_channel(target)
        async with channel:
            call = channel.unary_unary(LIVE)
            calls = (call(b"x" * 50_000, timeout=60) for _ in range(8))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for error in answers:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert "the agent has not named" in (error.details() or ""), error.details()


async def test_the_order_of_the_end(tmp_path: Path) -> None:
    """Unready; served on; nothing new; drained by the gateway; what is under way to its end; then the model."""
    release = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        await release.wait()
        writer.write(b"end")

    async with agent() as (fake, port), gateway(answer) as target:
        target.is_drained = False
        async with running(tmp_path, port, "--drain-delay", "0.7") as sidecar:
            fake.send_status(target)
            await until(sidecar.is_ready)
            reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.http)
            writer.write(b"begun")
            assert await reader.readexactly(5) == b"begun"
            sidecar.process.send_signal(signal.SIGTERM)
            await until(lambda: target.words == ["leaving"])
            assert await sidecar.why_not() == "draining"
            late = await asyncio.open_connection("127.0.0.1", sidecar.http)  # served as before
            late[1].write(b"late")
            assert await late[0].readexactly(4) == b"late"
            await until(lambda: target.words == ["leaving", "drain"])
            with pytest.raises(OSError, match="Connect call failed"):
                await asyncio.open_connection("127.0.0.1", sidecar.http)
            await asyncio.sleep(0.3)
            assert not any(isinstance(one, pb.UnloadRequest) for one in fake.asked)
            release.set()
            assert await reader.read(-1) == b"end"
            assert await late[0].read(-1) == b"end"
            assert not any(isinstance(one, pb.UnloadRequest) for one in fake.asked)
            target.drained()
            assert await asyncio.wait_for(sidecar.process.wait(), 10) == 0
            assert isinstance(fake.asked[-1], pb.UnloadRequest)
            for one in (writer, late[1]):
                one.close()


async def test_the_end_does_not_wait_for_ever_and_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with agent() as (fake, port), gateway() as target:
        target.is_drained = False
        for flags, signals, code in (
            (("--drain-timeout", "0.3"), 1, 0),
            (("--drain-timeout", "60"), 2, 128 + signal.SIGTERM),
        ):
            async with running(tmp_path, port, *flags) as sidecar:
                fake.send_status(target)
                await until(sidecar.is_ready)
                for _ in range(signals):
                    sidecar.process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.2)
                assert await asyncio.wait_for(sidecar.process.wait(), 10) == code


async def test_a_client_authority_that_was_taken_out_is_trusted_no_more(tmp_path: Path) -> None:
    authorities = {}
    for name in ("server", "old", "new"):
        (tmp_path / name).mkdir()
        authorities[name] = Authority(tmp_path / name)
    cert, key = authorities["server"].issue("localhost")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authorities["old"].file.read_bytes())
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(trusted))

    def client_of(name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(authorities["server"].file))
        context.load_cert_chain(*authorities[name].issue("me"))
        return context

    old, new = client_of("old"), client_of("new")
    async with agent() as (fake, port), gateway() as target, running(tmp_path, port, *flags) as sidecar:
        fake.send_status(target)
        await until(sidecar.is_ready)

        async def is_served(context: ssl.SSLContext) -> bool:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", sidecar.http, ssl=context)
                writer.write(b"hello")
                answer = await asyncio.wait_for(reader.read(5), 30)
                writer.close()
            except (OSError, ssl.SSLError):
                return False
            return answer == b"hello"

        assert await is_served(old)
        assert not await is_served(new)
        kept = await asyncio.open_connection("127.0.0.1", sidecar.http, ssl=old)
        trusted.write_bytes(authorities["new"].file.read_bytes())
        await until(lambda: is_served(new))
        assert not await is_served(old)
        kept[1].write(b"still")  # who is connected keeps what he had
        assert await kept[0].readexactly(5) == b"still"
        kept[1].close()


async def test_it_is_small(tmp_path: Path) -> None:
    """25 MiB is asked for, of an image whose Python has been compiled; here there is some slack."""
    async with agent() as (fake, port), gateway() as target, running(tmp_path, port) as sidecar:
        fake.send_status(target)
        await until(sidecar.is_ready)
        for _ in range(20):
            assert await echoed(sidecar, bytes(1000))
        assert sidecar.memory_kib() < 28 * 1024


async def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from berth.cli import main\n"
        "import proxy.command, proxy.sidecar.app\n"
        "heavy = {'numpy', 'grpc', 'google.protobuf', 'aiohttp', 'prometheus_client', 'decimal', 'hashlib', 'shutil'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert said.strip() == b"[]"
