"""Model pods and model files for the demo and the tests, made from `deploy/samples`.

The sample that users copy is what runs here: the sample Deployment with other names and numbers.
"""

import copy
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from berth.contract.keys import Keys

JsonObject = dict[str, Any]

SAMPLES = Path(__file__).parent.parent / "deploy" / "samples"
SIMPLE_MODEL = SAMPLES / "models" / "simple"


def model_deployment(
    name: str,
    *,
    source: str,
    gpu_mem: str,
    replicas: int = 1,
    namespace: str = "default",
    annotations: Mapping[str, str] | None = None,
    scaling: Mapping[str, str] | None = None,
    pod_spec: Mapping[str, Any] | None = None,
    proxy_args: tuple[str, ...] = (),
    keys: Keys = Keys(),
) -> JsonObject:
    """The sample Deployment for model `name`, whose files the loader takes from the URI `source`.

    `annotations` and `pod_spec` are merged over the sample's own. With `scaling`, annotations of the Deployment
    itself, the replicas are the scaler's once it is there.
    """
    deployment = _sample("Deployment")
    deployment["metadata"] = {"name": name, "namespace": namespace, "labels": {"app": name}}
    if scaling:
        deployment["metadata"]["annotations"] = dict(scaling)
    deployment["spec"] |= {"replicas": replicas, "selector": {"matchLabels": {"app": name}}}
    template = deployment["spec"]["template"]
    template["metadata"]["labels"] = {"app": name}
    template["metadata"]["annotations"] |= {keys.model_id: name, **(annotations or {})}
    spec = template["spec"]
    spec["initContainers"][0]["args"] = _replaced(spec["initContainers"][0]["args"], model=name, uri=source)
    proxy = spec["containers"][0]
    proxy["args"] = [*_replaced(proxy["args"], model=name), *proxy_args]
    proxy["resources"]["limits"] = {keys.gpu_mem: gpu_mem}
    spec |= dict(pod_spec or {})
    return deployment


def model_service(name: str, *, namespace: str = "default") -> JsonObject:
    """The sample Service for model `name`."""
    service = _sample("Service")
    service["metadata"] = {"name": name, "namespace": namespace}
    service["spec"]["selector"] = {"app": name}
    return service


def model_pod(name: str, **options: Any) -> JsonObject:
    """A bare pod of the same shape; see `model_deployment`."""
    deployment = model_deployment(name, **options)
    template = deployment["spec"]["template"]
    metadata = {**template["metadata"], "name": name, "namespace": deployment["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def archive(model: Path = SIMPLE_MODEL) -> bytes:
    """A model directory as .tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(model, arcname=".", filter=lambda member: None if "__pycache__" in member.name else member)
    return buffer.getvalue()


def packed(**files: bytes) -> bytes:
    """A .tar.gz of these files, by path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


def _sample(kind: str) -> JsonObject:
    documents = yaml.safe_load_all((SAMPLES / "model-deployment.yaml").read_text())
    # YAML aliases make one object of several places; each place gets its own.
    found: JsonObject = next(copy.deepcopy(document) for document in documents if document["kind"] == kind)
    unshared: JsonObject = _unshared(found)
    return unshared


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _replaced(args: list[str], **values: str) -> list[str]:
    """The arguments with some `--flag=value` given another value."""
    flags = {f"--{flag}": value for flag, value in values.items()}
    return [f"{name}={flags[name]}" if (name := arg.partition("=")[0]) in flags else arg for arg in args]
