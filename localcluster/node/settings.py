"""The settings of containerd, the CNI plugins, kubelet and kube-proxy. Pure: text and values out of a few facts."""

from pathlib import Path
from typing import Any

from localcluster.node import names

JsonObject = dict[str, Any]

ADDRESS, INTERFACE = "10.88.0.10", "10.88.0.10/24"
POD_NETWORK = "10.88.1.0/24"
# Below a tmpfs of the node's own; see localcluster.node.init.
STATE = Path("/run/node")
SOCKET = STATE / "containerd.sock"
_CNI_PROGRAMS = "/usr/lib/cni"  # where Debian puts them


def containerd(*, cni: Path, pause: str) -> str:
    """Its config.toml; `cni` is the directory of the network's configuration, `pause` an image's name."""
    runtimes = "\n".join(
        f"""
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
SystemdCgroup = false
"""
        for name in ("runc", "nvidia")
    )
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE no process may lower a process's score, and runc then fails
    # with "can't get final child's PID from pipe: EOF".
    return f"""
version = 2
root = "{STATE}/containerd"
state = "{STATE}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{_CNI_PROGRAMS}"
conf_dir = "{cni}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
{runtimes}"""


def cni() -> JsonObject:
    """Pods on a bridge, with hostPorts."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": POD_NETWORK}]],
        "dataDir": str(STATE / "cni"),
    }
    # isDefaultGateway: else pods have no route to anything but each other.
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "isDefaultGateway": True,
        "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "berth", "plugins": [bridge, ports]}


def kubelet(*, client_ca: Path) -> JsonObject:
    """Its KubeletConfiguration: the defaults, but for what this kind of node needs."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        # A renewed token reaches its container when its pod is looked at again: by default once in a minute.
        "syncFrequency": "5s",
        "oomScoreAdj": 0,  # a lower one is not allowed without CAP_SYS_RESOURCE
        "resolvConf": "",
        "clusterDNS": [ADDRESS],
        "clusterDomain": names.DOMAIN,
        "volumePluginDir": str(STATE / "volume-plugins"),
        # Of the machine's memory and disk most is not this node's to judge.
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
    }


def kube_proxy_flags() -> list[str]:
    # The machine's connection tracking is not this node's to size.
    return [
        "--proxy-mode=nftables",
        f"--cluster-cidr={POD_NETWORK}",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]
