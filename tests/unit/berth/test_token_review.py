"""Tokens of pods."""

from typing import Any

import pytest

from berth.contract.ids import PodUid
from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.token_review import TokenRefused, review_pod_token
from tests.fakes.kube import RecordingClient


def review(**status: Any) -> dict[str, Any]:
    """What the API server says of a good token, but for `status`."""
    user = {
        "username": "system:serviceaccount:team:default",
        "extra": {
            "authentication.kubernetes.io/pod-name": ["resnet"],
            "authentication.kubernetes.io/pod-uid": ["u1"],
        },
    }
    return {"status": {"authenticated": True, "audiences": ["berth-agent"], "user": user, **status}}


async def reviewed(answer: dict[str, Any], api: RecordingClient | None = None) -> Any:
    api = api or RecordingClient()
    api.answer = answer
    return await review_pod_token(api, "secret", audience="berth-agent")  # type: ignore[arg-type]


async def test_a_token_tells_its_pod() -> None:
    api = RecordingClient()
    pod = await reviewed(review(), api)
    assert pod.ref == PodRef("team", "resnet", PodUid("u1"))
    assert pod.user == "system:serviceaccount:team:default"
    assert api.written == [
        (
            "create",
            paths.TOKEN_REVIEWS,
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": "secret", "audiences": ["berth-agent"]},
            },
        )
    ]


POD_NAME, POD_UID = ("authentication.kubernetes.io/pod-" + what for what in ("name", "uid"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "the API server does not accept the token"),
        (review(authenticated=False), "the API server does not accept the token"),
        (review(authenticated=False, error="token has expired"), "token has expired"),
        (review(audiences=["other"]), "the token is not for audience berth-agent"),
        (review(audiences=None), "the token is not for audience berth-agent"),
        (review(user=None), "not bound to a pod"),
        (review(user={"username": "alice", "extra": {POD_NAME: ["p"], POD_UID: ["u"]}}), "not bound"),
        (review(user={"username": "system:serviceaccount:a:b"}), "not bound to a pod"),
        (review(user={"username": "system:serviceaccount:a:b", "extra": {POD_NAME: ["p"]}}), "not bound"),
        (review(user={"username": "system:serviceaccount:a:b", "extra": {POD_UID: ["u"]}}), "not bound"),
        (
            review(
                user={
                    "username": "system:serviceaccount:a:b",
                    "extra": {POD_NAME: ["p", "q"], POD_UID: ["u"]},
                }
            ),
            "not bound",
        ),
    ],
)
async def test_a_token_that_proves_nothing_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenRefused, match=message):
        await reviewed(answer)
