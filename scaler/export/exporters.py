"""All through which others see a scaler's figures, wired: its admin port's models, external metrics, KEDA's scaler."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

from berth.contract.scaling import ModelKey
from berth.kube.client import KubeClient
from berth.runtime.admin import Page, Reply, Request
from berth.runtime.errors import ConfigError
from berth.runtime.tasks import supervise
from scaler.core.models_view import MODELS_PATH, ModelView, model_of, to_json
from scaler.export.external_metrics import ExternalMetrics
from scaler.export.front_proxy import FrontProxyPort
from scaler.export.keda import KedaScaler, serve
from scaler.export.options import ExportOptions
from scaler.export.relay import relaying
from scaler.export.tls import GrpcTls, TlsFiles

_GRACE_SECONDS: Final = 1.0


class Models(Protocol):
    """The scaler's heart, as far as it shows anything."""

    def names(self, namespace: str) -> Sequence[str]: ...
    def view(self, model: ModelKey) -> ModelView | None: ...


class LeadersView:
    """As ModelsView: nothing unless this replica leads."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.leads = False

    def names(self, namespace: str) -> Sequence[str]:
        return self._models.names(namespace) if self.leads else ()

    def view(self, model: ModelKey) -> ModelView | None:
        return self._models.view(model) if self.leads else None


class Exporters:
    """Of one replica, whether it leads or not. `look` is to be called with the models that may be shown otherwise than before."""

    def __init__(
        self, options: ExportOptions, models: Models, client: KubeClient, leader: Callable[[], str]
    ) -> None:
        """`leader`: the leader's host, "" where none is known. Raises ConfigError where the
        certificates cannot be used."""
        self._options, self._client, self._leader = options, client, leader
        self._shown = LeadersView(models)
        self._keda = KedaScaler(self._shown)
        self._tls = tls_of(options)
        self._grpc_tls = None if self._tls is None else GrpcTls(self._tls)
        self._leads = asyncio.Event()

    def pages(self) -> Mapping[str, Page]:
        """For the admin port."""
        return {MODELS_PATH: self._model}

    def look(self, changed: Iterable[ModelKey]) -> None:
        self._keda.look(changed)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """What is shown is this replica's while the block lasts; watchers come back afterwards. It is entered
        once: a replica that loses the Lease ends."""
        self._shown.leads = True
        self._leads.set()
        try:
            yield
        finally:
            self._shown.leads = False
            self._keda.end()

    async def run(self) -> None:
        """For ever. Raises CannotStart."""
        await self._relay()
        async with self._serving_keda(), supervise() as tasks:
            if self._options.external_metrics_listen is not None and self._tls is not None:
                api = ExternalMetrics(self._shown)
                port = FrontProxyPort(self._client, self._tls, api.application)
                tasks.eternal("external metrics", port.run(self._options.external_metrics_listen))
            await asyncio.Event().wait()

    async def _relay(self) -> None:
        """Until this replica leads."""
        ports = {
            "--external-metrics-listen": self._options.external_metrics_listen,
            "--keda-listen": self._options.keda_listen,
        }
        async with AsyncExitStack() as stack:
            for flag, listen in ports.items():
                if listen is not None:
                    await stack.enter_async_context(relaying(flag, listen, self._leader))
            await self._leads.wait()

    @asynccontextmanager
    async def _serving_keda(self) -> AsyncIterator[None]:
        if self._options.keda_listen is None:
            yield
            return
        server = await serve(self._keda, self._options.keda_listen, self._grpc_tls)
        try:
            yield
        finally:
            self._keda.end()
            await server.stop(_GRACE_SECONDS)

    def _model(self, request: Request) -> Reply:
        model = model_of(request.path)
        view = None if model is None else self._shown.view(model)
        if view is None:
            return Reply(b"not scaled here\n", status=404)
        return Reply(json.dumps(to_json(view)).encode(), "application/json; charset=utf-8")


def tls_of(options: ExportOptions) -> TlsFiles | None:
    """Raises ConfigError for flags that do not go together, and for files that cannot be used."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    if options.keda_client_ca is not None and options.keda_listen is None:
        raise ConfigError("--keda-client-ca needs --keda-listen: it is KEDA that shows a certificate")
    if options.tls_cert is None or options.tls_key is None:
        if options.external_metrics_listen is not None:
            raise ConfigError("--external-metrics-listen needs --tls-cert: the API server asks by TLS only")
        if options.keda_client_ca is not None:
            raise ConfigError("--keda-client-ca needs --tls-cert: without TLS no client shows a certificate")
        return None
    files = TlsFiles(options.tls_cert, options.tls_key, options.keda_client_ca)
    files.read()
    return files
