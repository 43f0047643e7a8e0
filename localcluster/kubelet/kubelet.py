"""The kubelet of one simulated node: its Node object, its heartbeat and its pods."""

import asyncio
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from berth.contract.pod import has_ended, is_deleting
from berth.kube import paths
from berth.kube.client import STRATEGIC_PATCH, KubeClient
from berth.kube.errors import Conflict
from berth.kube.events import EventRecorder
from berth.kube.informer import Change, ChangeKind, Informer
from berth.kube.lease import Heartbeat
from berth.kube.times import rfc3339, utc_now
from berth.runtime.logs import fields
from berth.runtime.tasks import repeat, supervise
from localcluster.kubelet.environment import Addresses
from localcluster.kubelet.images import Images
from localcluster.kubelet.pod import Machine, PodRunner, grace_of
from localcluster.kubelet.refusal import containers_of
from localcluster.kubelet.status import with_transitions

log = logging.getLogger(__name__)

JsonObject = dict[str, Any]

_LEASE_NAMESPACE = "kube-node-lease"
_HEARTBEAT_SECONDS = 10.0
_LAST_POD_ADDRESS = 254
DEFAULT_CAPACITY: Mapping[str, str] = {
    "cpu": "16",
    "memory": "64Gi",
    "pods": "110",
    "ephemeral-storage": "100Gi",
}


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What the Node object says. `address` is the node's own; its pods follow in the same /24.

    A pod with a hostPort has the node's address as its own: there is no network to forward the port in.
    """

    name: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    capacity: Mapping[str, str] = field(default_factory=lambda: DEFAULT_CAPACITY)


class Kubelet:
    """Runs until cancelled; then every process of every pod is killed."""

    def __init__(
        self,
        client: KubeClient,
        node: NodeIdentity,
        *,
        directory: Path,
        images: Images,
        marks: Mapping[str, str],
        service: Callable[[str, str], str],
    ) -> None:
        self._client, self._node, self._directory = client, node, directory
        self._machine = Machine(images, host=host_directory(directory), marks=dict(marks), service=service)
        self._told: JsonObject | None = None
        self._events = EventRecorder(client, component="process-kubelet", host=node.name)
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._free = {f"{_prefix(node.address)}.{last}" for last in range(2, _LAST_POD_ADDRESS + 1)}

    def runner(self, namespace: str, name: str) -> PodRunner:
        """The runner of a pod that is on this node now. Raises KeyError."""
        for runner in self._runners.values():
            if (runner.ref.namespace, runner.ref.name) == (namespace, name):
                return runner
        raise KeyError(f"{namespace}/{name} does not run on {self._node.name}")

    def kept(self, namespace: str, container: str) -> list[PodRunner]:
        """The pods of a namespace that a controller keeps for this main container, by their names; last
        those that are ending."""
        here = [r for r in self._runners.values() if r.ref.namespace == namespace]
        kept = [r for r in here if r.is_kept_for(container)]
        return sorted(kept, key=lambda runner: (runner.is_ending, runner.ref.name))

    def host_path(self, path: str) -> Path:
        """Where a path of the node is on this machine."""
        return self._machine.host / path.lstrip("/")

    def runners(self) -> list[PodRunner]:
        """The pods that are on this node now."""
        return list(self._runners.values())

    async def register(self) -> None:
        """Make the Node object and its Ready condition."""
        node = self._node
        labels = {
            "kubernetes.io/hostname": node.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "unknown"),
            **node.labels,
        }
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node.name, "labels": labels},
            "spec": {"taints": [dict(taint) for taint in node.taints]},
        }
        try:
            await self._client.create(paths.NODES, body)
        except Conflict:
            log.info("node exists", extra=fields(node=node.name))
        await self._write_node_status()

    async def run(self) -> None:
        """Mirror the pods bound here and run them, for ever."""
        pods = Informer(
            self._client,
            paths.PODS,
            params={"fieldSelector": f"spec.nodeName={self._node.name}"},
            on_change=self._on_change,
        )
        lease = Heartbeat(
            self._client,
            namespace=_LEASE_NAMESPACE,
            name=self._node.name,
            holder=self._node.name,
            duration_seconds=40,
        )
        try:
            async with supervise() as tasks:
                tasks.eternal("pods", pods.run())
                tasks.eternal("events", self._events.run())
                beat = repeat(lease.beat, name="node lease", interval_seconds=_HEARTBEAT_SECONDS)
                tasks.eternal("lease", beat)
                status = repeat(self._write_node_status, name="node status", interval_seconds=60)
                tasks.eternal("status", status)
                await asyncio.Event().wait()
        finally:
            await self._kill_all()

    def _on_change(self, change: Change) -> None:
        pod = change.object
        uid = pod["metadata"]["uid"]
        runner = self._runners.get(uid)
        if change.kind is ChangeKind.GONE:
            if runner is not None:
                runner.stop(grace_seconds=0, gone=True)
        elif runner is None and not has_ended(pod):
            self._start(uid, pod)
        elif runner is not None and is_deleting(pod):
            runner.stop(grace_seconds=grace_of(pod), gone=False)

    def _start(self, uid: str, pod: JsonObject) -> None:
        address = self._address_for(pod)
        if address is None:
            log.warning("no address left", extra=fields(node=self._node.name))
            return
        runner = PodRunner(
            self._client,
            self._events,
            pod,
            directory=self._directory / "pods" / uid,
            addresses=Addresses(pod_ip=address, host_ip=self._node.address),
            machine=self._machine,
        )
        self._runners[uid] = runner
        self._tasks[uid] = asyncio.create_task(self._run(uid, runner, address), name=f"pod {runner.ref}")
        if is_deleting(pod):
            runner.stop(grace_seconds=grace_of(pod), gone=False)

    def _address_for(self, pod: JsonObject) -> str | None:
        ports = [port for container in containers_of(pod["spec"]) for port in container.get("ports") or []]
        if any(port.get("hostPort") for port in ports):
            return self._node.address
        address = min(self._free, key=lambda ip: int(ip.rpartition(".")[2]), default=None)
        self._free.discard(address or "")
        return address

    async def _run(self, uid: str, runner: PodRunner, address: str) -> None:
        try:
            await runner.run()
        except Exception:  # one pod must not take the node down; the log has the rest
            log.exception("pod crashed the kubelet's runner", extra=fields(pod=runner.ref))
        finally:
            if address != self._node.address:
                self._free.add(address)
            self._runners.pop(uid, None)
            self._tasks.pop(uid, None)

    async def _kill_all(self) -> None:
        for runner in list(self._runners.values()):
            runner.stop(grace_seconds=0, gone=True)
        await asyncio.gather(*list(self._tasks.values()), return_exceptions=True)

    async def _write_node_status(self) -> None:
        now, node = rfc3339(utc_now()), self._node
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "process kubelet is running",
            "lastHeartbeatTime": now,
        }
        status: JsonObject = {
            "capacity": dict(node.capacity),
            "allocatable": dict(node.capacity),
            "conditions": [condition],
            "addresses": [
                {"type": "InternalIP", "address": node.address},
                {"type": "Hostname", "address": node.name},
            ],
            "nodeInfo": _NODE_INFO,
        }
        status = with_transitions(status, self._told, utc_now())
        await self._client.patch(
            f"{paths.node(node.name)}/status", {"status": status}, content_type=STRATEGIC_PATCH
        )
        self._told = status


def host_directory(directory: Path) -> Path:
    """What a node whose kubelet has this directory has in place of `/`."""
    return directory / "host"


_NODE_INFO = {
    "kubeletVersion": "v0.1.0-berth-process-kubelet",
    "operatingSystem": "linux",
    "architecture": platform.machine(),
    "osImage": "local processes",
    "kernelVersion": platform.release(),
    "containerRuntimeVersion": "none://",
    "machineID": "",
    "systemUUID": "",
    "bootID": "",
    "kubeProxyVersion": "",
}


def _prefix(address: str) -> str:
    return address.rpartition(".")[0]
