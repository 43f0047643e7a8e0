"""Readiness, liveness and startup probes."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import grpc.aio

JsonObject = dict[str, Any]
Exec = Callable[[list[str]], Awaitable[int]]

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


@dataclass(slots=True)
class Verdict:
    """The running result of one probe: it changes after enough outcomes in a row, as thresholds say.

    A readiness probe begins as failed, the other two as passed (k8s.io/kubernetes/pkg/kubelet/prober).
    """

    success_threshold: int
    failure_threshold: int
    passed: bool
    _streak: int = 0
    _last: bool | None = None

    def take(self, outcome: bool) -> bool:
        """Count one outcome; True if the threshold for it has been reached."""
        self._streak = self._streak + 1 if outcome is self._last else 1
        self._last = outcome
        reached = self._streak >= (self.success_threshold if outcome else self.failure_threshold)
        if reached:
            self.passed = outcome
        return reached


class Probe:
    """One probe of one container."""

    def __init__(
        self, spec: JsonObject, container: JsonObject, *, pod_ip: str, run: Exec, ready: bool
    ) -> None:
        self._spec, self._ip, self._exec = spec, pod_ip, run
        self._ports = {p["name"]: p["containerPort"] for p in container.get("ports") or [] if "name" in p}
        self.verdict = Verdict(spec.get("successThreshold", 1), spec.get("failureThreshold", 3), passed=ready)

    async def run(self, on_outcome: Callable[[bool, bool], None]) -> None:
        """Probe for ever; `on_outcome(outcome, threshold_reached)` after each."""
        await asyncio.sleep(self._spec.get("initialDelaySeconds") or 0)
        while True:
            outcome = await self.once()
            on_outcome(outcome, self.verdict.take(outcome))
            await asyncio.sleep(self._spec.get("periodSeconds", 10))

    async def once(self) -> bool:
        """One attempt, bounded by timeoutSeconds."""
        with suppress(TimeoutError, OSError, aiohttp.ClientError, grpc.aio.AioRpcError):
            async with asyncio.timeout(self._spec.get("timeoutSeconds", 1)):
                return await self._attempt()
        return False

    async def _attempt(self) -> bool:
        if http := self._spec.get("httpGet"):
            return await self._http(http)
        if call := self._spec.get("grpc"):
            return await self._grpc(call)
        if command := self._spec.get("exec"):
            return await self._exec(command["command"]) == 0
        socket = self._spec["tcpSocket"]
        _, writer = await asyncio.open_connection(socket.get("host", self._ip), self._port(socket["port"]))
        writer.close()
        return True

    async def _http(self, http: JsonObject) -> bool:
        scheme, host = http.get("scheme", "HTTP").lower(), http.get("host", self._ip)
        headers = {
            "User-Agent": "kube-probe/1.36",
            **{h["name"]: h["value"] for h in http.get("httpHeaders") or []},
        }
        url = f"{scheme}://{host}:{self._port(http['port'])}{http.get('path', '/')}"
        session = aiohttp.ClientSession(headers=headers)
        # A kubelet does not verify certificates either.
        async with session, session.get(url, ssl=False, allow_redirects=False) as answer:
            return 200 <= answer.status < 400

    async def _grpc(self, call: JsonObject) -> bool:
        service = (call.get("service") or "").encode()
        request = b"\x0a" + bytes([len(service)]) + service if service else b""
        target, options = f"{self._ip}:{call['port']}", [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            return bool(await channel.unary_unary(_HEALTH_CHECK, None, None)(request) == _SERVING)

    def _port(self, port: int | str) -> int:
        """Raises OSError for a name that no port of the container has: such a probe fails, as a kubelet's."""
        if isinstance(port, str) and not port.isdigit():
            if port not in self._ports:
                raise OSError(f"the container has no port {port!r}")
            return int(self._ports[port])
        return int(port)
