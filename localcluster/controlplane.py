"""A real control plane, on loopback or in a network of its own: etcd, kube-apiserver, kube-controller-manager.

RBAC and the Node authorizer are on and ServiceAccount tokens are real. People and nodes have static
tokens; Berth's processes get tokens of their ServiceAccounts (`localcluster.credentials`).
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

import aiohttp

from localcluster.addresses import free_ports
from localcluster.credentials import (
    make_serving_certificate,
    make_signing_key,
    write_kubeconfig,
    write_private,
)
from localcluster.processes import StartFailed, end, spawn, tail

_START_SECONDS, _ANSWER_SECONDS = 60.0, 5.0
SERVICES = IPv4Network("10.231.0.0/16")
API_PORT = 6443
_USUAL_PORTS = (2379, 2380, API_PORT, 10257)  # in a network of its own
# All but the clouds' and what no pod of ours or of a test's can need: each costs its start. The node lifecycle
# stays: it takes the taint not-ready from nodes that are ready.
_WITHOUT = (
    *("node-ipam-controller", "node-route-controller", "service-lb-controller"),
    *("cronjob-controller", "horizontal-pod-autoscaler-controller", "clusterrole-aggregation-controller"),
    *("certificatesigningrequest-signing-controller", "certificatesigningrequest-approving-controller"),
    *("certificatesigningrequest-cleaner-controller", "persistentvolume-attach-detach-controller"),
    *("persistentvolume-expander-controller", "legacy-serviceaccount-token-cleaner-controller"),
    *("replicationcontroller-controller", "endpointslice-mirroring-controller", "ttl-controller"),
    "endpoints-controller",  # what it writes is not read, and it takes no address of a process kubelet's pod
)

# The rates that a program keeps to by itself are for clusters that many share: here they are seconds of waiting.
CLIENT_RATE = ("--kube-api-qps=500", "--kube-api-burst=1000")


@dataclass(frozen=True, slots=True)
class Network:
    """A network of its own that a control plane is in: its ports are all free, and its owner is outside."""

    enter: Sequence[str]
    """Stands before a program's command line, so that it runs inside."""
    reached_at: str
    """HOST:PORT outside by which connections get to the API server."""


@dataclass(frozen=True, slots=True)
class User:
    """A holder of a static token. `groups` as the API server sees them."""

    name: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(16))


def node_user(node: str) -> User:
    """The identity of a node's kubelet, as the Node authorizer and NodeRestriction expect it."""
    return User(f"system:node:{node}", ("system:nodes",))


