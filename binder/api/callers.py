"""Who may ask the binder over HTTP: the scaler's ServiceAccount alone, which a TokenReview proves."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from berth.contract.scaling import BINDER_AUDIENCE
from berth.kube.client import KubeClient
from berth.kube.token_review import TokenRefused, review_pod_token
from binder.loop.token_bucket import TokenBucket

SCALER: Final = "berth-scaler"
_BEARER: Final = "Bearer "
_TOKEN_LIMIT: Final = 4096
_BELIEVED_SECONDS, _REFUSED_SECONDS = 30.0, 5.0
_MOST_TOKENS: Final = 256
# Reviews under way; a second in the long run, and at once, of one address.
_REVIEWS, _RATE, _BURST = 4, 0.5, 5
_MOST_SOURCES: Final = 1024


class Refused(Exception):
    """`status`: of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Callers:
    """Lets in the scaler alone, by TokenReview. The answer about a token is remembered for a while, by its hash."""

    def __init__(self, client: KubeClient, system_namespace: str, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._user = f"system:serviceaccount:{system_namespace}:{SCALER}"
        # Until when, and the refusal; None: it is the scaler's.
        self._known: OrderedDict[bytes, tuple[float, Refused | None]] = OrderedDict()
        self._reviews: OrderedDict[str, TokenBucket] = OrderedDict()
        self._reviewing = 0

    async def require_scaler(self, authorization: str, source: str) -> None:
        """Raises Refused, or KubeError where the API server does not answer."""
        token = _token_of(authorization)
        key = hashlib.sha256(token.encode()).digest()
        until, refusal = self._known.get(key, (float("-inf"), None))
        if until <= self._clock():
            refusal = await self._review(token, source)
            self._remember(key, refusal)
        if refusal is not None:  # another one: what is raised again and again keeps each traceback
            raise Refused(refusal.status, str(refusal))

    async def _review(self, token: str, source: str) -> Refused | None:
        if not self._may_review(source) or self._reviewing >= _REVIEWS:
            raise Refused(429, "too many unknown tokens; try again later")
        self._reviewing += 1
        try:
            caller = await review_pod_token(self._client, token, audience=BINDER_AUDIENCE)
        except TokenRefused as error:
            return Refused(401, str(error).replace(token, "…"))
        finally:
            self._reviewing -= 1
        if caller.user != self._user:
            return Refused(403, f"{caller.user} may not ask; {self._user} may")
        return None

    def _remember(self, key: bytes, refusal: Refused | None) -> None:
        seconds = _BELIEVED_SECONDS if refusal is None else _REFUSED_SECONDS
        self._known[key] = (self._clock() + seconds, refusal)
        self._known.move_to_end(key)
        if len(self._known) > _MOST_TOKENS:
            self._known.popitem(last=False)

    def _may_review(self, source: str) -> bool:
        """Each address has few reviews, so that none takes all of them."""
        bucket = self._reviews.pop(source, None) or TokenBucket(
            per_second=_RATE, most=_BURST, clock=self._clock
        )
        self._reviews[source] = bucket
        if len(self._reviews) > _MOST_SOURCES:
            self._reviews.popitem(last=False)
        may = bucket.left() > 0
        bucket.spend(int(may))
        return may


def _token_of(authorization: str) -> str:
    token = authorization.removeprefix(_BEARER).strip()
    if not authorization.startswith(_BEARER) or not token:
        raise Refused(401, f"send `Authorization: Bearer TOKEN` with a token of audience {BINDER_AUDIENCE}")
    if len(token) > _TOKEN_LIMIT or not token.isascii() or not token.isprintable():
        raise Refused(401, "that is not a token")
    return token
