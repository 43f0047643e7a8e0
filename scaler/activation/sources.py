"""Whose an address is: what an activator needs to tell one namespace's clients from another's. Pure.

An address of a pod is its namespace's while the pod lives. One of the host's network is no pod's: every such pod of the
node has it. Where two living pods of different namespaces claim one address, as when a node that is gone still has its
pods in the API server, nobody has it until that is settled.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from berth.contract.pod import has_ended

Json = Mapping[str, Any]

# Of a client that nobody knows.
NOBODY: Final = ""


def keep_source(pod: Json) -> dict[str, Any]:
    """What of a pod is needed here, for a mirror."""
    meta, status = pod["metadata"], pod.get("status") or {}
    return {
        "metadata": {
            key: meta[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in meta
        },
        "spec": {"hostNetwork": bool((pod.get("spec") or {}).get("hostNetwork"))},
        "status": {key: status[key] for key in ("phase", "podIP", "podIPs") if key in status},
    }


class Sources:
    """All pods of the namespaces that somebody may want to know of."""

    def __init__(self) -> None:
        # By address: the living pods that claim it.
        self._claims: dict[str, dict[str, str]] = defaultdict(dict)
        self._addresses: dict[str, frozenset[str]] = {}
        self._of: dict[str, set[str]] = defaultdict(set)
        self._followers: set[Follower] = set()

    def set_pod(self, pod: Json) -> None:
        meta = pod["metadata"]
        self._put(meta["uid"], meta.get("namespace", ""), _addresses(pod))

    def pod_gone(self, pod: Json) -> None:
        self._put(pod["metadata"]["uid"], "", frozenset())

    def whose(self, address: str) -> str:
        """Its namespace, or NOBODY."""
        found = set(self._claims.get(address, {}).values())
        return found.pop() if len(found) == 1 else NOBODY

    def addresses(self, namespace: str) -> frozenset[str]:
        return frozenset(self._of.get(namespace, ()))

    def follow(self) -> "Follower":
        follower = Follower(self)
        self._followers.add(follower)
        return follower

    def leave(self, follower: "Follower") -> None:
        self._followers.discard(follower)

    def _put(self, uid: str, namespace: str, addresses: frozenset[str]) -> None:
        for address in self._addresses.pop(uid, frozenset()) | addresses:
            before = self.whose(address)
            claims = self._claims[address]
            claims.pop(uid, None)
            if address in addresses:
                claims[uid] = namespace
            if not claims:
                del self._claims[address]
            self._moved(address, before, self.whose(address))
        if addresses:
            self._addresses[uid] = addresses

    def _moved(self, address: str, before: str, after: str) -> None:
        if before == after:
            return
        if before != NOBODY:
            self._of[before].discard(address)
            if not self._of[before]:
                del self._of[before]
        if after != NOBODY:
            self._of[after].add(address)
        for follower in self._followers:
            follower.moved(address, after)


class Follower:
    """One activator's view: the addresses of some namespaces, as what has changed since it was last asked."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._wanted: frozenset[str] = frozenset()
        self._told: dict[str, str] = {}
        self._news: dict[str, str] = {}

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def want(self, namespaces: frozenset[str]) -> None:
        """These from now on, and no others."""
        for namespace in self._wanted - namespaces:
            for address in self._sources.addresses(namespace):
                self._note(address, NOBODY)
        added, self._wanted = namespaces - self._wanted, namespaces
        for namespace in added:
            for address in self._sources.addresses(namespace):
                self._note(address, namespace)

    def moved(self, address: str, namespace: str) -> None:
        self._note(address, namespace if namespace in self._wanted else NOBODY)

    def take(self) -> dict[str, str]:
        """What has changed: address → namespace, NOBODY for one that is over."""
        news, self._news = self._news, {}
        for address, namespace in news.items():
            if namespace == NOBODY:
                self._told.pop(address, None)
            else:
                self._told[address] = namespace
        return news

    def _note(self, address: str, namespace: str) -> None:
        """The newest word is what counts; what is known already is no news."""
        if self._told.get(address, NOBODY) == namespace:
            self._news.pop(address, None)
        else:
            self._news[address] = namespace


def _addresses(pod: Json) -> frozenset[str]:
    status = pod.get("status") or {}
    if (pod.get("spec") or {}).get("hostNetwork") or has_ended(pod):
        return frozenset()
    found = {one.get("ip") for one in status.get("podIPs") or ()} | {status.get("podIP")}
    return frozenset(address for address in found if isinstance(address, str) and address)
