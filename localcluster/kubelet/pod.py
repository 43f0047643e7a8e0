"""One pod's life on this node, from its first sight to the end of its last process."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from berth.contract.pod import pod_ref
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH, KubeClient
from berth.kube.errors import Conflict, KubeError, NotFound
from berth.kube.events import EventRecorder
from berth.kube.times import utc_now
from berth.runtime.backoff import Backoff
from berth.runtime.logs import fields
from localcluster.kubelet.container import Container, Launch, base_environment
from localcluster.kubelet.environment import Addresses, environment_of
from localcluster.kubelet.images import Images
from localcluster.kubelet.refusal import CannotRun, check
from localcluster.kubelet.status import ContainerRecord, pod_status, with_transitions
from localcluster.kubelet.volumes import Volumes

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

_DEFAULT_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What every pod of a node has from it. `host` is the node's `/`, `marks` go into each environment, `service`
    gives a Service's address by namespace and name."""

    images: Images
    host: Path
    marks: Mapping[str, str]
    service: Callable[[str, str], str]


class PodRunner:
    """Runs one pod. `run()` returns when every process has ended and the API server knows."""

    def __init__(
        self,
        client: KubeClient,
        events: EventRecorder,
        pod: JsonObject,
        *,
        directory: Path,
        addresses: Addresses,
        machine: Machine,
    ) -> None:
        self._client, self._events, self._pod = client, events, pod
        self._directory, self._addresses, self._machine = directory, addresses, machine
        self.ref = pod_ref(pod)
        self._started = utc_now()
        self._stopping = asyncio.Event()
        self._grace_seconds = _DEFAULT_GRACE_SECONDS
        self._gone = False
        self._changed = asyncio.Event()
        self._told: JsonObject | None = None
        self._writing, self._said_all = asyncio.Lock(), False
        self.containers: dict[str, Container] = {}
        self._records = _records(pod["spec"])

    @property
    def pod_ip(self) -> str:
        return self._addresses.pod_ip

    @property
    def is_ending(self) -> bool:
        return self._stopping.is_set()

    def is_kept_for(self, container: str) -> bool:
        """Whether the pod belongs to a controller and this is one of its main containers."""
        owned = any(owner.get("controller") for owner in self._pod["metadata"].get("ownerReferences") or [])
        return owned and any(c["name"] == container for c in self._pod["spec"]["containers"])

    def summary(self) -> str:
        """The pod in one line, for failures."""
        return f"{self.ref} " + " ".join(f"{r.name}={r.state.to_json()}" for r in self._records)

    def stop(self, *, grace_seconds: float, gone: bool) -> None:
        """The pod is to end; `gone`: the API server has forgotten it already. May be called again to hurry."""
        if self._stopping.is_set() and grace_seconds >= self._grace_seconds and gone == self._gone:
            return
        self._grace_seconds, self._gone = grace_seconds, self._gone or gone
        if self._stopping.is_set():
            self._hurry = asyncio.create_task(self._stop_all())
        self._stopping.set()

    async def run(self) -> None:
        telling = asyncio.create_task(self._tell_changes())
        try:
            await self._run()
        except CannotRun as error:
            await self._refuse(str(error))
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        await self._finish()

    async def _run(self) -> None:
        check(self._pod, self._machine.images)
        volumes = Volumes(
            self._client, self._pod, self._directory, host=self._machine.host, addresses=self._addresses
        )
        if not await self._made(volumes):
            return
        self._make_containers(volumes)
        living = asyncio.create_task(self._live())
        renewing = asyncio.create_task(volumes.keep_tokens_fresh())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not living.done():
                await self._stop_all()
            await living
        finally:
            for task in (renewing, stopping):
                task.cancel()
            await asyncio.gather(renewing, stopping, return_exceptions=True)

    async def _made(self, volumes: Volumes) -> bool:
        """Make the volumes, as often as it takes; False if the pod is to end before."""
        backoff = Backoff(initial_seconds=0.2, cap_seconds=5.0)
        while not self._stopping.is_set():
            try:
                await volumes.make()
            except KubeError as error:
                # The API server may not have seen yet that the pod is bound here: the Node authorizer then refuses.
                if backoff.failures == 5:
                    self._events.record(self.ref, "Warning", "FailedMount", str(error))
                await asyncio.sleep(backoff.next())
                continue
            return True
        return False

    def _make_containers(self, volumes: Volumes) -> None:
        spec = self._pod["spec"]
        specs = {c["name"]: c for c in [*(spec.get("initContainers") or []), *spec["containers"]]}
        for record in self._records:
            container = specs[record.name]
            launch = Launch(
                spec=container,
                image=self._machine.images.of(container["image"]),
                env=environment_of(self._pod, container, self._addresses),
                base_env={**base_environment(self._machine.marks), **self._service()},
                mounts=volumes.mounts_of(container),
                directory=self._directory / "containers" / record.name,
                pod_ip=self._addresses.pod_ip,
                grace_seconds=float(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)),
                service=self._machine.service,
            )
            self.containers[record.name] = Container(
                launch,
                record,
                restart_policy=spec.get("restartPolicy", "Always"),
                changed=self._changed.set,
            )

    def _service(self) -> dict[str, str]:
        """The Service `kubernetes`: here the API server itself, which has no slice."""
        server = urlsplit(self._client.host)
        return {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}

    async def _live(self) -> None:
        """Init containers in order, then the others side by side; sidecars end after them."""
        sidecars: list[asyncio.Task[None]] = []
        for container in self._of(is_init=True):
            if self._stopping.is_set():
                break
            if container.record.is_sidecar:
                sidecars.append(asyncio.create_task(container.run()))
                await self._until_started(container)
                continue
            await container.run()
            if not container.record.succeeded:
                break
        else:
            await asyncio.gather(*(container.run() for container in self._of(is_init=False)))
        await asyncio.gather(*(c.stop(grace_seconds=self._grace_seconds) for c in self._sidecars()))
        await asyncio.gather(*sidecars)

    async def _until_started(self, container: Container) -> None:
        while not container.record.started and not self._stopping.is_set():
            await asyncio.sleep(0.05)

    async def _stop_all(self) -> None:
        grace = self._grace_seconds
        mains = [c for c in self.containers.values() if not c.record.is_sidecar]
        await asyncio.gather(*(container.stop(grace_seconds=grace) for container in mains))

    def _of(self, *, is_init: bool) -> list[Container]:
        return [c for c in self.containers.values() if c.record.is_init is is_init]

    def _sidecars(self) -> list[Container]:
        return [c for c in self.containers.values() if c.record.is_sidecar]

    async def _refuse(self, why: str) -> None:
        self._events.record(self.ref, "Warning", "CannotRun", why)
        await self._write({"phase": "Failed", "reason": "CannotRun", "message": why}, last=True)

    async def _tell_changes(self) -> None:
        """Write the status after every change, the latest only."""
        self._changed.set()
        backoff = Backoff(initial_seconds=0.1, cap_seconds=5.0)
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._tell()
            except KubeError as error:
                log.warning("status not written", extra=fields(pod=self.ref, error=error))
                await asyncio.sleep(backoff.next())
                self._changed.set()
            else:
                backoff.reset()

    async def _tell(self) -> None:
        status = self._status()
        if status != self._told:
            await self._write(status)
            self._told = status

    def _status(self) -> JsonObject:
        status = pod_status(
            self._records,
            pod_ip=self._addresses.pod_ip,
            host_ip=self._addresses.host_ip,
            started=self._started,
            deleting=self._stopping.is_set(),
        )
        return with_transitions(status, self._told, utc_now())

    async def _write(self, status: JsonObject, *, last: bool = False) -> None:
        """One after the other: an earlier status must not land on a later one. `last`: none follows."""
        async with self._writing:
            if self._said_all:
                return
            self._said_all = last
            await self._patch(status)

    async def _patch(self, status: JsonObject) -> None:
        path = f"{paths.pod(self.ref.namespace, self.ref.name)}/status"
        body = {"metadata": {"uid": self.ref.uid}, "status": status}
        try:
            await self._client.patch(path, body, content_type=STRATEGIC_PATCH)
        except (NotFound, Conflict):
            self._gone = True  # deleted, or another pod has its name

    async def _finish(self) -> None:
        """Tell the last status; if the pod is being deleted, let the API server forget it."""
        backoff = Backoff(initial_seconds=0.1, cap_seconds=5.0)
        while not self._gone:
            try:
                if self.containers:
                    await self._tell()
                if not self._stopping.is_set():
                    return
                path = paths.pod(self.ref.namespace, self.ref.name)
                await self._client.delete(path, grace_seconds=0, uid=self.ref.uid)
                return
            except (NotFound, Conflict):
                return
            except KubeError as error:
                log.warning("pod not finished", extra=fields(pod=self.ref, error=error))
                await asyncio.sleep(backoff.next())


def grace_of(pod: JsonObject) -> float:
    """Seconds from SIGTERM to SIGKILL, as the deletion or the pod asks."""
    asked = pod["metadata"].get("deletionGracePeriodSeconds")
    if asked is None:
        asked = pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
    return float(asked)


def _records(spec: JsonObject) -> list[ContainerRecord]:
    inits = [
        ContainerRecord(c["name"], c["image"], is_init=True, is_sidecar=c.get("restartPolicy") == "Always")
        for c in spec.get("initContainers") or []
    ]
    return [*inits, *(ContainerRecord(c["name"], c["image"]) for c in spec["containers"])]
