"""Which pod a ServiceAccount token belongs to, by a TokenReview."""

from dataclasses import dataclass

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.client import KubeClient

# Set by the API server for tokens that are bound to a pod (KEP-1205).
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_SERVICE_ACCOUNT = "system:serviceaccount:"


class TokenRefused(Exception):
    """The token proves nothing: expired, forged, for another audience, or not bound to a pod."""


@dataclass(frozen=True, slots=True)
class TokenPod:
    """The pod that a token is bound to, and its ServiceAccount's user name."""

    ref: PodRef
    user: str


async def review_pod_token(client: KubeClient, token: str, *, audience: str) -> TokenPod:
    """Ask the API server whose token this is. Raises TokenRefused, or KubeError when it cannot answer.

    A token still passes for up to about 10 s after its pod is deleted, because the API server
    caches; a caller that acts on the answer must look at the pod itself.
    """
    answer = await client.create(
        paths.TOKEN_REVIEWS,
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        },
    )
    status = answer.get("status") or {}
    if not status.get("authenticated"):
        raise TokenRefused(status.get("error") or "the API server does not accept the token")
    if audience not in (status.get("audiences") or ()):
        raise TokenRefused(f"the token is not for audience {audience}")
    user = status.get("user") or {}
    name, extra = user.get("username") or "", user.get("extra") or {}
    pod_name, pod_uid = _only(extra, _POD_NAME), _only(extra, _POD_UID)
    if not name.startswith(_SERVICE_ACCOUNT) or pod_name is None or pod_uid is None:
        raise TokenRefused("the token is not bound to a pod; use a projected ServiceAccount token")
    namespace = name.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
    return TokenPod(PodRef(namespace, pod_name, PodUid(pod_uid)), name)


def _only(extra: dict[str, list[str]], key: str) -> str | None:
    values = extra.get(key) or []
    return values[0] if len(values) == 1 else None
