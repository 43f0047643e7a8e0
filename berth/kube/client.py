"""A thin client of the API server: JSON dictionaries over one aiohttp session.

Credentials, TLS and token renewal are those of `kubernetes.aio`; its generated models are not used
because they are slow and large on hot lists and watches.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from berth.kube.errors import KubeError, KubeUnreachable, may_pass, response_error
from berth.runtime.backoff import Backoff
from berth.runtime.errors import CannotStart, ConfigError
from berth.runtime.logs import fields

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML

REQUEST_TIMEOUT_SECONDS = 15.0
CONNECT_TIMEOUT_SECONDS = 5.0
# A write comes to its end, one way or another, this long after it was begun, whether or not we hear of it: we
# give up connecting, and from its receipt on the API server keeps to the time that the request names. Whoever
# may write for a limited time only, as a leader, relies on it.
_WRITE_CONNECT_SECONDS, _WRITE_SERVER_SECONDS = 3.0, 7.0
WRITE_SECONDS = _WRITE_CONNECT_SECONDS + _WRITE_SERVER_SECONDS
_READ_TIMEOUT = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS)
_WRITE_TIMEOUT = aiohttp.ClientTimeout(total=WRITE_SECONDS, connect=_WRITE_CONNECT_SECONDS)
# k8s.io/apiserver/pkg/endpoints/filters/request_deadline.go: for admission and etcd, too.
_WRITE_PARAMS = {"timeout": f"{_WRITE_SERVER_SECONDS:g}s"}
# How long a process waits at its start for an API server that is away: less than its startup probe does for it.
PATIENCE_SECONDS: Final = 30.0
# One watch line is one object; the API server's own limit for one is about 1.5 MiB.
_LINE_BYTES = 4 * 1024 * 1024


class KubeClient:
    """Requests to one API server. Every call is bounded in time and raises only KubeError."""

    def __init__(self, configuration: Configuration, session: aiohttp.ClientSession) -> None:
        self._configuration, self._session = configuration, session

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    async def get(self, path: str, **params: str) -> JsonObject:
        """One object, or one list with its `items`."""
        return await self._call("GET", path, params=params)

    async def create(self, path: str, body: Mapping[str, Any], **params: str) -> JsonObject:
        return await self._call("POST", path, params=params, body=body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return await self._call("PUT", path, body=body)

    async def patch(
        self, path: str, body: Mapping[str, Any], *, content_type: str = MERGE_PATCH
    ) -> JsonObject:
        return await self._call("PATCH", path, body=body, content_type=content_type)

    async def apply(self, path: str, body: Mapping[str, Any], *, manager: str, **params: str) -> JsonObject:
        """Server-side apply, taking over fields that another manager owns."""
        query = {"fieldManager": manager, "force": "true", **params}
        return await self._call("PATCH", path, params=query, body=body, content_type=APPLY_PATCH)

    async def delete(
        self, path: str, *, grace_seconds: int | None = None, uid: str | None = None
    ) -> JsonObject:
        """Delete one object; with `uid`, only that one and not a successor of the same name."""
        options: JsonObject = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return await self._call("DELETE", path, body=options)

    async def stream(
        self, path: str, params: Mapping[str, str], *, idle_timeout_seconds: float
    ) -> AsyncGenerator[JsonObject, None]:
        """The JSON objects of a watch, line by line, until the server ends it or falls silent."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=idle_timeout_seconds
        )
        with _mapped_errors():
            async with self._session.get(
                self.host + path, params=params, headers=await self._headers(), timeout=timeout
            ) as response:
                if response.status >= 400:
                    raise await _error_of(response)
                async for line in response.content:
                    yield _parsed(line)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        headers = {**await self._headers(), "Content-Type": content_type}
        timeout, limits = (_READ_TIMEOUT, {}) if method == "GET" else (_WRITE_TIMEOUT, _WRITE_PARAMS)
        with _mapped_errors():
            async with self._session.request(
                method,
                self.host + path,
                params={**limits, **(params or {})},
                headers=headers,
                data=_encoded(body),
                timeout=timeout,
            ) as response:
                if response.status >= 400:
                    raise await _error_of(response)
                return _parsed(await response.read())

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "berth"}
        token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return headers if token is None else {**headers, "Authorization": token}


