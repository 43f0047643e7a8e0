"""What pods that bring the same files have in common: their template and their family of controllers. Pure."""

from collections.abc import Mapping
from typing import Any

# Namespace, the controller's uid, and its template's hash, "" where it has only one template. Of a pod on its own "" for the
# controller, and its model's id.
Template = tuple[str, str, str]
# A controller by its kind and its name, a ReplicaSet by that of its Deployment: the same for all of its templates. "": none.
Family = str


def template_of(
    namespace: str, owner: str | None, labels: Mapping[str, Any], model_id: str | None = None
) -> Template | None:
    """What a pod has in common with those that bring the same files; None for a pod on its own without an id."""
    if owner is None:
        return (namespace, "", model_id) if model_id else None
    return (namespace, owner, _revision(labels))


def family_of(pod: Mapping[str, Any]) -> Family:
    """Of which controllers' pods it is one."""
    meta = pod["metadata"]
    owners = meta.get("ownerReferences") or ()
    owner: Mapping[str, Any] = next((one for one in owners if one.get("controller")), {})
    if not owner.get("name"):
        return ""
    return f"{owner.get('kind')}/{owner['name'].removesuffix('-' + _revision(meta.get('labels') or {}))}"


def _revision(labels: Mapping[str, Any]) -> str:
    return str(labels.get("pod-template-hash") or labels.get("controller-revision-hash") or "")
