"""A container's environment: values, field references and expansion. Pure."""

import re
from dataclasses import dataclass
from typing import Any

from localcluster.kubelet.expansion import expand
from localcluster.kubelet.refusal import CannotRun

JsonObject = dict[str, Any]

_MAP_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a pod and its node are."""

    pod_ip: str
    host_ip: str


def environment_of(pod: JsonObject, container: JsonObject, addresses: Addresses) -> dict[str, str]:
    """The container's variables in their order, each expanded by those before it. Raises CannotRun."""
    values: dict[str, str] = {}
    for variable in container.get("env") or []:
        source = variable.get("valueFrom")
        if source is None:
            values[variable["name"]] = expand(variable.get("value") or "", values)
        else:
            values[variable["name"]] = field(pod, source["fieldRef"]["fieldPath"], addresses)
    return values


def field(pod: JsonObject, path: str, addresses: Addresses) -> str:
    """One field of the downward API. Raises CannotRun for a path that it does not have."""
    meta, spec = pod["metadata"], pod["spec"]
    known = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": addresses.pod_ip,
        "status.podIPs": addresses.pod_ip,
        "status.hostIP": addresses.host_ip,
        "status.hostIPs": addresses.host_ip,
    }
    if path in known:
        return str(known[path])
    match = _MAP_FIELD.fullmatch(path)
    if match is None:
        raise CannotRun(f"fieldPath {path!r} is not supported by the process kubelet")
    return str((meta.get(match[1]) or {}).get(match[2], ""))