@asynccontextmanager
async def open_client(kubeconfig: str | None) -> AsyncIterator[KubeClient]:
    """A client from a kubeconfig file, or from the pod's own ServiceAccount when None.

    Raises ConfigError for a kubeconfig that cannot be used, CannotStart where there is neither.
    """
    configuration = await load_configuration(kubeconfig)
    try:
        tls = RESTClientObject(configuration).ssl_context
    except OSError as error:
        raise ConfigError(f"--kubeconfig: certificates cannot be read: {error}") from error
    # More than any process sends at once: the renewal of a Lease must not wait behind other writes.
    connector = aiohttp.TCPConnector(ssl=tls, limit=128)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES) as session:
        yield KubeClient(configuration, session)


async def load_configuration(kubeconfig: str | None) -> Configuration:
    """Host, credentials and TLS settings, from the same two places as every Kubernetes program."""
    configuration = Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG")
    if path and not any(os.path.exists(os.path.expanduser(one)) for one in path.split(os.pathsep)):
        raise ConfigError(f"--kubeconfig: {path}: no such file")
    try:
        if path:
            await kube_config.load_kube_config(
                config_file=path, client_configuration=configuration, persist_config=False
            )
        else:
            kube_config.load_incluster_config(client_configuration=configuration)
    except kube_config.ConfigException as error:
        if path:
            raise ConfigError(f"--kubeconfig: {path}: {error}") from error
        raise CannotStart(
            f"no API server: not in a pod ({error}) and neither --kubeconfig nor KUBECONFIG is set"
        ) from error
    except Exception as error:  # a kubeconfig is a person's file: whatever breaks in it is its fault
        raise ConfigError(f"--kubeconfig: {path}: {error!r}") from error
    return configuration


async def require_reachable(client: KubeClient, *, what_for: str, path: str, **params: str) -> JsonObject:
    """One first request that the process cannot do without.

    An API server that does not answer, or says that it cannot now, is asked again, for the last time half a minute
    later: a process that ended instead would be started anew after ever longer pauses. Raises CannotStart with the
    reason.
    """
    backoff, last = Backoff(initial_seconds=0.2, cap_seconds=2.0), time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await client.get(path, **params)
        except KubeError as error:
            if not may_pass(error) or time.monotonic() >= last:
                raise CannotStart(f"{what_for}: API server {client.host}: {error}") from error
            log.warning(
                "the API server is asked again",
                extra=fields(what_for=what_for, api_server=client.host, error=error),
            )
        await asyncio.sleep(backoff.next())


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Turn transport errors into KubeUnreachable; used only where a request is made."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise KubeUnreachable(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except ValueError as error:  # JSON that is none, or a watch line beyond the limit
        raise KubeUnreachable(f"unreadable answer: {error}") from error


def _encoded(body: Mapping[str, Any] | None) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def _parsed(data: bytes) -> JsonObject:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


async def _error_of(response: aiohttp.ClientResponse) -> KubeError:
    text = (await response.read())[:4096].decode(errors="replace")
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    message = status.get("message", text.strip())
    return response_error(response.status, status.get("reason", ""), " ".join([message, *_budgets(status)]))


def _budgets(status: JsonObject) -> list[str]:
    """Of a refused eviction: which budget does not allow it, that the message leaves out."""
    details = status.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return [
        str(cause.get("message", ""))
        for cause in (causes if isinstance(causes, list) else ())
        if isinstance(cause, dict) and cause.get("reason") == "DisruptionBudget"
    ]
