"""What a pod takes of a node's allocatable, as kube-scheduler counts it. Pure.

Source: k8s.io/component-helpers/resource/helpers.go (PodRequests, determineEffectiveRequests).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from berth.contract.errors import InvalidPod, InvalidValue
from berth.contract.keys import Keys
from berth.contract.quantity import MOST, ceil_units

JsonObject = Mapping[str, Any]
Amounts = Mapping[str, int]

PODS = "pods"
# What may stand at the level of the pod instead of its containers (KEP-2837).
_POD_LEVEL = ("cpu", "memory", "hugepages-")


def pod_amounts(pod: JsonObject, keys: Keys) -> dict[str, int]:
    """GPU memory aside: CPU in milli-cores, the rest in units; at its peak, by Kubernetes' rule for
    init containers and sidecars; one of `pods`; MOST at most of anything. A pod that is being resized in
    place takes the most of what it requests, was given and has.

    Raises InvalidPod.
    """
    spec, resize = pod["spec"], _Resize(pod, keys)
    running: dict[str, int] = {}
    for container in spec.get("containers") or ():
        _add(running, resize.requests(container))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(sidecars, resize.requests(container))
            _raise_to(peak, sidecars)
        else:
            _raise_to(peak, total((sidecars, _requests(container, keys))))
    _add(running, sidecars)
    _raise_to(running, peak)
    running |= resize.pod_level()
    _add(running, _amounts_of(spec.get("overhead") or {}, keys, "overhead"))
    return {resource: min(amount, MOST) for resource, amount in running.items()} | {PODS: 1}


@lru_cache(maxsize=4096)
def units(resource: str, quantity: str | int | float) -> int:
    """A quantity in the units that amounts are counted in. Raises InvalidValue."""
    return ceil_units(quantity, per_unit=1000 if resource == "cpu" else 1)


def total(amounts: Iterable[Amounts]) -> dict[str, int]:
    """The sum, resource by resource."""
    summed: dict[str, int] = {}
    for one in amounts:
        _add(summed, one)
    return summed


class _Resize:
    """Requests that a kubelet may be changing: what the status says counts beside the spec, and
    instead of it where the kubelet has called the change infeasible."""

    def __init__(self, pod: JsonObject, keys: Keys) -> None:
        status = pod.get("status") or {}
        self._keys, self._spec, self._status = keys, pod["spec"], status
        both = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
        self._containers = {one["name"]: one for one in both if one.get("resources") is not None}
        self._infeasible = any(
            condition["type"] == "PodResizePending" and condition.get("reason") == "Infeasible"
            for condition in status.get("conditions") or ()
        )

    def requests(self, container: JsonObject) -> dict[str, int]:
        asked = _requests(container, self._keys)
        return self._effective(asked, self._containers.get(container.get("name", "")))

    def pod_level(self) -> dict[str, int]:
        """Requests of the pod as a whole, which count instead of its containers'."""
        asked = (self._spec.get("resources") or {}).get("requests") or {}
        amounts = _amounts_of({k: v for k, v in asked.items() if k.startswith(_POD_LEVEL)}, self._keys, "pod")
        effective = self._effective(
            amounts, self._status if self._status.get("resources") is not None else None
        )
        return {resource: effective.get(resource, 0) for resource in amounts}

    def _effective(self, asked: dict[str, int], status: JsonObject | None) -> dict[str, int]:
        if status is None:
            return asked
        has = _amounts_of(status["resources"].get("requests") or {}, self._keys, "status")
        given = _amounts_of(status.get("allocatedResources") or {}, self._keys, "status")
        most = {} if self._infeasible else dict(asked)
        _raise_to(most, has)
        _raise_to(most, given)
        return most


def _requests(container: JsonObject, keys: Keys) -> dict[str, int]:
    resources = container.get("resources") or {}
    # The API server copies limits into absent requests; a pod read before that is treated alike.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return _amounts_of(asked, keys, f"container {container.get('name', '?')!r}")


def _amounts_of(quantities: Mapping[str, str], keys: Keys, where: str) -> dict[str, int]:
    amounts = {}
    for resource, quantity in quantities.items():
        if resource == keys.gpu_mem:
            continue  # no node advertises it; the report decides
        try:
            amounts[resource] = units(resource, quantity)
        except InvalidValue as error:
            raise InvalidPod(f"{where}: {resource}: {error}") from error
    return amounts


def _add(into: dict[str, int], more: Amounts) -> None:
    for resource, amount in more.items():
        into[resource] = into.get(resource, 0) + amount


def _raise_to(into: dict[str, int], least: Amounts) -> None:
    for resource, amount in least.items():
        into[resource] = max(into.get(resource, 0), amount)
