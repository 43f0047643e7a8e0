"""Which activator calls: its token, its pod, and whose models it may be assigned.

Nothing that a caller says of itself counts: the API server says whose the token is, and the pod itself where it is. So an
activator's address cannot be another pod's, or a Service would lead there.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from berth.contract.activation import SCALER_AUDIENCE
from berth.contract.ids import PodUid
from berth.contract.pod import PodRef, has_ended
from berth.kube import paths
from berth.kube.client import KubeClient
from berth.kube.errors import NotFound
from berth.kube.token_review import TokenRefused, review_pod_token

# Of the system's activators, and of those that run in a namespace of its own for that alone.
ACCOUNT: Final = "berth-activator"
_BEARER: Final = "Bearer "
_TOKEN_LIMIT: Final = 16 * 1024
# Reviews under way; a second in the long run, and at once, of one address. An activator needs one when it dials.
_REVIEWS, _RATE, _BURST = 8, 1.0, 10.0
_MOST_SOURCES: Final = 4096
# A refused token that is sent again and again costs the API server nothing meanwhile.
_REFUSED_SECONDS, _MOST_REFUSED = 5.0, 1024


class Unauthenticated(Exception):
    """The caller has not proved which pod it is."""


class PermissionDenied(Exception):
    """The caller is known, and is no activator, or not where it says."""


class TooManyCalls(Exception):
    """From this caller or in all. The same call may succeed later."""


@dataclass(frozen=True, slots=True)
class ActivatorIdentity:
    """An activator's pod. `scope`: the one namespace whose models it may be assigned; None: all."""

    ref: PodRef
    addresses: frozenset[str]
    scope: str | None

    @property
    def uid(self) -> PodUid:
        return self.ref.uid


class Authenticator(Protocol):
    async def authenticate(self, metadata: Mapping[str, str], source: str) -> ActivatorIdentity:
        """`source`: the address that it calls from. Raises Unauthenticated, PermissionDenied, TooManyCalls, or KubeError
        when the API server does not answer."""
        ...


class TokenAuthenticator:
    """By TokenReview, and a look at the pod: a token outlives it by a while."""

    def __init__(
        self,
        client: KubeClient,
        *,
        system_namespace: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._system, self._clock = client, system_namespace, clock
        self._reviewing = asyncio.Semaphore(_REVIEWS)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    async def authenticate(self, metadata: Mapping[str, str], source: str) -> ActivatorIdentity:
        token = _token_of(metadata)
        # The token itself is not kept.
        key = hashlib.sha256(token.encode()).digest()
        until, reason = self._refused.get(key, (0.0, ""))
        if until > self._clock():
            raise Unauthenticated(reason)
        self._require_share(source)
        async with self._reviewing:
            try:
                reviewed = await review_pod_token(self._client, token, audience=SCALER_AUDIENCE)
            except TokenRefused as error:
                self._refuse(key, str(error).replace(token, "…"))
                raise Unauthenticated(str(error).replace(token, "…")) from None
            if reviewed.user != f"system:serviceaccount:{reviewed.ref.namespace}:{ACCOUNT}":
                raise PermissionDenied(
                    f"{reviewed.user} is no activator's ServiceAccount; theirs is {ACCOUNT}"
                )
            return await self._pod(reviewed.ref)

    async def _pod(self, ref: PodRef) -> ActivatorIdentity:
        try:
            found = await self._client.get(paths.pod(ref.namespace, ref.name))
        except NotFound:
            raise PermissionDenied(f"pod {ref} has ended") from None
        if found["metadata"]["uid"] != ref.uid or has_ended(found):
            raise PermissionDenied(f"pod {ref} has ended")
        if found["spec"].get("hostNetwork") and ref.namespace != self._system:
            raise PermissionDenied(f"pod {ref} has its node's address, which is not its own")
        status = found.get("status") or {}
        addresses = {one.get("ip") for one in status.get("podIPs") or ()} | {status.get("podIP")}
        scope = None if ref.namespace == self._system else ref.namespace
        return ActivatorIdentity(ref, frozenset(address for address in addresses if address), scope)

    def _require_share(self, source: str) -> None:
        """Raises TooManyCalls. The least recently used, whose share is full or nearly so, is forgotten."""
        now = self._clock()
        had, at = self._buckets.pop(source, (_BURST, now))
        have = min(_BURST, had + (now - at) * _RATE)
        self._buckets[source] = (have - 1 if have >= 1 else have, now)
        if len(self._buckets) > _MOST_SOURCES:
            self._buckets.popitem(last=False)
        if have < 1:
            raise TooManyCalls("too many calls from this address; try again later")

    def _refuse(self, key: bytes, reason: str) -> None:
        self._refused[key] = (self._clock() + _REFUSED_SECONDS, reason)
        self._refused.move_to_end(key)
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)


def _token_of(metadata: Mapping[str, str]) -> str:
    """Raises Unauthenticated."""
    value = metadata.get("authorization", "")
    token = value.removeprefix(_BEARER).strip()
    if not value.startswith(_BEARER) or not token:
        raise Unauthenticated(
            f"send `authorization: Bearer TOKEN` with a token of audience {SCALER_AUDIENCE}"
        )
    if len(token) > _TOKEN_LIMIT or not token.isascii() or not token.isprintable():
        raise Unauthenticated("that is not a token")
    return token
