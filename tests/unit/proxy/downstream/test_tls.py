"""TLS towards clients: handshakes in memory."""

import asyncio
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from berth.contract.ids import ModelName
from berth.runtime.errors import ConfigError
from proxy.config import ProxyOptions
from proxy.downstream import tls
from proxy.downstream.tls import Certificates, certificates_of, follow_certificates


class Files:
    """A certificate that is its own authority, and its key."""

    def __init__(self, directory: Path, name: str) -> None:
        self.cert, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        self.renew(name)

    def renew(self, name: str) -> None:
        key, subject = (
            ec.generate_private_key(ec.SECP256R1()),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        )
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
        self.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def server(tmp_path: Path) -> Files:
    return Files(tmp_path, "server")


@pytest.fixture
def other(tmp_path: Path) -> Files:
    return Files(tmp_path, "other")


def client_of(server: Files, *protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(server.cert)
    context.set_alpn_protocols(list(protocols) or ["http/1.1", "h2"])
    return context


def shaken(ours: ssl.SSLContext, theirs: ssl.SSLContext) -> ssl.SSLObject:
    """The client's end after a handshake that both have finished. Raises SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = theirs.wrap_bio(down, up), ours.wrap_bio(up, down, server_side=True)
    unfinished = {client, server}
    for _ in range(10):
        for end in list(unfinished):
            try:
                end.do_handshake()
                unfinished.discard(end)
            except ssl.SSLWantReadError:
                pass
    assert not unfinished
    return client


def test_each_port_offers_its_protocol(server: Files) -> None:
    """A gRPC client hangs up on a server that does not choose h2."""
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=None)
    both = client_of(server)
    assert shaken(certificates.http, both).selected_alpn_protocol() == "http/1.1"
    assert shaken(certificates.grpc, both).selected_alpn_protocol() == "h2"
    assert shaken(certificates.http, both).compression() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_older_than_tls_1_2_and_no_renegotiation(server: Files) -> None:
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=None)
    for version, taken in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        client = client_of(server)
        client.set_ciphers("DEFAULT:@SECLEVEL=0")
        client.minimum_version = client.maximum_version = version
        if taken:
            assert shaken(certificates.grpc, client).version()
        else:
            with pytest.raises(ssl.SSLError):
                shaken(certificates.grpc, client)
    for context in (certificates.http, certificates.grpc):
        assert context.options & ssl.OP_NO_RENEGOTIATION
        assert context.options & ssl.OP_NO_COMPRESSION


def test_with_an_authority_only_its_clients_are_served(server: Files, other: Files) -> None:
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=other.cert)
    known, stranger, nameless = (client_of(server) for _ in range(3))
    known.load_cert_chain(other.cert, other.key)
    stranger.load_cert_chain(server.cert, server.key)
    for ours in (certificates.http, certificates.grpc):
        assert shaken(ours, known).version()
        for client in (stranger, nameless):
            with pytest.raises(ssl.SSLError):
                shaken(ours, client)


def serial(context: ssl.SSLContext, server: Files) -> object:
    certificate = shaken(context, client_of(server)).getpeercert()
    assert certificate
    return certificate["serialNumber"]


@pytest.mark.parametrize("changed", ["cert", "authority"])
def test_what_has_changed_is_loaded_and_nothing_else(server: Files, other: Files, changed: str) -> None:
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=None)
    if changed == "authority":
        certificates = Certificates(cert=server.cert, key=server.key, client_ca=other.cert)
    before = (certificates.http, certificates.grpc)
    assert not certificates.reload()
    assert (certificates.http, certificates.grpc) == before
    if changed == "cert":
        server.renew("server")
    else:
        other.renew("other")
    assert certificates.reload()
    assert not certificates.reload()  # once
    if changed == "cert":
        assert serial(certificates.http, server) == serial(certificates.grpc, server)
        with pytest.raises(ssl.SSLError):
            shaken(before[0], client_of(server))  # a client that is connected keeps its certificate
    else:
        known = client_of(server)
        known.load_cert_chain(other.cert, other.key)
        assert shaken(certificates.grpc, known).version()


@pytest.mark.parametrize("what", ["size", "time", "file"])
def test_any_trace_of_a_new_file_counts(server: Files, tmp_path: Path, what: str) -> None:
    """The kubelet replaces a Secret's files behind a symbolic link, often within one tick of the clock."""
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=None)
    stat, text = server.cert.stat(), server.cert.read_bytes()
    if what == "file":
        (new := tmp_path / "new").write_bytes(text)
        new.rename(server.cert)
    elif what == "size":
        server.cert.write_bytes(text + b"\n")
    os.utime(server.cert, ns=(stat.st_atime_ns, stat.st_mtime_ns + (what == "time")))
    assert certificates.reload()


def test_what_changes_while_it_is_read_is_read_again(server: Files) -> None:
    class Overtaken(Certificates):
        def _load(self, context: ssl.SSLContext) -> None:
            super()._load(context)
            loaded.append(context)
            if len(loaded) == 2:
                server.renew("server")

    loaded: list[ssl.SSLContext] = []
    certificates = Overtaken(cert=server.cert, key=server.key, client_ca=None)
    with pytest.raises(ssl.SSLError):
        shaken(certificates.http, client_of(server))
    assert certificates.reload()
    assert shaken(certificates.http, client_of(server)).version()


def options(**files: Path | None) -> ProxyOptions:
    return ProxyOptions(model=ModelName("m"), **files)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_used_is_named_by_its_flag(server: Files, other: Files, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert certificates_of(options().tls) is None
    assert certificates_of(options(tls_cert=server.cert).tls) is None  # reported as a wrong flag before
    assert certificates_of(options(tls_cert=server.cert, tls_key=server.key).tls) is not None
    for flags, message in (
        ({"tls_cert": missing, "tls_key": server.key}, f"--tls-cert {missing}"),
        ({"tls_cert": server.cert, "tls_key": other.key}, f"--tls-key {other.key}"),
        ({"tls_cert": server.key, "tls_key": server.key}, f"--tls-cert {server.key}"),
        ({"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": missing}, "--tls-client-ca"),
        ({"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": server.key}, "--tls-client-ca"),
    ):
        with pytest.raises(ConfigError, match=message):
            certificates_of(options(**flags).tls)


async def test_renewals_are_taken_as_long_as_the_proxy_runs(
    server: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after one that could not be used, and after files that were away for a moment."""
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.001)
    certificates = Certificates(cert=server.cert, key=server.key, client_ca=None)
    used: list[ssl.SSLContext] = []

    async def use() -> None:
        used.append(certificates.http)

    following = asyncio.create_task(follow_certificates(certificates, use))

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():
                assert not following.done()
                await asyncio.sleep(0.001)

    await asyncio.sleep(0.02)
    assert not used
    server.key.write_text("half a file")
    await asyncio.sleep(0.02)
    server.key.unlink()
    await asyncio.sleep(0.02)
    assert not used
    server.renew("server")
    await until(lambda: bool(used) and used[-1] is certificates.http and not certificates.reload())
    assert shaken(used[-1], client_of(server)).version()
    following.cancel()
