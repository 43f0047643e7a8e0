"""Who may ask the binder: what is asked of the API server about a token, what is remembered, and how much of both."""

import asyncio
from typing import Any

import pytest

from berth.kube.errors import KubeError, response_error
from binder.api import callers as module
from binder.api.callers import Callers, Refused
from tests.fakes.eventually import until

Json = dict[str, Any]
SCALER = "system:serviceaccount:berth-system:berth-scaler"


class TokenReviews:
    """Knows whose token each is."""

    def __init__(self) -> None:
        self.users = {"good": SCALER, "other": "system:serviceaccount:team:berth-scaler"}
        self.reviews: list[Json] = []
        self.fail = False
        self.go = asyncio.Event()
        self.go.set()

    async def create(self, path: str, body: Json) -> Json:
        self.reviews.append(body)
        await self.go.wait()
        if self.fail:
            raise response_error(500, "InternalError", path)
        user = self.users.get(body["spec"]["token"])
        extra = {f"authentication.kubernetes.io/pod-{key}": ["x"] for key in ("name", "uid")}
        return {
            "status": {
                "authenticated": user is not None,
                "error": "" if user is not None else f"does not accept {body['spec']['token']!r}",
                "audiences": body["spec"]["audiences"],
                "user": {"username": user, "extra": extra},
            }
        }


class Asked:
    """Callers of one replica, whose time the test moves."""

    def __init__(self) -> None:
        self.api, self.now = TokenReviews(), 0.0
        self.callers = Callers(self.api, "berth-system", lambda: self.now)  # type: ignore[arg-type]

    async def status(self, token: str = "good", *, source: str = "10.0.0.1") -> int:
        """200, or that of the refusal."""
        return (await self.answer(token, source=source))[0]

    async def answer(self, token: str, *, source: str = "10.0.0.1") -> tuple[int, str]:
        try:
            await self.callers.require_scaler(f"Bearer {token}" if token else "", source)
        except Refused as refused:
            return refused.status, str(refused)
        return 200, ""


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        ("good", 200, ""),
        ("", 401, "berth-binder"),
        ("forged", 401, "does not accept"),
        ("other", 403, "system:serviceaccount:team:berth-scaler may not ask"),
        ("x" * 5000, 401, "not a token"),
        ("a\xe9b", 401, "not a token"),
    ],
)
async def test_the_scaler_alone_may_ask(token: str, status: int, words: str) -> None:
    found, why = await Asked().answer(token)
    assert found == status
    assert words in why
    assert "forged" not in why


async def test_what_a_review_has_shown_of_a_token_is_remembered_for_a_while() -> None:
    asked = Asked()
    assert [await asked.status() for _ in range(3)] == [200] * 3
    assert [review["spec"] for review in asked.api.reviews] == [
        {"token": "good", "audiences": ["berth-binder"]}
    ]
    asked.now += 31
    asked.api.users.clear()
    assert [await asked.status() for _ in range(2)] == [401] * 2
    assert len(asked.api.reviews) == 2
    asked.now += 6
    asked.api.users["good"] = SCALER
    assert await asked.status() == 200


@pytest.mark.parametrize("quiet_seconds", [0, 3600])
async def test_an_address_has_few_reviews_and_known_tokens_need_none(quiet_seconds: float) -> None:
    asked = Asked()
    assert await asked.status() == 200
    left = 5 if quiet_seconds else 4
    asked.now += quiet_seconds
    found = [await asked.status(f"guess{number}") for number in range(8)]
    assert found == [401] * left + [429] * (8 - left)
    assert await asked.status(source="10.0.0.2") == 200
    assert await asked.status("guess-from-elsewhere", source="10.0.0.2") == 401


async def test_so_many_reviews_are_under_way_and_no_more() -> None:
    asked = Asked()
    asked.api.go.clear()
    tasks = [asyncio.create_task(asked.status(f"guess{number}")) for number in range(4)]
    await until(lambda: len(asked.api.reviews) == 4, what="four reviews under way")
    assert await asked.status("one-more") == 429
    asked.api.go.set()
    assert await asyncio.gather(*tasks) == [401] * 4
    for number in range(6):  # each has given its turn back
        asked.now += 10
        assert await asked.status(f"later{number}") == 401


async def test_what_is_remembered_of_callers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TOKENS", 3)
    monkeypatch.setattr(module, "_MOST_SOURCES", 3)
    asked = Asked()
    for number in range(9):
        assert await asked.status(f"guess{number}", source=f"10.0.0.{number}") == 401
        assert len(asked.callers._known) <= 3
        assert len(asked.callers._reviews) <= 3


async def test_no_token_is_believed_or_refused_while_the_api_server_cannot_tell() -> None:
    asked = Asked()
    asked.api.fail = True
    with pytest.raises(KubeError):
        await asked.status()
    asked.api.fail = False
    assert await asked.status() == 200
