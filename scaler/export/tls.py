"""The scaler's certificate for callers that ask for figures; read anew when its files change, as a Secret's do."""

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from berth.runtime.errors import ConfigError

_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`client_ca`: clients must show a certificate of this authority; None: they need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def stamps(self) -> _Stamps:
        """Another value when a file is another one."""
        return tuple(_stamp(path) for path in (self.cert, self.key, self.client_ca) if path is not None)

    def load_into(self, context: ssl.SSLContext) -> None:
        """The certificate and its key. Raises ConfigError where they are none."""
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-cert {self.cert}, --tls-key {self.key}: {error}") from error

    def read(self) -> "TlsBytes":
        """Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.load_into(context)
        try:
            cert, key = self.cert.read_bytes(), self.key.read_bytes()
        except OSError as error:  # they went a moment ago
            raise ConfigError(f"--tls-cert {self.cert}, --tls-key {self.key}: {error}") from error
        return TlsBytes(cert, key, None if self.client_ca is None else _authority(self.client_ca, context))


@dataclass(frozen=True, slots=True)
class TlsBytes:
    """What stands in the files."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None


def _authority(path: Path, context: ssl.SSLContext) -> bytes:
    """gRPC would take anything, and then refuse every client. Raises ConfigError."""
    try:
        context.load_verify_locations(path)
        return path.read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--keda-client-ca {path}: {error}") from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()  # of the file that a Secret's symbolic link points at
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


class GrpcTls:
    """Credentials of a gRPC server, which reads them at every handshake."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError."""
        self._files, self._seen = files, files.stamps()
        self._current = _configuration(files.read())

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._current, self._renewed, require_client_authentication=self._files.client_ca is not None
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration:
        """Files that are being written at this moment are read at the next handshake."""
        stamps = self._files.stamps()
        if stamps != self._seen:
            with suppress(ConfigError):
                self._current, self._seen = _configuration(self._files.read()), stamps
        return self._current


def _configuration(of: TlsBytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(of.key, of.cert)], of.client_ca)
