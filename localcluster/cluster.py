"""A whole cluster on one machine: `async with LocalCluster(spec) as cluster`.

Real etcd, kube-apiserver and controller-manager; per simulated node a real Triton, a Berth agent
with mock GPUs and a process kubelet; and the binders. Agents and binders run under their own
ServiceAccounts with exactly the rules of `deploy/base`. Nothing outlives the block, nor the process.
"""

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.errors import Conflict, NotFound
from berth.triton.keys import TritonKeys
from localcluster import triton
from localcluster.addresses import cluster_network
from localcluster.binaries import control_plane_directory
from localcluster.controlplane import ControlPlane, User, node_user
from localcluster.credentials import write_kubeconfig, write_private
from localcluster.guard import KEEP_FILE
from localcluster.kubelet.kubelet import DEFAULT_CAPACITY, Kubelet, NodeIdentity
from localcluster.processes import CLUSTER_ID_VARIABLE, Supervised

JsonObject = dict[str, Any]

SYSTEM_NAMESPACE = "berth-system"
AGENT_PORT, AGENT_ADMIN_PORT, BINDER_ADMIN_PORT, EXTENDER_PORT = 8470, 8471, 8480, 8481
_DEPLOY = Path(__file__).parent.parent / "deploy"
_RIGHTS = (
    *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
_TOKEN_SECONDS = 24 * 3600
_CONTROLLERS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One simulated GPU node. `scenario` is the mock GPUs' YAML, which can be rewritten while running."""

    name: str
    scenario: str
    server_name: str = "triton"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    capacity: Mapping[str, str] = field(default_factory=lambda: DEFAULT_CAPACITY)
    agent_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The nodes, how many binders, and flags that all binders get."""

    nodes: Sequence[NodeSpec] = ()
    binders: int = 1
    kube_scheduler: bool = False  # with the extender, as `deploy/extender` sets it up
    binder_flags: Sequence[str] = ()


@dataclass(slots=True)
class SimulatedNode:
    """The parts of one node. `agent` and `triton` come back when they are killed."""

    name: str
    address: str
    directory: Path
    agent: Supervised
    triton: Supervised
    kubelet: Kubelet

    @property
    def repository(self) -> Path:
        """The agent's `--repository`."""
        return self.directory / "repository"

    @property
    def scenario(self) -> Path:
        """The mock GPUs' YAML."""
        return self.directory / "gpus.yaml"


class LocalCluster:
    """Use as an async context manager; everything below is for its inside."""

    client: KubeClient
    kubeconfig: Path

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._stack = AsyncExitStack()
        self.id = secrets.token_hex(8)
        """What every process of the cluster carries in its environment."""
        self._env = {**_machine_environment(), CLUSTER_ID_VARIABLE: self.id}
        self.nodes: dict[str, SimulatedNode] = {}
        self._binders: dict[int, Supervised] = {}

    async def __aenter__(self) -> "LocalCluster":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def apply(self, documents: Iterable[JsonObject], *, dry_run: bool = False) -> None:
        """Server-side apply with strict field validation, as `kubectl apply --server-side` does."""
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        for document in documents:
            await self.client.apply(_path_of(document), document, manager="berth-localcluster", **params)

    def pid_of(self, namespace: str, pod: str, container: str) -> int:
        """The process of a container that is running now. Raises KeyError or ProcessLookupError."""
        for node in self.nodes.values():
            try:
                runner = node.kubelet.runner(namespace, pod)
            except KeyError:
                continue
            pid = runner.containers[container].pid
            if pid is None:
                raise ProcessLookupError(f"{container} of {namespace}/{pod} is not running")
            return pid
        raise KeyError(f"{namespace}/{pod} runs on no node")

    @property
    def binders(self) -> list[Supervised]:
        """By index; they come back when they are killed."""
        return [binder for _, binder in sorted(self._binders.items())]

    def binder_address(self, index: int) -> str:
        """Where a binder's admin port is."""
        return f"{self._network}.0.{10 + index}"

    def keep_logs(self) -> Path:
        """Leave the directory with every log behind; where it is."""
        (self.directory / KEEP_FILE).touch()
        return self.directory

    def addresses(self) -> list[str]:
        """What a person needs to play with the cluster, a line each."""
        lines = [f"export KUBECONFIG={self.kubeconfig}"]
        for node in self.nodes.values():
            lines.append(
                f"{node.name}: agent {node.address}:{AGENT_PORT}, metrics {node.address}:{AGENT_ADMIN_PORT}"
            )
            lines.append(f"{node.name}: mock GPUs in {node.scenario}")
        return [*lines, f"logs: {self.directory}"]

    def rss_mebibytes(self) -> dict[str, float]:
        """Resident memory of each process of the cluster."""
        pids: dict[str, int | None] = dict(self._control_plane.pids())
        for index, binder in enumerate(self.binders):
            pids[f"binder {index}"] = binder.pid
        for node in self.nodes.values():
            pids |= {f"agent {node.name}": node.agent.pid, f"triton {node.name}": node.triton.pid}
            for runner in node.kubelet.runners():
                pids |= {f"{name} {runner.ref.name}": c.pid for name, c in runner.containers.items()}
        return {name: _rss_mebibytes(pid) for name, pid in pids.items() if pid is not None}

    @property
    def signing_key(self) -> Path:
        """The private key of the cluster's ServiceAccount tokens."""
        return self._control_plane.signing_key

    async def _start(self) -> None:
        self.directory = self._stack.enter_context(self._work_directory())
        network = self._network = self._stack.enter_context(cluster_network())
        await self._start_guard()
        users = [node_user(node.name) for node in self._spec.nodes]
        self._binaries = await asyncio.to_thread(control_plane_directory)
        self._control_plane = ControlPlane(
            self.directory,
            host=f"{network}.0.1",
            binaries=self._binaries,
            users=users,
            env=self._env,
        )
        self._stack.push_async_callback(self._control_plane.stop)
        _, backends = await asyncio.gather(
            self._control_plane.start(),
            asyncio.to_thread(triton.prepare_backends, self.directory / "backends"),
        )
        self.kubeconfig = self._control_plane.kubeconfig(
            self._control_plane.admin, self.directory / "kubeconfig"
        )
        self.client = await self._stack.enter_async_context(open_client(str(self.kubeconfig)))
        await self._make_objects()
        await asyncio.gather(
            self._controllers_work(),
            *(
                self._start_node(index, spec, user, f"{network}.{index + 1}.1", backends)
                for index, (spec, user) in enumerate(zip(self._spec.nodes, users, strict=True))
            ),
            *(self._start_binder(index) for index in range(self._spec.binders)),
        )
        if self._spec.kube_scheduler:
            await self._start_kube_scheduler()

    @contextmanager
    def _work_directory(self) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(prefix="berth-"))
        try:
            yield directory
        finally:
            if not (directory / KEEP_FILE).exists():
                shutil.rmtree(directory, ignore_errors=True)

    async def _start_guard(self) -> None:
        """The pipe's other end is ours alone: it closes when this process ends, in whatever way."""
        guard = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "localcluster.guard",
            self.id,
            str(self.directory),
            stdin=asyncio.subprocess.PIPE,
            env=_machine_environment(),
            start_new_session=True,
        )

        async def release() -> None:
            assert guard.stdin is not None
            guard.stdin.close()
            await guard.wait()

        self._stack.push_async_callback(release)

    async def _make_objects(self) -> None:
        parts = ("base", "extender") if self._spec.kube_scheduler else ("base",)
        await self.apply(
            document for part in parts for document in _documents(part) if document["kind"] in _RIGHTS
        )
        # The controller-manager makes this too, but only after some seconds, and pods need it.
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        try:
            await self.client.create("/api/v1/namespaces/default/serviceaccounts", account)
        except Conflict:
            return

    async def _controllers_work(self) -> None:
        """The controller-manager begins some seconds after its start; this ConfigMap is a sign of it."""
        async with asyncio.timeout(_CONTROLLERS_SECONDS):
            while True:
                try:
                    await self.client.get("/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
                    return
                except NotFound:
                    await asyncio.sleep(0.1)

    async def _start_binder(self, index: int) -> None:
        kubeconfig = await self._account_kubeconfig("berth-binder", f"binder-{index}")
        binder = self._supervised(
            f"binder-{index}",
            [
                *(
                    "binder",
                    f"--kubeconfig={kubeconfig}",
                    f"--admin-listen={self.binder_address(index)}:{BINDER_ADMIN_PORT}",
                    f"--extender-listen={self.binder_address(index)}:{EXTENDER_PORT}",
                    f"--extender-url=http://{self.binder_address(index)}:{EXTENDER_PORT}",
                ),
                *self._spec.binder_flags,
            ],
        )
        self._binders[index] = binder
        await binder.start()

    async def _start_kube_scheduler(self) -> None:
        """The overlay's configuration, but for the Service: it calls the first binder, which need not lead."""
        config = yaml.safe_load((_DEPLOY / "extender" / "scheduler.yaml").read_text())
        config["extenders"][0]["urlPrefix"] = f"http://{self.binder_address(0)}:{EXTENDER_PORT}"
        kubeconfig = await self._account_kubeconfig("berth-kube-scheduler", "kube-scheduler")
        config["clientConnection"] = {"kubeconfig": str(kubeconfig)}
        path = self.directory / "kube-scheduler.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [str(self._binaries / "kube-scheduler"), f"--config={path}", "--secure-port=0"]
        await self._keep(
            Supervised("kube-scheduler", command, log=path.with_suffix(".log"), env=self._env)
        ).start()

    async def _start_node(self, index: int, spec: NodeSpec, user: User, address: str, backends: Path) -> None:
        directory = self.directory / spec.name
        (directory / "repository" / "models").mkdir(parents=True)
        (directory / "keys").mkdir(mode=0o700)
        keys = TritonKeys.generate()
        keys.write(directory / "keys")
        (directory / "gpus.yaml").write_text(spec.scenario)
        kubelet = await self._start_kubelet(spec, user, address, directory)
        node = SimulatedNode(
            spec.name,
            address,
            directory,
            agent=self._agent(spec, address, directory, backends, await self._agent_kubeconfig(spec.name)),
            triton=self._triton(
                spec, address, directory, backends, keys, shm_prefix=f"{triton.shm_prefix(self.id)}{index}-"
            ),
            kubelet=kubelet,
        )
        self.nodes[spec.name] = node
        await node.triton.start()
        await node.agent.start()

    async def _start_kubelet(self, spec: NodeSpec, user: User, address: str, directory: Path) -> Kubelet:
        kubeconfig = self._control_plane.kubeconfig(user, directory / "kubelet.kubeconfig")
        client = await self._stack.enter_async_context(open_client(str(kubeconfig)))
        identity = NodeIdentity(spec.name, address, spec.labels, spec.taints, spec.capacity)
        kubelet = Kubelet(
            client, identity, directory=directory / "pods", marks={CLUSTER_ID_VARIABLE: self.id}
        )
        await kubelet.register()
        await self._stack.enter_async_context(_running(kubelet))
        return kubelet

    def _agent(
        self, spec: NodeSpec, address: str, directory: Path, backends: Path, kubeconfig: Path
    ) -> Supervised:
        return self._supervised(
            f"agent-{spec.name}",
            [
                "agent",
                f"--node-name={spec.name}",
                f"--nvml=mock:{directory / 'gpus.yaml'}",
                f"--repository={directory / 'repository'}",
                f"--triton-http={address}:{triton.HTTP_PORT}",
                f"--triton-grpc={address}:{triton.GRPC_PORT}",
                f"--triton-keys={directory / 'keys'}",
                f"--backend-directory={backends}",
                f"--listen={address}:{AGENT_PORT}",
                f"--admin-listen={address}:{AGENT_ADMIN_PORT}",
                f"--server-name={spec.server_name}",
                f"--kubeconfig={kubeconfig}",
                *spec.agent_flags,
            ],
        )

    def _triton(
        self,
        spec: NodeSpec,
        address: str,
        directory: Path,
        backends: Path,
        keys: TritonKeys,
        *,
        shm_prefix: str,
    ) -> Supervised:
        command = triton.command(
            address=address,
            models=directory / "repository" / "models",
            backends=backends,
            keys=keys,
            shm_prefix=shm_prefix,
        )
        server = Supervised(
            f"triton-{spec.name}",
            command,
            log=directory / "triton.log",
            env=triton.environment(self._env),
            before=lambda: triton.remove_shared_memory(shm_prefix),
        )
        self._stack.callback(triton.remove_shared_memory, shm_prefix)
        return self._keep(server)

    def _supervised(self, name: str, arguments: Sequence[str]) -> Supervised:
        """One of Berth's own processes."""
        command = [sys.executable, "-m", "berth.cli", *arguments]
        return self._keep(Supervised(name, command, log=self.directory / f"{name}.log", env=self._env))

    def _keep(self, process: Supervised) -> Supervised:
        """It ends with the cluster."""
        self._stack.push_async_callback(process.stop, grace_seconds=0)
        return process

    async def _agent_kubeconfig(self, node: str) -> Path:
        """The token is bound to the node, as that of an agent's pod is by way of the pod."""
        found = await self.client.get(paths.node(node))
        bound = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": found["metadata"]["uid"]}
        return await self._account_kubeconfig("berth-agent", node, bound_to=bound)

    async def _account_kubeconfig(
        self, account: str, name: str, *, bound_to: JsonObject | None = None
    ) -> Path:
        """A kubeconfig with a real token of a ServiceAccount, for a process that is not in a pod."""
        spec = {"expirationSeconds": _TOKEN_SECONDS, **({"boundObjectRef": bound_to} if bound_to else {})}
        answer = await self.client.create(
            f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        token = write_private(self.directory / f"{name}.token", answer["status"]["token"])
        return write_kubeconfig(
            self.directory / f"{name}.kubeconfig",
            server=self._control_plane.server,
            certificate=self._control_plane.certificate,
            token_file=token,
        )


@asynccontextmanager
async def _running(kubelet: Kubelet) -> AsyncIterator[None]:
    task = asyncio.create_task(kubelet.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _documents(part: str) -> list[JsonObject]:
    return [
        document
        for path in sorted((_DEPLOY / part).glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] != "Kustomization"
    ]


_CLUSTER_SCOPED = frozenset(
    {
        *("Namespace", "ClusterRole", "ClusterRoleBinding", "Node", "PriorityClass"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    }
)
_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}


def _path_of(document: JsonObject) -> str:
    """The path of a built-in kind."""
    version, kind, meta = document["apiVersion"], document["kind"], document["metadata"]
    prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = "" if kind in _CLUSTER_SCOPED else f"/namespaces/{meta.get('namespace', 'default')}"
    return f"{prefix}{scope}/{_PLURALS.get(kind, kind.lower() + 's')}/{meta['name']}"


def _machine_environment() -> dict[str, str]:
    """The caller's environment without settings that would reach Berth's processes by accident."""
    return {k: v for k, v in os.environ.items() if not k.startswith("BERTH_") and k != "KUBECONFIG"}


def _rss_mebibytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2
