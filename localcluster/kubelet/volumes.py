"""A pod's volumes as directories, with real ServiceAccount tokens that are renewed."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, NotFound
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from localcluster.kubelet.environment import Addresses, field
from localcluster.kubelet.refusal import CannotRun

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

_DEFAULT_TOKEN_SECONDS = 3600
# A kubelet renews a token at 80 % of its life (k8s.io/kubernetes/pkg/kubelet/token).
_RENEW_AT = 0.8


@dataclass(frozen=True, slots=True)
class TokenFile:
    """One projected token: where it goes and what it says."""

    path: Path
    audience: str | None
    seconds: int


class Volumes:
    """Makes the volumes of one pod below `directory`. `tokens` are to be renewed while the pod lives.

    `host` is what the node has in place of `/`: every hostPath is below it.
    """

    def __init__(
        self, client: KubeClient, pod: JsonObject, directory: Path, *, host: Path, addresses: Addresses
    ) -> None:
        self._client, self._pod, self._directory = client, pod, directory
        self._host, self._addresses = host, addresses
        self._places: dict[str, Path] = {}
        self.tokens: list[TokenFile] = []

    async def make(self) -> None:
        """Raises CannotRun or KubeError; after the latter it may be called again."""
        self.tokens.clear()
        for volume in self._pod["spec"].get("volumes") or []:
            self._places[volume["name"]] = await self._make(volume)

    def mounts_of(self, container: JsonObject) -> dict[str, str]:
        """mountPath to directory or file, for `rewriting.rewrite`; what a subPath names may not be there yet."""
        mounts = {}
        for mount in container.get("volumeMounts") or []:
            place = self._places[mount["name"]]
            if mount.get("subPath"):
                place = place / mount["subPath"]
            mounts[mount["mountPath"].rstrip("/")] = str(place)
        return mounts

    async def keep_tokens_fresh(self) -> None:
        """Renew the tokens for ever."""
        while True:
            shortest = min((token.seconds for token in self.tokens), default=_DEFAULT_TOKEN_SECONDS)
            await asyncio.sleep(shortest * _RENEW_AT)
            for token in self.tokens:
                await self._renew(token)

    async def _renew(self, token: TokenFile) -> None:
        """As often as it takes: the old token is good for a while."""
        backoff = Backoff(initial_seconds=1.0, cap_seconds=30.0)
        while True:
            try:
                await self._write_token(token)
                return
            except KubeError as error:
                log.warning("token not renewed", extra=fields(path=token.path, error=error))
                await asyncio.sleep(backoff.next())

    async def _make(self, volume: JsonObject) -> Path:
        if "hostPath" in volume:
            return _host_path(volume, self._host)
        place: Path = self._directory / "volumes" / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        sources = (volume.get("projected") or {}).get("sources") or [
            {kind: source} for kind, source in volume.items() if kind in ("configMap", "downwardAPI")
        ]
        for source in sources:
            await self._project(place, source)
        return place

    async def _project(self, place: Path, source: JsonObject) -> None:
        if token := source.get("serviceAccountToken"):
            seconds = token.get("expirationSeconds") or _DEFAULT_TOKEN_SECONDS
            projected = TokenFile(place / token["path"], token.get("audience"), seconds)
            await self._write_token(projected)
            self.tokens.append(projected)
        if config_map := source.get("configMap"):
            await self._write_config_map(place, config_map)
        for item in (source.get("downwardAPI") or {}).get("items") or []:
            if "fieldRef" not in item:
                raise CannotRun(f"downwardAPI item {item['path']!r}: only fieldRef is supported")
            _write(place / item["path"], field(self._pod, item["fieldRef"]["fieldPath"], self._addresses))

    async def _write_token(self, token: TokenFile) -> None:
        meta, spec = self._pod["metadata"], self._pod["spec"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        request: JsonObject = {"expirationSeconds": token.seconds, "boundObjectRef": bound}
        if token.audience:
            request["audiences"] = [token.audience]
        account = spec.get("serviceAccountName") or "default"
        answer = await self._client.create(
            f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": request},
        )
        _write(token.path, answer["status"]["token"], mode=0o600)

    async def _write_config_map(self, place: Path, source: JsonObject) -> None:
        namespace = self._pod["metadata"]["namespace"]
        path = f"{paths.pods(namespace).removesuffix('pods')}configmaps/{source['name']}"
        try:
            found = await self._client.get(path)
        except NotFound:
            if not source.get("optional"):
                raise
            return
        data = found.get("data") or {}
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            _write(place / item["path"], data.get(item["key"], ""))


def _host_path(volume: JsonObject, host: Path) -> Path:
    """A missing directory is made, by the kubelet or by the container runtime, unless it has to be there."""
    asked, kind = volume["hostPath"]["path"], volume["hostPath"].get("type", "")
    path: Path = host / asked.lstrip("/")
    if kind in ("", "DirectoryOrCreate"):
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise CannotRun(f"volume {volume['name']!r}: hostPath {asked} does not exist on this node")
    return path


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a file in one step, so that a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=mode)
    fresh.write_text(text)
    os.replace(fresh, path)
