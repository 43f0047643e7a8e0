"""A port with TLS whose certificates are renewed while it serves."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import ConfigError
from proxy.downstream.listener import Listener
from proxy.downstream.tls import Certificates
from tests.fakes.certificates import Authority


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")  # type: ignore[attr-defined]


@asynccontextmanager
async def listening(certificates: Certificates) -> AsyncIterator[Listener]:
    listener = Listener(Greeter, what="--http-listen")
    await listener.start(Endpoint("127.0.0.1", 0), tls=certificates.http)
    yield listener
    await listener.stop()


async def is_served(port: int, context: ssl.SSLContext) -> bool:
    """A client whose certificate is not taken learns it with its first read."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        greeting = await asyncio.wait_for(reader.read(5), 30)
        writer.close()
    except (OSError, ssl.SSLError):
        return False
    return greeting == b"hello"


def client_of(server: Authority, cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(server.file))
    context.load_cert_chain(cert, key)
    return context


async def test_an_authority_that_was_taken_out_is_trusted_no_more(tmp_path: Path) -> None:
    authorities = {}
    for name in ("server", "old", "new"):
        (tmp_path / name).mkdir()
        authorities[name] = Authority(tmp_path / name)
    cert, key = authorities["server"].issue("server")
    old, new = (client_of(authorities["server"], *authorities[name].issue("me")) for name in ("old", "new"))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authorities["old"].file.read_bytes())
    certificates = Certificates(cert=cert, key=key, client_ca=trusted)
    async with listening(certificates) as listener:
        port = listener.port
        assert (await is_served(port, old), await is_served(port, new)) == (True, False)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=old)
        trusted.write_bytes(authorities["new"].file.read_bytes())
        assert certificates.reload()
        await listener.renew(certificates.http)
        assert listener.port == port
        assert (await is_served(port, old), await is_served(port, new)) == (False, True)
        assert await reader.readexactly(5) == b"hello"  # who is connected stays
        writer.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


def test_a_renewal_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    certificates = Certificates(cert=cert, key=key, client_ca=authority.file)
    before = (certificates.http, certificates.grpc)
    assert not certificates.reload()
    authority.file.write_text("nothing")
    with pytest.raises(ConfigError, match="--tls-client-ca"):
        certificates.reload()
    assert (certificates.http, certificates.grpc) == before
