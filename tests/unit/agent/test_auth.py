"""Who is let in: what is asked of the API server, how long its answer holds, and what it does not say."""

import asyncio
import base64
import json
from typing import Any

import pytest

from agent.auth import NotAllowed, PodGuard, TokenAuthenticator, TrustingAuthenticator, Unauthenticated
from agent.limits import Busy
from berth.contract.ids import NodeName, PodUid
from berth.contract.keys import Keys
from berth.contract.pod import PodRef
from berth.kube.errors import KubeUnreachable, response_error
from tests.fakes.objects import pod

REF = PodRef("team", "p1", PodUid("uid-1"))
N1 = NodeName("n1")
POD = "ipv4:10.0.0.9"


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


def claiming(uid: str, more: object = 0) -> dict[str, str]:
    """A token that says it is bound to this pod."""
    claims = {"kubernetes.io": {"pod": {"uid": uid}}, "more": more}
    return bearer(
        "e30." + base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=") + ".sign"
    )


def authenticator(api: Api, clock: Clock | None = None, *, known: str = "here") -> TokenAuthenticator:
    """`known`: how the uids of this node's pods begin."""
    return TokenAuthenticator(
        api,  # type: ignore[arg-type]
        knows=lambda uid: uid.startswith(known),
        clock=clock or Clock(),
    )


async def test_a_token_is_reviewed_once_in_ten_seconds_and_each_for_itself() -> None:
    api, clock = Api(), Clock()
    authn = authenticator(api, clock)
    for _ in range(3):
        assert await authn.pod_of(bearer("one"), POD) == REF
    await authn.pod_of(bearer("two"), POD)
    assert api.reviewed == ["one", "two"]
    clock.now += 9.9
    await authn.pod_of(bearer("one"), POD)
    assert api.reviewed == ["one", "two"]
    clock.now += 0.2
    await authn.pod_of(bearer("one"), POD)
    assert api.reviewed == ["one", "two", "one"]


async def test_a_token_that_is_refused_is_asked_about_again_after_a_moment() -> None:
    """It may have been too early, and nobody gets in by it."""
    api, clock = Api(), Clock()
    authn, good = authenticator(api, clock), api.status
    api.status = {"authenticated": False, "error": "token one has expired"}
    for _ in range(1000):
        with pytest.raises(Unauthenticated, match=r"^token … has expired$"):  # it is not told on
            await authn.pod_of(bearer("one"), POD)
    assert api.reviewed == ["one"]
    clock.now += 5
    api.status = good
    assert await authn.pod_of(bearer("one"), POD) == REF
    assert len(api.reviewed) == 2


async def flood(authn: TokenAuthenticator, count: int, source: str, uid: str = "elsewhere") -> int:
    """Send so many tokens, each once; how many were not even looked at."""
    busy: list[Busy] = []
    for number in range(count):
        try:
            await authn.pod_of(claiming(uid, number), source)
        except Unauthenticated:
            pass
        except Busy as error:
            busy.append(error)
    assert all(error.retry_seconds > 0 for error in busy)
    return len(busy)


@pytest.mark.parametrize("uid", ["elsewhere", "here-evil"])
async def test_a_flood_of_bad_tokens_costs_little_and_stops_nobody_else(uid: str) -> None:
    api, clock = Api(), Clock()
    authn, good = authenticator(api, clock), api.status
    api.status = {"authenticated": False}
    assert await flood(authn, 1000, POD, uid) >= 950
    assert len(api.reviewed) <= 50
    clock.now += 10
    await flood(authn, 1000, POD, uid)
    assert len(api.reviewed) <= 100
    api.status = good
    # A pod of this node is let in also where all come from one address, and so is who has one of its own.
    assert await authn.pod_of(claiming("here-good"), POD) == REF
    assert await authn.pod_of(bearer("another"), "ipv4:10.0.0.10") == REF


async def test_many_sources_together_cost_little_as_well() -> None:
    api = Api()
    authn = authenticator(api)
    api.status = {"authenticated": False}
    for source in range(100):
        await flood(authn, 5, f"ipv4:10.0.1.{source}", f"elsewhere-{source}")
    assert len(api.reviewed) == 150
    await flood(authn, 1, POD, "here")
    assert len(api.reviewed) == 151


class SlowApi(Api):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = asyncio.Event()

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await super().create(path, body)
        await self.answer.wait()
        return answer


async def test_one_token_is_under_review_once_whoever_waits_for_it_and_gives_up() -> None:
    api = SlowApi()
    authn = authenticator(api)
    calls = [asyncio.create_task(authn.pod_of(bearer("one"), POD)) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls[0].cancel()
    api.answer.set()
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert others == [REF] * 4
    assert api.reviewed == ["one"]


async def test_an_api_server_that_hangs_is_not_asked_by_everybody_at_once() -> None:
    api = SlowApi()
    authn = authenticator(api)
    calls = [asyncio.create_task(authn.pod_of(bearer(str(n)), f"ipv4:{n}")) for n in range(40)]
    calls += [asyncio.create_task(authn.pod_of(claiming(f"here-{n}"), POD)) for n in range(40)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(api.reviewed) == 32
    api.answer.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [sum(answer == REF for answer in part) for part in (answers[:40], answers[40:])] == [16, 16]
    assert all(answer == REF or isinstance(answer, Busy) for answer in answers)


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b.c",
        "..",
        "a.!.c",
        "a." + "W1tb" * 2000 + ".c",
        "a.bnVsbA.c",
        "a.eyJrdWJlcm5ldGVzLmlvIjp7InBvZCI6eyJ1aWQiOjF9fX0.c",
    ],
)
async def test_a_token_may_claim_any_nonsense(token: str) -> None:
    assert await authenticator(Api(), known="").pod_of(bearer(token), POD) == REF


