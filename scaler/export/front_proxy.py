"""A port for the API server's aggregator alone: only its client certificate is served.

What the aggregator's certificate is signed by, and what it is called, the API server writes itself into the ConfigMap
`kube-system/extension-apiserver-authentication`. Headers such as X-Remote-User say nothing here, with it or without.

Source: k8s.io/apiserver pkg/server/options/authentication.go, pkg/authentication/request/{x509,headerrequest}.
"""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from berth.contract.endpoint import Endpoint
from berth.contract.errors import InvalidValue
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError
from berth.runtime.backoff import Backoff
from berth.runtime.errors import ConfigError
from berth.runtime.logs import fields
from berth.runtime.process import starting
from scaler.export.tls import TlsFiles

log = logging.getLogger(__name__)

CONFIG_MAP: Final = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
Guard = Callable[[web.Request], str | None]

# Authorities and certificates live for months.
_LOOK_SECONDS: Final = 60.0
# The aggregator keeps its connections. Who else comes costs a handshake, and no more of them than this a second, each
# for no longer than this: the decisions have their turn meanwhile.
_HANDSHAKES_PER_SECOND: Final = 50
_HANDSHAKE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """Whose certificates are the aggregator's. `names`: as it may be called; none: as its authority allows."""

    authority: str
    names: frozenset[str]

    def refusal(self, certificate: Mapping[str, Any]) -> str | None:
        """Why a verified certificate, as `ssl` reads it, is not the aggregator's."""
        parts = (part for relative in certificate.get("subject", ()) for part in relative)
        name = next((value for key, value in parts if key == "commonName"), "")
        if name and (name in self.names or not self.names):
            return None
        return "only the API server's aggregator is served here"


def front_proxy_of(config_map: Mapping[str, Any]) -> FrontProxy:
    """Raises InvalidValue where the API server does not say who its aggregator is, or anybody could pass for it."""
    data = config_map.get("data") or {}
    authority = data.get("requestheader-client-ca-file") or ""
    if not authority:
        raise InvalidValue(
            "the API server has no aggregator: it runs without --requestheader-client-ca-file and --proxy-client-cert-file"
        )
    try:
        names = frozenset(json.loads(data.get("requestheader-allowed-names") or "[]"))
    except (ValueError, TypeError) as error:
        raise InvalidValue(f"requestheader-allowed-names is no list of names: {error}") from None
    front = FrontProxy(authority, names)
    if not names and _certificates(authority) & _certificates(data.get("client-ca-file") or ""):
        raise InvalidValue(
            "every client certificate of the cluster would pass for the aggregator's: give the API server"
            " --requestheader-allowed-names, or an authority of its own as --requestheader-client-ca-file"
        )
    return front


def _certificates(pem: str) -> frozenset[bytes]:
    """Each that stands in it. Raises InvalidValue."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    try:
        return frozenset(
            ssl.PEM_cert_to_DER_cert(begin + part.partition(end)[0] + end) for part in pem.split(begin)[1:]
        )
    except ValueError as error:
        raise InvalidValue(f"an authority of the API server cannot be read: {error}") from None


class FrontProxyPort:
    """One listener. It begins to serve once the API server has said who its aggregator is."""

    def __init__(
        self,
        client: KubeClient,
        files: TlsFiles,
        application: Callable[[Guard], web.Application],
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._client, self._files, self._application = client, files, application
        self._look_seconds = look_seconds

    async def run(self, listen: Endpoint) -> None:
        """For ever. Raises CannotStart where the port is taken, ConfigError where the certificate cannot be read."""
        self._files.read()
        with _bound(listen) as listener:
            while True:
                stamps = self._files.stamps()
                front, context = await self._read()
                listener.listen()
                async with self._serving(listener, front, context):
                    await self._until_other(front, stamps)
                log.info("the aggregator's authority or the certificate has changed")

    async def _read(self) -> tuple[FrontProxy, ssl.SSLContext]:
        """Until it can be read. No request is served meanwhile."""
        backoff = Backoff(initial_seconds=1.0, cap_seconds=60.0)
        while True:
            try:
                front = front_proxy_of(await self._client.get(CONFIG_MAP))
                return front, self._context(front)
            except (KubeError, InvalidValue, ConfigError) as error:
                log.warning("external metrics are not served", extra=fields(error=error))
                await asyncio.sleep(backoff.next())

    async def _until_other(self, front: FrontProxy, stamps: object) -> None:
        """While the API server does not answer, what it has said last holds."""
        while self._files.stamps() == stamps:
            await asyncio.sleep(self._look_seconds)
            try:
                if front_proxy_of(await self._client.get(CONFIG_MAP)) != front:
                    return
            except InvalidValue:
                return
            except KubeError as error:
                log.warning("the aggregator's authority is not known anew", extra=fields(error=error))

    @asynccontextmanager
    async def _serving(
        self, listener: socket.socket, front: FrontProxy, context: ssl.SSLContext
    ) -> AsyncIterator[None]:
        """Connections of an earlier authority end with it."""
        runner = web.AppRunner(self._application(_guard_of(front)), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        accepting = asyncio.create_task(_accept(listener, runner, context))
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
            await runner.cleanup()

    def _context(self, front: FrontProxy) -> ssl.SSLContext:
        """Raises ConfigError, InvalidValue."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=front.authority)
        except ssl.SSLError as error:
            raise InvalidValue(f"the aggregator's authority cannot be read: {error}") from None
        self._files.load_into(context)
        return context


def _bound(listen: Endpoint) -> socket.socket:
    """Bound, and not listening yet: until the server is ready a client is refused and does not wait."""
    with starting("--external-metrics-listen", listen):
        listener = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((listen.host, listen.port))
        except OSError:
            listener.close()
            raise
    return listener


async def _accept(listener: socket.socket, runner: web.AppRunner, context: ssl.SSLContext) -> None:
    loop, handshakes = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    try:
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be taken", extra=fields(error=error))
                await asyncio.sleep(1.0)
                continue
            task = loop.create_task(_handshake(connection, runner, context))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)
            await asyncio.sleep(1 / _HANDSHAKES_PER_SECOND)
    finally:
        for task in handshakes:
            task.cancel()


async def _handshake(connection: socket.socket, runner: web.AppRunner, context: ssl.SSLContext) -> None:
    """Who breaks it off, or has no certificate, is gone."""
    loop = asyncio.get_running_loop()
    assert runner.server is not None
    try:
        await loop.connect_accepted_socket(
            runner.server, connection, ssl=context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
        )
    except (OSError, TimeoutError):
        connection.close()


def _guard_of(front: FrontProxy) -> Guard:
    def guard(request: web.Request) -> str | None:
        shown = None if request.transport is None else request.transport.get_extra_info("peercert")
        return front.refusal(shown or {})

    return guard
