"""Which namespace an address belongs to: what an activator needs to tell one namespace's clients from another's. Pure.

An address of a pod is its namespace's while the pod lives. One of the host's network belongs to no pod: every such pod of
the node has it. Where two living pods of different namespaces claim one address, as when a node that is gone still has its
pods in the API server, it is unknown until that is settled.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from berth.contract.pod import has_ended

Json = Mapping[str, Any]

# The namespace of an address that no pod has, or several claim.
UNKNOWN: Final = ""


def keep_client(pod: Json) -> dict[str, Any]:
    """What of a pod is needed here, for an informer's cache."""
    meta, status = pod["metadata"], pod.get("status") or {}
    return {
        "metadata": {
            key: meta[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in meta
        },
        "spec": {"hostNetwork": bool((pod.get("spec") or {}).get("hostNetwork"))},
        "status": {key: status[key] for key in ("phase", "podIP", "podIPs") if key in status},
    }


class ClientAddresses:
    """Of all pods that may be clients."""

    def __init__(self) -> None:
        # By address: the namespaces of the living pods that claim it, by uid.
        self._claims: dict[str, dict[str, str]] = defaultdict(dict)
        self._of_pod: dict[str, frozenset[str]] = {}
        self._of_namespace: dict[str, set[str]] = defaultdict(set)
        self._subscriptions: set[AddressSubscription] = set()

    def set_pod(self, pod: Json) -> None:
        meta = pod["metadata"]
        self._put(meta["uid"], meta.get("namespace", ""), _addresses(pod))

    def delete_pod(self, pod: Json) -> None:
        self._put(pod["metadata"]["uid"], "", frozenset())

    def namespace_of(self, address: str) -> str:
        found = set(self._claims.get(address, {}).values())
        return found.pop() if len(found) == 1 else UNKNOWN

    def addresses(self, namespace: str) -> frozenset[str]:
        return frozenset(self._of_namespace.get(namespace, ()))

    def subscribe(self) -> "AddressSubscription":
        subscription = AddressSubscription(self)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: "AddressSubscription") -> None:
        self._subscriptions.discard(subscription)

    def _put(self, uid: str, namespace: str, addresses: frozenset[str]) -> None:
        for address in self._of_pod.pop(uid, frozenset()) | addresses:
            before = self.namespace_of(address)
            claims = self._claims[address]
            claims.pop(uid, None)
            if address in addresses:
                claims[uid] = namespace
            if not claims:
                del self._claims[address]
            self._moved(address, before, self.namespace_of(address))
        if addresses:
            self._of_pod[uid] = addresses

    def _moved(self, address: str, before: str, after: str) -> None:
        if before == after:
            return
        if before != UNKNOWN:
            self._of_namespace[before].discard(address)
            if not self._of_namespace[before]:
                del self._of_namespace[before]
        if after != UNKNOWN:
            self._of_namespace[after].add(address)
        for subscription in self._subscriptions:
            subscription.moved(address, after)


class AddressSubscription:
    """One activator's view: the addresses of some namespaces, as what has changed since it last took them."""

    def __init__(self, addresses: ClientAddresses) -> None:
        self._addresses = addresses
        self._selected: frozenset[str] = frozenset()
        self._sent: dict[str, str] = {}
        self._changes: dict[str, str] = {}

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def select(self, namespaces: frozenset[str]) -> None:
        """These from now on, and no others."""
        for namespace in self._selected - namespaces:
            for address in self._addresses.addresses(namespace):
                self._note(address, UNKNOWN)
        added, self._selected = namespaces - self._selected, namespaces
        for namespace in added:
            for address in self._addresses.addresses(namespace):
                self._note(address, namespace)

    def moved(self, address: str, namespace: str) -> None:
        self._note(address, namespace if namespace in self._selected else UNKNOWN)

    def take(self) -> dict[str, str]:
        """What has changed: address → namespace, UNKNOWN for one that is removed."""
        changes, self._changes = self._changes, {}
        for address, namespace in changes.items():
            if namespace == UNKNOWN:
                self._sent.pop(address, None)
            else:
                self._sent[address] = namespace
        return changes

    def _note(self, address: str, namespace: str) -> None:
        """The newest counts; what was sent already is no change."""
        if self._sent.get(address, UNKNOWN) == namespace:
            self._changes.pop(address, None)
        else:
            self._changes[address] = namespace


def _addresses(pod: Json) -> frozenset[str]:
    status = pod.get("status") or {}
    if (pod.get("spec") or {}).get("hostNetwork") or has_ended(pod):
        return frozenset()
    found = {one.get("ip") for one in status.get("podIPs") or ()} | {status.get("podIP")}
    return frozenset(address for address in found if isinstance(address, str) and address)
