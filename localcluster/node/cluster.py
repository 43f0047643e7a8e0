"""A cluster with one real node: `async with RealCluster(images) as cluster`.

The control plane is that of `localcluster`, in the node's network; everything else is what runs on
any node: containerd, kubelet, kube-proxy. Berth comes from `deploy/base` by way of `overlay/`.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import NotFound
from localcluster.binaries import control_plane_directory, node_directory
from localcluster.controlplane import API_PORT, ControlPlane, Network, User, node_user
from localcluster.credentials import make_client_certificate
from localcluster.guard import KEEP_FILE
from localcluster.images import Images
from localcluster.node import names, settings
from localcluster.node.forwarding import Forwarder
from localcluster.node.namespaces import Namespaces
from localcluster.processes import StartFailed, Supervised, reaping, tail

JsonObject = dict[str, Any]

NODE = "gpu-node"
OVERLAY = Path(__file__).parent / "overlay"
SCALED = Path(__file__).parent / "scaling"
"""The same with `deploy/autoscaling`."""
_LABELS = "nvidia.com/gpu.present=true"
_SCHEDULER, _PROXY = User("system:kube-scheduler"), User("system:kube-proxy")
_START_SECONDS = 60.0
_HEARTBEAT = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}"
_AUDIT_POLICY = Path(__file__).parent / "audit-policy.yaml"
_CREDENTIAL_ID = "authentication.kubernetes.io/credential-id"
# Of a node that has lost its power: mounts, what lay in memory, and the network are gone, its disk is not.
_FORGET = """
grep -o ' /var/lib/kubelet/[^ ]*\\| /run/node/[^ ]*\\| /run/netns/[^ ]*' /proc/mounts | sort -r | xargs -r umount -l
rm -rf /run/berth /run/netns /run/node/containerd-state /run/node/containerd.sock*
ip link delete cni0
nft flush ruleset
"""


@dataclass(frozen=True, slots=True)
class RealNode:
    """What of a node its owner looks at."""

    repository: Path
    """The agents' `--repository`, seen from outside."""


