"""What one replica shows: only while it leads, and only to whom it was told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web

from berth.contract.endpoint import Endpoint
from berth.runtime.admin import AdminServer
from berth.runtime.errors import CannotStart, ConfigError
from berth.v1.externalscaler_pb2 import ScaledObjectRef
from berth.v1.externalscaler_pb2_grpc import ExternalScalerStub
from localcluster.addresses import free_port
from localcluster.credentials import make_serving_certificate
from scaler.export.exporters import Exporters
from scaler.export.options import ExportOptions
from scaler.export.tls import TlsFiles
from tests.fakes.kube import connected
from tests.fakes.models_view import FakeModels

HOST = "127.0.0.1"
_SOON_AGAIN = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))


@asynccontextmanager
async def exporters(models: FakeModels, leader: str = "", **options: Any) -> AsyncIterator[Exporters]:
    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    async with connected(nothing) as client:
        yield Exporters(ExportOptions(**options), models, client, leader=lambda: leader)


async def test_the_admin_port_shows_a_model_while_this_replica_leads() -> None:
    models = FakeModels()
    models.add("a/resnet", desired=3)
    async with exporters(models) as one:
        admin = AdminServer(Endpoint(HOST, 0), not_ready=lambda: None, pages=one.pages())
        async with admin, aiohttp.ClientSession() as session:
            url = f"http://{HOST}:{admin.port}/models/a/"

            async def status(name: str) -> tuple[int, int | None]:
                async with session.get(url + name) as response:
                    told = await response.json() if response.status == 200 else {}
                    return response.status, told.get("desired")

            assert await status("resnet") == (404, None)
            async with one.leading():
                assert await status("resnet") == (200, 3)
                assert await status("bert") == (404, None)
            assert await status("resnet") == (404, None)


@asynccontextmanager
async def run(one: Exporters) -> AsyncIterator[None]:
    running = asyncio.create_task(one.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()


async def test_keda_is_answered_by_the_leader_whichever_replica_it_asks() -> None:
    """And by the next one, where it asked before."""
    models, later = FakeModels(), FakeModels()
    model = models.add("a/m")
    later.add("a/m", buffered=1)
    hosts = (HOST, "127.0.0.2")
    port = free_port(*hosts)
    first, second = ({"keda_listen": Endpoint(host, port)} for host in hosts)
    asked = ScaledObjectRef(namespace="a", name="m")
    async with (
        exporters(models, **first) as one,
        exporters(later, leader=HOST, **second) as other,
        grpc.aio.insecure_channel(f"{hosts[1]}:{port}", options=_SOON_AGAIN) as channel,
        run(other),
    ):
        stub = ExternalScalerStub(channel)  # type: ignore[no-untyped-call]
        async with run(one), one.leading():
            stream = stub.StreamIsActive(asked, wait_for_ready=True, timeout=20)
            assert not (await stub.IsActive(asked, wait_for_ready=True, timeout=20)).result
            models.change(model, buffered=1)
            one.look([model])
            assert (await stream.read()).result
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.IsActive(asked, timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        models.change(model, buffered=0)
        async with other.leading():
            assert (await stub.IsActive(asked, wait_for_ready=True, timeout=20)).result


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": Path("tls.crt")}, "--tls-key"),
        ({"tls_key": Path("tls.key")}, "--tls-cert"),
        ({"external_metrics_listen": Endpoint(HOST, 0)}, "--external-metrics-listen needs --tls-cert"),
        (
            {"keda_listen": Endpoint(HOST, 0), "keda_client_ca": Path("ca.crt")},
            "--keda-client-ca needs --tls-cert",
        ),
        ({"keda_client_ca": Path("ca.crt")}, "--keda-client-ca needs --keda-listen"),
        (
            {"tls_cert": Path("no.crt"), "tls_key": Path("no.key")},
            "--tls-cert no.crt, --tls-key no.key: .*No such",
        ),
    ],
)
async def test_options_that_do_not_go_together_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with exporters(FakeModels(), **options):
            pass


def test_a_file_that_is_replaced_is_another_one_however_alike(tmp_path: Path) -> None:
    """As a Secret's is: by a link to another directory, in the same second, with as many bytes."""
    files = TlsFiles(*(tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")))
    for path in (files.cert, files.key, files.client_ca):
        assert path is not None
        path.write_text("a")
        before = files.stamps()
        assert files.stamps() == before
        (tmp_path / "new").write_text("b")
        (tmp_path / "new").replace(path)
        assert files.stamps() != before
        path.unlink()
        assert files.stamps() != before


async def test_an_authority_that_is_none_is_named(tmp_path: Path) -> None:
    tls = {"tls_cert": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key"}
    make_serving_certificate(*tls.values(), hosts=[HOST])
    authority = tmp_path / "ca.crt"
    for text in (None, "nonsense"):
        if text is not None:
            authority.write_text(text)
        with pytest.raises(ConfigError, match=rf"--keda-client-ca {authority}: "):
            async with exporters(
                FakeModels(), keda_listen=Endpoint(HOST, 0), keda_client_ca=authority, **tls
            ):
                pass


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    make_serving_certificate(files.cert, files.key, hosts=[HOST])
    tls = {"tls_cert": files.cert, "tls_key": files.key}
    taken = await asyncio.start_server(lambda *_: None, HOST, 0)
    endpoint = Endpoint(HOST, taken.sockets[0].getsockname()[1])
    for option in ("keda_listen", "external_metrics_listen"):
        async with exporters(FakeModels(), **tls, **{option: endpoint}) as one:
            with pytest.raises((CannotStart, ExceptionGroup)) as failed:
                await one.run()
            causes = failed.value.exceptions if isinstance(failed.value, ExceptionGroup) else (failed.value,)
            flag = "--" + option.replace("_", "-")
            assert [isinstance(cause, CannotStart) and flag in str(cause) for cause in causes] == [True]
    taken.close()
    await taken.wait_closed()