async def test_an_api_server_that_is_away_refuses_nobody() -> None:
    """KubeError, which callers are told as UNAVAILABLE; what was believed before still is."""
    api = Api()
    authn = authenticator(api)
    await authn.pod_of(bearer("one"), POD)
    api.error = KubeUnreachable("connection refused")
    assert await authn.pod_of(bearer("one"), POD) == REF
    with pytest.raises(KubeUnreachable):
        await authn.pod_of(bearer("two"), POD)


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
        await authenticator(api).pod_of(bearer("one"), POD)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "send `authorization: Bearer TOKEN`"),
        ({"authorization": ""}, "send `authorization: Bearer TOKEN`"),
        ({"authorization": "Bearer "}, "send `authorization: Bearer TOKEN`"),
        ({"authorization": "Basic x"}, "send `authorization: Bearer TOKEN`"),
        (bearer("x" * (16 * 1024 + 1)), "that is not a token"),
        (bearer("ü"), "that is not a token"),
        (bearer("a\nb"), "that is not a token"),
        (bearer("a\tb"), "that is not a token"),
    ],
    ids=range(8),
)
async def test_what_is_no_token_never_reaches_the_api_server_and_what_would_be_is_told(
    metadata: dict[str, str], why: str
) -> None:
    api = Api()
    with pytest.raises(Unauthenticated, match=why):
        await authenticator(api).pod_of(metadata, POD)
    assert api.reviewed == []


async def test_few_answers_are_kept() -> None:
    api = Api()
    authn = authenticator(api)
    for number in range(1025):
        await authn.pod_of(claiming(f"here-{number}"), POD)
    await authn.pod_of(claiming("here-1024"), POD)
    assert len(api.reviewed) == 1025
    await authn.pod_of(claiming("here-0"), POD)  # the oldest had to go
    assert len(api.reviewed) == 1026


async def test_without_authentication_the_caller_says_who_it_is() -> None:
    assert await TrustingAuthenticator().pod_of({"berth-pod": "team/p1/uid-1"}, POD) == REF
    for text in ("", "team/p1", "team//uid", "a/b/c/d"):
        with pytest.raises(Unauthenticated):
            await TrustingAuthenticator().pod_of({"berth-pod": text}, POD)
    with pytest.raises(Unauthenticated, match="send `berth-pod: NAMESPACE/NAME/UID`"):
        await TrustingAuthenticator().pod_of({}, POD)


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


async def test_a_pod_that_is_gone_is_none_and_an_unknown_one_is_an_error() -> None:
    api = Api()
    guard = guard_of(api)
    assert await guard.current(PodRef("team", "other", PodUid("x"))) is None
    api.error = KubeUnreachable("connection refused")
    with pytest.raises(KubeUnreachable):
        await guard.admit(REF)


async def test_the_cache_is_of_the_token_and_forgets_the_oldest_first() -> None:
    api, clock = Api(), Clock()
    authn = authenticator(api, clock)
    for number in range(1024):
        await authn.pod_of(claiming(f"here-{number}"), POD)
    clock.now += 10  # they are over now: none is believed without being asked about
    await authn.pod_of(claiming("here-0"), POD)
    assert len(api.reviewed) == 1025
    await authn.pod_of(
        claiming("here-new"), POD
    )  # which pushes out 1, and not 0, that was asked about just now
    clock.now += 5
    await authn.pod_of(claiming("here-0"), POD)
    assert len(api.reviewed) == 1026


async def test_a_token_of_the_largest_size_and_one_with_spaces_around_it_are_tokens() -> None:
    api = Api()
    authn = authenticator(api)
    assert await authn.pod_of(bearer("x" * (16 * 1024)), POD) == REF
    assert await authn.pod_of(bearer("  one  "), POD) == REF
    assert api.reviewed[1:] == ["one"]


async def test_who_claims_to_be_a_pod_of_this_node_takes_nothing_of_that_pods_share() -> None:
    """What a token says of its pod is no proof: another source may name any pod."""
    api, clock = Api(), Clock()
    authn, good = authenticator(api, clock), api.status
    api.status = {"authenticated": False}
    await flood(authn, 1000, "ipv4:10.0.0.66", "here-good")
    api.status = good
    assert await authn.pod_of(claiming("here-good", "its own"), POD) == REF


async def test_few_calls_wait_for_one_review_and_make_room_when_it_is_done() -> None:
    api = SlowApi()
    authn = authenticator(api)
    calls = [asyncio.create_task(authn.pod_of(bearer("one"), POD)) for _ in range(600)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [call.done() for call in calls] == [False] * 512 + [True] * 88
    api.answer.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, Busy) for answer in answers] == [False] * 512 + [True] * 88
    api.answer.clear()
    later = [asyncio.create_task(authn.pod_of(bearer("two"), POD)) for _ in range(512)]
    for _ in range(5):
        await asyncio.sleep(0)
    api.answer.set()
    assert await asyncio.gather(*later) == [REF] * 512
