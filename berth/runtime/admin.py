"""The admin port of every process: `/livez`, `/readyz`, `/metrics`, and routes of its own."""

from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from berth.contract.endpoint import Endpoint
from berth.runtime.errors import CannotStart
from berth.runtime.process import starting

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ReadyCheck = Callable[[], str | None]


class AdminServer:
    """Serves health and metrics. `not_ready()` returns the reason, or None when ready; `not_alive()` a
    reason that only a restart mends, or None."""

    def __init__(
        self,
        listen: Endpoint,
        *,
        not_ready: ReadyCheck,
        not_alive: ReadyCheck = lambda: None,
        registry: CollectorRegistry,
        routes: Iterable[tuple[str, Handler]] = (),
    ) -> None:
        self._listen, self._registry = listen, registry
        self._not_ready, self._not_alive = not_ready, not_alive
        application = web.Application()
        application.router.add_get("/livez", self._livez)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        for path, handler in routes:
            application.router.add_get(path, handler)
        # A probe or a scrape is answered at once; one in progress must not hold up the end.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> "AdminServer":
        """Raises CannotStart when the port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._listen.host, self._listen.port)
        try:
            with starting("--admin-listen", self._listen):
                await site.start()
        except CannotStart:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        port: int = self._runner.addresses[0][1]
        return port

    async def _livez(self, _: web.Request) -> web.Response:
        return _health(self._not_alive())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _health(self._not_ready())

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def _health(trouble: str | None) -> web.Response:
    return web.Response(text="ok\n") if trouble is None else web.Response(status=503, text=f"{trouble}\n")
