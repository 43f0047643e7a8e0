"""TLS towards clients: certificates that may be renewed while the proxy runs."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from proxy.config import TlsFiles

log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
_ALPN: Final = {"http": ["http/1.1"], "grpc": ["h2"]}


class Certificates:
    """The contexts of both ports. `reload` makes new ones; connections that are there keep theirs.

    Nothing of an old context lives on in a new one: no authority that was taken out of the file, and no
    session of a client that had a certificate of such a one.
    """

    def __init__(self, *, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Raises ConfigError where the files cannot be used."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._stamps()  # before they are read: what changes meanwhile is seen later
        self.http, self.grpc = self._context("http"), self._context("grpc")

    def reload(self) -> bool:
        """Load what has changed; True if something has. Raises ConfigError, and keeps what it has."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self.http, self.grpc = self._context("http"), self._context("grpc")
        self._seen = stamps
        return True

    def _context(self, protocol: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(_ALPN[protocol])
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-cert {self._cert}, --tls-key {self._key}: {error}") from error
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--tls-client-ca {self._client_ca}: {error}") from error

    def _stamps(self) -> tuple[object, ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key, self._client_ca) if path is not None)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()  # of the file that a Secret's symbolic link points at
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def certificates_of(files: TlsFiles | None) -> Certificates | None:
    """Raises ConfigError."""
    if files is None:
        return None
    return Certificates(cert=files.cert, key=files.key, client_ca=files.client_ca)


async def follow_certificates(certificates: Certificates, use: Callable[[], Awaitable[None]]) -> None:
    """Take renewed files for ever; `use` is called after each renewal."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if certificates.reload():
                await use()
                log.info("certificates renewed")
        except ConfigError as error:
            log.warning("certificates not renewed", extra=fields(error=error))
