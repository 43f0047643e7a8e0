"""A sidecar as its users run it, in front of the real gateway; only Triton and the agent are fakes."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest

from berth.contract.endpoint import Endpoint, UnixSocket
from proxy.gateway.app import Gateway, serving
from proxy.gateway.config import GatewayOptions
from tests.fakes.agent_control import Agent, agent_at, replica_of
from tests.fakes.eventually import until
from tests.fakes.triton_rest import BODY, fake_triton
from tests.loopback.proxy.test_sidecar import agent, running, says

REPLICA = replica_of("uid-1", "m")
READY = "/inference.GRPCInferenceService/ServerReady"


@asynccontextmanager
async def gateway_of(
    directory: Path, triton: Endpoint, port: int = 0
) -> AsyncIterator[tuple[Gateway, Agent]]:
    options = GatewayOptions(
        triton_http=triton,
        triton_grpc=triton,
        listen=Endpoint("127.0.0.1", port),
        control=UnixSocket(str(directory / "control")),
        admin_listen=Endpoint("127.0.0.1", 0),
    )
    async with serving(options) as gateway, agent_at(str(directory / "control")) as control:
        control.tell([REPLICA])
        yield gateway, control


async def test_a_request_goes_through_both_and_the_end_is_in_order(tmp_path: Path) -> None:
    async with (
        fake_triton() as upstream,
        agent() as (fake, agent_port),
        gateway_of(tmp_path, upstream.endpoint) as (gateway, _),
        running(tmp_path, agent_port, "--drain-delay", "1") as sidecar,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{sidecar.http}/v2"

        async def infer() -> int:
            async with session.post(f"{url}/models/m/infer", data=json.dumps(BODY)) as answer:
                return answer.status

        fake.status.gateway.endpoint = f"127.0.0.1:{gateway.port}"
        fake.status.gateway.ticket = bytes(32)  # of no replica
        fake.send_status(None)
        await until(lambda: says(sidecar, "ticket"))
        assert await infer() == 503
        fake.status.gateway.ticket = REPLICA.ticket
        fake.send_status(None)
        await until(sidecar.is_ready)
        assert await infer() == 200
        await until(lambda: counted(sidecar.get("/metrics")))
        upstream.may_answer.clear()
        asked = asyncio.create_task(infer())
        await until(lambda: upstream.running)
        sidecar.process.send_signal(signal.SIGTERM)
        await until(lambda: says(sidecar, "draining"))

        async def is_reported() -> bool:
            async with session.get(f"{url}/health/ready") as answer:
                return answer.status != 200

        await until(is_reported)  # by the gateway, which serves as before
        await asyncio.sleep(1.2)
        assert not asked.done()
        assert not any(type(one).__name__ == "UnloadRequest" for one in fake.asked)
        upstream.may_answer.set()
        assert await asked == 200
        assert await asyncio.wait_for(sidecar.process.wait(), 10) == 0
        assert type(fake.asked[-1]).__name__ == "UnloadRequest"
        assert "out of time" not in sidecar.log.read_text()


async def counted(metrics: "asyncio.Future[tuple[int, bytes]]") -> bool:
    return b'berth_proxy_requests_total{code="200",protocol="rest"} 1.0' in (await metrics)[1]


async def test_a_gateway_that_restarts_is_found_again(tmp_path: Path) -> None:
    async with (
        fake_triton() as upstream,
        agent() as (fake, agent_port),
        running(tmp_path, agent_port) as sidecar,
    ):
        async with gateway_of(tmp_path, upstream.endpoint) as (gateway, _):
            port = gateway.port
            fake.status.gateway.endpoint, fake.status.gateway.ticket = f"127.0.0.1:{port}", REPLICA.ticket
            fake.send_status(None)
            await until(sidecar.is_ready)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{sidecar.grpc}")
            assert await channel.unary_unary(READY)(b"", timeout=10) == b"\x08\x01"
        await until(lambda: says(sidecar, "no gateway"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(READY)(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with gateway_of(tmp_path, upstream.endpoint, port):
            await until(sidecar.is_ready, seconds=3)
            assert await channel.unary_unary(READY)(b"", timeout=10, wait_for_ready=True) == b"\x08\x01"
        await channel.close()


async def test_a_sidecar_that_is_restarted_in_its_pod_serves_again(tmp_path: Path) -> None:
    """The kubelet ends a container and starts it anew; the pod, and with it the ticket, goes on."""
    async with (
        fake_triton() as upstream,
        agent() as (fake, agent_port),
        gateway_of(tmp_path, upstream.endpoint) as (gateway, _),
    ):
        fake.status.gateway.endpoint, fake.status.gateway.ticket = f"127.0.0.1:{gateway.port}", REPLICA.ticket
        for _ in range(2):
            async with running(tmp_path, agent_port) as sidecar:
                fake.send_status(None)
                await until(sidecar.is_ready)
                async with aiohttp.ClientSession() as session:
                    url = f"http://127.0.0.1:{sidecar.http}/v2/models/m/infer"
                    async with session.post(url, data=json.dumps(BODY)) as answer:
                        assert answer.status == 200
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{sidecar.grpc}")
                assert await channel.unary_unary(READY)(b"", timeout=10) == b"\x08\x01"
                await channel.close()
                sidecar.process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(sidecar.process.wait(), 10) == 0
