"""What `deploy/` says, and the little that the local cluster lays over it.

Flags, mounts, users and probes stand in `deploy/` and nowhere else: the local cluster's nodes have the label
and the RuntimeClass that it names, and the process kubelet knows its image names. Laid over it are mock
GPUs, flags that a test sets, and how many binders, scalers and activators there are.
"""

import copy
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

JsonObject = dict[str, Any]

DEPLOY = Path(__file__).parent.parent / "deploy"
AUTOSCALED = Path(__file__).parent / "autoscaling"
SYSTEM_NAMESPACE = "berth-system"
SCENARIO = "/etc/berth/mock-gpus/gpus.yaml"
"""Where a node has its mock GPUs."""
_RENDER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Overlay:
    """What differs from `deploy/`. Both are by the name of the main container, which none has in common."""

    replicas: Mapping[str, int]
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def over(self, documents: Sequence[JsonObject]) -> list[JsonObject]:
        """The documents, changed, with what the cluster itself has to bring."""
        changed = [copy.deepcopy(document) for document in documents]
        for document in changed:
            if document["kind"] in ("DaemonSet", "Deployment"):
                pod = document["spec"]["template"]["spec"]
                if document["kind"] == "Deployment":
                    document["spec"]["replicas"] = self.replicas[pod["containers"][0]["name"]]
                _mock_gpus(pod)
                self._add_flags(pod)
        return [*_runtime_classes(changed), *changed]

    def _add_flags(self, pod: JsonObject) -> None:
        for container in pod["containers"]:
            if more := self.flags.get(container["name"]):
                container["args"] = [*container["args"], *more]


def _mock_gpus(pod: JsonObject) -> None:
    directory = SCENARIO.rpartition("/")[0]
    for container in pod["containers"]:
        args = container.get("args") or []
        if any(arg.startswith("--nvml=") for arg in args):
            container["args"] = [
                f"--nvml=mock:{SCENARIO}" if arg.startswith("--nvml=") else arg for arg in args
            ]
            container["volumeMounts"].append({"name": "mock-gpus", "mountPath": directory})
            pod["volumes"].append({"name": "mock-gpus", "hostPath": {"path": directory}})


def rendered(kubectl: Path, kustomization: Path) -> list[JsonObject]:
    """What `kubectl apply -k` applies, in its order."""
    command = [str(kubectl), "kustomize", str(kustomization)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_RENDER_SECONDS)
    return list(yaml.safe_load_all(done.stdout))


def pod_specs(documents: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """The pods of DaemonSets and Deployments."""
    for document in documents:
        if document["kind"] in ("DaemonSet", "Deployment"):
            yield document["spec"]["template"]["spec"]


def node_labels(documents: Sequence[JsonObject]) -> dict[str, str]:
    """What a node must be labelled with for every pod of `deploy/` to go there."""
    return {
        key: value for pod in pod_specs(documents) for key, value in (pod.get("nodeSelector") or {}).items()
    }


def base_container(name: str) -> JsonObject:
    """A main container of the DaemonSets of `deploy/base`, as its file has it. Raises LookupError."""
    for path in sorted((DEPLOY / "base").glob("*.yaml")):
        documents = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "DaemonSet"]
        for container in (c for pod in pod_specs(documents) for c in pod["containers"]):
            if container["name"] == name:
                found: JsonObject = container
                return found
    raise LookupError(f"deploy/base has no DaemonSet with a container {name!r}")


def flag_of(container: JsonObject, flag: str) -> str:
    """The value of `--flag=value` among a container's arguments. Raises LookupError."""
    for arg in container["args"]:
        if arg.startswith(f"{flag}="):
            return str(arg.removeprefix(f"{flag}="))
    raise LookupError(f"{container['name']} has no {flag} in deploy/base")


def sockets() -> list[str]:
    """The paths of the unix sockets by which the pods of a node speak to each other."""
    words = [argument for name in ("gateway", "agent") for argument in base_container(name)["args"]]
    return sorted({word.partition("=unix:")[2] for word in words if "=unix:" in word})


def _runtime_classes(documents: Sequence[JsonObject]) -> list[JsonObject]:
    names = {pod["runtimeClassName"] for pod in pod_specs(documents) if pod.get("runtimeClassName")}
    head = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "process"}
    return [{**head, "metadata": {"name": name}} for name in sorted(names)]
