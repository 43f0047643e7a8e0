"""Who is let in: what is asked of the API server, how long its answer holds, and what it does not say."""

from typing import Any

import pytest

from agent.auth import NotAllowed, PodGuard, TokenAuthenticator, TrustingAuthenticator, Unauthenticated
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.kube.errors import KubeUnreachable, response_error
from tests.fakes.objects import pod

REF = PodRef("team", "p1", PodUid("uid-1"))
N1 = NodeName("n1")


class Api:
    """Reviews every token as pod p1's; `error` is raised instead."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.reviewed: list[str] = []
        self.status: dict[str, Any] = {
            "authenticated": True,
            "audiences": ["berth-agent"],
            "user": {
                "username": "system:serviceaccount:team:default",
                "extra": {
                    "authentication.kubernetes.io/pod-name": ["p1"],
                    "authentication.kubernetes.io/pod-uid": ["uid-1"],
                },
            },
        }
        self.pods: dict[str, Any] = {}

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/tokenreviews")
        assert body["spec"]["audiences"] == ["berth-agent"]
        self.reviewed.append(body["spec"]["token"])
        if self.error is not None:
            raise self.error
        return {"status": self.status}

    async def get(self, path: str) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if path not in self.pods:
            raise response_error(404, "NotFound", path)
        return dict(self.pods[path])


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def authenticator(api: Api, clock: Clock | None = None) -> TokenAuthenticator:
    return TokenAuthenticator(api, clock=clock or Clock())  # type: ignore[arg-type]


async def test_a_token_is_reviewed_once_in_ten_seconds_and_each_for_itself() -> None:
    api, clock = Api(), Clock()
    door = authenticator(api, clock)
    for _ in range(3):
        assert await door.pod_of(bearer("one")) == REF
    await door.pod_of(bearer("two"))
    assert api.reviewed == ["one", "two"]
    clock.now += 9.9
    await door.pod_of(bearer("one"))
    assert api.reviewed == ["one", "two"]
    clock.now += 0.2
    await door.pod_of(bearer("one"))
    assert api.reviewed == ["one", "two", "one"]


async def test_a_token_that_is_refused_is_asked_about_again() -> None:
    """It may have been too early, and nobody gets in by it."""
    api = Api()
    door, good = authenticator(api), api.status
    api.status = {"authenticated": False, "error": "token has expired"}
    for _ in range(2):
        with pytest.raises(Unauthenticated, match="expired"):
            await door.pod_of(bearer("one"))
    api.status = good
    assert await door.pod_of(bearer("one")) == REF
    assert len(api.reviewed) == 3


async def test_an_api_server_that_is_away_refuses_nobody() -> None:
    """KubeError, which callers are told as UNAVAILABLE; what was believed before still is."""
    api = Api()
    door = authenticator(api)
    await door.pod_of(bearer("one"))
    api.error = KubeUnreachable("connection refused")
    assert await door.pod_of(bearer("one")) == REF
    with pytest.raises(KubeUnreachable):
        await door.pod_of(bearer("two"))


@pytest.mark.parametrize(
    "changes",
    [
        {"audiences": []},
        {"audiences": ["https://kubernetes.default.svc"]},
        {"user": {"username": "admin"}},
        {"user": {"username": "system:serviceaccount:team:default", "extra": {}}},
        {"authenticated": False},
    ],
)
async def test_answers_that_prove_nothing(changes: dict[str, Any]) -> None:
    api = Api()
    api.status |= changes
    with pytest.raises(Unauthenticated):
        await authenticator(api).pod_of(bearer("one"))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": "Basic x"},
        bearer("x" * (16 * 1024 + 1)),
        bearer("ü"),
        bearer("a\nb"),
    ],
)
async def test_what_is_no_token_never_reaches_the_api_server(metadata: dict[str, str]) -> None:
    api = Api()
    with pytest.raises(Unauthenticated):
        await authenticator(api).pod_of(metadata)
    assert api.reviewed == []


async def test_few_answers_are_kept() -> None:
    api = Api()
    door = authenticator(api)
    for number in range(1025):
        await door.pod_of(bearer(str(number)))
    await door.pod_of(bearer("1024"))
    assert len(api.reviewed) == 1025
    await door.pod_of(bearer("0"))  # the oldest had to go
    assert len(api.reviewed) == 1026


async def test_without_authentication_the_caller_says_who_it_is() -> None:
    assert await TrustingAuthenticator().pod_of({"berth-pod": "team/p1/uid-1"}) == REF
    for text in ("", "team/p1", "team//uid", "a/b/c/d"):
        with pytest.raises(Unauthenticated):
            await TrustingAuthenticator().pod_of({"berth-pod": text})


def guard_of(api: Api, **changes: Any) -> PodGuard:
    one = pod("p1", on=changes.pop("on", "n1"), phase=changes.pop("phase", "Running"))
    one["metadata"] |= {"uid": "uid-1", **changes}
    api.pods["/api/v1/namespaces/team/pods/p1"] = one
    return PodGuard(api, node=N1, keys=Keys())  # type: ignore[arg-type]


async def test_a_pod_of_this_node_is_admitted_also_while_it_ends() -> None:
    assert (await guard_of(Api()).admit(REF)).ref == REF
    ending = await guard_of(Api(), deletionTimestamp="2026-01-01T00:00:00Z").admit(REF)
    assert ending.deleting


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"uid": "uid-2"}, "has ended"),  # another pod under its name
        ({"phase": "Succeeded"}, "has ended"),
        ({"phase": "Failed"}, "has ended"),
        ({"on": "n2"}, "not on node n1"),
        ({"on": None}, "not on node n1"),
        ({"annotations": {Keys().model_id: "a/b"}}, "model-id"),
    ],
)
async def test_pods_that_have_no_business_here(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(NotAllowed, match=why):
        await guard_of(Api(), **changes).admit(REF)


async def test_a_pod_that_is_gone_is_none_and_one_that_nobody_can_tell_of_is_an_error() -> None:
    api = Api()
    guard = guard_of(api)
    assert await guard.current(PodRef("team", "other", PodUid("x"))) is None
    api.error = KubeUnreachable("connection refused")
    with pytest.raises(KubeUnreachable):
        await guard.admit(REF)


async def test_the_cache_is_of_the_token_and_forgets_the_oldest_first() -> None:
    api, clock = Api(), Clock()
    door = authenticator(api, clock)
    for number in range(1024):
        await door.pod_of(bearer(str(number)))
    clock.now += 10  # they are over now: none is believed without being asked about
    await door.pod_of(bearer("0"))
    assert len(api.reviewed) == 1025
    await door.pod_of(bearer("new"))  # which pushes out 1, and not 0, that was asked about just now
    clock.now += 5
    await door.pod_of(bearer("0"))
    assert len(api.reviewed) == 1026


async def test_a_token_of_the_largest_size_and_one_with_spaces_around_it_are_tokens() -> None:
    api = Api()
    door = authenticator(api)
    assert await door.pod_of(bearer("x" * (16 * 1024))) == REF
    assert await door.pod_of(bearer("  one  ")) == REF
    assert api.reviewed[1:] == ["one"]


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "send `authorization: Bearer TOKEN`"),
        ({"authorization": "Token x"}, "send `authorization: Bearer TOKEN`"),
        (bearer("x" * 16385), "that is not a token"),
        (bearer("a\tb"), "that is not a token"),
    ],
)
async def test_who_is_not_let_in_is_told_what_to_send(metadata: dict[str, str], why: str) -> None:
    with pytest.raises(Unauthenticated, match=why):
        await authenticator(Api()).pod_of(metadata)


async def test_who_may_say_who_it_is_and_does_not_is_told_how() -> None:
    with pytest.raises(Unauthenticated, match="send `berth-pod: NAMESPACE/NAME/UID`"):
        await TrustingAuthenticator().pod_of({})