class RealCluster:
    """Use as an async context manager; everything below is for its inside."""

    client: KubeClient
    kubeconfig: Path
    """For the owner's side of the network."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._stack = AsyncExitStack()
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("BERTH_") and k != "KUBECONFIG"}

    async def __aenter__(self) -> "RealCluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def nodes(self) -> Mapping[str, RealNode]:
        """By name."""
        return {NODE: RealNode(self.namespaces.root / "var/lib/berth/repository")}

    async def kubectl(self, *arguments: str, text: str = "") -> str:
        """What kubectl says. Raises KubectlFailed with what it complains about."""
        process = await asyncio.create_subprocess_exec(
            *(str(self._binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._env,
        )
        async with reaping(process):
            out, err = await process.communicate(text.encode())
        if process.returncode:
            raise KubectlFailed(f"kubectl {' '.join(arguments)}: {err.decode().strip()}")
        return out.decode()

    async def apply(self, documents: Iterable[JsonObject]) -> None:
        """Server-side apply of anything; the image `berth` is the one that is on the node."""
        await self.kubectl("apply", "--server-side", "-f", "-", text=await self._with_images(documents))

    async def deploy(self, overlay: Path = OVERLAY) -> None:
        """Apply `deploy/base` through the overlay. Does not wait for it to come up."""
        await self.apply(await self.rendered(overlay))

    async def rendered(self, overlay: Path) -> list[JsonObject]:
        """Every object, in the order that kubectl applies them in."""
        return list(yaml.safe_load_all(await self.kubectl("kustomize", str(overlay))))

    async def reach(self, host: str, port: int) -> str:
        """HOST:PORT on the owner's side for an address of the node or of a pod."""
        return await self._forwarder.to(host, port)

    async def restart_kubelet(self, **settings_over: Any) -> None:
        """kill -9; it comes back, with these of its settings changed, and says so to the API server."""
        self._write_kubelet_settings(**settings_over)
        self.kubelet.kill()
        await self._kubelet_reports(datetime.now(UTC))

    async def kill_runtime(self) -> None:
        """kill -9 of kubelet and containerd at once; returns when both are back. Containers run on."""
        self.kubelet.kill()
        self.containerd.kill()
        await self._kubelet_reports(datetime.now(UTC))

    async def reboot(self) -> None:
        """What a power failure does: nothing that ran runs on, and what was in memory is gone."""
        parts = (self.kubelet, self.containerd, self.kube_proxy)
        for part in parts:
            await part.stop(grace_seconds=0)
        for pid in self._pods_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._run_inside("sh", "-c", _FORGET)
        for part in reversed(parts):
            await part.start()
        await self._kubelet_reports(datetime.now(UTC))

    def _pods_processes(self) -> list[int]:
        """Containers, and containerd's shims above them."""
        found = []
        for pid in self.namespaces.processes():
            with suppress(OSError):
                cgroup, name = Path(f"/proc/{pid}/cgroup").read_text(), Path(f"/proc/{pid}/comm").read_text()
                if "/kubepods/" in cgroup or name.startswith("containerd-shim"):
                    found.append(pid)
        return found

    def tokens_seen(self) -> set[str]:
        """The ids (`jti`) of all tokens that Berth's ServiceAccounts have come to the API server with."""
        events = (json.loads(line) for line in (self.directory / "audit.log").read_text().splitlines())
        return {
            identity.removeprefix("JTI=")
            for event in events
            for identity in event["user"].get("extra", {}).get(_CREDENTIAL_ID, [])
        }

    async def _run_inside(self, *command: str) -> str:
        """Raises StartFailed with what it says."""
        process = await asyncio.create_subprocess_exec(
            *self.namespaces.enter,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with reaping(process):
            said, _ = await process.communicate()
        if process.returncode:
            raise StartFailed(f"{' '.join(command)}: {said.decode()}")
        return said.decode()

    async def _with_images(self, documents: Iterable[JsonObject]) -> str:
        """As `kustomize edit set image` does for a user."""
        (directory := Path(tempfile.mkdtemp(dir=self.directory))).joinpath("objects.yaml").write_text(
            yaml.safe_dump_all(documents)
        )
        named = [
            {"name": name, "newName": image.name.rpartition(":")[0], "newTag": image.name.rpartition(":")[2]}
            for name, image in (("berth", self._images.berth), ("tritonserver", self._images.tritonserver))
        ]
        kustomization = {"resources": ["objects.yaml"], "images": named}
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return await self.kubectl("kustomize", str(directory))

    def keep_logs(self) -> Path:
        """Leave the directory with every log behind; where it is."""
        (self.directory / KEEP_FILE).touch()
        return self.directory

    async def _start(self) -> None:
        self._binaries, self._node_binaries = await asyncio.gather(
            asyncio.to_thread(control_plane_directory), asyncio.to_thread(node_directory)
        )
        self.directory = Path(tempfile.mkdtemp(prefix="berth-node-"))
        self.namespaces = await self._stack.enter_async_context(
            Namespaces(self.directory, interface=settings.INTERFACE, env=self._env)
        )
        self._forwarder = await self._stack.enter_async_context(Forwarder(self.namespaces))
        await asyncio.gather(self._start_control_plane(), self._start_containerd())
        self.kubelet, self.kube_proxy, self.kube_scheduler = (
            self._kubelet(),
            self._kube_proxy(),
            self._kube_scheduler(),
        )
        for process in (self.kubelet, self.kube_proxy, self.kube_scheduler):
            await process.start()
        await self._kubelet_reports(datetime.min.replace(tzinfo=UTC))

    async def _start_control_plane(self) -> None:
        client = self.directory / "kubelet-client.crt"
        make_client_certificate(
            client, client.with_suffix(".key"), user="kube-apiserver", group="system:masters"
        )
        self._node_user = node_user(NODE)
        self._control_plane = ControlPlane(
            self.directory,
            host=settings.ADDRESS,
            binaries=self._binaries,
            users=[self._node_user, _SCHEDULER, _PROXY],
            env=self._env,
            api_flags=[
                f"--audit-policy-file={_AUDIT_POLICY}",
                f"--audit-log-path={self.directory / 'audit.log'}",
                "--endpoint-reconciler-type=lease",  # pods find the API server by its Service
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={client}",
                f"--kubelet-client-key={client.with_suffix('.key')}",
            ],
            network=Network(
                enter=self.namespaces.enter,
                reached_at=await self._forwarder.to(settings.ADDRESS, API_PORT),
            ),
        )
        self._stack.push_async_callback(self._control_plane.stop)
        await self._control_plane.start()
        self.kubeconfig = self._control_plane.kubeconfig(
            self._control_plane.admin, self.directory / "kubeconfig", outside=True
        )
        self.client = await self._stack.enter_async_context(open_client(str(self.kubeconfig)))
        datagrams = await self.namespaces.receive(settings.ADDRESS, names.PORT)
        await self._stack.enter_async_context(names.Names(datagrams, self._address_of))

    async def _address_of(self, namespace: str, service: str) -> str | None:
        try:
            found = await self.client.get(f"/api/v1/namespaces/{namespace}/services/{service}")
        except NotFound:
            return None
        address = found["spec"].get("clusterIP", "None")
        return None if address == "None" else str(address)

    async def _start_containerd(self) -> None:
        network = self.directory / "cni"
        network.mkdir()
        (network / "berth.conflist").write_text(json.dumps(settings.cni()))
        config = self.directory / "containerd.toml"
        config.write_text(settings.containerd(cni=network, pause=self._images.pause.name))
        self.containerd = self._supervised("containerd", ["containerd", f"--config={config}"])
        await self.containerd.start()
        socket = self.namespaces.root / settings.SOCKET.relative_to("/")
        async with asyncio.timeout(_START_SECONDS):
            while not socket.exists():
                await asyncio.sleep(0.02)
        images = (self._images.pause, self._images.berth, self._images.tritonserver)
        await asyncio.gather(*(self._import(image.archive) for image in images))

    async def _import(self, archive: Path) -> None:
        ctr = ("ctr", f"--address={settings.SOCKET}", "--namespace=k8s.io")
        await self._run_inside(*ctr, "images", "import", str(archive))

    def _write_kubelet_settings(self, **over: Any) -> Path:
        path = self.directory / "kubelet.yaml"
        config = settings.kubelet(client_ca=self.directory / "kubelet-client.crt")
        path.write_text(yaml.safe_dump(config | over))
        return path

    def _kubelet(self) -> Supervised:
        config = self._write_kubelet_settings()
        kubeconfig = self._control_plane.kubeconfig(self._node_user, self.directory / "kubelet.kubeconfig")
        command = [
            str(self._node_binaries / "kubelet"),
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--cert-dir={settings.STATE / 'kubelet-pki'}",
            f"--hostname-override={NODE}",
            f"--node-ip={settings.ADDRESS}",
            f"--node-labels={_LABELS}",
        ]
        return self._supervised("kubelet", command)

    def _kube_proxy(self) -> Supervised:
        kubeconfig = self._control_plane.kubeconfig(_PROXY, self.directory / "kube-proxy.kubeconfig")
        program = str(self._node_binaries / "kube-proxy")
        flags = [f"--kubeconfig={kubeconfig}", f"--hostname-override={NODE}", *settings.kube_proxy_flags()]
        return self._supervised("kube-proxy", [program, *flags])

    def _kube_scheduler(self) -> Supervised:
        kubeconfig = self._control_plane.kubeconfig(_SCHEDULER, self.directory / "scheduler.kubeconfig")
        program = str(self._binaries / "kube-scheduler")
        flags = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        return self._supervised("kube-scheduler", [program, *flags])

    def _supervised(self, name: str, command: Sequence[str]) -> Supervised:
        log = self.directory / f"{name}.log"
        process = Supervised(name, [*self.namespaces.enter, *command], log=log, env=self._env)
        self._stack.push_async_callback(process.stop, grace_seconds=0)
        return process

    async def _kubelet_reports(self, since: datetime) -> None:
        """Wait until the kubelet has reported after `since` and its node is Ready. Raises StartFailed."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await self._is_ready(since):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise StartFailed(f"the node is not ready:\n{tail(self.kubelet.log)}") from None

    async def _is_ready(self, since: datetime) -> bool:
        try:
            node, lease = await self.client.get(paths.node(NODE)), await self.client.get(_HEARTBEAT)
        except NotFound:
            return False
        conditions: list[Mapping[str, str]] = node["status"].get("conditions") or []
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        return ready and datetime.fromisoformat(lease["spec"]["renewTime"]) > since


class KubectlFailed(Exception):
    """kubectl ended with an error; the message holds its stderr."""
