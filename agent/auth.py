"""Authentication of the agent's callers, and what the calling pod may do here."""

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from agent.limits import Busy, RateLimiter
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
# The token may have come too early; meanwhile a client that repeats it costs nothing.
_REFUSED_SECONDS = 5.0
_TOKEN_LIMIT = 16 * 1024
_BEARER = "Bearer "
# Reviews under way. Of these only so many for tokens that do not even claim to be of a pod of this node.
_REVIEWS, _UNKNOWN_REVIEWS = 32, 16
_MOST_WAITING = 512
# Reviews a second in the long run, and at once. A pod's token is reviewed every 10 s at most while it is good.
_POD_RATE, _POD_BURST = 2.0, 20.0
_SOURCE_RATE, _SOURCE_BURST = 5.0, 50.0
_UNKNOWN_RATE, _UNKNOWN_BURST = 20.0, 150.0

Metadata = Mapping[str, str]


class Unauthenticated(Exception):
    """The caller has not proved which pod it is."""


class NotAllowed(Exception):
    """The caller is known, and may not do this."""


class Authenticator(Protocol):
    async def pod_of(self, metadata: Metadata, source: str) -> PodRef:
        """The calling pod. `source`: the address that it calls from. Raises Unauthenticated, Busy, or
        KubeError when it cannot be determined."""
        ...


class TokenAuthenticator:
    """By projected ServiceAccount token and TokenReview. Answers are remembered for a moment.

    Reviews cost the API server something, so each source has few. What a token says of its pod is no proof,
    but it keeps callers of one source apart (pods behind one address, say): tokens that claim to be of a pod
    which lives here (`knows`) are counted for that pod, and the rest of a source together.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        knows: Callable[[PodUid], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._knows = client, knows
        self._believed: _Kept[PodRef] = _Kept(_CACHE_SECONDS, clock)
        self._refused: _Kept[str] = _Kept(_REFUSED_SECONDS, clock)
        self._reviews: dict[bytes, asyncio.Task[PodRef]] = {}
        self._waiting = 0
        self._of_pods = RateLimiter(rate=_POD_RATE, burst=_POD_BURST, clock=clock)
        self._of_sources = RateLimiter(rate=_SOURCE_RATE, burst=_SOURCE_BURST, clock=clock)
        self._of_unknown = RateLimiter(rate=_UNKNOWN_RATE, burst=_UNKNOWN_BURST, clock=clock)

    async def pod_of(self, metadata: Metadata, source: str) -> PodRef:
        token = _token_of(metadata)
        # The token itself is not kept.
        key = hashlib.sha256(token.encode()).digest()
        if (ref := self._believed.get(key)) is not None:
            return ref
        if (reason := self._refused.get(key)) is not None:
            raise Unauthenticated(reason)
        review = self._reviews.get(key)
        if review is None:
            self._require_review(_claimed_pod(token), source)
            review = asyncio.create_task(self._review(key, token), name="token review")
            self._reviews[key] = review
            review.add_done_callback(lambda done: self._reviewed(key, done))
        if self._waiting >= _MOST_WAITING:
            raise Busy(
                "too many calls wait until their token has been looked at; try again", retry_seconds=2.0
            )
        self._waiting += 1
        try:
            # Others may wait for the same; it goes on when one of them has gone.
            return await asyncio.shield(review)
        finally:
            self._waiting -= 1

    def _require_review(self, claimed: PodUid | None, source: str) -> None:
        """Raises Busy when this source has had its share of reviews."""
        if claimed is not None and self._knows(claimed):
            seconds, most = self._of_pods.take((source, claimed)), _REVIEWS
        else:
            seconds = self._of_sources.take(source) or self._of_unknown.take("")
            most = _UNKNOWN_REVIEWS
        if seconds:
            raise Busy("too many unknown tokens; try again later", retry_seconds=seconds)
        if len(self._reviews) >= most:
            raise Busy(f"{most} tokens are being looked at; try again", retry_seconds=1.0)

    async def _review(self, key: bytes, token: str) -> PodRef:
        try:
            reviewed = await review_pod_token(self._client, token, audience=AGENT_AUDIENCE)
        except TokenRefused as error:
            reason = str(error).replace(token, "…")
            self._refused.put(key, reason)
            raise Unauthenticated(reason) from None
        self._believed.put(key, reviewed.ref)
        return reviewed.ref

    def _reviewed(self, key: bytes, review: "asyncio.Task[PodRef]") -> None:
        del self._reviews[key]
        if not review.cancelled():
            review.exception()  # its callers may be gone


class TrustingAuthenticator:
    """`--auth none`: the caller says who it is in the metadata `berth-pod: NAMESPACE/NAME/UID`."""

    async def pod_of(self, metadata: Metadata, source: str) -> PodRef:
        parts = metadata.get("berth-pod", "").split("/")
        if len(parts) != 3 or not all(parts):
            raise Unauthenticated("send `berth-pod: NAMESPACE/NAME/UID`")
        return PodRef(parts[0], parts[1], PodUid(parts[2]))


T = TypeVar("T")


class _Kept(Generic[T]):
    """Answers, each for some seconds; the oldest go first when there are too many."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._entries: OrderedDict[bytes, tuple[float, T]] = OrderedDict()

    def get(self, key: bytes) -> T | None:
        until, value = self._entries.get(key, (float("-inf"), None))
        return value if until > self._clock() else None

    def put(self, key: bytes, value: T) -> None:
        self._entries[key] = (self._clock() + self._seconds, value)
        self._entries.move_to_end(key)
        if len(self._entries) > _CACHE_ENTRIES:
            self._entries.popitem(last=False)


def _token_of(metadata: Metadata) -> str:
    """Raises Unauthenticated."""
    value = metadata.get("authorization", "")
    token = value.removeprefix(_BEARER).strip()
    if not value.startswith(_BEARER) or not token:
        raise Unauthenticated("send `authorization: Bearer TOKEN` with a token of audience berth-agent")
    if len(token) > _TOKEN_LIMIT or not token.isascii() or not token.isprintable():
        raise Unauthenticated("that is not a token")
    return token


def _claimed_pod(token: str) -> PodUid | None:
    """The uid of the pod that a token says it is bound to. Whether that is true is the API server's to say."""
    try:
        payload = token.split(".")[1]
        claims: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        uid = claims["kubernetes.io"]["pod"]["uid"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return PodUid(uid) if isinstance(uid, str) else None


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