class ControlPlane:
    """Starts the first three; `admin` and `users` are known to the API server from its start.

    `controllers=False` leaves out the third: nothing but what the caller writes changes the objects then.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        binaries: Path,
        users: Sequence[User],
        env: Mapping[str, str],
        api_flags: Sequence[str] = (),
        controllers: bool = True,
        network: Network | None = None,
        services: IPv4Network = SERVICES,
    ) -> None:
        self._directory, self._host, self._binaries, self._env = directory, host, binaries, dict(env)
        self._more_api_flags, self._controllers = tuple(api_flags), controllers
        self.admin = User("berth-admin", ("system:masters",))
        self._manager = User("system:kube-controller-manager")
        self._users = [self.admin, self._manager, *users]
        self._network, self._services = network, services
        self._etcd_port, self._peer_port, self._api_port, self._manager_port = (
            free_ports(host, 4) if network is None else _USUAL_PORTS
        )
        self._children: dict[str, asyncio.subprocess.Process] = {}

    @property
    def server(self) -> str:
        """The API server as its own network sees it."""
        return f"https://{self._host}:{self._api_port}"

    @property
    def reached_at(self) -> str:
        """The API server as the owner sees it."""
        return self.server if self._network is None else f"https://{self._network.reached_at}"

    @property
    def certificate(self) -> Path:
        return self._directory / "serving.crt"

    @property
    def signing_key(self) -> Path:
        """The private key of ServiceAccount tokens."""
        return self._directory / "signing.key"

    def kubeconfig(self, user: User, path: Path, *, outside: bool = False) -> Path:
        """For a process in the control plane's network or, if `outside`, in its owner's."""
        server = self.reached_at if outside else self.server
        return write_kubeconfig(path, server=server, certificate=self.certificate, token=user.token)

    async def start(self) -> None:
        """Return once the API server is ready. Raises StartFailed with the end of the log."""
        make_signing_key(self.signing_key)
        hosts = (
            self._host,
            str(self._services[1]),  # the Service `kubernetes`
            *((self._network.reached_at.split(":")[0],) if self._network else ()),
        )
        make_serving_certificate(self.certificate, self._directory / "serving.key", hosts=hosts)
        lines = (f'{u.token},{u.name},{u.name},"{",".join(u.groups)}"\n' for u in self._users)
        write_private(self._directory / "tokens.csv", "".join(lines))
        await self._spawn("etcd", self._etcd_flags())
        # The API server waits for etcd by itself; both come up side by side.
        api = await self._spawn("kube-apiserver", self._api_flags())
        await self._ready(api)
        if self._controllers:
            await self._spawn("kube-controller-manager", self._manager_flags())

    async def start_scheduler(self, name: str, flags: Sequence[str]) -> None:
        """A kube-scheduler; `name` is that of its log."""
        await self._spawn("kube-scheduler", [*flags, "--secure-port=0"], name=name)

    async def restart_api_server(self) -> None:
        """kill -9, and another in its place. Raises StartFailed."""
        await end(self._children["kube-apiserver"], grace_seconds=0)
        await self._ready(await self._spawn("kube-apiserver", self._api_flags()))

    async def stop(self) -> None:
        for child in reversed(self._children.values()):
            await end(child, grace_seconds=0)

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def _spawn(
        self, program: str, flags: Sequence[str], *, name: str | None = None
    ) -> asyncio.subprocess.Process:
        log = self._directory / f"{name or program}.log"
        enter = () if self._network is None else self._network.enter
        child = await spawn([*enter, str(self._binaries / program), *flags], log=log, env=self._env)
        self._children[name or program] = child
        return child

    async def _ready(self, api: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + _START_SECONDS
        # One that takes the connection and says nothing, too, is asked again.
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        headers = {"Authorization": f"Bearer {self.admin.token}"}
        async with aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(ssl=False), timeout=timeout
        ) as session:
            while api.returncode is None and time.monotonic() < deadline:
                try:
                    async with session.get(f"{self.reached_at}/readyz") as answer:
                        if answer.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.05)
        raise StartFailed(f"kube-apiserver is not ready:\n{tail(self._directory / 'kube-apiserver.log')}")

    def _etcd_flags(self) -> list[str]:
        client, peer = f"http://{self._host}:{self._etcd_port}", f"http://{self._host}:{self._peer_port}"
        return [
            f"--data-dir={self._directory / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",  # the data lives as long as the process
            "--log-level=warn",
        ]

    def _api_flags(self) -> list[str]:
        return [
            f"--etcd-servers=http://{self._host}:{self._etcd_port}",
            f"--bind-address={self._host}",
            f"--advertise-address={self._host}",
            f"--secure-port={self._api_port}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={self._directory / 'serving.key'}",
            f"--token-auth-file={self._directory / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-account-issuer={self.server}",
            f"--service-account-key-file={self.signing_key}",
            f"--service-account-signing-key-file={self.signing_key}",
            f"--service-cluster-ip-range={self._services}",
            "--allow-privileged=true",
            "--profiling=false",
            *self._more_api_flags,
        ]

    def _manager_flags(self) -> list[str]:
        kubeconfig = self.kubeconfig(self._manager, self._directory / "controller-manager.kubeconfig")
        return [
            f"--kubeconfig={kubeconfig}",
            f"--bind-address={self._host}",
            f"--secure-port={self._manager_port}",
            f"--cert-dir={self._directory / 'controller-manager'}",
            f"--root-ca-file={self.certificate}",
            f"--service-account-private-key-file={self.signing_key}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            f"--controllers=*,{','.join(f'-{name}' for name in _WITHOUT)}",
            *CLIENT_RATE,
        ]
