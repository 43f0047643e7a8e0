"""Who an activator is, by its token and its pod."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from berth.kube.client import KubeClient
from berth.kube.errors import KubeError, response_error
from scaler.activation.authentication import (
    PermissionDenied,
    TokenAuthenticator,
    TooManyCalls,
    Unauthenticated,
)

Json = dict[str, Any]


class ApiServer:
    """Knows one pod, and whose the token `good` is."""

    def __init__(self) -> None:
        self.user = "system:serviceaccount:berth-system:berth-activator"
        self.extra = {"pod-name": ["act"], "pod-uid": ["u"]}
        self.audiences = ["berth-scaler"]
        self.pod: Json | None = {
            "metadata": {"name": "act", "uid": "u"},
            "spec": {},
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.7",
                "podIPs": [{"ip": "10.0.0.7"}, {"ip": "fd00::7"}],
            },
        }
        self.reviews = 0
        self.broken: KubeError | None = None

    async def create(self, path: str, body: Mapping[str, Any]) -> Json:
        self.reviews += 1
        if self.broken is not None:
            raise self.broken
        spec = body["spec"]
        assert spec["audiences"] == ["berth-scaler"]
        if spec["token"] != "good":
            return {"status": {"error": f"no token: {spec['token']}"}}
        extra = {f"authentication.kubernetes.io/{key}": value for key, value in self.extra.items()}
        return {
            "status": {
                "authenticated": True,
                "audiences": self.audiences,
                "user": {"username": self.user, "extra": extra},
            }
        }

    async def get(self, path: str) -> Json:
        if self.pod is None:
            raise response_error(404, "NotFound", path)
        self.path = path
        return json.loads(json.dumps(self.pod))  # type: ignore[no-any-return]


class Place:
    def __init__(self) -> None:
        self.api, self.now = ApiServer(), 100.0
        client: Any = self.api
        assert not isinstance(client, KubeClient)
        self.authenticator = TokenAuthenticator(
            client, system_namespace="berth-system", clock=lambda: self.now
        )

    async def call(self, token: str | None = "good", source: str = "ipv4:10.0.0.7") -> Any:
        metadata = {} if token is None else {"authorization": f"Bearer {token}"}
        return await self.authenticator.authenticate(metadata, source)


async def test_the_systems_activators_hold_for_all_and_others_for_their_namespace() -> None:
    place = Place()
    caller = await place.call()
    assert (caller.uid, caller.scope, caller.addresses) == ("u", None, {"10.0.0.7", "fd00::7"})
    assert place.api.path == "/api/v1/namespaces/berth-system/pods/act"
    place.api.user = "system:serviceaccount:team:berth-activator"
    assert (await place.call()).scope == "team"


@pytest.mark.parametrize(
    ("user", "extra"),
    [
        ("system:serviceaccount:berth-system:default", None),
        ("system:serviceaccount:team:berth-activator-2", None),
        ("system:serviceaccount:berth-system:berth-activator:x", None),
    ],
)
async def test_no_other_account_is_an_activators(user: str, extra: Any) -> None:
    place = Place()
    place.api.user = user
    with pytest.raises(PermissionDenied):
        await place.call()


async def test_a_token_that_proves_no_pod_is_none() -> None:
    place = Place()
    changes: tuple[Json, ...] = ({"audiences": ["api"]}, {"extra": {}}, {"user": "somebody"})
    for change in changes:
        vars(place.api).update(vars(ApiServer()) | change)
        place.now += 100
        with pytest.raises(Unauthenticated):
            await place.call()
    for token in (None, "", " ", "x" * 20_000, "böse", "a\nb"):
        with pytest.raises(Unauthenticated):
            await place.call(token)


async def test_a_pod_that_is_gone_or_another_is_no_activator() -> None:
    place = Place()
    assert place.api.pod is not None
    for pod in (
        None,
        place.api.pod | {"metadata": {"name": "act", "uid": "another"}},
        place.api.pod | {"status": {"phase": "Failed"}},
    ):
        place.api.pod = pod
        with pytest.raises(PermissionDenied):
            await place.call()


async def test_a_tenants_activator_has_an_address_of_its_own() -> None:
    """On its node's address others listen, too."""
    place = Place()
    assert place.api.pod is not None
    place.api.pod["spec"] = {"hostNetwork": True}
    assert (await place.call()).scope is None
    place.api.user = "system:serviceaccount:team:berth-activator"
    with pytest.raises(PermissionDenied):
        await place.call()


async def test_a_refused_token_costs_one_review_in_a_while_and_is_not_told_back() -> None:
    place = Place()
    for _ in range(50):
        with pytest.raises(Unauthenticated) as refusal:
            await place.call("secret-token")
        assert "secret-token" not in str(refusal.value)
    assert place.api.reviews == 1
    place.now += 5.1
    with pytest.raises(Unauthenticated):
        await place.call("secret-token")
    assert place.api.reviews == 2


async def test_who_asks_too_often_waits_and_nobody_else_does() -> None:
    place = Place()
    for n in range(10):
        with pytest.raises(Unauthenticated):
            await place.call(f"bad-{n}", source="ipv4:10.6.6.6")
    with pytest.raises(TooManyCalls):
        await place.call("bad", source="ipv4:10.6.6.6")
    assert place.api.reviews == 10
    assert (await place.call()).uid == "u"
    place.now += 1.0
    with pytest.raises(Unauthenticated):
        await place.call("bad", source="ipv4:10.6.6.6")


async def test_an_api_server_that_is_away_is_nobodys_refusal() -> None:
    place = Place()
    place.api.broken = response_error(500, "", "away")
    with pytest.raises(KubeError):
        await place.call()
    place.api.broken = None
    assert (await place.call()).uid == "u"


async def test_what_is_kept_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler.activation.authentication._MOST_REFUSED", 3)
    monkeypatch.setattr("scaler.activation.authentication._MOST_SOURCES", 4)
    place = Place()
    for number in range(9):
        with pytest.raises(Unauthenticated):
            await place.call(f"forged-{number}", f"ipv4:10.0.1.{number}")
    assert (len(place.authenticator._refused), len(place.authenticator._buckets)) == (3, 4)
    # The newest are known still.
    with pytest.raises(Unauthenticated):
        await place.call("forged-8")
    assert place.api.reviews == 9
