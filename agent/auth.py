"""Who calls the agent, and what that pod may do here."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from berth.contract.errors import InvalidPod
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import AGENT_AUDIENCE, Keys
from berth.contract.pod import ModelPod, PodRef, parse_model_pod
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import NotFound
from berth.kube.token_review import TokenRefused, review_pod_token

# Not longer than the API server itself believes a deleted pod's token.
_CACHE_SECONDS = 10.0
_CACHE_ENTRIES = 1024
_TOKEN_LIMIT = 16 * 1024
_BEARER = "Bearer "

Metadata = Mapping[str, str]


class Unauthenticated(Exception):
    """The caller has not proved which pod it is."""


class NotAllowed(Exception):
    """The caller is known, and may not do this."""


class NotPlaced(Exception):
    """The pod has no usable GPU choice: the binder has not placed it."""


class Authenticator(Protocol):
    async def pod_of(self, metadata: Metadata) -> PodRef:
        """The calling pod. Raises Unauthenticated, or KubeError when nobody can tell."""
        ...


class TokenAuthenticator:
    """By projected ServiceAccount token and TokenReview. Good answers are remembered for a moment."""

    def __init__(self, client: KubeClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._cache: OrderedDict[bytes, tuple[float, PodRef]] = OrderedDict()

    async def pod_of(self, metadata: Metadata) -> PodRef:
        value = metadata.get("authorization", "")
        token = value.removeprefix(_BEARER).strip()
        if not value.startswith(_BEARER) or not token:
            raise Unauthenticated("send `authorization: Bearer TOKEN` with a token of audience berth-agent")
        if len(token) > _TOKEN_LIMIT or not token.isascii() or not token.isprintable():
            raise Unauthenticated("that is not a token")
        # The token itself is not kept.
        key = hashlib.sha256(token.encode()).digest()
        known = self._cache.get(key)
        if known is not None and known[0] > self._clock():
            return known[1]
        try:
            reviewed = await review_pod_token(self._client, token, audience=AGENT_AUDIENCE)
        except TokenRefused as error:
            raise Unauthenticated(str(error)) from error
        self._remember(key, reviewed.ref)
        return reviewed.ref

    def _remember(self, key: bytes, ref: PodRef) -> None:
        self._cache[key] = (self._clock() + _CACHE_SECONDS, ref)
        self._cache.move_to_end(key)
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.popitem(last=False)


class TrustingAuthenticator:
    """`--auth none`: the caller says who it is in the metadata `berth-pod: NAMESPACE/NAME/UID`."""

    async def pod_of(self, metadata: Metadata) -> PodRef:
        parts = metadata.get("berth-pod", "").split("/")
        if len(parts) != 3 or not all(parts):
            raise Unauthenticated("send `berth-pod: NAMESPACE/NAME/UID`")
        return PodRef(parts[0], parts[1], PodUid(parts[2]))


class PodGuard:
    """Looks at the calling pod itself: a token outlives its pod by a while, and says nothing of its node."""

    def __init__(self, client: KubeClient, *, node: NodeName, keys: Keys) -> None:
        self._client, self._node, self._keys = client, node, keys

    async def current(self, ref: PodRef) -> ModelPod | None:
        """The pod as the API server has it now; None if it is gone. Raises NotAllowed or KubeError."""
        try:
            found = await self._client.get(paths.pod(ref.namespace, ref.name))
        except NotFound:
            return None
        if found["metadata"]["uid"] != ref.uid:
            return None
        try:
            return parse_model_pod(found, self._keys)
        except InvalidPod as error:
            raise NotAllowed(f"pod {ref}: {error}") from error

    async def admit(self, ref: PodRef) -> ModelPod:
        """A pod that lives on this node. Raises NotAllowed or KubeError."""
        pod = await self.current(ref)
        if pod is None or pod.ended:
            raise NotAllowed(f"pod {ref} has ended")
        if pod.node != self._node:
            raise NotAllowed(f"pod {ref} is not on node {self._node}")
        return pod
