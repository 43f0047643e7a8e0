"""Keys, certificates and kubeconfigs of a cluster that lives as long as one process."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

_LIFETIME = timedelta(days=30)


def write_private(path: Path, text: str) -> Path:
    """A file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def make_signing_key(path: Path) -> None:
    """The key that the API server signs ServiceAccount tokens with."""
    _write_key(path, rsa.generate_private_key(public_exponent=65537, key_size=2048))


def make_serving_certificate(certificate: Path, key_path: Path, *, hosts: Sequence[str]) -> None:
    """A self-signed serving certificate for some addresses and names, which clients take as their CA."""
    addresses = x509.SubjectAlternativeName([_host(host) for host in hosts])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "berth local cluster")])
    _make_certificate(certificate, key_path, name, [addresses])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def make_client_certificate(certificate: Path, key_path: Path, *, user: str, group: str) -> None:
    """A self-signed certificate that says who a client is; a server takes it as the CA of its clients."""
    names = ((NameOID.COMMON_NAME, user), (NameOID.ORGANIZATION_NAME, group))
    _make_certificate(
        certificate, key_path, x509.Name([x509.NameAttribute(kind, value) for kind, value in names]), []
    )


def _make_certificate(
    certificate: Path, key_path: Path, name: x509.Name, extensions: Sequence[x509.ExtensionType]
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(key_path, key)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def write_kubeconfig(
    path: Path, *, server: str, certificate: Path, token: str | None = None, token_file: Path | None = None
) -> Path:
    """A kubeconfig with one user, known by a token or by a file that holds one."""
    user = {"token": token} if token is not None else {"tokenFile": str(token_file)}
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "berth", "cluster": {"server": server, "certificate-authority": str(certificate)}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "berth", "context": {"cluster": "berth", "user": "user"}}],
        "current-context": "berth",
    }
    return write_private(path, yaml.safe_dump(config))


def _usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(path, pem.decode())
    os.chmod(path, 0o600)
